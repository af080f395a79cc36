"""Progress: counts the trials of a study and estimates its remaining time.

`ProgressLog` prints the progress as lines of a log. At a terminal, `lit_dps.study.display` shows it
in place, with the progress of running trials (`progress_event`).
"""

from __future__ import annotations

import dataclasses
import io
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from lit_dps.core.goal import Goal
from lit_dps.core.racing import is_final, longest_attempt, race_limit
from lit_dps.core.repeats import RepeatPlan, missing_repeats
from lit_dps.core.statistic import MINIMUM, Statistic
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.core.unit import Cost
from lit_dps.study.progress_event import ProgressEvent
from lit_dps.study.remaining_time import (
    MAX_CLOSE_RACE_FACTOR,
    CellSteps,
    SteadyEstimate,
    StepRates,
    TimeRemaining,
    clock,
    rounded_seconds,
    time_remaining,
)

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_NOTEBOOK_LINES = 1.0
MAX_CELLS_SHOWN = 3  # running cells that a line names


class RepeatCounts(NamedTuple):
    """The number of repeats that have finished, and that remain."""

    finished: int
    remaining: int


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The trials of one run of a study.

    Attributes:
        most_steps: The steps after which a trial has spent its budget, by cell of the run.
        trials: The number of trials of each cell, as in `study.trials`.
        race_factor: The factor at which trials are stopped early; None without racing.
        repeats: The repeats after the search.
        statistic: What K* is.
        at_a_time: The number of trials that run at the same time.
    """

    most_steps: Mapping[Cell, int]
    trials: int
    race_factor: float | None = None
    repeats: RepeatPlan = RepeatPlan()
    statistic: Statistic = MINIMUM
    at_a_time: int = 1


class Progress:
    """Counts the finished trials of a study, and estimates its remaining time.

    Args:
        plan: The trials of this run.
        results: Results of earlier runs of the study, by cell. Failed trials run again.
        repeats: Repeats of earlier runs, by cell.
        now: Returns the time in seconds.

    Attributes:
        results: The result of each trial by cell and point, without its curve.
        repeats: The results of the repeats by cell, without their curves.
        rates: The running trials, and the steps a second of the cells.
    """

    def __init__(
        self,
        plan: RunPlan,
        results: Mapping[Cell, Sequence[TrialResult]] | None = None,
        repeats: Mapping[Cell, Sequence[TrialResult]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self.plan = plan
        self.results: dict[Cell, dict[int, TrialResult]] = {}
        self.repeats: dict[Cell, list[TrialResult]] = {}
        for cell in plan.most_steps:
            self.results[cell] = {}
            for result in (results or {}).get(cell, ()):
                if result.status is not Status.FAILED and result.trial.point < plan.trials:
                    self.results[cell][result.trial.point] = _without_curves(result)
            self.repeats[cell] = []
            for result in (repeats or {}).get(cell, ()):
                self.repeats[cell].append(_without_curves(result))
        self.rates = StepRates(now)
        self.shown_time = SteadyEstimate(self.time_remaining, now)

    def on_event(self, event: ProgressEvent) -> None:
        """Add the progress of a running trial."""
        self.rates.on_event(event)

    @property
    def running(self) -> Collection[ProgressEvent]:
        """The last event of each running trial."""
        return self.rates.running.values()

    def add(self, result: TrialResult) -> None:
        """Add a new result."""
        cell = result.trial.cell
        point = result.trial.point
        short = _without_curves(result)
        if result.trial.repeat:
            self.repeats[cell].append(short)
        else:
            self.results[cell][point] = longest_attempt(self.results[cell].get(point), short)
        self.rates.on_end(result.trial, result.steps_run)
        self.shown_time.expire()

    def finished(self) -> dict[Cell, int]:
        """Return the number of trials of each cell that ran as far as racing requires so far."""
        return {cell: len(self._ended(cell)) for cell in self.results}

    def failed(self) -> int:
        """Return the number of trials that failed."""
        return sum(self.failed_in(cell) for cell in self.results)

    def failed_in(self, cell: Cell) -> int:
        """Return the number of trials of a cell that failed."""
        results = self.results[cell].values()
        return sum(result.status is Status.FAILED for result in results)

    def repeat_counts(self) -> RepeatCounts:
        """Return the number of repeats that have finished, and that remain."""
        finished = 0
        remaining = 0
        for cell in self.results:
            counts = self._repeat_counts_of(cell)
            finished += counts.finished
            remaining += counts.remaining
        return RepeatCounts(finished, remaining)

    def k_star(self, cell: Cell) -> Cost | None:
        """Return K* of a cell so far; None if too few trials are complete."""
        costs = [result.cost for result in self.results[cell].values()]
        return self.plan.statistic.k_star(costs)

    def is_at_first_check(self, cell: Cell, goal: Goal) -> bool:
        """Return True if the trial of K* met the goal at the first check that can meet it."""
        return goal.is_at_first_check(self.k_star(cell), self.results[cell].values())

    def _ended(self, cell: Cell) -> list[TrialResult]:
        """Return the trials of a cell that ran as far as racing requires so far."""
        limit = self._race_limit(cell)
        return [result for result in self.results[cell].values() if is_final(result, limit)]

    def _race_limit(self, cell: Cell) -> float:
        """Return the cost that the trials of a cell must reach; infinity without a limit."""
        costs = [result.cost for result in self.results[cell].values()]
        return race_limit(costs, self.plan.race_factor, self.plan.statistic)

    def _repeat_counts_of(self, cell: Cell) -> RepeatCounts:
        """Return the number of repeats of a cell. A cell without a K* is assumed to get one."""
        plan = self.plan.repeats
        results = self.results[cell].values()
        complete = [(r.cost, r.trial.point) for r in results if r.cost is not None]
        points = plan.best_points(complete, self.plan.statistic)
        if not points:
            remaining = 0
            if len(self._ended(cell)) < self.plan.trials:
                remaining = plan.count * plan.points
            return RepeatCounts(0, remaining)
        ended = [r for r in self.repeats[cell] if r.status is not Status.FAILED]
        remaining = len(missing_repeats(plan, results, ended, self.plan.statistic))
        total = plan.count * len(points)
        return RepeatCounts(total - remaining, remaining)

    def running_text(self) -> str:
        """Return how many trials run, and in which cells: 3 of 4 (B=8 S=0 x2)."""
        cells: Counter[Cell] = Counter()
        for event in self.running:
            assert event.trial is not None
            cells[event.trial.cell] += 1
        names = []
        for cell, count in sorted(cells.items()):
            names.append(f"{cell} x{count}" if count > 1 else f"{cell}")
        if len(names) > MAX_CELLS_SHOWN:
            names[MAX_CELLS_SHOWN:] = [f"{len(names) - MAX_CELLS_SHOWN} more cells"]
        text = f"{len(self.running)} of {self.plan.at_a_time}"
        if names:
            text += f" ({', '.join(names)})"
        return text

    def remaining_time_text(self) -> str:
        """Return the remaining time as it is shown: about 0:02:30, or until when it is unknown."""
        remaining = self.shown_time.remaining()
        if remaining is None:
            if self.plan.race_factor is None:
                return "unknown until more trials end"
            if any(self.k_star(cell) is not None for cell in self.results):
                return "unknown until a trial has run for some time"  # after a resume
            return "unknown until a trial meets the goal"
        if not remaining.seconds and not self.running:
            return clock(0)
        word = "at least" if remaining.is_lower_bound else "about"
        return f"{word} {clock(rounded_seconds(remaining.seconds))}"

    def time_remaining(self) -> TimeRemaining | None:
        """Estimate the remaining time of the study; None if it is unknown."""
        cells = {cell: self._steps_of(cell) for cell in self.results}
        return time_remaining(cells, self.rates)

    def _steps_of(self, cell: Cell) -> CellSteps:
        """Return what is known of the steps of a cell's trials."""
        running = self.rates.steps_now(cell)
        results = self.results[cell]
        limit = self._race_limit_in_steps(cell)
        factor = self.plan.race_factor
        # In a close race, the trials of a cell end at not much more than K*.
        is_close = factor is not None and factor <= MAX_CLOSE_RACE_FACTOR
        steps = CellSteps(
            min(limit, self.plan.most_steps[cell]),
            is_raced=limit < math.inf and is_close,
            repeats=self._repeat_counts_of(cell).remaining,
        )
        ended_points = set()
        for result in self._ended(cell):
            ended_points.add(result.trial.point)
            end = min(result.steps_run, steps.limit)
            if result.status is not Status.FAILED:
                steps.ended.append(end)
            if result.status not in (Status.FAILED, Status.INFEASIBLE):
                steps.judged.append(end)
        for point in range(self.plan.trials):
            if point in ended_points:
                continue
            if point in running:
                steps.running[point] = running[point]
            elif point in results:
                steps.paused.append(results[point].steps_run)
            else:
                steps.waiting += 1
        return steps

    def _race_limit_in_steps(self, cell: Cell) -> float:
        """Return the steps at which the race stops a cell's trials; infinity without a limit."""
        limit = self._race_limit(cell)
        for result in self.results[cell].values():
            if result.steps is not None and result.cost:
                return limit * result.steps / result.cost
        return limit


