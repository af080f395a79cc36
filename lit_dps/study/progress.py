"""The progress of a study: trials, best K so far and remaining time; printed as lines of a log.

At a terminal, `lit_dps.study.display` shows it in place.
"""

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

# The ratio of a quantity of a cell to that at another batch size.
Ratio = Callable[[Cell, int], float]
MIN_SECONDS = 1e-9  # of a run: keeps ratios defined


def ratio_one(cell: Cell, batch_size: int) -> float:
    """Return 1: a cell is assumed to need what the other batch size needs."""
    return 1.0


class TimeRemaining(NamedTuple):
    """Seconds that a study still needs.

    Attributes:
        seconds: The estimate.
        bound: True if it is a lower bound.
    """

    seconds: float
    bound: bool


class Progress:
    """Counts the finished trials of a study, and prints a line from time to time.

    Args:
        results: Results of earlier runs of the study, by cell. Failed trials run again.
        cells: The cells of this run.
        points: The number of trials of each cell.
        workers: Trials that run at the same time.
        slack: The factor at which trials are stopped early; None without racing.
        plan: The repeats after the search.
        repeats: Repeats of earlier runs, by cell.
        stream: Where lines are printed; by default stderr.
        every: Seconds between two lines.
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
        self.every = every
        self.points = points
        self.workers = workers
        self.slack = slack
        self.plan = plan
        self.done: dict[Cell, dict[int, TrialResult]] = {}
        self.repeats: dict[Cell, list[TrialResult]] = {}
        for cell in cells:
            self.done[cell] = {}
            for result in results.get(cell, ()):
                if result.status is not Status.FAILED and result.trial.point < points:
                    self.done[cell][result.trial.point] = _without_curves(result)
            stored_repeats = (repeats or {}).get(cell, ())
            self.repeats[cell] = [_without_curves(result) for result in stored_repeats]
        self._last_line = -math.inf  # time of the last printed line
        self._began = time.monotonic()
        self._stacked_seconds = 0.0

    def update(self, result: TrialResult) -> None:
        """Add a new result, and print a line if the last one is old."""
        self.add(result)
        self.show(result.trial.cell)

    def add(self, result: TrialResult) -> None:
        """Add a new result."""
        cell, point = result.trial.cell, result.trial.point
        short = _without_curves(result)
        if result.trial.repeat:
            self.repeats[cell].append(short)
        else:
            self.done[cell][point] = longest_attempt(self.done[cell].get(point), short)
        if result.flags.get(STACKED):
            self._stacked_seconds += result.seconds

    def show(self, cell: Cell | None = None) -> None:
        """Print a line with the best K of a cell, unless the last line is recent."""
        if time.monotonic() - self._last_line >= self.every:
            self._print(self.line(cell))

    def close(self) -> None:
        """Print a last line."""
        self._print(self.line())

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.stream.write(text + "\n")
        self.stream.flush()

    def line(self, cell: Cell | None = None) -> str:
        """Return the text of a line, with the best K of a cell."""
        finished = self.finished
        full = sum(count >= self.points for count in finished.values())
        trials = len(self.done) * self.points
        parts = [f"cells {full}/{len(self.done)}", f"trials {sum(finished.values())}/{trials}"]
        if self.plan.count:
            done, total = self.repeated
            parts.append(f"repeats {done}/{total}")
        if cell is not None:
            parts.append(f"{cell}: best K {self.best(cell) or '-'}")
        remaining = self.remaining(finished)
        if remaining is None:
            parts.append("time left ?")
        else:
            at_least = "at least " if remaining.bound else ""
            parts.append(f"time left {at_least}{clock(remaining.seconds)}")
        return "  ".join(parts)

    @property
    def finished(self) -> dict[Cell, int]:
        """The number of trials of each cell that have run as far as racing requires so far."""
        return {cell: len(self._ended(cell)) for cell in self.done}

    @property
    def repeated(self) -> tuple[int, int]:
        """The number of finished repeats, and of all repeats."""
        done, remaining = 0, 0
        for cell in self.done:
            done_of_cell, remaining_of_cell = self._repeats(cell)
            done += done_of_cell
            remaining += remaining_of_cell
        return done, done + remaining

    def best(self, cell: Cell) -> int | None:
        """Return the fewest steps to the goal in a cell so far; None without a complete trial."""
        steps = [result.steps for result in self.done[cell].values() if result.steps is not None]
        return min(steps, default=None)

    def _ended(self, cell: Cell) -> list[TrialResult]:
        return truncate_at_race_limit(list(self.done[cell].values()), self.slack)

    def _repeats(self, cell: Cell) -> tuple[int, int]:
        """Return the number of finished and of remaining repeats of a cell.

        Until a cell has a K*, it is assumed to get one.
        """
        results = self.done[cell].values()
        complete = [(r.steps, r.trial.point) for r in results if r.steps is not None]
        if not complete:
            has_open_trials = len(self._ended(cell)) < self.points
            return 0, self.plan.count * self.plan.points if has_open_trials else 0
        ended = [r for r in self.repeats[cell] if r.status is not Status.FAILED]
        remaining = len(missing_repeats(self.plan, results, ended))
        return self.plan.count * len(self.plan.best_points(complete)) - remaining, remaining

    def remaining(self, finished: Mapping[Cell, int]) -> TimeRemaining | None:
        """Estimate the remaining time from the mean time of finished trials.

        A cell without finished trials takes the mean of the nearest batch size. K* falls as the
        batch grows, so that a trial costs about as much up to the critical batch size, and more
        above it. A paused trial counts as finished. While all trials pause, their own times are a
        lower bound.

        Args:
            finished: The number of finished trials of each cell.

        Returns:
            The time with all workers; None without any result.
        """
        ended: dict[Cell, list[float]] = {}
        paused: dict[Cell, list[float]] = {}
        for cell, results in self.done.items():
            ended[cell] = [r.seconds for r in self._ended(cell)]
            paused[cell] = [r.seconds for r in results.values()]
        mean = mean_of_nearest_batch_size(ended, self.done)
        is_bound = mean is None
        if mean is None:
            mean = mean_of_nearest_batch_size(paused, self.done)
        if mean is None:
            return None
        seconds = 0.0
        for cell in self.done:
            trials = self.points - finished[cell] + self._repeats(cell)[1]
            seconds += mean[cell] * trials
        return TimeRemaining(seconds / self._trials_at_a_time(), is_bound)

    def _trials_at_a_time(self) -> float:
        """Return the number of workers; with stacked trials, the mean number of stacked ones."""
        seconds = max(time.monotonic() - self._began, MIN_SECONDS)
        return max(self.workers, self._stacked_seconds / seconds)


def mean_of_nearest_batch_size(
    values: Mapping[Cell, Iterable[float]],
    cells: Iterable[Cell],
    ratio: Ratio = ratio_one,
) -> dict[Cell, float] | None:
    """Return for each cell the mean of the values at the nearest batch size.

    Of two equally near batch sizes, the smaller one counts.

    Args:
        values: Values of some cells.
        cells: The cells to estimate.
        ratio: The expected ratio of a cell's value to that at another batch size.

    Returns:
        None if there are no values.
    """
    by_size: dict[int, list[float]] = {}
    for cell, of_cell in values.items():
        by_size.setdefault(cell.batch_size, []).extend(of_cell)
    means = {size: sum(each) / len(each) for size, each in by_size.items() if each}
    if not means:
        return None
    result = {}
    for cell in cells:
        distances = [(abs(size - cell.batch_size), size) for size in means]
        nearest = min(distances)[1]
        result[cell] = means[nearest] * ratio(cell, nearest)
    return result


def _without_curves(result: TrialResult) -> TrialResult:
    """Return a result with only the last step of its curve, which saves memory in long studies."""
    last_step = result.curve.get("step", [])[-1:]
    return dataclasses.replace(result, curve={"step": last_step}, smoothness={})


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds: 0:01:40."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
