"""The report of a study without K*: the best values, how trials ended, what to change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lit_dps.analysis.summary import CellSummary, movable_ends
from lit_dps.analysis.tables import aligned, cell_texts, three_digits
from lit_dps.core.goal import Goal
from lit_dps.core.metric_names import is_share
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Status, TrialResult
from lit_dps.core.unit import EXAMPLES, SECONDS

# A run is still improving if its best value is in the last part of its checks.
LAST_PART = 0.25
# Column of a curve -> key of the budget that limits it.
BUDGET_KEYS = {
    "step": "goal.max_steps",
    EXAMPLES.column: "goal.max_examples",
    SECONDS.column: "goal.max_seconds",
}
# Heads of the columns of the tables that count trials by how they ended.
COUNT_HEADS = {
    "complete": "met goal",
    "incomplete": "missed goal",
    "infeasible": "diverged",
    "outraced": "stopped early",
    "stopped": "ended by callback",
    "failed": "failed",
    "pending": "pending",
}


@dataclass(frozen=True)
class BestValidation:
    """The best value of the goal's metric that a trial reached.

    Attributes:
        value: The value; if not `exact`, the true value is worse.
        step: Optimizer step of the validation.
        exact: Whether the validation used the entire split.
        result: The trial.
    """

    value: float
    step: int
    exact: bool
    result: TrialResult

    def text(self, goal: Goal) -> str:
        """Return the value with its step: 0.123 at step 40."""
        bound = ""
        if not self.exact:
            bound = "below " if goal.at_least else "above "
        return f"{bound}{three_digits(self.value)} at step {self.step}"


def ended_without_result(cells: Sequence[CellSummary]) -> bool:
    """Return True if all trials of a study ended, some without an error, and none at the goal."""
    if any(cell.best is not None or cell.pending for cell in cells):
        return False
    return any(cell.trials for cell in cells)


def have_failed(summary: CellSummary) -> bool:
    """Return True if trials of a cell ended and each one failed."""
    ended = len(summary.trials) + len(summary.undetermined_points)
    return summary.counts[Status.FAILED] > 0 and not ended


def have_diverged(summary: CellSummary) -> bool:
    """Return True if trials of a cell ended without an error and each one diverged."""
    ended = len(summary.trials) + len(summary.undetermined_points)
    return ended > 0 and summary.counts[Status.INFEASIBLE] == ended


def best_validation(goal: Goal, trials: Sequence[TrialResult]) -> BestValidation | None:
    """Return the best value of the goal's metric at any validation; None without a finite one.

    Validations beyond a budget do not count if one within all budgets has a finite value. A
    validation that stopped early (`goal.early_reject`) has a bound in place of the value. Bounds
    count only if no validation of these trials is exact.
    """
    values: list[BestValidation] = []
    within_budget: list[BestValidation] = []
    for result in trials:
        finite = _finite_values(goal, result)
        last_step = goal.last_step_within(result.curve)
        values += finite
        within_budget += [each for each in finite if each.step <= last_step]
    if not values:
        return None
    values = within_budget or values
    candidates = [each for each in values if each.exact] or values
    sign = -1 if goal.at_least else 1
    return min(candidates, key=lambda each: (sign * each.value, each.step))


def _finite_values(goal: Goal, result: TrialResult) -> list[BestValidation]:
    """Return the finite values of the goal's metric along a trial."""
    values = result.curve.get(goal.metric, [])
    exact = result.curve.get("exact", [1] * len(values))
    finite = []
    for step, value, is_exact in zip(result.curve.get("step", []), values, exact, strict=False):
        if math.isfinite(value):
            finite.append(BestValidation(float(value), int(step), bool(is_exact), result))
    return finite


def missed_text(goal: Goal, cell: CellSummary) -> str:
    """Return what the trials of a cell without K* reached, in one line; empty if unknown."""
    best = best_validation(goal, cell.trials)
    parts = []
    if best is not None:
        parts.append(f"best {goal.metric} {best.text(goal)}")
    diverged = cell.counts[Status.INFEASIBLE]
    if diverged:
        parts.append(f"{diverged} of {len(cell.trials)} diverged")
    if not parts:
        return ""
    return f"{cell.cell}: {', '.join(parts)}"


def is_without_k_star(cells: Sequence[CellSummary]) -> bool:
    """Return True if trials of a study have ended and surely no cell has a K*."""
    return any(cell.trials for cell in cells) and have_no_k_star(cells)


def have_no_k_star(cells: Iterable[CellSummary]) -> bool:
    """Return True if no cell has a K*, nor may have one because of undetermined trials."""
    return all(cell.best is None and not cell.may_have_k_star for cell in cells)