@dataclasses.dataclass
class ProgressLog:
    """Prints the progress of a study as lines of a log.

    Attributes:
        progress: The progress.
        stream: The stream that is written to; by default stderr.
        seconds: Seconds between two lines.
    """

    progress: Progress
    stream: TextIO = dataclasses.field(default_factory=lambda: sys.stderr)
    seconds: float = SECONDS_BETWEEN_LINES

    def __post_init__(self):
        self._last_line = -math.inf  # time of the last printed line

    def show(self) -> None:
        """Print a first line."""
        self._print()

    def update(self, result: TrialResult) -> None:
        """Add a new result, and print a line unless the last one is recent."""
        self.progress.add(result)
        self._print_if_due()

    def on_event(self, event: ProgressEvent) -> None:
        """Add the progress of a running trial, and print a line unless the last one is recent."""
        self.progress.on_event(event)
        if event.step:
            self._print_if_due()

    def close(self) -> None:
        """Print a last line."""
        self._print()

    def _print_if_due(self) -> None:
        if time.monotonic() - self._last_line >= self.seconds:
            self._print()

    def _print(self) -> None:
        self._last_line = time.monotonic()
        self.stream.write(self.line() + "\n")
        self.stream.flush()

    def line(self) -> str:
        """Return the text of a line: finished and failed trials, running cells, time left."""
        progress = self.progress
        trials = progress.plan.trials
        finished = progress.finished()
        cells = len(finished)
        full_cells = sum(count >= trials for count in finished.values())
        parts = [f"cells {full_cells}/{cells}", f"trials {sum(finished.values())}/{cells * trials}"]
        if progress.plan.repeats.count:
            repeats = progress.repeat_counts()
            parts.append(f"repeats {repeats.finished}/{sum(repeats)}")
        failed = progress.failed()
        if failed:
            parts.append(f"{failed} failed")
        parts.append(f"running {progress.running_text()}")
        parts.append(f"remaining time {progress.remaining_time_text()}")
        return "  ".join(parts)


class NotebookLine(io.StringIO):
    """A stream whose last written line replaces the line before, in the output of a cell.

    Args:
        display: `IPython.display.display`.
    """

    def __init__(self, display: Any):
        super().__init__()
        self._display = display
        self._handle: Any = None

    def write(self, text: str) -> int:
        """Show a line in place of the line before."""
        shown = {"text/plain": text.rstrip()}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
        return len(text)


def notebook_line() -> NotebookLine | None:
    """Return a line in the output of the running cell; None outside of a notebook."""
    # IPython is no dependency. A notebook has imported it.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return NotebookLine(sys.modules["IPython.display"].display)


def _without_curves(result: TrialResult) -> TrialResult:
    """Return a result with its costs at the goal and at the end, to save memory in long studies."""
    kept = []
    for i, step in enumerate(result.curve.get("step", ())):
        if step in (result.steps, result.steps_run):
            kept.append(i)
    curve = {}
    for name in ("step", result.unit.column):
        curve[name] = [result.curve[name][i] for i in kept]
    return dataclasses.replace(result, curve=curve, readings={})
