"""What is known of a trial at a step: the best value of the goal's metric up to there, or only that
it is a bound.

A curve ends where its trial stopped: at the goal (without `study.run_on`), outraced, or at the
budget. What it would have found later is not known, unless it had diverged: then there is no later.
And a check that stopped early leaves a lower bound.

The best metric under a budget of steps or of examples, against the batch size (Shallue et al.
2019).

As their measurements have it (batch_science, `measurement_utils`): those with step <= S, or with B
step <= E, and of these the best, over all trials of a cell and all their checks. Trials that
stopped at the goal or were outraced did not spend the budget: what they leave is a bound where they
might have found better (`curves.Best.exact`).

The best value of the metric at the whole budget against the batch size (Shallue et al. 2019,
"solution quality").

Does a large batch end worse, if it is tuned as well? Two readings: the best of all checks, as if
training had been stopped there, and that of the last check. Both are chosen by the validation split
that they are measured on, over all trials: they flatter, at every batch size alike where the trials
are as many. A budget of steps gives large batches more examples; `budgets` has one of examples
beside it.
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


class Seen:
    """The curve of a trial.

    Args:
        result: The trial.
        goal: What its metric is, whether it falls, and how often it was checked.

    Attributes:
        steps: (n,), of its checks, ascending.
        values: (n,), of the metric; nan where it was not finite or is only a bound.
        until: The last step up to which the best value is known: that before the first check that
            was not made; infinite for a trial that diverged.
    """

    def __init__(self, result: TrialResult, goal: Goal):
        self.result, self._sign = result, -1 if goal.at_least else 1
        curve = result.curve
        self.steps = np.array(curve.get("step", ()), float)
        found = np.array(curve.get(goal.metric, ()), float)
        exact = np.array(curve.get("exact") or [1] * len(found), bool)
        self.values = np.where(exact & np.isfinite(found), found, np.nan)
        self._bounds = np.where(exact, np.inf, self._sign * found)
        went_on = (
            result.steps is not None
            and result.steps_run > result.steps
            and result.steps_run < goal.max_steps
        )
        diverged = result.status is Status.INFEASIBLE or (
            went_on and not result.failure
        )  # nothing else ends it there
        last = int(self.steps[-1]) if len(self.steps) else 0
        self.until = math.inf if diverged else last + goal.check_interval - 1

    def best(self, step: float) -> tuple[float, int] | None:
        """The best value up to a step, and the step of the first check that found it; None before
        any."""
        until = self.steps <= step
        cost = np.where(until & np.isfinite(self.values), self._sign * self.values, np.inf)
        if not np.isfinite(cost).any():
            return None
        i = int(np.argmin(cost))
        return float(self.values[i]), int(self.steps[i])

    def floor(self, step: float) -> float:
        """What `best` may be below, its sign turned where the metric rises: infinite where it is
        exact."""
        if step > self.until:
            return -math.inf
        return float(np.min(self._bounds[self.steps <= step], initial=math.inf))


@dataclass(frozen=True)
class Best:
    """The best value that any trial of a cell found up to a step.

    Attributes:
        value: Of the goal's metric.
        step: Of the first check that found it.
        result: The trial, the lowest point among equals.
        exact: Whether no other trial can have a better one there: else the true best is this one or
            a better one.
        ended: Trials of which it is not known how they stood at that step.
    """

    value: float
    step: int
    result: TrialResult
    exact: bool
    ended: int


def best_within(seen: Iterable[Seen], goal: Goal, step: float) -> Best | None:
    """The best value of some trials up to a step; None where none has an exact one yet."""
    seen = list(seen)
    found = [(of.best(step), of.result) for of in seen]
    known = [(best, result) for best, result in found if best is not None]
    if not known:
        return None
    sign = -1 if goal.at_least else 1
    (value, at), result = min(known, key=lambda one: (sign * one[0][0], one[1].trial.point))
    lowest = min(of.floor(step) for of in seen)
    perfect = goal.is_validation_error and value <= 0  # no error is below 0
    return Best(
        value, at, result, perfect or sign * value <= lowest, sum(step > of.until for of in seen)
    )


LINES = 8  # budgets of a family, at most


STEPS, EXAMPLES = "steps", "examples"


def step_budgets(goal: Goal) -> list[int]:
    """Budgets in steps, ascending: the study's own and shorter ones by one power of two, on the
    grid of the checks."""
    return _down(goal.max_steps, goal.check_interval, goal.check_interval)


def example_budgets(goal: Goal, batch_sizes: Sequence[int]) -> list[int]:
    """Budgets in examples, ascending, each within reach of two batch sizes or more; none of a
    single batch size."""
    if len(batch_sizes) < 2:
        return []
    return _down(goal.max_steps * batch_sizes[-2], goal.check_interval * batch_sizes[1], 1)


def _down(high: int, low: int, grid: int) -> list[int]:
    octaves = math.log2(max(high / low, 1))
    ratio = 2 ** max(1, math.ceil(octaves / (LINES - 1)))
    budgets = {high // ratio**i // grid * grid for i in range(LINES)}
    return sorted(budget for budget in budgets if budget >= low)


def budget_rows(
    record: StudyRecord,
    cells: Sequence[CellSummary],
    steps: Sequence[int] | None = None,
    examples: Sequence[int] | None = None,
) -> pd.DataFrame:
    """One row a cell and budget, by series, batch size, kind and size of the budget.

    Budgets that end before a cell's first check, or beyond the step budget of the study, are left
    out there; so are cells where no trial has an exact value.

    Args:
        record: The study.
        cells: Its summaries.
        steps, examples: The budgets; by default `step_budgets` and `example_budgets`.

    Returns:
        Columns: sparsity and further axes, batch_size [examples], budget ("steps" or "examples"),
            size (of the budget,
        in its unit), step (the last check within it), best (of the goal's metric), exact (1; 0
        where it is a bound: the true best is this value or a better one), ended_early (trials that
        stopped before `step`), found_at [steps], the check that found it, point and the
        metaparameters (short names) of that trial.
    """
    goal, names, rows = record.goal, short_names(list(record.space)), []
    families = {
        STEPS: step_budgets(goal) if steps is None else sorted(steps),
        EXAMPLES: example_budgets(goal, record.batch_sizes)
        if examples is None
        else sorted(examples),
    }
    for summary in cells:
        seen, batch_size = (
            [Seen(result, goal) for result in summary.trials],
            summary.cell.batch_size,
        )
        for kind, budgets in families.items():
            for size in budgets:
                step = (
                    (size // batch_size if kind == EXAMPLES else size)
                    // goal.check_interval
                    * goal.check_interval
                )
                if not goal.check_interval <= step <= goal.max_steps or not seen:
                    continue
                if (best := best_within(seen, goal, step)) is None:
                    continue
                params = best.result.trial.params
                rows.append(
                    {
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
                        **{name: params.get(key) for key, name in names.items()},
                    }
                )
    columns = [
        "batch_size",
        "budget",
        "size",
        "step",
        "best",
        "exact",
        "ended_early",
        "found_at",
        "point",
    ]
    return frame(rows, [*columns_of(record.series[0]), *columns, *names.values()])


def goes_on(record: StudyRecord) -> bool:
    """Whether trials trained on after they met the goal, so that more is known than the steps to
    it."""
    trials = (result for results in record.results.values() for result in results)
    return any(result.steps is not None and result.steps_run > result.steps for result in trials)


TOP = 5  # the best trials that the spread is over


LATE = 0.9  # a best value that is found after this share of the budget may fall further


def quality_rows(record: StudyRecord, cells: Sequence[CellSummary]) -> pd.DataFrame:
    """One row a cell that has a value of the goal's metric, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], best (of all trials and checks),
    exact (1; 0 where trials stopped before the budget, and the true best is this one or a better
    one), ended_early, the number of those, found_at [steps], late (1 where that is in the last
    tenth of the budget: a longer one may do better), trials, the number that are known to the end,
    top (how many of them the spread is over, at most `TOP`), top_median and top_worst, of the best
    values of these, final (the best value at the last check, of trials that ran to the budget),
    point and the metaparameters (short names) of the best trial, and, where its curve keeps further
    metrics, the training loss of the batch among them, their values where it was best.
    """
    goal, names, rows = record.goal, short_names(list(record.space)), []
    sign = -1 if goal.at_least else 1
    others = sorted(
        {key for s in cells for r in s.trials for key in r.curve} - {"step", "exact", goal.metric}
    )
    for summary in cells:
        seen = [Seen(result, goal) for result in summary.trials]
        if not seen or (best := best_within(seen, goal, goal.max_steps)) is None:
            continue
        whole = [
            of for of in seen if of.until >= goal.max_steps and of.best(goal.max_steps) is not None
        ]
        top = sorted((of.best(goal.max_steps)[0] for of in whole), key=lambda value: sign * value)[
            :TOP
        ]
        final = [
            of.values[-1]
            for of in whole
            if of.steps[-1] == goal.max_steps and math.isfinite(of.values[-1])
        ]
        params, curve = best.result.trial.params, best.result.curve
        at = list(curve["step"]).index(best.step)
        rows.append(
            {
                **columns_of(summary.cell.series),
                "batch_size": summary.cell.batch_size,
                "best": best.value,
                "exact": int(best.exact),
                "ended_early": best.ended,
                "found_at": best.step,
                "late": int(best.step > LATE * goal.max_steps),
                "trials": len(whole),
                "top": len(top),
                "top_median": float(np.median(top)) if top else None,
                "top_worst": top[-1] if top else None,
                "final": min(final, key=lambda value: sign * value, default=None),
                "point": best.result.trial.point,
                **{name: params.get(key) for key, name in names.items()},
                **{key: curve[key][at] if curve.get(key) else None for key in others},
            }
        )
    columns = [
        "batch_size",
        "best",
        "exact",
        "ended_early",
        "found_at",
        "late",
        "trials",
        "top",
        "top_median",
    ]
    columns += ["top_worst", "final", "point", *names.values(), *others]
    return frame(rows, [*columns_of(record.series[0]), *columns])
