"""The best metric under a budget of steps or of examples, against the batch size (Shallue et al.
2019).

As their measurements have it (batch_science, `measurement_utils`): those with step <= S, or with B
step <= E, and of these the best, over all trials of a cell and all their checks. Trials that
stopped at the goal or were outraced did not spend the budget: what they leave is a bound where they
might have found better (`curves.Best.exact`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from lit_dps.analysis.curves import Seen, best_within
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import short_names

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
