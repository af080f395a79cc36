"""What is told of the results of a study while it runs: the live progress line, and files of its failed trials."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from lit_dps.errors import StorageError, UserError
from lit_dps.files import replacing
from lit_dps.racing import longest_attempt, truncate_at_race_limit
from lit_dps.repeats import RepeatPlan, repeats_left
from lit_dps.trial import Cell, Status, TrialResult

FIRST = 3  # results of which one at least has to be none of a failed trial
FAILED = 1  # exit code of a study with failed trials


class Progress:
    """Cells, trials, best K so far, and time left: rewritten in place on a terminal, a line now and then elsewhere.

    Args:
        results: Results of an earlier run of the study, by cell; its failed trials are run again.
        cells, points: Of this run, and how many in each.
        workers: Trials that run at the same time.
        slack: The study's; a trial that stopped and has to go on is not finished.
        plan, repeats: What is repeated after the search, and the repeats of an earlier run, by cell.
        stream: Where to write; by default stderr.
        every: Seconds between two lines where the stream is no terminal.
    """

    def __init__(
        self,
        results: Mapping[Cell, Sequence[TrialResult]],
        cells: Sequence[Cell],
        points: int,
        workers: int,
        slack: float | None = None,
        plan: RepeatPlan = RepeatPlan(),  # noqa: B008 (it is frozen)
        repeats: Mapping[Cell, Sequence[TrialResult]] | None = None,
        stream: TextIO | None = None,
        every: float = 15.0,
    ):
        self.stream = stream or sys.stderr
        self.every, self.points, self.workers, self.slack = every, points, workers, slack
        earlier = {cell: [r for r in results.get(cell, ()) if r.status is not Status.FAILED] for cell in cells}
        self.done = {cell: {r.trial.point: _end(r) for r in earlier[cell] if r.trial.point < points} for cell in cells}
        self.plan, self.repeats = plan, {cell: list(map(_end, (repeats or {}).get(cell, ()))) for cell in cells}
        self._shown = 0.0

    def update(self, result: TrialResult) -> None:
        """Takes a new result into account and shows the line."""
        done = self.done[result.trial.cell]
        if result.trial.repeat:
            self.repeats[result.trial.cell].append(_end(result))
        else:
            done[result.trial.point] = longest_attempt(done.get(result.trial.point), _end(result))
        self.show(result.trial.cell)

    def show(self, cell: Cell | None = None) -> None:
        """Shows the line; `cell` is the one whose best K is told."""
        terminal = self.stream.isatty()
        if not terminal and time.monotonic() - self._shown < self.every:
            return
        self._shown = time.monotonic()
        text = self.line(cell)
        if terminal:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r{text[:width]:<{width}}")
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Ends the line; where the stream is no terminal, shows it a last time."""
        self.stream.write("\n" if self.stream.isatty() else self.line() + "\n")
        self.stream.flush()

    def line(self, cell: Cell | None = None) -> str:
        """The line's text."""
        finished = {each: self._finished(each) for each in self.done}
        full = sum(n >= self.points for n in finished.values())
        parts = [f"cells {full}/{len(self.done)}", f"trials {sum(finished.values())}/{len(self.done) * self.points}"]
        if self.plan.count:
            done, left = map(sum, zip(*(self._repeats(each) for each in self.done), strict=True))
            parts.append(f"repeats {done}/{done + left}")
        if cell is not None:
            steps = [r.steps for r in self.done[cell].values() if r.status is Status.COMPLETE]
            parts.append(f"{cell}: best K {min(steps) if steps else '-'}")
        left = self.seconds_left(finished)
        paused = any(len(done) > finished[each] for each, done in self.done.items())
        least = "at least " if paused else ""  # how far those have to go is not known
        parts.append(f"time left {least}{_clock(left)}" if left is not None else "time left ?")
        return "  ".join(parts)

    def _finished(self, cell: Cell) -> int:
        """Trials of a cell that ran as far as they have to, by what is known of the race."""
        return len(truncate_at_race_limit(list(self.done[cell].values()), self.slack))

    def _repeats(self, cell: Cell) -> tuple[int, int]:
        """Repeats of a cell that are done, and those that are left; as if it had a K*, while nobody knows better."""
        done, plan, repeats = self.done[cell].values(), self.plan, self.repeats[cell]
        complete = [(r.steps, r.trial.point) for r in done if r.steps is not None]
        if not complete:
            return 0, plan.count * plan.points * (self._finished(cell) < self.points)
        ended = [r for r in repeats if r.status is not Status.FAILED]
        left = len(repeats_left(plan, done, ended))
        return plan.count * len(plan.best(complete)) - left, left

    def seconds_left(self, finished: Mapping[Cell, int]) -> float | None:
        """Mean seconds of a finished trial of the nearest batch size, summed over what is left, shared by the workers.

        For a batch size that no trial has finished at yet, the nearest smaller one stands: K* falls as the batch grows,
        so a trial costs about as much until the critical batch size, and more beyond it.
        """
        seconds = {cell: [r.seconds for r in results.values()] for cell, results in self.done.items()}
        mean = mean_of_nearest_batch_size(seconds, self.done)
        if mean is None:
            return None
        left = {cell: self.points - finished[cell] + self._repeats(cell)[1] for cell in self.done}
        return sum(mean[cell] * left[cell] for cell in self.done) / self.workers


