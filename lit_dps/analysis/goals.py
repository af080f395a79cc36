"""A study at an easier goal: the curve of a run that went on to the hardest goal answers all easier ones."""

from __future__ import annotations

import dataclasses

from lit_dps.errors import ConfigError
from lit_dps.goal import Goal
from lit_dps.racing import cut, truncate_at_race_limit
from lit_dps.record import StudyRecord
from lit_dps.trial import Status, TrialResult


def at_goal(record: StudyRecord, value: float) -> StudyRecord:
    """The study as it would have ended at another value of the goal's metric, everything else equal.

    A trial is complete at the first check that meets this goal, whatever became of it afterwards; one that never met
    it ended as it did. Exact, since training knows nothing of the goal but when to stop. Where checks stopped early
    (`GoalErrorCallback.early_reject`) and this was no goal of the study then, trials of which nobody can tell are left
    out.

    Raises:
        ConfigError: for a goal harder than the study's own, whose trials stopped too early to tell.
    """
    own = record.goal
    if value != own.value and not own.easier(value):
        side = "at most" if own.at_least else "at least"
        raise ConfigError("goals", value, f"{side} {own.value:g}, the goal that the trials stopped at")
    goal = own.at(value)
    results = {}
    for cell, ended in record.results.items():
        known = [seen for result in ended if (seen := _at(result, goal)) is not None]
        results[cell] = truncate_at_race_limit(known, record.slack)
    return dataclasses.replace(record, goal=goal, goals=(), results=results)


def _at(result: TrialResult, goal: Goal) -> TrialResult | None:
    steps, errors = result.curve.get("step", []), result.curve.get(goal.metric, [])
    first = next((i for i, error in enumerate(errors) if goal.reached(error)), None)
    if first is None:
        return result
    if not result.curve.get("exact", [1] * len(errors))[first]:  # the true error lies above this one
        return None
    stop = int(steps[first])
    return cut(dataclasses.replace(result, status=Status.COMPLETE, steps=stop), stop)
