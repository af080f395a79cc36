"""The goal counts mistakes: at most error x N of them, whatever a float32 mean makes of the
number."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Status
from tests.support.errors import refuses
from tests.support.texts import numbers_in

GOALS = ["0.12", "0.14", "0.02", "0.4", "0.1"]
SIZES = [6000, 5000, 150]


def allowed_mistakes(goal: str, n: int) -> int:
    return math.floor(Fraction(goal) * n)  # exact: the decimal number that the user wrote, times N


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("n", SIZES)
def test_reached_is_a_comparison_of_integers_for_every_count(goal, n):
    errors = torch.arange(n + 1) / n  # float32, as `mistakes / seen` of the module
    assert errors.dtype is torch.float32
    stop = Goal(float(goal))
    reached = [stop.is_reached(error) for error in errors.tolist()]
    limit = allowed_mistakes(goal, n)
    assert reached == [True] * (limit + 1) + [False] * (n - limit)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("n", SIZES)
def test_reached_is_exact_for_float32_means_of_batch_means(goal, n):
    """As a plain module's `self.log(..., on_epoch=True)` makes them: each batch mean times its
    size, summed, over N."""
    limit, rng = allowed_mistakes(goal, n), np.random.default_rng(0)
    for mistakes in range(limit - 3, limit + 4):
        wrong = np.zeros(n, dtype=np.float32)
        wrong[rng.permutation(n)[:mistakes]] = 1
        total = np.float32(0)
        for batch in np.split(
            wrong, range(37, n, 37)
        ):  # a size that rounds, and a short last batch
            total += np.float32(batch.mean()) * np.float32(len(batch))
        assert Goal(float(goal)).is_reached(float(total / np.float32(n))) is (mistakes <= limit), (
            mistakes
        )


def test_nan_and_infinite_errors_do_not_reach_the_goal():
    assert not Goal(0.5).is_reached(math.nan)
    assert not Goal(0.5).is_reached(math.inf)


GOAL = Goal(0.1, check_interval=16, max_steps=48)


@pytest.mark.parametrize(
    ("step", "error", "loss", "finite", "status"),
    [
        (16, 0.5, 1.0, True, None),
        (32, 0.5, 1.0, True, None),
        (48, 0.5, 1.0, True, Status.INCOMPLETE),
        (64, 0.5, 1.0, True, Status.INCOMPLETE),
        (16, 0.1, 1.0, True, Status.COMPLETE),
        (48, 0.1, 1.0, True, Status.COMPLETE),  # at the last check the goal comes before the budget
        (
            16,
            0.1,
            math.nan,
            True,
            Status.COMPLETE,
        ),  # and before a loss that is not finite, as in the authors' code
        (16, 0.1, 1.0, False, Status.INFEASIBLE),  # a share of |nan - y| > tolerance is 0
        (48, 0.0, math.nan, False, Status.INFEASIBLE),
        (16, 0.5, math.nan, True, Status.INFEASIBLE),
        (16, 0.5, math.inf, True, Status.INFEASIBLE),
        (16, math.nan, 1.0, True, None),  # no value yet: a check that is not met
        (16, math.inf, 1.0, True, None),
        (48, math.nan, 1.0, True, Status.INCOMPLETE),
        (16, math.nan, math.nan, True, Status.INFEASIBLE),
        (16, math.nan, 1.0, False, Status.INFEASIBLE),
        (16, 0.5, 1.0, False, Status.INFEASIBLE),
        (48, 0.5, math.nan, True, Status.INFEASIBLE),  # divergence comes before the budget
    ],
)
def test_judge_asks_the_goal_then_divergence_then_the_budget(step, error, loss, finite, status):
    curve = {"step": [step], "val_error": [error]}
    assert GOAL.judge(curve, loss, finite) is status


@pytest.mark.parametrize("error", [0, 0.0, 1, 1.0, -0.1, 1.5, 12, math.nan, math.inf])
def test_an_error_that_is_no_fraction_is_refused(error):
    with refuses("goal.error", error) as caught:
        Goal(error)
    assert numbers_in(caught.value.allowed) == [0, 1]


@pytest.mark.parametrize("interval", [0, -16])
def test_a_check_interval_below_one_is_refused(interval):
    with refuses("goal.check_interval", interval):
        Goal(0.1, check_interval=interval)


@pytest.mark.parametrize(
    ("budget", "interval"), [(0, 16), (-16, 16), (15, 16), (17, 16), (40_000, 7)]
)
def test_a_budget_that_ends_unchecked_is_refused_with_one_that_would_do(budget, interval):
    with pytest.raises(ConfigError) as caught:
        Goal(0.1, check_interval=interval, max_steps=budget)
    assert (caught.value.key, caught.value.value) == ("goal.max_steps", budget)
    named, proposed = numbers_in(caught.value.allowed)
    assert named == interval
    assert Goal(0.1, check_interval=interval, max_steps=proposed).max_steps == proposed


def test_the_defaults_are_the_papers():
    assert (Goal(0.02).check_interval, Goal(0.02).max_steps) == (16, 40_000)
