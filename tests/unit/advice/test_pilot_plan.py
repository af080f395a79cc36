"""The rates of the runs after the pilot, and the batch sizes that are answered for."""

from __future__ import annotations

import math

import pytest

from lit_dps.advice.pilot_plan import PilotPlan, RuledRate, next_factor

SGD = PilotPlan(32, "model.lr", 0.1, 1.0, is_adaptive=False)
ADAM = PilotPlan(32, "model.lr", 1e-3, 0.5, is_adaptive=True)


@pytest.mark.parametrize(("plan", "rate"), [(SGD, 0.8), (ADAM, 1e-3 * math.sqrt(8))])
def test_the_rate_grows_by_the_rule_of_the_optimizer(plan, rate):
    assert plan.rate_by_rule(256) == pytest.approx(rate)
    assert plan.rate_by_rule(32) == plan.rate
    first, second = plan.points(256, (1.0, 2.0))
    assert first == {"model.lr": pytest.approx(rate)}
    assert second == {"model.lr": pytest.approx(2 * rate)}


@pytest.mark.parametrize(
    ("tried", "factor"),
    [
        ({}, 1.0),
        ({1.0: 100}, 2.0),
        ({1.0: 100, 2.0: None}, None),  # the larger rate diverged, or was slower
        ({1.0: 100, 2.0: 91}, None),
        ({1.0: 100, 2.0: 89}, 4.0),  # a still larger rate may be better
        ({1.0: None, 2.0: 89}, 4.0),
        ({1.0: 100, 2.0: 60, 4.0: 40}, 8.0),
        ({1.0: 100, 2.0: 60, 4.0: 58}, None),
        ({1.0: 100, 2.0: 60, 4.0: None}, None),
        ({1.0: None, 2.0: None}, 0.5),
        ({1.0: None, 2.0: None, 0.5: None}, None),
        ({1.0: None, 2.0: None, 0.5: 80}, None),
        ({1.0: 100, 2.0: 60, 4.0: 40, 8.0: 30, 16.0: 20, 32.0: 10}, None),  # six runs
    ],
)
def test_rates_are_run_as_long_as_the_largest_is_the_best_by_far(tried, factor):
    assert next_factor(tried) == factor


def test_the_space_has_the_users_rate_in_its_middle_and_all_rates_inside():
    space = ADAM.space()["model.lr"]
    assert space.at(0.5) == pytest.approx(1e-3, rel=1e-12)
    assert space.low < ADAM.rate_by_rule(8) and 4 * ADAM.rate_by_rule(2**15) < space.high


@pytest.mark.parametrize(
    ("batch_size", "parts", "most", "sizes"),
    [
        (32, 1, 128, [8, 16, 32, 64, 128]),
        (32, 1, 100, [8, 16, 32, 64]),
        (30, 1, 60, [15, 30, 60]),  # 15 is odd
        (32, 8, 64, [8, 16, 32, 64]),  # every batch has 8 parts
        (32, 32, 64, [32, 64]),
        (7, 1, 10, [7]),
    ],
)
def test_batch_sizes_are_the_users_times_powers_of_two(batch_size, parts, most, sizes):
    plan = PilotPlan(batch_size, "model.lr", 0.1, 1.0, is_adaptive=False)
    assert plan.batch_sizes(parts, most) == sizes


def test_a_recommended_rate_follows_the_nearest_run():
    rate = RuledRate.of(ADAM, {32: 1e-3, 256: 6e-3}, (8.0, 4096.0))
    assert rate.at(32) == 1e-3 and rate.at(256) == 6e-3
    assert rate.at(64) == pytest.approx(1e-3 * math.sqrt(2))
    assert rate.at(1024) == pytest.approx(6e-3 * 2)
    unmeasured = RuledRate.of(SGD, {}, (8.0, 4096.0))
    assert unmeasured.at(64) == pytest.approx(0.2) and unmeasured.name == "model.lr"