def no_result_lines(record: StudyRecord, cells: Sequence[CellSummary]) -> list[str]:
    """Return that a study has no K*, and what to change, a line each."""
    so_far = ""
    if any(cell.pending for cell in cells):
        so_far = " so far"
    too_few = record.statistic.too_few.capitalize()
    reached = f"{too_few}{so_far} reached {record.goal} within {record.goal.budget_text}"
    return [f"{reached}, so there is no K*.", *advice(record, cells)]


def no_result_table(goal: Goal, cells: Sequence[CellSummary]) -> list[str]:
    """Return the table of a study without any K*: best values, and how trials ended."""
    statuses = [Status.INCOMPLETE]
    for status in (Status.INFEASIBLE, Status.STOPPED, Status.FAILED):
        if any(cell.counts[status] for cell in cells):
            statuses.append(status)
    rows = []
    for cell in cells:
        best = best_validation(goal, cell.trials)
        row = cell_texts(cell.cell)
        row[f"best {goal.metric}"] = "-" if best is None else best.text(goal)
        for status in statuses:
            row[COUNT_HEADS[status.value]] = str(cell.counts[status])
        rows.append(row)
    return aligned(rows)


def advice(record: StudyRecord, cells: Sequence[CellSummary]) -> list[str]:
    """Return what to change in a study without K*, by what its trials show, a line each."""
    goal = record.goal
    trials: list[TrialResult] = []
    diverged = 0
    for cell in cells:
        trials += cell.trials
        diverged += cell.counts[Status.INFEASIBLE]
    lines = []
    if diverged:
        lines.append(_divergence_advice(record, diverged, len(trials)))
    if diverged == len(trials):
        return lines
    best = best_validation(goal, trials)
    if best is None:
        lines.append(f"No validation has a finite {goal.metric}. Check what validation_step logs.")
        return lines
    name = f"The best trial ({best.result.trial.cell}, sample {best.result.trial.point})"
    edges = ", ".join(movable_ends(record, best.result))
    if edges:
        lines.append(
            f"{name} is at the end of a range: {edges}. Widen it with lit-dps study --extend-space."
        )
    lines.append(_goal_advice(goal, best, name))
    return lines


def spent_budgets(goal: Goal, trials: Sequence[TrialResult]) -> dict[str, float]:
    """Return the budgets that trials spent, by configuration key; `max_steps` if they spent none.

    A trial that a callback or the race stopped has spent no budget.
    """
    spent: dict[str, float] = {}
    for column, limit in {"step": goal.max_steps, **goal.limits}.items():
        for result in trials:
            if result.curve.get(column) and result.curve[column][-1] >= limit:
                spent[BUDGET_KEYS[column]] = limit
    return spent or {"goal.max_steps": goal.max_steps}


def _goal_advice(goal: Goal, best: BestValidation, name: str) -> str:
    """Return whether to raise a budget or to choose an easier goal, by the best trial."""
    # Without a validation within all budgets, the best one is beyond a budget.
    last = goal.last_step_within(best.result.curve) or best.result.curve["step"][-1]
    spent = spent_budgets(goal, [best.result])
    budgets = " and ".join(f"{key} = {limit}" for key, limit in spent.items())
    if goal.at_least and is_share(goal.metric) and 0 < best.value <= 1 < goal.value:
        return (
            f"{goal.metric} is a share: its best value is {three_digits(best.value)}, and "
            f"goal.at_least = {goal.value:g} is above 1. Set goal.at_least {goal.value / 100:g} "
            "in a new study."
        )
    if best.result.status is Status.STOPPED:
        return (
            f"The module or a callback ended the trial of {name} at step {last}. Let it train "
            f"longer, or choose an easier goal than {goal.value:g}."
        )
    if not best.exact:
        return (
            "Validation stopped as soon as the goal was missed, so the best values are bounds; "
            f"--goal.early_reject false in a new study measures them. Raise {budgets}, or choose "
            f"an easier goal than {goal.value:g}."
        )
    if best.step > (1 - LAST_PART) * last:
        return f"{name} was still improving at step {best.step}. Raise {budgets} in a new study."
    return (
        f"{name} did not improve after step {best.step} of {last}. Choose an easier goal than "
        f"{goal.value:g}, such as {three_digits(best.value)}, in a new study."
    )


def _divergence_advice(record: StudyRecord, diverged: int, total: int) -> str:
    """Return what to do about trials whose loss or weights became not finite."""
    if diverged < total:
        return (
            f"{diverged} of {total} trials diverged: the upper part of the range of the learning "
            "rate is too high."
        )
    names = record.short_names
    ranges = []
    for key, box in record.space.items():
        if isinstance(box, Range):
            ranges.append(f"{names[key]} from {box.low:g}")
    searched = f" ({', '.join(ranges)})" if ranges else ""
    return (
        f"All {total} trials diverged: loss or weights became not finite. Lower the range of the "
        f"learning rate{searched}. If the lowest rate diverges too, check the loss and the data "
        "for values that are not finite."
    )
