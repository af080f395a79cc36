"""The rates of the runs after the pilot, and the batch sizes that are answered for."""

from __future__ import annotations

import math

import pytest

from lit_dps.advice.pilot_plan import (
    DIVERGED,
    MET,
    MISSED,
    Outcome,
    PilotPlan,
    RuledRate,
    next_factor,
)
from lit_dps.advice.pilot_preview import Preview

SGD = PilotPlan(32, "model.lr", 0.1, 1.0, is_adaptive=False)
ADAM = PilotPlan(32, "model.lr", 1e-3, 0.5, is_adaptive=True)


@pytest.mark.parametrize(("plan", "rate"), [(SGD, 0.8), (ADAM, 1e-3 * math.sqrt(8))])
def test_the_rate_grows_by_the_rule_of_the_optimizer(plan, rate):
    assert plan.rate_by_rule(256) == pytest.approx(rate)
    assert plan.rate_by_rule(32) == plan.rate
    first, second = plan.points(256, (1.0, 2.0))
    assert first == {"model.lr": pytest.approx(rate)}
    assert second == {"model.lr": pytest.approx(2 * rate)}


def met(steps: int) -> Outcome:
    return Outcome(MET, steps)


def missed(metric: float) -> Outcome:
    return Outcome(MISSED, metric)


DIVERGES = Outcome(DIVERGED, math.inf)


@pytest.mark.parametrize(
    ("tried", "factor"),
    [
        ({}, 1.0),
        ({1.0: met(100)}, 2.0),
        ({1.0: met(100), 2.0: met(91)}, None),
        ({1.0: met(100), 2.0: met(89)}, 4.0),  # a still larger rate may be better
        ({1.0: missed(0.2), 2.0: met(89)}, 4.0),
        ({1.0: met(100), 2.0: DIVERGES}, 0.5),  # a smaller rate may be better
        ({1.0: met(100), 2.0: DIVERGES, 0.5: met(95)}, None),
        ({1.0: met(100), 2.0: DIVERGES, 0.5: met(80)}, 0.25),
        ({1.0: met(100), 2.0: DIVERGES, 0.5: missed(0.2)}, None),
        ({1.0: met(100), 2.0: met(60), 4.0: met(40)}, 8.0),
        ({1.0: met(100), 2.0: met(60), 4.0: met(58)}, None),
        ({1.0: met(100), 2.0: met(60), 4.0: missed(0.06)}, None),
        ({1.0: missed(0.3), 2.0: missed(0.2)}, 4.0),  # the nearer to the goal is followed
        ({1.0: missed(0.2), 2.0: missed(0.3)}, 0.5),
        ({1.0: DIVERGES, 2.0: DIVERGES}, 0.5),
        ({1.0: DIVERGES, 2.0: DIVERGES, 0.5: DIVERGES}, 0.25),
        ({1.0: met(100), 2.0: met(60), 4.0: met(40), 8.0: met(30), 16.0: met(20)}, None),
    ],
)
def test_rates_are_run_beyond_the_better_one_as_long_as_it_is_the_best_by_far(tried, factor):
    assert next_factor(tried, (1.0, 2.0)) == factor


def test_the_first_rates_are_by_the_rule_of_the_optimizer():
    assert ADAM.first_factors == (1.0, 2.0)
    assert SGD.first_factors == (0.5, 1.0), "the linear rule is an upper end"


@pytest.mark.parametrize(
    ("plan", "factor", "at_user_size"),
    [
        (ADAM, 2.0, None),
        (ADAM, 4.0, 4.0),  # the user's rate is too small
        (ADAM, 0.25, None),  # 0.25 sqrt(8) = 0.71 times the user's rate
        (ADAM, 0.125, pytest.approx(0.125 * math.sqrt(8))),  # it is too large
        (SGD, 0.125, None),  # the user's rate
        (SGD, 0.03, pytest.approx(0.24)),
    ],
)
def test_a_rate_that_is_far_off_at_a_larger_batch_is_far_off_at_the_users(
    plan, factor, at_user_size
):
    assert plan.factor_at_user_size(256, factor) == at_user_size


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