def mean_of_nearest_batch_size(
    known: Mapping[Cell, Iterable[float]], cells: Iterable[Cell]
) -> dict[Cell, float] | None:
    """For each cell the mean of what is known of the nearest batch size, the smaller of two equally near ones.

    None where nothing is known of any.
    """
    by_size: dict[int, list[float]] = {}
    for cell, values in known.items():
        by_size.setdefault(cell.batch_size, []).extend(values)
    mean = {batch_size: sum(values) / len(values) for batch_size, values in by_size.items() if values}
    if not mean:
        return None
    return {cell: mean[min(mean, key=lambda b, cell=cell: (abs(b - cell.batch_size), b))] for cell in cells}


def _end(result: TrialResult) -> TrialResult:
    """A result with the last step of its curves alone: a long study's would fill the memory."""
    return dataclasses.replace(result, curve={"step": result.curve.get("step", [])[-1:]}, smoothness={})


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


class AllFail(UserError):
    """The first trials of a run of a study failed, every one."""


class Failures:
    """Takes all results of one run of a study.

    Args:
        folder: Gets the traceback of each failed trial, "CELL point-N.txt", and loses it when the trial succeeds.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._told, self._failed = 0, set[tuple[Cell, str]]()

    def on_result_stored(self, result: TrialResult) -> None:
        """Takes a result. Raises AllFail if it is one more failure and there was nothing else so far."""
        trial, self._told = result.trial, self._told + 1
        path = self.folder / f"{trial.cell} {trial.file_name}.txt"
        if result.status is not Status.FAILED:
            self._failed.discard((trial.cell, trial.file_name))
            with suppress(OSError):
                path.unlink(missing_ok=True)
                self.folder.rmdir()
                self.folder.parent.rmdir()
            return
        self._failed.add((trial.cell, trial.file_name))
        with suppress(StorageError), replacing(path) as temporary:  # the storage has it, and MLflow
            temporary.write_text(result.traceback or result.failure, encoding="utf-8")
        if self._told == len(self._failed) == FIRST:
            raise AllFail(
                f"the first {FIRST} trials failed, the last with {result.failure}; tracebacks in {self.folder}"
            )

    def summary(self) -> str:
        """What to tell of the trials that failed, in a sentence; nothing if none did."""
        match len(self._failed):
            case 0:
                return ""
            case 1:
                return f"1 trial failed, its traceback is in {self.folder}; the same command runs it again"
            case n:
                return f"{n} trials failed, their tracebacks are in {self.folder}; the same command runs them again"
