"""The budget of steps that advice proposes where the configuration has none."""

from __future__ import annotations

import math

import pytest

from lit_dps.advice.max_steps import (
    ShortRun,
    expected_steps,
    propose,
    run_short,
    settle_max_steps,
)
from lit_dps.advice.options import Options
from lit_dps.core.errors import UserError
from lit_dps.core.goal import Goal
from lit_dps.parallel.process import Interrupted, StopRequest
from tests.support.errors import refuses
from tests.unit.advice.test_step_probe import with_module

GOAL = Goal(0.1, check_interval=5)


def short(values, step_seconds=0.01, interval=5) -> ShortRun:
    checks = tuple(float(interval * (i + 1)) for i in range(len(values)))
    return ShortRun(32, step_seconds, interval * len(values), checks, tuple(values))


MET = short([0.5, 0.3, 0.1])
FALLING = short([0.5, 0.4, 0.3, 0.2])
FLAT = short([0.5, 0.5, 0.5, 0.6])
UNKNOWN = short([0.5, float("nan"), 0.2])


@pytest.mark.parametrize(
    ("run", "expected"),
    [(MET, 15), (FALLING, 25), (FLAT, None), (UNKNOWN, None), (short([]), None)],
)
def test_steps_to_the_goal_are_extrapolated_from_the_best_values(run, expected):
    assert expected_steps(run, GOAL) == pytest.approx(expected)


def test_a_metric_that_rises_is_extrapolated_upwards():
    goal = Goal(0.9, check_interval=5, metric="accuracy", at_least=True)
    assert expected_steps(short([0.1, 0.2, 0.4, 0.3, 0.5]), goal) == pytest.approx(25 + 4 * 10)


@pytest.mark.parametrize(
    ("run", "seconds", "steps"),
    [
        (MET, 60.0, 2 * 15),  # the goal makes it plausible
        (MET, 0.23, 20),  # the time pays 23 steps
        (MET, 0.06, 15),  # no fewer than the run itself took
        (FALLING, 60.0, 2 * 25),
        (FALLING, 0.4, 40),
        (FLAT, 60.0, 6000),
        (FLAT, 1e6, Goal.max_steps),  # nothing speaks for more than the default
        (FLAT, 1e-3, 5),  # one check at least
    ],
)
def test_the_proposal_is_what_the_goal_needs_and_the_time_pays(run, seconds, steps):
    proposal = propose(run, GOAL, 4 * seconds, share=0.25)
    assert proposal.max_steps == steps
    assert f"goal.max_steps: {steps}" in proposal.note


@pytest.mark.parametrize(
    ("middle", "budget", "steps"),
    [
        (0.4901, math.inf, 2 * 395),  # the goal is at step 396 by the pace, of a run of 20 steps
        (0.4899, math.inf, Goal.max_steps),  # 404, more than 20 times the run
        (0.4899, 1e6, 805),  # a budget limits what a wrong pace costs
    ],
)
def test_without_a_budget_a_pace_counts_up_to_20_times_the_short_run(middle, budget, steps):
    proposal = propose(short([0.5, middle, middle, 0.48]), GOAL, budget, 1 / 3)
    assert proposal.max_steps == steps
    assert ("too far" in proposal.note) == (steps == Goal.max_steps)


def test_the_proposal_is_more_than_a_short_run_that_missed_the_goal():
    """A pace of nothing, and one that is too slow, after 60,000 steps."""
    slow = short([0.5, 0.4901, 0.4901, 0.4900], interval=15_000)
    for run in (short(FLAT.values, interval=15_000), slow):
        assert propose(run, GOAL, math.inf, 1 / 3).max_steps == 2 * 60_000


def test_progress_below_the_precision_of_a_number_is_not_extrapolated():
    goal = Goal(1e308, check_interval=5, metric="score", at_least=True)
    run = short([0.0, 5e-324, 1e-323, 1.5e-323])
    assert expected_steps(run, goal) is None
    assert propose(run, goal, math.inf, 1 / 3).max_steps == Goal.max_steps


def test_the_note_has_the_share_of_the_budget_that_a_training_takes():
    """A step takes 10 ms, so 40 steps are 32 % of 1.25 s, and 5 steps two thirds of 75 ms."""
    assert "32% of --budget" in propose(FALLING, GOAL, 1.25, 1 / 3).note
    assert "67% of --budget" in propose(FLAT, GOAL, 0.075, 1 / 3).note


def test_a_stored_proposal_holds_for_every_budget():
    stored = {"max_steps": 70, "configuration": {}}
    given = with_module("Schedule")
    for budget in (60.0, 600.0):
        assert settle_max_steps(given, Options(budget), stored, StopRequest()).max_steps == 70


def test_advice_of_an_earlier_version_keeps_its_number():
    assert (
        settle_max_steps(
            with_module("Schedule"), Options(60.0), {"configuration": {}}, StopRequest()
        )
        is None
    )


def test_a_short_run_has_a_budget_that_the_time_pays_and_ends_in_time():
    """The schedule asks for more steps than its warm-up of 3, and sees the same number
    everywhere."""
    given = with_module("Schedule", max_steps=40_000)
    run = run_short(given, 1.0, StopRequest())
    assert 0 < run.steps < 40_000 and run.steps * run.step_seconds < 10
    assert run.checks == tuple(range(1, len(run.checks) + 1)) and run.values == pytest.approx(
        [0.9] * len(run.values)
    )


def test_what_fails_in_the_short_run_is_refused_with_its_cause():
    with refuses(None, 4, error=UserError) as refused:
        settle_max_steps(with_module("Broken"), Options(60.0), {}, StopRequest())
    assert "ZeroDivisionError" in str(refused.value)


def test_what_fails_in_the_short_run_alone_asks_for_a_number():
    """Its warm-up is longer than what the time pays."""
    with refuses("goal.max_steps", None) as refused:
        settle_max_steps(
            with_module("LongWarmUp", max_steps=40_000), Options(1.0), {}, StopRequest()
        )
    assert "ValueError" in refused.value.allowed


def test_a_signal_ends_the_short_run():
    with pytest.raises(Interrupted):
        run_short(with_module("Schedule", max_steps=40_000), 60.0, StopRequest(lambda: True))
