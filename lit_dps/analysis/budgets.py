"""The best metric within a budget of steps or of examples, against the batch size.

Shallue et al. (2019; batch_science, `measurement_utils`) take all checks of all trials of a cell
with step <= S, or with B step <= E, and report the best value. Their "solution quality" is the best
value within the entire budget. It shows whether a large batch ends worse although it is tuned too.

The curve of a trial ends where the trial stopped: at the goal (without `study.train_past_goal`), at
the race limit, or at the budget. Later values are unknown. A trial that diverged has no later
values. A check that stopped early gives a lower bound. So a best value may be a bound
(`BestValue.is_exact`).

The values are optimistic, because the same validation split measures and selects them. Batch sizes
with the same number of trials have the same bias. A budget of steps gives large batches more
examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.readings import metric_column
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.batch_schedule import BatchSchedule
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Status, TrialResult
from lit_dps.core.unit import value_at

MAX_BUDGETS = 8  # number of budgets of one kind
STEPS = "steps"
EXAMPLES = "examples"
TOP = 5  # number of best trials whose spread is reported
# A best value after this share of the budget is late. Longer trials may improve it.
LATE = 0.9


def _cost(value: Any, goal: Goal) -> Any:
    """Return values of the goal's metric such that lower is better (number or array)."""
    if goal.at_least:
        return -value
    return value


class MetricCurve:
    """The goal's metric along a trial, and up to which step it is known.

    Args:
        result: The trial.
        goal: The goal of its study.
        last_step: Later checks are omitted.

    Attributes:
        steps: (n,), the steps of its checks, ascending.
        values: (n,), the metric; nan where it is not finite or only a bound.
        costs: (n,), the values, negated if the metric rises, so that lower is better; infinite
            where they are nan.
        last_known_step: The best value is known up to this step. The next check would be one step
            later. Infinity for a trial that diverged.
    """

    def __init__(self, result: TrialResult, goal: Goal, last_step: float = math.inf):
        self.result = result
        self.steps = np.array(result.curve.get("step", ()), float)
        count = int((self.steps <= last_step).sum())
        self.steps = self.steps[:count]
        metric = np.array(result.curve.get(goal.metric, ()), float)[:count]
        is_exact = np.array(result.curve.get("exact") or [1] * count, bool)[:count]
        self.values = np.where(is_exact & np.isfinite(metric), metric, np.nan)
        self.costs = np.where(np.isnan(self.values), np.inf, _cost(metric, goal))
        self._bounds = np.where(is_exact, np.inf, _cost(metric, goal))
        self.last_known_step = math.inf
        if not _has_diverged(result, goal):
            last_check = int(self.steps.max(initial=0))
            self.last_known_step = last_check + goal.check_interval - 1

    def best(self, last_step: float) -> int | None:
        """Return the index of the first best value up to a step; None without an exact value."""
        costs = np.where(self.steps <= last_step, self.costs, np.inf)
        if not np.isfinite(costs).any():
            return None
        return int(np.argmin(costs))

    def lowest_bound(self, last_step: float) -> float:
        """Return a lower bound of the cost of values that are not exact; infinity without any."""
        if last_step > self.last_known_step:
            return -math.inf
        return float(np.min(self._bounds[self.steps <= last_step], initial=math.inf))


def _has_diverged(result: TrialResult, goal: Goal) -> bool:
    """Return True if a trial ended because its values became infinite or nan."""
    if result.status is Status.INFEASIBLE:
        return True
    if result.steps is None or result.failure:
        return False
    # A trial that trained past its goal ends before the budget by divergence or by an error.
    return result.steps < result.steps_run and not goal.is_spent(result.curve)


@dataclass(frozen=True)
class BestValue:
    """The best value that any trial of a cell reached up to a step.

    Attributes:
        value: The value of the goal's metric.
        step: The first check with that value.
        result: The trial; among equal values, the trial with the lowest point.
        is_exact: Whether no trial can have a better value. Otherwise the value is a bound.
        ended_early: Number of trials whose value at the step is unknown.
    """

    value: float
    step: int
    result: TrialResult
    is_exact: bool
    ended_early: int

    @property
    def columns(self) -> dict[str, object]:
        """The columns of a table: best, exact, ended_early and found_at."""
        return {
            "best": self.value,
            "exact": int(self.is_exact),
            "ended_early": self.ended_early,
            "found_at": self.step,
        }

    def trial_columns(self, names: Mapping[str, str]) -> dict[str, object]:
        """Return the columns of a table that describe the trial: point and its metaparameters.

        Args:
            names: Columns of the metaparameters by configuration key.
        """
        columns: dict[str, object] = {"point": self.result.trial.point}
        for key, name in names.items():
            columns[name] = self.result.trial.params.get(key)
        return columns


