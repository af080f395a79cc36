"""Describes cells in which no trial reached the goal: the best value, how trials ended, what to
change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import aligned, short_columns, three_digits
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Range, short_names
from lit_dps.core.trial import Status, TrialResult

NO_RESULT = 3  # exit code of a study whose trials all ended, none of them at the goal
# A run is still improving if its best value is in the last part of its checks.
LAST_PART = 0.25


@dataclass(frozen=True)
class BestValue:
    """The best value of the goal's metric that a trial reached.

    Attributes:
        value: The value; if not `exact`, the true value is worse.
        step: Optimizer step of the check.
        exact: Whether the check looked at the entire validation split.
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
    """Return True if all trials of a study ended, some without an error, and none reached the
    goal."""
    if any(cell.best is not None or cell.pending for cell in cells):
        return False
    return any(cell.trials for cell in cells)


def best_value(goal: Goal, trials: Sequence[TrialResult]) -> BestValue | None:
    """Return the best value of the goal's metric at any check of some trials; None without a finite
    one.

    A check that stopped early (`goal.early_reject`) has a bound in place of the value. Bounds count
    only if no check of these trials is exact.
    """
    found: list[BestValue] = []
    for result in trials:
        values = result.curve.get(goal.metric, [])
        exact = result.curve.get("exact", [1] * len(values))
        for step, value, whole in zip(result.curve.get("step", []), values, exact, strict=False):
            if math.isfinite(value):
                found.append(BestValue(float(value), int(step), bool(whole), result))
    found = [each for each in found if each.exact] or found
    if not found:
        return None
    sign = -1 if goal.at_least else 1
    return min(found, key=lambda each: (sign * each.value, each.step))


def missed_text(goal: Goal, cell: CellSummary) -> str:
    """Return what the trials of a cell without K* reached, in one line; empty if nothing is
    known."""
    best = best_value(goal, cell.trials)
    parts = []
    if best is not None:
        parts.append(f"best {goal.metric} {best.text(goal)}")
    diverged = cell.counts[Status.INFEASIBLE]
    if diverged:
        parts.append(f"{diverged} of {len(cell.trials)} diverged")
    return f"{cell.cell}: {', '.join(parts)}" if parts else ""


def no_result_text(record: StudyRecord, cells: Sequence[CellSummary]) -> str:
    """Return the first section of a report of a study without any K*; empty if no trial has
    ended."""
    goal = record.goal
    if any(cell.best is not None for cell in cells) or not any(cell.trials for cell in cells):
        return ""
    so_far = " so far" if any(cell.pending for cell in cells) else ""
    rows = []
    for cell in cells:
        best = best_value(goal, cell.trials)
        rows.append(
            {
                "B": str(cell.cell.batch_size),
                **short_columns(cell.cell.series),
                f"best {goal.metric}": "-" if best is None else best.text(goal),
                "missed the goal": str(cell.counts[Status.INCOMPLETE]),
                "diverged": str(cell.counts[Status.INFEASIBLE]),
                "stopped": str(cell.counts[Status.STOPPED]),
                "failed": str(cell.counts[Status.FAILED]),
            }
        )
    reached = f"No trial{so_far} reached {goal} within {goal.max_steps} steps, so there is no K*."
    return (
        "\n".join(
            [f"study {record.name}: {reached}", "", *aligned(rows), "", *advice(record, cells)]
        )
        + "\n"
    )


def advice(record: StudyRecord, cells: Sequence[CellSummary]) -> list[str]:
    """Return what to change in a study without K*, by what its trials show, a line each."""
    goal = record.goal
    trials = [result for cell in cells for result in cell.trials]
    diverged = [result for result in trials if result.status is Status.INFEASIBLE]
    lines = []
    if diverged:
        lines.append(_diverged_advice(record, len(diverged), len(trials)))
    if len(diverged) == len(trials):
        return lines
    best = best_value(goal, trials)
    if best is None:
        return [*lines, f"No check has a finite {goal.metric}: look at what validation_step logs."]
    where = f"The best trial ({best.result.trial.cell}, point {best.result.trial.point})"
    edges = _edges(record, best.result)
    if edges:
        lines.append(
            f"{where} is at the end of a range: {edges}. Widen it with lit-dps study "
            "--extend-space."
        )
    last = best.result.curve["step"][-1]
    if not best.exact:
        lines.append(
            "Checks stopped as soon as the goal was missed; --goal.early_reject false in a new "
            "study shows the values. "
            f"Raise goal.max_steps = {goal.max_steps}, or choose an easier goal than "
            f"{goal.value:g}."
        )
    elif best.step > (1 - LAST_PART) * last:
        lines.append(
            f"{where} was still improving at step {best.step}: raise goal.max_steps = "
            f"{goal.max_steps} in a new study."
        )
    else:
        lines.append(
            f"{where} did not improve after step {best.step} of {last}: choose an easier goal "
            f"than {goal.value:g}, "
            f"such as {three_digits(best.value)}, in a new study."
        )
    return lines


def _diverged_advice(record: StudyRecord, diverged: int, total: int) -> str:
    """Return what to do about trials whose loss or weights became not finite."""
    names = short_names(list(record.space))
    ranges = [
        f"{names[key]} from {box.low:g}"
        for key, box in record.space.items()
        if isinstance(box, Range)
    ]
    searched = f" ({', '.join(ranges)})" if ranges else ""
    if diverged == total:
        return (
            f"All {total} trials diverged: loss or weights became not finite. Lower the range of "
            "the learning rate"
            f"{searched}; if the lowest rate diverges too, check the loss and the data for values "
            "that are not finite."
        )
    return (
        f"{diverged} of {total} trials diverged: the upper part of the range of the learning "
        "rate "
        "is too high."
    )


def _edges(record: StudyRecord, result: TrialResult) -> str:
    """Return the metaparameters of a trial that lie near an end of their range: learning_rate
    high."""
    names = short_names(list(record.space))
    found = []
    for key, box in record.space.items():
        if key in result.trial.params:
            end = box.boundary(result.trial.params[key])
            if end is not None:
                found.append(f"{names[key]} {end}")
    return ", ".join(found)
