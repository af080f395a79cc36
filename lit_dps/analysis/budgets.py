"""The best metric under a budget of steps or of examples, against the batch size.

Shallue et al. (2019; batch_science, `measurement_utils`) take the measurements with step <= S, or
with B step <= E, and of these the best, over all trials of a cell and all their checks. Their
"solution quality" is the best value at the whole budget: does a large batch end worse, if it is
tuned as well?

A curve ends where its trial stopped: at the goal (without `study.train_past_goal`), by racing, or
at the budget. Its later values are not known, unless it diverged: then there are none. A check that
stopped early leaves a lower bound. So a best value may be a bound (`Best.exact`).

Values are chosen by the validation split that they are measured on, over all trials: they are
optimistic, equally at every batch size with as many trials. A budget of steps gives large batches
more examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import short_names
from lit_dps.core.trial import Status, TrialResult

MAX_BUDGETS = 8  # of a family
STEPS = "steps"
EXAMPLES = "examples"
TOP = 5  # the best trials that the spread is over
LATE = 0.9  # a best value that is reached after this share of the budget may fall further


class MetricCurve:
    """The goal's metric along a trial, with what is known of it at each step.

    Args:
        result: The trial.
        goal: What its metric is, whether it falls, and how often it was checked.

    Attributes:
        steps: (n,), of its checks, ascending.
        values: (n,), of the metric; nan where it was not finite or is only a bound.
        until: The last step up to which the best value is known: the step before the first check
            that was not made; infinite for a trial that diverged.
    """

    def __init__(self, result: TrialResult, goal: Goal):
        self.result = result
        self._sign = -1 if goal.at_least else 1
        curve = result.curve
        self.steps = np.array(curve.get("step", ()), float)
        metric = np.array(curve.get(goal.metric, ()), float)
        exact = np.array(curve.get("exact") or [1] * len(metric), bool)
        self.values = np.where(exact & np.isfinite(metric), metric, np.nan)
        self._bounds = np.where(exact, np.inf, self._sign * metric)
        if _diverged(result, goal):
            self.until = math.inf
        else:
            last = int(self.steps[-1]) if len(self.steps) else 0
            self.until = last + goal.check_interval - 1

    def best(self, step: float) -> tuple[float, int] | None:
        """Return the best value up to a step, and the step of the first check that found it.

        None before any.
        """
        counts = (self.steps <= step) & np.isfinite(self.values)
        cost = np.where(counts, self._sign * self.values, np.inf)
        if not np.isfinite(cost).any():
            return None
        i = int(np.argmin(cost))
        return float(self.values[i]), int(self.steps[i])

    def floor(self, step: float) -> float:
        """Return the lower bound of the best value up to a step; infinite where it is exact.

        Its sign is turned where the metric rises.
        """
        if step > self.until:
            return -math.inf
        return float(np.min(self._bounds[self.steps <= step], initial=math.inf))


def _diverged(result: TrialResult, goal: Goal) -> bool:
    """Return True if a trial ended as its values were not finite any more."""
    if result.status is Status.INFEASIBLE:
        return True
    if result.steps is None or result.failure:
        return False
    # A run past its goal ends before the budget by divergence or by an error.
    return result.steps < result.steps_run < goal.max_steps


@dataclass(frozen=True)
class Best:
    """The best value that any trial of a cell reached up to a step.

    Attributes:
        value: Of the goal's metric.
        step: Of the first check that found it.
        result: The trial, the lowest point among equals.
        exact: Whether no other trial can have a better one there: else the true best is this one or
            a better one.
        ended: The number of trials whose value at that step is not known.
    """

    value: float
    step: int
    result: TrialResult
    exact: bool
    ended: int


def best_within(curves: Iterable[MetricCurve], goal: Goal, step: float) -> Best | None:
    """Return the best value of some trials up to a step; None where none has an exact one yet."""
    curves = list(curves)
    sign = -1 if goal.at_least else 1
    candidates = []
    for curve in curves:
        best = curve.best(step)
        if best is not None:
            value, at = best
            candidates.append((sign * value, curve.result.trial.point, value, at, curve.result))
    if not candidates:
        return None
    _, _, value, at, result = min(candidates, key=lambda candidate: candidate[:2])
    lowest = min(curve.floor(step) for curve in curves)
    is_perfect = goal.is_validation_error and value <= 0  # no error is below 0
    ended = sum(step > curve.until for curve in curves)
    return Best(value, at, result, is_perfect or sign * value <= lowest, ended)


def step_budgets(goal: Goal) -> list[int]:
    """Return budgets in steps, ascending: max steps, and shorter ones by one power of two.

    They are on the grid of the checks.
    """
    return _budgets(goal.max_steps, goal.check_interval, goal.check_interval)


def example_budgets(goal: Goal, batch_sizes: Sequence[int]) -> list[int]:
    """Return budgets in examples, ascending, each within reach of two batch sizes or more.

    None of a single batch size.
    """
    if len(batch_sizes) < 2:
        return []
    return _budgets(goal.max_steps * batch_sizes[-2], goal.check_interval * batch_sizes[1], 1)


def _budgets(high: int, low: int, grid: int) -> list[int]:
    """Return at most `MAX_BUDGETS` budgets from low to high, on a grid, by one power of two."""
    octaves = math.log2(max(high / low, 1))
    ratio = 2 ** max(1, math.ceil(octaves / (MAX_BUDGETS - 1)))
    budgets = {high // ratio**i // grid * grid for i in range(MAX_BUDGETS)}
    return sorted(budget for budget in budgets if budget >= low)


def budget_rows(
    record: StudyRecord,
    cells: Sequence[CellSummary],
    steps: Sequence[int] | None = None,
    examples: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return one row a cell and budget, by series, batch size, kind and size of the budget.

    Budgets that end before a cell's first check, or beyond the step budget of the study, are left
    out there; so are cells where no trial has an exact value.

    Args:
        record: The study.
        cells: Its summaries.
        steps, examples: The budgets; by default `step_budgets` and `example_budgets`.

    Returns:
        Columns: sparsity and further axes, batch_size [examples], budget ("steps" or "examples"),
        size (of the budget, in its unit), step (the last check within it), best (of the goal's
        metric), exact (1; 0 where it is a bound: the true best is this value or a better one),
        ended_early (trials that stopped before `step`), found_at [steps], the check that found it,
        point and the metaparameters (short names) of that trial.
    """
    goal = record.goal
    names = short_names(list(record.space))
    if steps is None:
        steps = step_budgets(goal)
    if examples is None:
        examples = example_budgets(goal, record.batch_sizes)
    rows = []
    for summary in cells:
        curves = [MetricCurve(result, goal) for result in summary.trials]
        batch_size = summary.cell.batch_size
        budgets = [(STEPS, size, size) for size in sorted(steps)]
        budgets += [(EXAMPLES, size, size // batch_size) for size in sorted(examples)]
        for kind, size, last_step in budgets:
            step = last_step // goal.check_interval * goal.check_interval
            if not goal.check_interval <= step <= goal.max_steps:
                continue
            best = best_within(curves, goal, step)
            if best is None:
                continue
            row = {
                **columns_of(summary.cell.series),
                "batch_size": batch_size,
                "budget": kind,
                "size": size,
                "step": step,
                "best": best.value,
                "exact": int(best.exact),
                "ended_early": best.ended,
                "found_at": best.step,
                "point": best.result.trial.point,
            }
            params = best.result.trial.params
            row |= {name: params.get(key) for key, name in names.items()}
            rows.append(row)
    columns = [*columns_of(record.series[0]), "batch_size", "budget", "size", "step", "best"]
    columns += ["exact", "ended_early", "found_at", "point"]
    return frame(rows, [*columns, *names.values()])


def goes_on(record: StudyRecord) -> bool:
    """Return True if a trial trained past its goal, so that its later values are known."""
    for results in record.results.values():
        for result in results:
            if result.steps is not None and result.steps_run > result.steps:
                return True
    return False


def quality_rows(record: StudyRecord, cells: Sequence[CellSummary]) -> pd.DataFrame:
    """Return one row a cell that has a value of the goal's metric, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], best (of all trials and checks),
    exact (1; 0 where trials stopped before the budget, and the true best is this one or a better
    one), ended_early, the number of those, found_at [steps], late (1 where that is in the last
    tenth of the budget: a longer one may do better), trials, the number that are known to the end,
    top (how many of them the spread is over, at most `TOP`), top_median and top_worst, of the best
    values of these, final (the best value at the last check, of trials that ran to the budget),
    point and the metaparameters (short names) of the best trial, and, where its curve keeps further
    metrics, the training loss of the batch among them, their values where it was best.
    """
    goal = record.goal
    names = short_names(list(record.space))
    metrics = set()
    for summary in cells:
        for result in summary.trials:
            metrics |= result.curve.keys()
    other_metrics = sorted(metrics - {"step", "exact", goal.metric})
    rows = []
    for summary in cells:
        curves = [MetricCurve(result, goal) for result in summary.trials]
        best = best_within(curves, goal, goal.max_steps)
        if best is None:
            continue
        row = {
            **columns_of(summary.cell.series),
            "batch_size": summary.cell.batch_size,
            "best": best.value,
            "exact": int(best.exact),
            "ended_early": best.ended,
            "found_at": best.step,
            "late": int(best.step > LATE * goal.max_steps),
        }
        row |= _spread_columns(curves, goal)
        row["point"] = best.result.trial.point
        params = best.result.trial.params
        row |= {name: params.get(key) for key, name in names.items()}
        curve = best.result.curve
        at = list(curve["step"]).index(best.step)
        row |= {key: curve[key][at] if curve.get(key) else None for key in other_metrics}
        rows.append(row)
    columns = [*columns_of(record.series[0]), "batch_size", "best", "exact", "ended_early"]
    columns += ["found_at", "late", "trials", "top", "top_median", "top_worst", "final", "point"]
    return frame(rows, [*columns, *names.values(), *other_metrics])


def _spread_columns(curves: Iterable[MetricCurve], goal: Goal) -> dict[str, object]:
    """Return the columns trials to final of `quality_rows`, of the trials known to the end."""
    sign = -1 if goal.at_least else 1
    bests, finals = [], []
    for curve in curves:
        best = curve.best(goal.max_steps)
        if curve.until < goal.max_steps or best is None:
            continue
        bests.append(best[0])
        if curve.steps[-1] == goal.max_steps and math.isfinite(curve.values[-1]):
            finals.append(curve.values[-1])
    top = sorted(bests, key=lambda value: sign * value)[:TOP]
    return {
        "trials": len(bests),
        "top": len(top),
        "top_median": float(np.median(top)) if top else None,
        "top_worst": top[-1] if top else None,
        "final": min(finals, key=lambda value: sign * value, default=None),
    }