def best_within(curves: Sequence[MetricCurve], goal: Goal, last_step: float) -> BestValue | None:
    """Return the best value of some trials up to a step; None without an exact value."""
    reached = []
    for curve in curves:
        i = curve.best(last_step)
        if i is not None:
            # Among equal values, the lowest point wins.
            reached.append((curve.costs[i], curve.result.trial.point, i, curve))
    if not reached:
        return None
    cost, _, i, best = min(reached, key=lambda each: each[:3])
    value = float(best.values[i])
    ended_early = sum(last_step > curve.last_known_step for curve in curves)
    lowest_bound = min(curve.lowest_bound(last_step) for curve in curves)
    is_perfect = goal.is_validation_error and value <= 0  # no error is below 0
    is_exact = is_perfect or bool(cost <= lowest_bound)
    return BestValue(value, int(best.steps[i]), best.result, is_exact, ended_early)


class Budget(NamedTuple):
    """A budget of training.

    Attributes:
        kind: `STEPS` or `EXAMPLES`.
        size: The number of steps or examples.
    """

    kind: str
    size: int

    def last_check(self, schedule: BatchSchedule, batch_size: int, check_interval: int) -> int:
        """Return the last step within the budget at which a trial is checked."""
        steps = self.size
        if self.kind == EXAMPLES:
            steps = schedule.steps_within(self.size, batch_size)
        return steps // check_interval * check_interval


def step_budgets(goal: Goal) -> list[Budget]:
    """Return budgets in steps, ascending: max steps, and smaller budgets at a constant ratio.

    All budgets are multiples of the check interval.
    """
    sizes = _budget_sizes(goal.max_steps, goal.check_interval, goal.check_interval)
    return [Budget(STEPS, size) for size in sizes]


def example_budgets(
    goal: Goal, batch_sizes: Sequence[int], schedules: Iterable[BatchSchedule]
) -> list[Budget]:
    """Return budgets in examples, ascending, each within reach of at least two batch sizes.

    The list is empty for a single batch size.

    Args:
        goal: The goal of the study.
        batch_sizes: Its batch sizes, ascending.
        schedules: The batch size schedules of its series.
    """
    if len(batch_sizes) < 2:
        return []
    largest = 0
    smallest = math.inf
    for schedule in schedules:
        largest = max(largest, schedule.examples_of(goal.max_steps, batch_sizes[-2]))
        first_check = schedule.examples_of(goal.check_interval, batch_sizes[1])
        smallest = min(smallest, first_check)
    return [Budget(EXAMPLES, size) for size in _budget_sizes(int(largest), smallest, 1)]


