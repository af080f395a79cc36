"""Racing: a trial that has run as long as the best complete trial of its cell needed cannot improve
K*.

Where a trial was really stopped depends on who finished first; what is reported does not. Every
trial runs to step slack x K* at least, so how it went up to there is always known, and that alone
is told.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from lit_dps.core.trial import SHORT_STEPS, UNCOUNTED_STEPS, Status, TrialResult

FIRST_RUNG = 8  # checks that the first rung has at least
GROWTH = 4


def last_step(k_best: int | None, slack: float | None) -> float:
    """The step that the trials of a cell have to reach, infinite where nothing is raced yet.

    Args:
        k_best: The fewest steps to result of the cell's complete trials so far.
        slack: 1 stops trials at the best one, 2 at twice as many steps, None never.
    """
    return math.inf if k_best is None or slack is None else slack * k_best


def rungs(check_interval: int, max_steps: int) -> list[float]:
    """The rungs (as of successive halving): steps at which trials pause, as long as none of their
    cell is complete.

    Else the first ones could spend the whole budget before the first good one begins. A trial that
    paused goes on to the next rung if it was saved, else it starts anew. Each is four times as long
    as the one before, the last one is the budget: a cell that nobody completes costs at most about
    a third more.
    """
    steps, step = [], max_steps
    while (
        step := step // GROWTH // check_interval * check_interval
    ) >= FIRST_RUNG * check_interval:
        steps.append(step)
    return [*reversed(steps), math.inf]


def best_steps(steps: Iterable[int | None]) -> int | None:
    """K*: the fewest steps to result of any complete trial (Lee et al. 2021, Section 2); None
    without one.

    Args:
        steps: Steps to result of some trials; None for one that is not complete.
    """
    return min((k for k in steps if k is not None), default=None)


def needs_no_rerun(status: Status, steps_run: float, limit: float) -> bool:
    """Whether an attempt that ended so need not be run again, where trials have to reach a step
    `limit`.

    One that was outraced or paused short of it has to go on: the slack was raised since, or the
    best one was not yet known. A failed one is settled until the study is taken up again.

    Args:
        status: How the attempt ended.
        steps_run: Its last check.
        limit: From `last_step`.
    """
    return status not in (Status.OUTRACED, Status.PAUSED) or steps_run >= limit


def truncate_at_race_limit(
    results: Sequence[TrialResult], slack: float | None
) -> list[TrialResult]:
    """The results of a cell as they stood at step slack x K*, whoever finished first.

    Trials that ended later, however they did, are outraced, and curves end there. Those that are
    not `needs_no_rerun` are left out.
    """
    limit = last_step(best_steps(result.steps for result in results), slack)
    return [
        _until(result, limit)
        for result in results
        if needs_no_rerun(result.status, result.steps_run, limit)
    ]


def _until(result: TrialResult, limit: float) -> TrialResult:
    end = result.steps_run if result.steps is None else result.steps
    if end <= limit and result.status is not Status.PAUSED:
        return result
    return cut(dataclasses.replace(result, status=Status.OUTRACED, steps=None), limit)


def cut(result: TrialResult, limit: float) -> TrialResult:
    """Return a result whose curves end at a step, with its share of short and uncounted steps."""
    run, observed = result.steps_run, result.observed
    curve, smoothness = (
        {
            key: values[: sum(step <= limit for step in series.get("step", []))]
            for key, values in series.items()
        }
        for series in (result.curve, result.smoothness)
    )
    ended = dataclasses.replace(result, curve=curve, smoothness=smoothness)
    shares = {}
    for name in (SHORT_STEPS, UNCOUNTED_STEPS):
        if name in observed:
            shares[name] = observed[name] * ended.steps_run / run
    return dataclasses.replace(ended, observed={**observed, **shares})


def to_goal(result: TrialResult) -> TrialResult:
    """A complete result up to its goal, also where its run went on; any other as it is."""
    return result if result.steps is None else cut(result, result.steps)


def longest_attempt(first: TrialResult | None, second: TrialResult) -> TrialResult:
    """Of two attempts at a point, the one that tells more: an outraced one may be run again and
    further.

    Whatever came after a failed one replaces it.
    """
    if first is None or first.status is Status.FAILED:
        return second
    further = second.steps_run > first.steps_run or second.status is Status.FAILED
    more = first.status in (Status.OUTRACED, Status.PAUSED) and further
    return second if more else first
