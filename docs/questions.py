"""Counts the files that a question leads through: `python docs/questions.py` prints the table.

While the answer is at work, every line of the package that runs is recorded (`sys.settrace`).
Imports do not count. Questions about trials count the lines of the worker. K*, the report and a
figure come from a synthetic study. A question about an addition (racing, ranks, an axis, advice)
counts lines that run with the addition and do not run without it. Lines of advice are those below
the command. docs/architecture.md has these counts.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

PACKAGE = Path(__file__).resolve().parents[1] / "lit_dps"
sys.path.insert(0, str(PACKAGE.parent))

CONFIG = PACKAGE / "configs" / "quickstart.yaml"
# One batch size, one sparsity and two trials, one after the other, in this process.
SMALL = {
    "study.name": "question",
    "study.batch_sizes": "[32]",
    "study.sparsities": "[0.5]",
    "study.trials": 2,
    "study.workers": 1,
    "study.race_factor": "null",
    "study.noise_scale": "false",
    "goal.error": 0.3,
}
ADVICE_BUDGET = "2m"  # recording makes Python several times slower
SHARE = 0.9  # of the lines; the rest is in helpers of a few lines each

Lines = dict[str, set[int]]  # file -> numbers of the lines that ran


class LinesRun:
    """Records which lines of the package's functions run, below one function if given."""

    def __init__(self, within: Callable[..., Any] | None = None):
        self.lines: Lines = {}
        self._within: CodeType | None = getattr(within, "__code__", None)
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code is self._within:
            self._depth += 1
        if code.co_name == "<module>" or (self._within is not None and self._depth == 0):
            return None
        file = code.co_filename
        if not file.startswith(f"{PACKAGE}/"):
            return None
        lines = self.lines.setdefault(file[len(f"{PACKAGE}/") : -len(".py")], set())

        def on_line(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            if event == "line":
                lines.add(frame.f_lineno)
            elif event == "return" and code is self._within:
                self._depth -= 1
            return on_line

        return on_line

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the lines of all threads in the body."""
        threading.settrace(self)
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]


def arguments_of_study(folder: str, **options: object) -> list[str]:
    """Return the command line of a small study with options."""
    settings = SMALL | {"storage.folder": folder} | options
    return ["study", f"--config={CONFIG}", *(f"--{key}={settings[key]}" for key in settings)]


def lines_of_trials(**options: object) -> Lines:
    """Run a small study with options, and return the lines that its worker runs."""
    from lit_dps.cli import main
    from lit_dps.study.workers import work

    recorder = LinesRun(work)
    with tempfile.TemporaryDirectory() as folder, recorder.recording():
        assert main(arguments_of_study(folder, **options)) == 0, options
    return recorder.lines


def lines_of_resumed_trials() -> Lines:
    """Interrupt a study as it stores its first result, and return the lines of the resumed worker.

    The trial is saved at each check, so that the resumed worker loads a checkpoint.
    """
    from lit_dps.cli import main
    from lit_dps.storage.trial_queue import TrialQueue
    from lit_dps.study.workers import work

    recorder = LinesRun(work)
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of_study(folder, **{"study.checkpoint_minutes": 1e-6})
        with patch.object(TrialQueue, "store_result", side_effect=KeyboardInterrupt):
            main(arguments)
        assert list(Path(folder).rglob("*.ckpt")), "the interrupted study left no checkpoint"
        with recorder.recording():
            assert main(arguments) == 0
    return recorder.lines


def lines_of_study() -> Lines:
    """Run a small study, and return the lines below the verb."""
    from lit_dps.cli import main, study

    recorder = LinesRun(study.main)
    with tempfile.TemporaryDirectory() as folder, recorder.recording():
        assert main(arguments_of_study(folder)) == 0
    return recorder.lines


def lines_of_advice() -> Lines:
    """Ask for advice on the quickstart, and return the lines below the verb.

    The budget is enough for timed steps, the user's run, and a few others.
    """
    from lit_dps.cli import advise, main

    settings = {"study.name": "question", "study.workers": 1, "goal.error": 0.1}
    recorder = LinesRun(advise.main)
    with tempfile.TemporaryDirectory() as folder, recorder.recording():
        options = [f"--{key}={value}" for key, value in settings.items()]
        options += [f"--storage.folder={folder}", f"--budget={ADVICE_BUDGET}"]
        assert main(["advise", f"--config={CONFIG}", *options]) == 0
    return recorder.lines


def lines_of_call(call: Callable[[], object]) -> Lines:
    """Return the lines that a call runs."""
    recorder = LinesRun()
    with recorder.recording():
        call()
    return recorder.lines


def added(lines: Lines, without: Lines) -> Lines:
    """Return the lines that run in the first recording and not in the second."""
    differences = {file: run - without.get(file, set()) for file, run in lines.items()}
    return {file: run for file, run in differences.items() if run}


def main_files(lines: Lines) -> list[str]:
    """Return the fewest files that hold `SHARE` of the lines, those with most lines first."""
    enough = SHARE * sum(map(len, lines.values()))
    chosen: list[str] = []
    for file in sorted(lines, key=lambda file: -len(lines[file])):
        if sum(len(lines[each]) for each in chosen) >= enough:
            break
        chosen.append(file)
    return chosen


def questions() -> Iterator[tuple[str, Lines]]:
    """Yield each question with the lines that run for its answer."""
    from optuna.storages import InMemoryStorage

    from lit_dps import Analysis
    from lit_dps.report.figures import scaling
    from lit_dps.report.figures.write import write_figures
    from lit_dps.report.publish import publish
    from lit_dps.report.text import render
    from lit_dps.storage.read import read_study
    from tests.support.fake_study import law_study

    trial = lines_of_trials()
    yield "How is a trial run?", trial
    yield "How does it resume?", added(lines_of_resumed_trials(), trial)
    yield "How does racing work?", added(lines_of_trials(**{"study.race_factor": 1.5}), trial)
    yield (
        "What does Lightning's own loop add?",
        added(lightning := lines_of_trials(**{"study.engine": "lightning"}), trial),
    )
    ranks = lines_of_trials(**{"study.engine": "lightning", "trainer.devices": 2})
    yield "How do ranks train together?", added(ranks, lightning)
    delayed = lines_of_trials(**{"study.grid": '{"optim.delay": [4]}'})
    yield "What does an axis such as `optim.delay` touch?", added(delayed, trial)
    storage = InMemoryStorage()
    law_study(storage, "question")
    record = read_study(storage, "question")
    yield "How do trials become K\\* and its law?", lines_of_call(lambda: Analysis(record).laws)
    text = lines_of_call(lambda: render(Analysis(record)))
    yield "Where does the report in the terminal come from?", text
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        figure = lines_of_call(lambda: write_figures([scaling], [Analysis(record)], target))
        yield "Where does a figure come from?", figure
        files = lines_of_call(lambda: publish(Analysis(record), target))
        yield "Where do all files of a report come from, with every figure?", files
    yield "What does `advise` do beyond `study`?", added(lines_of_advice(), lines_of_study())


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        rows = list(questions())
    print("| question | files that run | files with 90 % of the lines, most lines first |")
    print("|---|---|---|")
    for question, lines in rows:
        chosen = main_files(lines)
        names = " ".join(f"`{file}`" for file in chosen)
        print(f"| {question} | {len(lines)} | {len(chosen)}: {names} |")
