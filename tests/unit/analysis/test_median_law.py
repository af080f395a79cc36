"""The noise of K* and of medians over seeds, their draws, and the law of the medians."""

from __future__ import annotations

import math
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lit_dps.analysis.law import fit_law
from lit_dps.analysis.law_fit import data_of
from lit_dps.analysis.law_tables import medians_outside
from lit_dps.analysis.observations import (
    AT_MOST,
    Observation,
    medians,
    noise_of_minimum,
    noise_of_search,
    observations_of_repeats,
)
from lit_dps.analysis.repeats import RepeatSummary
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Series, Status, Trial, TrialResult
from lit_dps.report.repeats import medians_beside_law, outside_text
from tests.support.texts import numbers_in

SIZES = [4, 16, 64, 256]
K_STAR = {b: 4096 // b * 16 + 160 for b in SIZES}  # c1 = 65536, c2 = 160


def law(steps, noise=0.02, resolution=16.0):
    return fit_law([Observation(b, k, noise, resolution) for b, k in steps.items()])


def repeats(by_batch_size, check_interval=16):
    """Return the repeats of the best point of each batch size, by their steps; None for a miss."""
    summaries = []
    for b, steps in by_batch_size.items():
        results = []
        for i, k in enumerate(steps, 1):
            status = Status.INCOMPLETE if k is None else Status.COMPLETE
            curve = {"step": [k or 1000], "val_error": [0.5], "train_loss": [1.0]}
            trial = Trial(Cell(b), 0, {}, repeat=i)
            results.append(TrialResult(trial, status, k, curve, seconds=1.0))
        searched = TrialResult(Trial(Cell(b), 0), Status.COMPLETE, 100)
        goal = Goal(0.5, check_interval, max_steps=10**4 * check_interval)
        summaries.append(RepeatSummary(Cell(b), 0, searched, 1, results, len(results), goal))
    return summaries


def repeats_that_ended(*ends: tuple[Status, int]) -> RepeatSummary:
    """Return the repeats of a point by how each ended, and after how many steps."""
    results = []
    for number, (status, end) in enumerate(ends, 1):
        checks = list(range(10, end + 1, 10))
        curve = {"step": checks, "val_error": [0.5] * len(checks), "train_loss": [1.0]}
        steps = end if status is Status.COMPLETE else None
        trial = Trial(Cell(8), 0, {}, repeat=number)
        results.append(TrialResult(trial, status, steps, curve))
    searched = TrialResult(Trial(Cell(8), 0), Status.COMPLETE, 200)
    goal = Goal(0.1, check_interval=10, max_steps=1000)
    return RepeatSummary(Cell(8), 0, searched, 1, results, len(results), goal)


MET = [(Status.COMPLETE, steps) for steps in (420, 300, 500)]


@pytest.mark.parametrize(
    ("missed", "median", "bound"),
    [
        # Two repeats that a callback stopped at 350 may have met the goal at 351.
        ([(Status.STOPPED, 350)] * 2, None, 1),
        # Those that were stopped at 500 or later needed more than the median of 500.
        ([(Status.STOPPED, 500)] * 2, 500, 0),
        ([(Status.INCOMPLETE, 1000)] * 2, 500, 0),
        # A repeat that diverged never meets the goal.
        ([(Status.INFEASIBLE, 20)] * 2, 500, 0),
        # The one that was stopped early may be below 420; the median is 420 at most.
        ([(Status.STOPPED, 350), (Status.COMPLETE, 310)], None, 1),
    ],
)
def test_each_missed_repeat_has_its_limit(missed, median, bound):
    repeated = repeats_that_ended(*MET, *missed)
    assert repeated.median == median
    assert repeated.is_upper_bound(0.5) == bool(bound)
    (observation,) = observations_of_repeats([repeated], 0.0)
    assert observation.bound == (AT_MOST if bound else 0)
    assert observation.k == repeated.quantile(0.5)
    if median is None:
        assert repeated.bias is repeated.finite_median is None
    else:
        assert repeated.bias == 200 / median


def test_limits_of_repeats_keep_the_order_of_the_repeats():
    repeated = repeats_that_ended((Status.STOPPED, 350), *MET, (Status.INFEASIBLE, 20))
    assert repeated.costs_or_limits == [350.0, 420.0, 300.0, 500.0, math.inf]
    assert repeated.costs_over_seeds == [300, 420, 500, math.inf, math.inf]


@pytest.mark.parametrize(("count", "noise"), [(4, 0.5), (16, 0.25), (25, 0.2), (100, 0.1)])
def test_the_noise_of_one_complete_trial_is_that_of_other_searches(count, noise):
    steps = [100, *[None] * (count - 1)]
    assert noise_of_minimum(steps, 2) == pytest.approx(math.hypot(noise, 0.1))
    assert noise_of_minimum(steps, 3) == noise_of_minimum(steps, 2)
    assert noise_of_minimum(steps, 1) == pytest.approx(math.hypot(1 / count, 0.1))
    assert noise_of_search(count, 2) == pytest.approx(noise) and noise_of_search(count, 0) == 0


def test_an_unknown_noise_is_not_the_smallest_where_others_are_known():
    known, unknown = Observation(4, 100, noise=0.35), Observation(16, 40, resolution=16)
    place = (16 / 40) ** 2 / 12
    assert data_of([known, unknown]).variance == pytest.approx([0.35**2, 0.1**2 + place])
    # Without any known noise the error of the law contains it.
    assert data_of([unknown]).variance == pytest.approx([place])


def test_near_best_trials_narrow_or_widen_the_noise():
    near = noise_of_minimum([100, 101, 102, 103, *[None] * 21], 2)
    far = noise_of_minimum([100, 150, 220, 330, *[None] * 21], 2)
    alone = noise_of_minimum([100, *[None] * 24], 2)
    assert 0.5 * alone < near < alone < far
    farther = noise_of_minimum([100, 101, 102, 103, 5000, *[None] * 20], 2)
    assert farther == near, "only the nearest count"


def test_chosen_points_and_seeds_have_the_noise_of_their_spread_alone():
    assert noise_of_minimum([100], 2) == noise_of_minimum([100, None, None], 2) == 0
    assert noise_of_minimum([100, 120], 2) == pytest.approx(math.log(1.2) / 2)
    assert noise_of_minimum([100, None], 0) == noise_of_minimum([100] * 5, 0) == 0


def test_the_noise_of_a_minimum_is_that_of_exponential_distances():
    """The least of n exponential values of scale n s has the standard deviation s."""
    random = np.random.default_rng(0)
    estimates = []
    for _ in range(300):
        steps = np.exp(5 + random.exponential(25 * 0.2, 25))
        estimates.append(noise_of_minimum(steps.tolist(), 0))
    assert np.mean(estimates) == pytest.approx(0.2, rel=0.1)


def test_draws_are_on_the_grid_of_checks_and_independent_of_other_names():
    observation = Observation(8.0, 1000.0, 0.1, 50.0)
    draws = observation.draws(4000, "a")
    assert np.log(draws).std() == pytest.approx(math.sqrt(observation.variance), rel=0.05)
    assert np.median(draws) == pytest.approx(975, rel=0.01), "less half a check interval"
    assert (draws == observation.draws(4000, "a")).all()
    assert abs(np.corrcoef(draws, observation.draws(4000, "b"))[0, 1]) < 0.06
    other = Observation(16.0, 1000.0, 0.1, 50.0).draws(4000, "a")
    assert abs(np.corrcoef(draws, other)[0, 1]) < 0.06
    exact = Observation(8.0, 1000.0, 0.0, 50.0).draws(4000, "a")
    assert 950 < exact.min() < 952 and 998 < exact.max() <= 1000


def test_limits_of_one_k_are_those_of_its_noise():
    low, high = Observation(8.0, 1000.0, 0.1).limits
    assert (low, high) == pytest.approx((1000 * math.exp(-0.196), 1000 * math.exp(0.196)))
    assert Observation(8.0, 1000.0).limits is None, "the noise is not known"
    assert Observation(8.0, 16.0, 0.1, bound=-1).limits is None
    found = law({4: 1000, 64: 100}, noise=0.1)
    assert {*found.limits} == {4, 64} and found.fit is None


def test_medians_of_repeats_have_the_noise_of_seeds_and_of_the_search():
    found = observations_of_repeats(repeats({8: [100, 110, 120], 64: [50, 55, 60]}), 0.0)
    assert [(o.batch_size, o.k, o.resolution) for o in found] == [(8, 110, 16), (64, 55, 16)]
    assert 0.05 < found[0].noise == found[1].noise < 0.1
    wider = observations_of_repeats(repeats({8: [100, 110, 120], 64: [50, 55, 60]}), 0.2)
    assert wider[0].noise == pytest.approx(math.hypot(found[0].noise, 0.2))
    bounds = observations_of_repeats(repeats({8: [16] * 3, 64: [90, None, None]}), 0.0)
    assert [o.bound for o in bounds] == [-1, 1]
    assert observations_of_repeats([], 0.2) == []


def coverage(seeds, budget, never, studies=300):
    """Return the shares of 80 % and 95 % intervals of the median that hold the median of all runs.

    Log K over seeds is normal, and the same at 6 batch sizes.

    Args:
        seeds: Runs of each batch size.
        budget: The share of runs that meet the goal within the budget, of those that can meet it.
        never: The share of runs that never meet the goal.
        studies: How often the runs are drawn.
    """
    random = np.random.default_rng(0)
    deviation = 0.3
    limit = math.exp(deviation * NormalDist().inv_cdf(budget))
    median = math.exp(deviation * NormalDist().inv_cdf(0.5 / (1 - never)))
    hits = []
    for _ in range(studies):
        steps = np.exp(deviation * random.standard_normal((6, seeds)))
        misses = (steps > limit) | (random.random(steps.shape) < never)
        runs = {"batch_size": np.repeat(2 ** np.arange(6), seeds), "censored": misses.ravel()}
        runs["steps"] = np.where(misses, limit, steps).ravel()
        for found in medians(pd.DataFrame(runs)):
            distance = math.log(median / found.k) / found.noise
            if found.is_lower_bound:
                distance = min(distance, 0.0)
            hits.append((abs(distance) < 1.2816, abs(distance) < 1.9600))
    return np.mean(hits, axis=0)


@pytest.mark.parametrize(
    ("seeds", "budget", "never"),
    [
        (15, 1 - 1e-9, 0.0),
        pytest.param(15, 0.8, 0.0, marks=pytest.mark.long),
        (15, 0.7, 0.0),
        (5, 0.8, 0.0),
        (15, 1 - 1e-9, 0.3),
        pytest.param(5, 1 - 1e-9, 0.2, marks=pytest.mark.long),
    ],
)
def test_intervals_of_a_median_hold_it_as_often_as_they_say_where_runs_missed(seeds, budget, never):
    narrow, wide = coverage(seeds, budget, never)
    assert 0.77 <= narrow <= 0.9
    assert 0.89 <= wide <= 0.97


@pytest.mark.parametrize(("factor", "side"), [(1.4, "above"), (0.7, "below"), (1.0, "")])
def test_medians_beside_the_band_are_noted_with_series_and_batch_sizes(factor, side):
    of_k_star, medians = law(K_STAR), law({b: factor * k for b, k in K_STAR.items()})
    outside = medians_outside(of_k_star, medians, 16)
    study = SimpleNamespace(
        laws={Series(0.9): of_k_star},
        median_laws={Series(0.9): medians},
        record=SimpleNamespace(goal=Goal(0.1, 16, 9600)),
    )
    notes = [*medians_beside_law(study)]
    if not side:
        assert outside == {} and notes == []
        return
    assert outside == {b: pytest.approx(factor, rel=0.01) for b in SIZES}
    places = outside_text(outside)
    assert places.startswith(f"{side} ") and places.endswith(" 4, 16, 64, 256")
    assert notes[0]["places"] == f"S=0.9 {places}"
    assert f"x{factor}" in notes[0]["most"]


def test_medians_are_compared_where_both_are_known():
    of_k_star = law(K_STAR)
    assert medians_outside(of_k_star, law({512: 9000}), 16) == {}
    assert medians_outside(law({4: 320}), law({4: 900}), 16) == {}, "no law, no band"
    places = outside_text({2: 0.8, 8: 1.5, 16: 1.2})
    assert numbers_in(places.replace(",", "")) == [8, 16, 2]
    assert places.index("above") < places.index("below")
