"""The results of a study as if its goal had been another value of the same metric.

Training does not depend on the goal, except for the step at which it stops. So the curve of a trial
that stopped at the study's goal also shows when the trial reached every easier goal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.racing import cut_at_step, truncate_at_race_limit
from lit_dps.core.record import StudyRecord
from lit_dps.core.repeats import truncate_repeats
from lit_dps.core.trial import Status, TrialResult
from lit_dps.core.unit import Cost


def at_goal(record: StudyRecord, value: float) -> StudyRecord:
    """Return a study as if its goal had been another value of the metric.

    A trial is complete at the check where it first meets the new goal, however it ended later. A
    trial that never meets the new goal ends as it did. If trials train past the goal
    (`record.train_past_goal`), they do so here too, and they also answer harder goals.

    Two kinds of results are omitted:
        - A trial that may first have met the new goal at a check that stopped early
          (`GoalErrorCallback.early_reject`). It is listed in `undetermined_points`. One such repeat
          removes all repeats of its cell.
        - Repeats, if the new goal is harder: they always stop at the study's goal.

    Raises:
        ConfigError: for a harder goal, if the trials stopped at the study's goal.
    """
    is_harder = value != record.goal.value and not record.goal.is_easier(value)
    if is_harder and not record.train_past_goal:
        side = "at most" if record.goal.at_least else "at least"
        allowed = f"{side} {record.goal.value:g}, because the trials stopped at that goal"
        hint = "Set study.train_past_goal to measure harder goals"
        raise ConfigError("goals", value, allowed, hint)
    goal = record.goal.with_value(value)
    results = {}
    undetermined_points = {}
    for cell, trials in record.results.items():
        ended, undetermined = _end_at_goal(trials, goal, record.train_past_goal)
        results[cell] = truncate_at_race_limit(ended, record.race_factor, record.statistic)
        undetermined_points[cell] = undetermined
    repeats = {}
    for cell, trials in record.repeats.items():
        ended, undetermined = _end_at_goal(trials, goal, train_past_goal=False)
        ended = truncate_repeats(record.plan, results[cell], ended, record.statistic)
        repeats[cell] = [] if is_harder or undetermined else ended
    return dataclasses.replace(
        record,
        goal=goal,
        goals=(),
        results=results,
        repeats=repeats,
        undetermined_points=undetermined_points,
    )


def _end_at_goal(
    results: Iterable[TrialResult], goal: Goal, train_past_goal: bool
) -> tuple[list[TrialResult], dict[int, Cost]]:
    """Return the results of trials at a goal, and the undetermined trials.

    The latter are by point, with the lowest cost at which each may have met the goal.
    """
    ended = []
    undetermined = {}
    for result in results:
        first_met = goal.first_met(result.curve)
        if first_met is None:
            if train_past_goal and result.steps is not None:
                ended.append(_missed(result, goal))
            else:
                ended.append(result)
            continue
        step = int(result.curve["step"][first_met])
        if goal.is_exact_at(result.curve, first_met):
            complete = dataclasses.replace(result, status=Status.COMPLETE, steps=step)
            ended.append(complete if train_past_goal else cut_at_step(complete, step))
        else:
            # A value that decides is a bound, so that its true value may miss the goal.
            undetermined[result.trial.point] = result.unit.cost_at(result.curve, step)
    return ended, undetermined


def _missed(result: TrialResult, goal: Goal) -> TrialResult:
    """Return how a trial ends that met an easier goal, trained on, and missed this one."""
    if goal.is_spent(result.curve):
        status = Status.INCOMPLETE
    elif result.failure:
        status = Status.STOPPED
    else:
        status = Status.INFEASIBLE
    return dataclasses.replace(result, status=status, steps=None)
