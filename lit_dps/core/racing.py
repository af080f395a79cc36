"""Racing: a trial that has run longer than the best trials of its cell cannot change K*.

A trial stops after `race_factor` times the cost of the best complete trial of its cell, in steps or
another unit (`lit_dps.core.unit`).
If K* is another statistic than the minimum, it stops at `Statistic.race_limit`. Where a trial
really stopped depends on which worker finished first. Therefore every trial runs to the first
check at that cost or above, and every result is reported truncated there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lit_dps.core.statistic import Statistic
from lit_dps.core.trial import SHORT_STEPS, UNCOUNTED_STEPS, RepeatId, Status, TrialResult
from lit_dps.core.unit import Cost

# Checks before the first rung: fewer do not show how a trial trains.
MIN_RUNG_CHECKS = 8
# Ratio of neighbouring rungs, as usual for successive halving.
RUNG_GROWTH = 4
# How the race ends attempts. They run again if a later limit exceeds what they spent.
STOPPED_BY_RACE = (Status.OUTRACED, Status.PAUSED)


def best_trial(results: Iterable[TrialResult], statistic: Statistic) -> TrialResult | None:
    """Return the trial of K* (`Statistic.ranking`); None without a K*."""
    by_point = {}
    for result in results:
        if result.steps is not None:
            by_point[result.trial.point] = result
    costs = [(result.cost, point) for point, result in by_point.items()]
    ranking = statistic.ranking(costs)
    if not ranking:
        return None
    return by_point[ranking[0][1]]


def race_limit(
    costs: Iterable[Cost | None], race_factor: float | None, statistic: Statistic
) -> float:
    """Return the cost that the trials of a cell must reach; infinity without a race.

    Args:
        costs: Costs of the cell's trials so far; None for a trial that is not complete.
        race_factor: 1 stops trials where they cannot change K*, 2 at twice that cost, None never.
        statistic: What K* is.
    """
    if race_factor is None:
        return math.inf
    return statistic.race_limit([k for k in costs if k is not None], race_factor)


def larger_factor(factor: float | None, other: float | None) -> float | None:
    """Return the larger race factor; None is the largest."""
    if factor is None or other is None:
        return None
    return max(factor, other)


def default_rungs(check_interval: int, max_steps: int) -> list[float]:
    """Return the steps at which trials pause while their cell has no complete trial, then infinity.

    These are the rungs of successive halving. Without them, the first trials could spend the whole
    budget before the first good trial begins. A paused trial continues to the next rung if it was
    saved; else it starts again. Each rung is four times as long as the one before, and the last one
    is the budget. So a cell without any complete trial costs at most about a third more.

    Rungs are steps whatever the unit of K* is: the budget is in steps, and a step takes different
    seconds in different runs.
    """
    steps: list[float] = [math.inf]
    step = max_steps // RUNG_GROWTH // check_interval * check_interval
    while step >= MIN_RUNG_CHECKS * check_interval:
        steps.insert(0, step)
        step = step // RUNG_GROWTH // check_interval * check_interval
    return steps


def reruns_above(status: Status, spent: float) -> float:
    """Return the limit above which an attempt runs again; infinity if it never does.

    An outraced or paused attempt runs again if the race limit exceeds what it spent: the user has
    raised the race_factor, or the best trial was not yet known. A failed attempt runs again only
    when the user resumes the study, which this function does not decide.

    Args:
        status: How the attempt ended.
        spent: Its cost until its last check, for a race limit; or its steps, for a rung.
    """
    if status in STOPPED_BY_RACE:
        return spent
    return math.inf


def is_final(result: TrialResult, limit: float) -> bool:
    """Return True if a trial with this result need not run again for a race limit."""
    return reruns_above(result.status, result.cost_run) >= limit


class RungPoints(NamedTuple):
    """The points that must still reach a rung.

    Attributes:
        points: The points.
        is_last: Whether no higher rung follows.
    """

    points: list[int]
    is_last: bool


@dataclass
class CellCoverage:
    """What is known of each point of a cell, which decides the points that must run.

    Attributes:
        taken: Points that wait, or that live processes run.
        reruns_above_cost: Point -> race limit above which it runs again (`reruns_above`).
        reruns_above_step: Point -> rung above which it runs again.
    """

    taken: set[int] = field(default_factory=set)
    reruns_above_cost: dict[int, float] = field(default_factory=dict)
    reruns_above_step: dict[int, float] = field(default_factory=dict)

    def add(self, point: int, cost: float, step: float) -> None:
        """Add a finished attempt at a point. Of several, the longest one counts."""
        self.reruns_above_cost[point] = max(self.reruns_above_cost.get(point, -math.inf), cost)
        self.reruns_above_step[point] = max(self.reruns_above_step.get(point, -math.inf), step)

    def points_short_of_limit(self, points: int, limit: float) -> list[int]:
        """Return those of the first `points` points that must run to a race limit."""
        return self._short_of(points, self.reruns_above_cost, limit)

    def points_short_of_rung(self, points: int, rungs: Iterable[float]) -> RungPoints:
        """Return those of the first `points` points that must run to the lowest open rung.

        All points must reach a rung before any point continues to the next one. A point that a
        process trains counts as reached.
        """
        for rung in rungs:
            missing = self._short_of(points, self.reruns_above_step, rung)
            if missing:
                return RungPoints(missing, rung == math.inf)
        return RungPoints([], True)

    def _short_of(self, points: int, reruns_above: Mapping[int, float], limit: float) -> list[int]:
        missing = []
        for point in range(points):
            if point not in self.taken and reruns_above.get(point, -math.inf) < limit:
                missing.append(point)
        return missing


def next_rung(step: float, rungs: Iterable[float]) -> float:
    """Return the first rung after a step; infinity after the last one."""
    return next((rung for rung in rungs if rung > step), math.inf)


def truncate_at_race_limit(
    attempts: Sequence[TrialResult], race_factor: float | None, statistic: Statistic
) -> list[TrialResult]:
    """Return the results of a cell truncated at its race limit, whichever worker finished first.

    Trials that ended later become outraced, and their curves end there. The list has no trials that
    must run again (`is_final`).

    Args:
        attempts: The attempts of the cell that ended, of each point in their order.
        race_factor: As in `race_limit`.
        statistic: What K* is.
    """
    costs = [result.cost for result in results_at_limit(attempts, math.inf)]
    limit = race_limit(costs, race_factor, statistic)
    truncated = []
    for result in results_at_limit(attempts, limit):
        if is_final(result, limit):
            truncated.append(truncate_at(result, limit))
    return truncated


def results_at_limit(attempts: Iterable[TrialResult], limit: float) -> list[TrialResult]:
    """Return the attempt of each trial that counts for a limit (`attempt_at_limit`).

    Args:
        attempts: The attempts that ended, of each trial in their order.
        limit: As in `attempt_at_limit`.
    """
    by_trial: dict[RepeatId, list[TrialResult]] = {}
    for attempt in attempts:
        by_trial.setdefault(attempt.trial.repeat_id, []).append(attempt)
    return [attempt_at_limit(each, limit) for each in by_trial.values()]


def attempt_at_limit(attempts: Iterable[TrialResult], limit: float) -> TrialResult:
    """Return the attempt at a trial that counts for a limit.

    The longest attempt that did not fail counts, unless a later one failed on the way to the limit.

    Args:
        attempts: The attempts that ended, in their order, at least one.
        limit: The cost that the trial must reach; infinity for its goal or its budget.
    """
    longest = None
    failed = None
    for attempt in attempts:
        if attempt.status is Status.FAILED:
            failed = attempt
        else:
            longest = longest_attempt(longest, attempt)
            failed = None
    if longest is not None and (failed is None or is_final(longest, limit)):
        return longest
    assert failed is not None, "a trial without attempts has no result"
    return failed


def truncate_at(result: TrialResult, limit: float) -> TrialResult:
    """Return a result as if the race had stopped its trial at a cost."""
    end = result.cost_run
    if result.cost is not None:
        end = result.cost
    if end <= limit and result.status is not Status.PAUSED:
        return result
    outraced = dataclasses.replace(result, status=Status.OUTRACED, steps=None)
    return cut_at_step(outraced, result.unit.step_of(result.curve, limit))


def cut_at_step(result: TrialResult, limit: float) -> TrialResult:
    """Return a result whose curves end at a step, with its share of short and uncounted steps.

    A result that is shortened has no readings of its end.
    """
    readings = {name: _cut_series(columns, limit) for name, columns in result.readings.items()}
    shortened = dataclasses.replace(
        result,
        curve=_cut_series(result.curve, limit),
        readings=readings,
    )
    if shortened.steps_run < result.steps_run:
        shortened = dataclasses.replace(shortened, end_readings={})
    flags = dict(result.flags)
    for name in (SHORT_STEPS, UNCOUNTED_STEPS):
        if name in flags:
            flags[name] = flags[name] * shortened.steps_run / result.steps_run
    return dataclasses.replace(shortened, flags=flags)


def _cut_series(series: Mapping[str, list[float]], limit: float) -> dict[str, list[float]]:
    """Return equally long lists up to a step, by the list "step"."""
    length = sum(step <= limit for step in series.get("step", []))
    return {key: values[:length] for key, values in series.items()}


def to_goal(result: TrialResult) -> TrialResult:
    """Return a complete result truncated at its goal; return any other result unchanged."""
    if result.steps is None:
        return result
    return cut_at_step(result, result.steps)


def longest_attempt(first: TrialResult | None, second: TrialResult) -> TrialResult:
    """Return the attempt at a point that counts, of an earlier and a later one.

    A later attempt replaces a failed one. It also replaces an outraced or paused one if it ran
    longer, came to an end, or failed. An attempt that begins again may end at a lower cost than the
    earlier one had spent: seconds differ between runs, and so do results of another machine.
    """
    if first is None or first.status is Status.FAILED:
        return second
    if first.status not in STOPPED_BY_RACE:
        return first
    spent = reruns_above(second.status, second.cost_run)
    return second if spent > first.cost_run else first
