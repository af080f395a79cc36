"""How long a user waits before anything is trained, over the import that none of it can do without.

Baseline: `python -c "import torch, lightning"`, in turns with the commands.
"""

from __future__ import annotations

import multiprocessing
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import yaml

from benchmarks.numbers import Sample, interleaved
from benchmarks.options import Options
from benchmarks.text import seconds, table, times
from lit_dps.core.trial import Cell, Trial
from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.training.workload import Workload

TITLE = "Start-up"
TRIALS = 50  # that are built, each with another learning rate
ROOT = Path(__file__).parents[1]
BARE = 'python -c "import torch, lightning"'
STUDY = {
    "model": {
        "class_path": "lit_dps.module.ImageClassifier",
        "init_args": {"network": "lit_dps.models.MLP"},
    },
    "data": {"class_path": "lit_dps.data.Digits"},
    "trainer": {"accelerator": "cpu"},
    "goal": {"error": 0.3, "check_interval": 4, "max_steps": 64},
    "study": {
        "name": "startup",
        **{"batch_sizes": [16, 64], "sparsities": [0.0, 0.5], "trials": 2, "workers": 1},
        "space": {"model.learning_rate": {"low": 1e-3, "high": 1.0, "scale": "log"}},
    },
}


@dataclass(frozen=True)
class Row:
    """One kind of start: its seconds, and those over the bare import's of the same round."""

    what: str
    seconds: Sample
    ratio: Sample


@dataclass(frozen=True)
class Startup:
    """All kinds of start, and what building a trial takes.

    Attributes:
        rows: The starts; the first row is the baseline.
        build: CPU seconds of `Workload.build`.
        construction: CPU seconds of the constructors of the same module and data alone.
    """

    rows: tuple[Row, ...]
    build: Sample
    construction: Sample


def measure(options: Options) -> Startup:
    """Times each kind of start in turns, on a small study that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "study.yaml").write_text(yaml.safe_dump(STUDY))
        study = [str(ROOT / "cli.py"), "study", "--config", "study.yaml"]
        _timed(folder, study, {0})
        starts = {
            BARE: partial(_timed, folder, ["-c", "import torch, lightning"], {0}),
            "`study`, no trials remain": partial(_timed, folder, study, {0}),
            "`analyze`": partial(_timed, folder, [study[0], "analyze", *study[2:]], {0}),
            "`study`, first words on a terminal": partial(_first_words, folder, study),
            "`study`, a mistyped key is refused": partial(
                _timed, folder, [*study, "--study.trialss", "2"], {2}
            ),
            "a worker is ready": _worker,
        }
        found = interleaved(starts, options.repeats)
    builds = interleaved({"build": _build, "construction": _construct}, options.repeats)
    rows = tuple(Row(what, sample, sample.over(found[BARE])) for what, sample in found.items())
    return Startup(rows, **builds)


def show(found: Startup) -> str:
    """The rows as markdown."""
    rows = [
        [row.what, seconds(row.seconds), times(row.ratio) if i else ""]
        for i, row in enumerate(found.rows)
    ]
    text = f"Baseline: `{BARE}`.\n\n{table(['start', 'time', 'over the baseline'], rows)}"
    ratio = times(found.build.over(found.construction))
    text += f"\n\nA trial is built in {seconds(found.build)} of CPU: {ratio} of its constructors,"
    return f"{text} which take {seconds(found.construction)}."


def _build() -> float:
    """CPU seconds in which `Workload.build` builds a trial of the study."""
    workload = Workload(STUDY["model"], STUDY["data"], STUDY["trainer"])
    trials = []
    for point in range(TRIALS):
        trials.append(Trial(Cell(16), point, {"model.learning_rate": 0.01 + point / 1000}))
    return _cpu_seconds([partial(workload.build, trial) for trial in trials])


def _construct() -> float:
    """CPU seconds of the constructors of the same module and data."""

    def construct() -> None:
        ImageClassifier(MLP())
        Digits(batch_size=16)

    return _cpu_seconds([construct] * TRIALS)


def _cpu_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """CPU seconds of a call, after a first one that is not timed."""
    calls[0]()
    begin = time.process_time()
    for call in calls:
        call()
    return (time.process_time() - begin) / len(calls)


def _timed(folder: str, argv: list[str], codes: set[int]) -> float:
    """Seconds of a command in a folder; it has to end with one of these codes."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, env=_environment(), capture_output=True, text=True
    )
    taken = time.perf_counter() - begin
    if done.returncode not in codes:
        raise RuntimeError(f"{argv} ended with {done.returncode}: {done.stderr}")
    return taken


def _first_words(folder: str, argv: list[str]) -> float:
    """Seconds until a command says anything on its terminal."""
    ours, theirs = pty.openpty()
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *argv],
        cwd=folder,
        env=_environment(),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        if not select.select([ours], [], [], 300)[0]:
            raise RuntimeError(f"{argv} says nothing")
        return time.perf_counter() - begin
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _worker() -> float:
    """Seconds from the start of a worker's process until it has all that it needs to ask for a
    trial."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    begin = time.perf_counter()
    process = context.Process(target=_import, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    taken = time.perf_counter() - begin
    process.join()
    return taken


def _import(ready: Connection) -> None:
    import lit_dps.study.workers  # noqa: F401

    ready.send(True)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}
