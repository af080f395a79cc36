"""A study at a higher goal error: the curve of a run that went on to the lowest goal answers all higher ones."""

from __future__ import annotations

import dataclasses

from lit_dps.errors import ConfigError
from lit_dps.goal import Goal
from lit_dps.racing import cut, truncate_at_race_limit
from lit_dps.record import StudyRecord
from lit_dps.trial import Status, TrialResult


def at_goal(record: StudyRecord, error: float) -> StudyRecord:
    """The study as it would have ended under another goal error, everything else equal.

    A trial is complete at the first check that meets this goal, whatever became of it afterwards; one that never met
    it ended as it did. Exact, since training knows nothing of the goal but when to stop. Where checks stopped early
    (`GoalErrorCallback.early_reject`) and this was no goal of the study then, trials of which nobody can tell are left
    out.

    Raises:
        ConfigError: for a goal below the study's own, whose trials stopped too early to tell.
    """
    if error < record.goal.error:
        raise ConfigError("goals", error, f"at least {record.goal.error:g}, the goal that the trials stopped at")
    goal = dataclasses.replace(record.goal, error=error)
    results = {}
    for cell, ended in record.results.items():
        known = [seen for result in ended if (seen := _at(result, goal)) is not None]
        results[cell] = truncate_at_race_limit(known, record.slack)
    return dataclasses.replace(record, goal=goal, goals=(), results=results)


def _at(result: TrialResult, goal: Goal) -> TrialResult | None:
    steps, errors = result.curve.get("step", []), result.curve.get("val_error", [])
    first = next((i for i, error in enumerate(errors) if goal.reached(error)), None)
    if first is None:
        return result
    if not result.curve.get("exact", [1] * len(errors))[first]:  # the true error lies above this one
        return None
    stop = int(steps[first])
    return cut(dataclasses.replace(result, status=Status.COMPLETE, steps=stop), stop)