def test_a_recommended_rate_is_interpolated_and_beyond_the_runs_grows_at_most_by_the_rule():
    rate = RuledRate.of(ADAM, {32: 1e-3, 512: 2e-3}, (8.0, 8192.0))
    assert rate.at(32) == pytest.approx(1e-3) and rate.at(512) == pytest.approx(2e-3)
    assert rate.at(128) == pytest.approx(1e-3 * math.sqrt(2))
    # It grew with B^(1/4) between the runs, so it does beyond.
    assert rate.at(8192) == pytest.approx(4e-3) and rate.at(2) == pytest.approx(5e-4)
    steep = RuledRate.of(ADAM, {32: 1e-3, 64: 4e-3}, (8.0, 8192.0))
    assert steep.at(256) == pytest.approx(8e-3), "with sqrt(B)"
    falling = RuledRate.of(SGD, {32: 0.1, 64: 0.05}, (8.0, 8192.0))
    assert falling.at(256) == pytest.approx(0.05)
    unmeasured = RuledRate.of(SGD, {}, (8.0, 4096.0))
    assert unmeasured.at(64) == pytest.approx(0.2) and unmeasured.name == "model.lr"


def test_a_rate_next_to_the_users_own_follows_the_searched_one():
    """The user's rate was not searched: half of the best rate by sqrt(B) was found at 16 B0."""
    rate = RuledRate.of(ADAM, {32: 1e-3, 512: 16e-3}, (8.0, 8192.0))
    assert rate.at(128) == pytest.approx(8e-3), "sqrt(B) from B = 512, not 4e-3 on the line"
    assert rate.at(32) == pytest.approx(1e-3) and rate.at(512) == pytest.approx(16e-3)
    again = RuledRate.of(ADAM, {32: 2e-3, 512: 16e-3}, (8.0, 8192.0))
    assert again.at(128) == pytest.approx(math.sqrt(2e-3 * 16e-3)), "a rerun found the rate at B0"
    flat = RuledRate.of(SGD, {32: 0.1, 512: 0.1}, (8.0, 8192.0))
    assert flat.at(128) == pytest.approx(0.1), "it grows no more than between the runs"
    falling = RuledRate.of(SGD, {32: 0.1, 512: 0.05}, (8.0, 8192.0))
    assert falling.at(128) == pytest.approx(0.05)


@pytest.mark.parametrize(("width", "has_limits"), [(100, True), (50, False)])
def test_a_table_before_any_run_fits_the_terminal(width, has_limits):
    plan = PilotPlan(32, "model.lr", 0.1, 0.5, is_adaptive=True)
    seconds = {1: lambda size: 1.0 + size / 64, 2: lambda size: 1.5 + size / 128}
    preview = Preview.of(plan, [16, 32, 64, 128], seconds, 1.5)
    lines = preview.table(width)
    assert len(lines) == 5 and max(map(len, lines)) <= width
    assert ("[" in lines[1]) == has_limits
    assert lines[2].split()[:3] == ["32", "1", "1"], "relative to the user's run"
    narrow = preview.table(24)
    assert max(map(len, narrow)) <= 24
    tables = "\n".join(narrow).split("\n\n")
    heads = [table.splitlines()[0].split()[1:] for table in tables]
    assert heads == [["steps"], ["time", "on", "1", "device"], ["time", "on", "2", "devices"]]
    for table in tables:
        assert [line.split()[0] for line in table.splitlines()] == ["B", "16", "32", "64", "128"]


def test_times_before_any_run_are_relative_to_the_users_run_on_its_devices():
    """It takes 2 s a step on 4 devices. 64 devices cannot divide B0, so 32 has no time there."""
    plan = PilotPlan(32, "model.lr", 0.1, 0.5, is_adaptive=True)
    seconds = {
        64: lambda size: 0.5 if size >= 64 else math.inf,
        1: lambda size: 6.0,
    }
    preview = Preview.of(plan, [16, 32, 64], seconds, seconds_of_user=2.0)
    assert preview.times[1][:, 1] == pytest.approx(3.0)
    assert preview.times[64] == pytest.approx(preview.steps * [math.inf, math.inf, 0.25])
    assert preview.likely_best(64) == [64]
