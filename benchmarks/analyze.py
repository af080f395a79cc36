"""CPU seconds of `analyze` for a study of 300 cells, by part.

Baseline: Optuna's own reading of the same trials, without lit_dps.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import optuna

from benchmarks.numbers import Sample
from benchmarks.options import Options
from benchmarks.text import seconds, table, times
from lit_dps.analysis.analysis import Analysis
from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.report.figures import FIGURES, write_figures
from lit_dps.report.html import page
from lit_dps.report.text import render
from lit_dps.storage.bulk import add_trials
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import declare
from lit_dps.storage.read import read_study
from lit_dps.storage.samplers import distributions
from lit_dps.storage.schema import (
    ENVIRONMENT,
    POINT_ATTR,
    REPEAT_ATTR,
    RESULT_ATTR,
    STATES,
    cell_study_name,
    encode_result,
)

TITLE = "CPU seconds of `analyze`"
ROOT = Path(__file__).parents[1]
NAME = "made-up"
AXIS = "model.weight_decay"
BATCH_SIZES = [2**i for i in range(1, 16)]
SPARSITIES = [0.0, 0.5, 0.7, 0.9]
VALUES = [0.0, 1e-5, 1e-4, 1e-3, 1e-2]
TRIALS = 10
CHECKS = 100  # of a trial
GOAL = Goal(0.1, check_interval=16, max_steps=40_000)
SPACE = {
    "model.learning_rate": Range(1e-3, 10.0, "log"),
    "model.momentum": Range(0.5, 0.999, "reverse_log"),
}
BASELINE = "Optuna reads the same trials"
WHOLE = "`analyze`, whole command"
AGAIN = "`analyze` again, nothing changed"


@dataclass(frozen=True)
class Row:
    """CPU seconds of a part, and over those of the baseline in the same round."""

    what: str
    seconds: Sample
    ratio: Sample


@dataclass(frozen=True)
class Analyzed:
    """All parts; the first row is the baseline."""

    cells: int
    trials: int
    rows: tuple[Row, ...]


def measure(options: Options) -> Analyzed:
    """Makes the study, and measures each part and the whole command in turns."""
    sizes, values = (BATCH_SIZES[:4], VALUES[:1]) if options.quick else (BATCH_SIZES, VALUES)
    with tempfile.TemporaryDirectory() as folder:
        make_study(folder, sizes, SPARSITIES, values)
        rounds = [_round(folder, number) for number in range(options.repeats)]
    samples = {what: Sample(tuple(each[what] for each in rounds)) for what in rounds[0]}
    rows = [Row(what, sample, sample.over(samples[BASELINE])) for what, sample in samples.items()]
    cells = len(sizes) * len(SPARSITIES) * len(values)
    return Analyzed(cells, cells * TRIALS, tuple(rows))


def show(found: Analyzed) -> str:
    """A row a part."""
    head = ["part", "CPU seconds", "over the baseline"]
    rows = [
        [row.what, seconds(row.seconds), times(row.ratio) if i else ""]
        for i, row in enumerate(found.rows)
    ]
    made = f"{found.cells} cells, {found.trials:,} trials of up to {CHECKS} checks, made up"
    return f"{made}. Baseline: {BASELINE}.\n\n{table(head, rows)}"


def make_study(
    folder: str, batch_sizes: list[int], sparsities: list[float], values: list[float]
) -> None:
    """Stores a finished study of made-up trials in FOLDER/study.db, in one transaction a cell."""
    url = f"sqlite:///{folder}/study.db"
    study = StudyConfig(
        name=NAME,
        batch_sizes=batch_sizes,
        sparsities=sparsities,
        trials=TRIALS,
        space=SPACE,
        grid={AXIS: values},
        race_factor=None,
    )
    declare(url, study, "made up", GOAL, {}, {})
    storage, boxes = open_storage(url), distributions(SPACE)
    for cell in study.cells:
        stored = optuna.create_study(study_name=cell_study_name(NAME, cell), storage=storage)
        trials = []
        for point in range(TRIALS):
            result = _made_up(cell, point)
            trials.append(
                optuna.trial.create_trial(
                    state=STATES[result.status],
                    value=result.steps,
                    params=dict(result.trial.params),
                    distributions=boxes,
                    user_attrs={
                        POINT_ATTR: point,
                        REPEAT_ATTR: 0,
                        ENVIRONMENT: None,
                        RESULT_ATTR: encode_result(result),
                    },
                )
            )
        add_trials(storage, stored, trials)
    storage.engine.dispose()


def _made_up(cell: Cell, point: int) -> TrialResult:
    """A trial whose steps follow a law of its series, the farther from the best rate and momentum
    the more."""
    axis = [float(value) for _, value in cell.axes]
    rng = np.random.default_rng(
        (point, cell.batch_size, round(1000 * cell.sparsity), *(round(1e6 * x) for x in axis))
    )
    units = rng.random(2)
    params = {key: box.at(float(u)) for u, (key, box) in zip(units, SPACE.items(), strict=True)}
    law = 4e4 * (1 + cell.sparsity + sum(axis)) / cell.batch_size + 60 * (1 + 2 * cell.sparsity)
    off = float(np.mean(units)) - 0.4 - 0.02 * math.log2(cell.batch_size)
    steps = math.ceil(law * math.exp(20 * off**2) / GOAL.check_interval) * GOAL.check_interval
    if off > 0.25:
        status, last = Status.INFEASIBLE, 2 * GOAL.check_interval
    elif steps > GOAL.max_steps:
        status, last = Status.INCOMPLETE, GOAL.max_steps
    else:
        status, last = Status.COMPLETE, steps
    checks = range(GOAL.check_interval, last + 1, GOAL.check_interval)
    at = sorted({*checks[:: max(1, len(checks) // CHECKS)], last})
    shape = np.exp(-4 * np.array(at) / last) * rng.lognormal(0, 0.08, len(at))
    error = 1.001 * GOAL.value + 0.8 * shape
    loss = 0.1 + 2.2 * shape
    if status is Status.COMPLETE:
        error[-1] = GOAL.value
    if status is Status.INFEASIBLE:
        loss[-1] = math.nan
    curve = {"step": at, "val_error": error.tolist(), "train_loss": loss.tolist()}
    timed = {
        "steps": last,
        "training": last * 1e-3 * (1 + cell.batch_size / 256),
        "checks": len(at),
        "checking": 1.0,
    }
    reached = steps if status is Status.COMPLETE else None
    trial = Trial(cell, point, params)
    return TrialResult(
        trial, status, reached, curve, {"linear.weight": (1_024, 10_240)}, 1.0, timed=timed
    )


def _round(folder: str, number: int) -> dict[str, float]:
    """CPU seconds of each part, and of the command without and with its files of before."""
    url, output = f"sqlite:///{folder}/study.db", Path(folder, f"parts-{number}")
    found = {BASELINE: _cpu(partial(_read_by_optuna, url))}
    record: list[StudyRecord] = []
    found["reading"] = _cpu(lambda: record.append(read_study(url, NAME)))
    study = Analysis(record[0])
    found["tables, laws and notes"] = _cpu(partial(render, study))
    for figure in FIGURES:
        taken = _cpu(partial(_draw, study, output, figure))
        if (output / f"{figure.NAME}.csv").exists():
            found[f"figure {figure.NAME}"] = taken
    found["report.html"] = _cpu(partial(page, study))
    command = [
        "analyze",
        "--study.name",
        NAME,
        "--storage.folder",
        folder,
        "--output",
        f"{folder}/whole-{number}",
    ]
    found["start: `analyze --help`"] = _cpu_of_command(["analyze", "--help"])
    found[WHOLE] = _cpu_of_command(command)
    found[AGAIN] = _cpu_of_command(command)
    return found


def _draw(study: Analysis, output: Path, figure) -> None:
    write_figures([figure], [study], output)


def _read_by_optuna(url: str) -> None:
    storage = open_storage(url)
    for name in optuna.get_all_study_names(storage):
        optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False)
    storage.engine.dispose()


def _cpu(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _cpu_of_command(argv: list[str]) -> float:
    """CPU seconds of `lit-dps` with these arguments, and of the processes that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *argv],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{argv} ended with {done.returncode}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
