"""How far a study has come: trials, best K so far and time left, and the plain lines that tell so
in a log."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TextIO

from lit_dps.core.racing import longest_attempt, truncate_at_race_limit
from lit_dps.core.repeats import RepeatPlan, missing_repeats
from lit_dps.core.trial import STACKED, Cell, Status, TrialResult

Along = Callable[[Cell, int], float]  # what a cell has over what the nearest batch size has


def as_many(cell: Cell, nearest: int) -> float:
    """A cell has what the nearest batch size has."""
    return 1.0


class TimeRemaining(NamedTuple):
    """Seconds that are left of a study, and whether they are no more than a lower bound."""

    seconds: float
    bound: bool


class Progress:
    """Cells, trials, best K so far, and time left, told by a line now and then
    (`lit_dps.study.display` at a terminal).

    Args:
        results: Results of an earlier run of the study, by cell; its failed trials are run again.
        cells, points: Of this run, and how many in each.
        workers: Trials that run at the same time.
        slack: The study's; a trial that stopped and has to go on is not finished.
        plan, repeats: What is repeated after the search, and the repeats of an earlier run, by
            cell.
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
        earlier = {
            cell: [r for r in results.get(cell, ()) if r.status is not Status.FAILED]
            for cell in cells
        }
        self.done = {
            cell: {r.trial.point: _end(r) for r in earlier[cell] if r.trial.point < points}
            for cell in cells
        }
        self.plan, self.repeats = (
            plan,
            {cell: list(map(_end, (repeats or {}).get(cell, ()))) for cell in cells},
        )
        self._shown = -math.inf
        self._began = time.monotonic()
        self._stacked = 0.0

    def update(self, result: TrialResult) -> None:
        """Takes a new result into account and shows the line."""
        self.take(result)
        self.show(result.trial.cell)

    def take(self, result: TrialResult) -> None:
        """Takes a new result into account."""
        done = self.done[result.trial.cell]
        if result.trial.repeat:
            self.repeats[result.trial.cell].append(_end(result))
        else:
            done[result.trial.point] = longest_attempt(done.get(result.trial.point), _end(result))
        self._stacked += result.seconds if result.flags.get(STACKED) else 0.0

    def show(self, cell: Cell | None = None) -> None:
        """Shows the line, if none was shown for a while; `cell` is the one whose best K is told."""
        if time.monotonic() - self._shown >= self.every:
            self._write(self.line(cell))

    def close(self) -> None:
        """Shows the line a last time."""
        self._write(self.line())

    def _write(self, text: str) -> None:
        self._shown = time.monotonic()
        self.stream.write(text + "\n")
        self.stream.flush()

    def line(self, cell: Cell | None = None) -> str:
        """The line's text."""
        finished = self.finished
        full = sum(n >= self.points for n in finished.values())
        parts = [
            f"cells {full}/{len(self.done)}",
            f"trials {sum(finished.values())}/{len(self.done) * self.points}",
        ]
        if self.plan.count:
            parts.append("repeats {}/{}".format(*self.repeated))
        if cell is not None:
            parts.append(f"{cell}: best K {self.best(cell) or '-'}")
        left = self.left(finished)
        least = "at least " if left and left.bound else ""
        parts.append(f"time left {least}{clock(left.seconds)}" if left else "time left ?")
        return "  ".join(parts)

    @property
    def finished(self) -> dict[Cell, int]:
        """Trials of each cell that ran as far as they have to, by what is known of the race."""
        return {cell: len(self._ended(cell)) for cell in self.done}

    @property
    def repeated(self) -> tuple[int, int]:
        """Repeats that are done, and all of them."""
        done, left = map(sum, zip(*map(self._repeats, self.done), strict=True))
        return done, done + left

    def best(self, cell: Cell) -> int | None:
        """The fewest steps to the goal in a cell so far; None without a complete trial."""
        return min(
            (r.steps for r in self.done[cell].values() if r.status is Status.COMPLETE), default=None
        )

    def _ended(self, cell: Cell) -> list[TrialResult]:
        return truncate_at_race_limit(list(self.done[cell].values()), self.slack)

    def _repeats(self, cell: Cell) -> tuple[int, int]:
        """Repeats of a cell that are done, and those that are left; as if it had a K*, while nobody
        knows better."""
        done, plan, repeats = self.done[cell].values(), self.plan, self.repeats[cell]
        complete = [(r.steps, r.trial.point) for r in done if r.steps is not None]
        if not complete:
            return 0, plan.count * plan.points * (len(self._ended(cell)) < self.points)
        ended = [r for r in repeats if r.status is not Status.FAILED]
        left = len(missing_repeats(plan, done, ended))
        return plan.count * len(plan.best_points(complete)) - left, left

    def left(self, finished: Mapping[Cell, int]) -> TimeRemaining | None:
        """Mean seconds of a finished trial of the nearest batch size, summed over what is left,
        shared by the workers.

        For a batch size that no trial has finished at yet, the nearest smaller one stands: K* falls
        as the batch grows, so a trial costs about as much until the critical batch size, and more
        beyond it. A trial that paused counts as one of them. While all pause, nobody knows how far
        they have to go: then their own seconds are a bound. None without any result.
        """
        ended = {cell: [r.seconds for r in self._ended(cell)] for cell in self.done}
        paused = {
            cell: [r.seconds for r in results.values()] for cell, results in self.done.items()
        }
        likely = mean_of_nearest_batch_size(ended, self.done)
        mean = likely or mean_of_nearest_batch_size(paused, self.done)
        if mean is None:
            return None
        left = {cell: self.points - finished[cell] + self._repeats(cell)[1] for cell in self.done}
        return TimeRemaining(
            sum(mean[cell] * left[cell] for cell in self.done) / self._lanes(), likely is None
        )

    def _lanes(self) -> float:
        """Trials at a time: as many as workers; where each trains a stack of them, as many as that
        came to so far."""
        return max(self.workers, self._stacked / max(time.monotonic() - self._began, 1e-9))


def mean_of_nearest_batch_size(
    known: Mapping[Cell, Iterable[float]],
    cells: Iterable[Cell],
    along: Along = as_many,
) -> dict[Cell, float] | None:
    """For each cell the mean of what is known of the nearest batch size, the smaller of two equally
    near ones.

    None where nothing is known of any. `along` takes it from there to the cell.
    """
    by_size: dict[int, list[float]] = {}
    for cell, values in known.items():
        by_size.setdefault(cell.batch_size, []).extend(values)
    mean = {
        batch_size: sum(values) / len(values) for batch_size, values in by_size.items() if values
    }
    if not mean:
        return None
    near = {
        cell: min(mean, key=lambda b, cell=cell: (abs(b - cell.batch_size), b)) for cell in cells
    }
    return {cell: mean[size] * along(cell, size) for cell, size in near.items()}


def _end(result: TrialResult) -> TrialResult:
    """A result with the last step of its curves alone: a long study's would fill the memory."""
    return dataclasses.replace(
        result, curve={"step": result.curve.get("step", [])[-1:]}, smoothness={}
    )


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:40."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
