"""A study as it would have ended at another goal, from the curves of its trials."""

from __future__ import annotations

import dataclasses

from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.racing import cut, truncate_at_race_limit
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Status, TrialResult


def at_goal(record: StudyRecord, value: float) -> StudyRecord:
    """The study as it would have ended at another value of the goal's metric, everything else
    equal.

    The curve of a run that went on to the hardest goal answers all easier ones: a trial is complete
    at the first check that meets this goal, whatever became of it afterwards; one that never met it
    ended as it did. Exact, since training knows nothing of the goal but when to stop. Where checks
    stopped early (`GoalErrorCallback.early_reject`) and this was no goal of the study then, trials
    of which nobody can tell are left out and told (`record.untold`), and so are all repeats of a
    cell where one of them is such a trial. Where runs went on after their goal
    (`record.train_past_goal`) so do these, and they answer harder goals too; but not repeats, which
    end at the study's own goal: at a harder one there are none.

    Raises:
        ConfigError: for a goal harder than the study's own, whose trials stopped too early to tell.
    """
    own = record.goal
    beyond = value != own.value and not own.is_easier(value)
    if beyond and not record.train_past_goal:
        side = "at most" if own.at_least else "at least"
        raise ConfigError(
            "goals", value, f"{side} {own.value:g}, the goal that the trials stopped at"
        )
    goal = own.with_value(value)
    results, undetermined_points, repeats = {}, {}, {}
    for cell, ended in record.results.items():
        seen = {result.trial.point: _at(result, goal, record.train_past_goal) for result in ended}
        known = [each for each in seen.values() if isinstance(each, TrialResult)]
        results[cell] = truncate_at_race_limit(known, record.race_factor)
        undetermined_points[cell] = {
            point: step for point, step in seen.items() if isinstance(step, int)
        }
    for cell, ended in record.repeats.items():
        seen = [] if beyond else [_at(result, goal, False) for result in ended]
        repeats[cell] = [] if any(isinstance(each, int) for each in seen) else seen
    return dataclasses.replace(
        record,
        goal=goal,
        goals=(),
        results=results,
        repeats=repeats,
        undetermined_points=undetermined_points,
    )


def _at(result: TrialResult, goal: Goal, train_past_goal: bool) -> TrialResult | int:
    """How a trial would have ended, or the first check at which it may have met the goal, where
    nobody can tell."""
    steps, errors = result.curve.get("step", []), result.curve.get(goal.metric, [])
    first = next((i for i, error in enumerate(errors) if goal.is_reached(error)), None)
    if first is None:
        return _missed(result, goal) if train_past_goal and result.steps is not None else result
    stop = int(steps[first])
    if not result.curve.get("exact", [1] * len(errors))[
        first
    ]:  # the true error lies above this one
        return stop
    complete = dataclasses.replace(result, status=Status.COMPLETE, steps=stop)
    return complete if train_past_goal else cut(complete, stop)


def _missed(result: TrialResult, goal: Goal) -> TrialResult:
    """How a run that went on after an easier goal ended, which did not meet this one."""
    if result.steps_run >= goal.max_steps:
        status = Status.INCOMPLETE
    else:
        status = Status.STOPPED if result.failure else Status.INFEASIBLE
    return dataclasses.replace(result, status=status, steps=None)
