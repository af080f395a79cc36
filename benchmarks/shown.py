"""What it costs to bring an empty MLflow in step with a stored study."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass

from benchmarks.made_up import result, trial
from benchmarks.numbers import Sample
from benchmarks.options import Options
from benchmarks.text import spread, table, times
from lit_dps.core.trial import Cell, TrialResult
from lit_dps.tracking.sync import MlflowSync

TITLE = "MLflow brought in step"
# MLflow takes 40 to 300 ms for a trial with its curves, so that 2,000 trials took many minutes.
TRIALS = 120
CELLS = 4
MAX_REPEATS = 2


@dataclass(frozen=True)
class Shown:
    """Trials a second that are logged to an empty MLflow in a local file.

    Attributes:
        trials: Of the study.
        rate: By the one call that `analyze --sync` makes.
        ratio: That rate over the baseline's: a call of `MlflowSync.log_trial` for each trial.
    """

    trials: int
    rate: Sample
    ratio: Sample


def measure(options: Options) -> Shown:
    """Logs the same trials both ways, each to a database of its own."""
    n = 40 if options.quick else TRIALS
    cells = [Cell(2**i) for i in range(2 if options.quick else CELLS)]
    per_cell = n // len(cells)
    results = [result(trial(cell, point, per_cell)) for cell in cells for point in range(per_cell)]
    repeats = 1 if options.quick else min(options.repeats, MAX_REPEATS)
    together = Sample(tuple(_rate(results, together=True) for _ in range(repeats)))
    single = Sample(tuple(_rate(results, together=False) for _ in range(repeats)))
    return Shown(n, together, together.over(single))


def _rate(results: list[TrialResult], together: bool) -> float:
    """Trials a second."""
    with tempfile.TemporaryDirectory() as folder:
        mlflow = MlflowSync(f"sqlite:///{folder}/mlflow.db", folder, "made up", "s", {})
        begin = time.perf_counter()
        if together:
            for _ in mlflow.log_trials(results):
                pass
        else:
            for each in results:
                mlflow.log_trial(each)
        return len(results) / (time.perf_counter() - begin)


def show(found: Shown) -> str:
    """One row."""
    head = ["trials", "trials a second", "over one call a trial"]
    rows = [[f"{found.trials:,}", spread(found.rate, "{:.3g}".format), times(found.ratio)]]
    return table(head, rows)