def _budget_sizes(largest: int, smallest: float, grid: int) -> list[int]:
    """Return at most `MAX_BUDGETS` multiples of `grid` in a range, ascending.

    The ratio of neighbours is a constant power of two, up to rounding.
    """
    octaves = math.log2(max(largest / smallest, 1))
    ratio = 2 ** max(1, math.ceil(octaves / (MAX_BUDGETS - 1)))
    sizes = {largest // ratio**i // grid * grid for i in range(MAX_BUDGETS)}
    return sorted(size for size in sizes if size >= smallest)


def budget_rows(
    record: StudyRecord, cells: Iterable[CellSummary], budgets: Sequence[Budget] | None = None
) -> pd.DataFrame:
    """Return one row per cell and budget, by series, batch size and budget.

    Budgets that end before the first check have no row, nor do budgets beyond `goal.max_steps` or
    `goal.max_examples`. Cells without an exact value have no rows.

    Args:
        record: The study.
        cells: Its summaries.
        budgets: By default `step_budgets` and `example_budgets`.

    Returns:
        Columns: sparsity and further axes, batch_size [examples], budget ("steps" or "examples"),
        size (of the budget, in its unit), step (the last check within it), best (value of the
        goal's metric), exact (1; 0 if the true best may be better), ended_early (number of trials
        that stopped before `step`), found_at [steps] (the first check with the best value), point
        and the metaparameters (short names) of that trial.
    """
    goal = record.goal
    names = record.short_names
    if budgets is None:
        schedules = map(record.batch_schedule, record.series)
        budgets = step_budgets(goal) + example_budgets(goal, record.batch_sizes, schedules)
    rows = []
    for summary in cells:
        batch_size = summary.cell.batch_size
        schedule = record.batch_schedule(summary.cell.series)
        curves = [MetricCurve(result, goal) for result in summary.trials]
        most_steps = goal.most_steps(batch_size, 0, schedule)
        for budget in budgets:
            step = budget.last_check(schedule, batch_size, goal.check_interval)
            if not goal.check_interval <= step <= most_steps:
                continue
            best = best_within(curves, goal, step)
            if best is not None:
                row = {**columns_of(summary.cell.series), "batch_size": batch_size}
                row |= {"budget": budget.kind, "size": budget.size, "step": step}
                rows.append(row | best.columns | best.trial_columns(names))
    columns = [*columns_of(record.series[0]), "batch_size", "budget", "size", "step", "best"]
    columns += ["exact", "ended_early", "found_at", "point", *names.values()]
    return frame(rows, columns)


def has_trained_past_goal(record: StudyRecord) -> bool:
    """Return True if any trial trained past its goal, so that its later values are known."""
    for results in record.results.values():
        for result in results:
            if result.steps is not None and result.steps_run > result.steps:
                return True
    return False


def quality_rows(record: StudyRecord, cells: Sequence[CellSummary]) -> pd.DataFrame:
    """Return one row per cell with a value of the goal's metric, by series, then batch size.

    The budget is `goal.max_steps`, `goal.max_examples` or `goal.max_seconds`, the first one that a
    trial spends.

    Columns: sparsity and further axes, batch_size [examples], best (value of all trials and their
    checks within the budget), exact (1; 0 if trials stopped before the budget, so that the true
    best may be better), ended_early (the number of these trials), found_at [steps] (the first check
    with the best value), late (1 if found_at is in the last tenth of the budget, so that longer
    trials may be better).

    The next columns count only trials whose values are known up to the budget: trials (their
    number), top (the number of best trials, at most `TOP`), top_median and top_worst (the median
    and the worst of their best values), final (the best value at the last check of the budget).

    The last columns describe the best trial: point, metaparameters (short names), and the values of
    further metrics of its curve, such as the training loss, at its best check.
    """
    goal = record.goal
    names = record.short_names
    other_metrics = _other_metrics(record, cells)
    rows = []
    for summary in cells:
        curves = _curves_to_budget(summary, goal)
        best = best_within(curves, goal, goal.max_steps)
        if best is None:
            continue
        row = {**columns_of(summary.cell.series), "batch_size": summary.cell.batch_size}
        row |= best.columns
        schedule = record.batch_schedule(summary.cell.series)
        last_step = goal.most_steps(summary.cell.batch_size, 0, schedule)
        if goal.is_spent(best.result.curve):
            # A budget of seconds ends trials at different steps.
            last_step = min(last_step, goal.last_step_within(best.result.curve))
        row["late"] = int(best.step > LATE * last_step)
        row |= _spread_columns(curves, goal)
        row |= best.trial_columns(names)
        for metric, column in other_metrics.items():
            row[column] = value_at(best.result.curve, metric, best.step)
        rows.append(row)
    columns = [*columns_of(record.series[0]), "batch_size", "best", "exact", "ended_early"]
    columns += ["found_at", "late", "trials", "top", "top_median", "top_worst", "final", "point"]
    return frame(rows, [*columns, *names.values(), *other_metrics.values()])


def _curves_to_budget(summary: CellSummary, goal: Goal) -> list[MetricCurve]:
    """Return the curves of a cell within the budget.

    A trial that spent a budget has no later values. The check that showed this may be beyond a
    budget of examples or of seconds.
    """
    curves = []
    for result in summary.trials:
        curve = MetricCurve(result, goal, goal.last_step_within(result.curve))
        if goal.is_spent(result.curve):
            curve.last_known_step = math.inf
        curves.append(curve)
    return curves


def _other_metrics(record: StudyRecord, cells: Iterable[CellSummary]) -> dict[str, str]:
    """Return the column of each metric of any curve except the goal's metric, sorted."""
    names = set()
    for summary in cells:
        for result in summary.trials:
            names |= result.curve.keys()
    columns = {}
    for name in sorted(names - {"step", "exact", record.goal.metric}):
        columns[name] = metric_column(name) if name in record.metrics else name
    return columns


def _spread_columns(curves: Iterable[MetricCurve], goal: Goal) -> dict[str, object]:
    """Return the columns `trials` to `final` of `quality_rows`."""
    values = []
    final_values = []
    for curve in curves:
        best = curve.best(goal.max_steps)
        if curve.last_known_step < goal.max_steps or best is None:
            continue
        values.append(float(curve.values[best]))
        if goal.is_spent(curve.result.curve) and math.isfinite(curve.values[-1]):
            final_values.append(curve.values[-1])
    top = _best_first(values, goal)[:TOP]
    final = _best_first(final_values, goal)
    return {
        "trials": len(values),
        "top": len(top),
        "top_median": float(np.median(top)) if top else None,
        "top_worst": top[-1] if top else None,
        "final": final[0] if final else None,
    }


def _best_first(values: Iterable[float], goal: Goal) -> list[float]:
    """Return values of the goal's metric sorted, the best first."""
    return sorted(values, reverse=goal.at_least)
