"""The intervals of a scaling law, and what it says where the data cannot tell B_crit."""

import math

import numpy as np
import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.intervals import Interval, estimate
from lit_dps.analysis.law_bootstrap import NEGLIGIBLE, Scaling, bootstrap_law, resample
from lit_dps.analysis.tables import three_digits
from lit_dps.core.trial import Cell, Series
from lit_dps.storage.read import read_study
from tests.support.fake_study import law_results, result, write_study

POWERS = 2.0 ** np.arange(1, 15)  # the batch sizes of the paper, 2 to 16384


def test_resamples_take_the_best_complete_trial():
    # 1000 unless both draws are the second trial, in 3 of 4 resamples; 300 unless both are the
    # incomplete one.
    steps = resample([1000, 2000], 4000, (0, 10))
    assert set(steps) == {1000, 2000}
    assert np.mean(steps == 1000) == pytest.approx(
        0.75, abs=0.03
    )  # 4 standard deviations of a binomial
    steps = resample([300, None], 4000, (0, 100))
    assert np.isnan(steps).mean() == pytest.approx(0.25, abs=0.03) and set(
        steps[~np.isnan(steps)]
    ) == {300}


def test_resamples_left_with_one_batch_size_are_left_out():
    # Of 4 cells, each without a complete trial in a quarter of the resamples, 1 or none is left in
    # 13 of 256.
    scaling = bootstrap_law({b: [1e4 / b + 10, None] for b in (4, 16, 64, 256)}, replicates=4000)
    assert len(scaling.replicates) == pytest.approx(4000 * (1 - 13 / 256), abs=56)
    assert scaling.c1 == pytest.approx((1e4, 1e4))


def test_resamples_are_rounded_to_the_grid_of_checks():
    # The goal was met in (980, 1000], and so on: a resample has each K* anywhere in there, and the
    # law of all three.
    trials = {10: [1000, 1000], 30: [481.5, 481.5], 100: [300, 300]}
    scaling = bootstrap_law(trials, check_interval=20)
    c1, c2 = scaling.replicates.T
    for b, (k, _) in trials.items():
        steps = c1 / b + c2
        assert min(steps) < k - 17 and k - 3 < max(steps)
        assert np.mean(steps) == pytest.approx(
            k - 10, abs=0.75
        )  # 4 standard errors of a uniform: 20 / sqrt(12 R)
    large = c1 / 100 + c2
    assert (
        min(large) > 279 and max(large) < 301
    )  # the others say next to nothing of the end where c2 rules
    low, high = scaling.band(np.array([100.0]))
    assert (
        low == pytest.approx([np.percentile(large, 2.5)]) and 280 < low[0] < 283
    )  # 280.5 if it were alone
    assert high == pytest.approx(
        [300], abs=0.7
    )  # widened to hold the fit, which is of the K* observed
    assert scaling.fit == bootstrap_law(trials).fit
    assert (scaling.replicates == bootstrap_law(trials, check_interval=20).replicates).all()
    assert (scaling.replicates != bootstrap_law(trials, check_interval=20, seed=1).replicates).any()


def test_rounding_draws_the_same_trials_but_is_a_cells_own():
    trials = {10: [1000, 1200, 1400], 30: [481, 520, 600], 100: [300, 320, 400]}
    exact, rounded = (
        bootstrap_law(trials).replicates,
        bootstrap_law(trials, check_interval=20).replicates,
    )
    off = {b: (exact - rounded) @ [1 / b, 1] for b in trials}
    for shift in off.values():
        assert (
            min(shift) > -12 and max(shift) < 32
        )  # of a law of three points, shifted by 0 to 20 each
        assert np.mean(shift) == pytest.approx(10, abs=1.5)
    # Twice as many steps at the same batch size and points: the rounding of the one says nothing of
    # the other's.
    twice = {b: [2 * k for k in steps] for b, steps in trials.items()}
    other = (
        bootstrap_law(twice).replicates - bootstrap_law(twice, check_interval=20).replicates
    ) @ [1 / 10, 1]
    assert abs(np.corrcoef(off[10], other)[0, 1]) < 0.13


def test_intervals_are_percentiles_that_hold_the_estimate():
    trials = {
        b: [r.steps for r in law_results(Cell(b, 0.0), 30, 4e4, 60)] for b in (4, 16, 64, 256, 1024)
    }
    scaling = bootstrap_law(trials)
    fit, (c1, c2) = scaling.fit, scaling.replicates.T
    assert scaling.replicates.shape == (1000, 2)
    for interval, values, value in (
        (scaling.c1, c1, fit.c1),
        (scaling.c2, c2, fit.c2),
        (scaling.critical, c1 / c2, fit.critical_batch_size),
    ):
        low, high = np.percentile(values, (2.5, 97.5))
        assert interval.low == pytest.approx(min(low, value), rel=1e-3)
        assert interval.high == pytest.approx(max(high, value), rel=1e-3)
        assert interval.low < interval.high
    low, high = scaling.band(np.array([4.0, 1024.0]))
    assert (low <= fit.steps(np.array([4.0, 1024.0]))).all()
    assert (high >= fit.steps(np.array([4.0, 1024.0]))).all()
    assert low[1] == pytest.approx(min(np.percentile(c1 / 1024 + c2, 2.5), fit.steps(1024)))
    assert bootstrap_law(trials) == scaling
    assert bootstrap_law(trials, seed=1).c1 != scaling.c1


def test_an_interval_never_misses_its_estimate():
    # The best of six trials is missing from a third of a cell's resamples: with 14 cells hardly any
    # keeps them all.
    scaling = bootstrap_law(
        {int(b): [k * (4e4 / b + 60) for k in (1, *[1.05] * 5)] for b in POWERS}
    )
    low, _ = np.percentile(scaling.replicates, 2.5, axis=0)
    assert low > 40_010
    assert scaling.c1.low == scaling.fit.c1 == pytest.approx(4e4)
    steps = scaling.replicates[:, 0] / 2 + scaling.replicates[:, 1]
    assert np.percentile(steps, 2.5) > 20_065
    assert scaling.band(np.array([2.0]))[0] == pytest.approx([20_060])


def test_the_order_of_cells_does_not_matter():
    trials = {10: [1000, 1500, 2000], 100: [300, 350], 1000: [200, 100]}
    shuffled = {b: trials[b] for b in (100, 1000, 10)}
    assert bootstrap_law(trials, replicates=50) == bootstrap_law(shuffled, replicates=50)


def trials_of(c1, c2, batch):
    """Four trials a cell, the best of which is on the law."""
    return {b: [k * (c1 / b + c2) for k in (1.3, 1.0, 1.1)] + [None] for b in batch}


def test_identifiable_from_half_of_b_crit_on():
    seen = bootstrap_law(trials_of(1e5, 100, (8, 64, 512)), replicates=200)  # B_crit = 1000
    assert seen.identifiable
    assert seen.describe().startswith("B_crit = 1000 [")
    short = bootstrap_law(trials_of(1e5, 100, (8, 64, 480)), replicates=200)
    assert short.c2.low * 480 / short.fit.c1 > NEGLIGIBLE
    assert not short.identifiable
    assert short.bound == short.critical.low < 1000
    assert short.describe() == f"not identifiable: B_crit > {three_digits(short.critical.low)}"


def test_not_identifiable_where_c2_may_be_zero():
    perfect = bootstrap_law(trials_of(1e5, 0, (8, 64, 512)), replicates=200)
    assert not perfect.identifiable
    assert math.isfinite(perfect.bound)
    assert 0 < perfect.bound <= 512 / NEGLIGIBLE
    # B_crit by the estimate well inside the data, but some resamples see no floor at all.
    unsure = bootstrap_law({8: [1000, 5000], 64: [400, 500], 512: [60, 350]}, replicates=500)
    assert unsure.fit.critical_batch_size < 2 * 512
    assert unsure.c2.low * 512 / unsure.fit.c1 < NEGLIGIBLE
    assert unsure.critical.high > 512 / NEGLIGIBLE
    assert unsure.describe() == f"not identifiable: B_crit > {three_digits(unsure.critical.low)}"


def test_a_c2_too_small_to_see_counts_as_zero():
    # A sixteenth of the resamples, with 5000 steps at B = 8 and 625 at 64, want c2 = 0: 78.13 is
    # 40000 / 512.
    faint = bootstrap_law({8: [1000, 5000], 64: [180.6, 625], 512: [78.13, 78.13]}, replicates=200)
    assert faint.fit.critical_batch_size == pytest.approx(118, abs=1)
    assert 0 <= faint.c2.low < 0.01
    assert not faint.identifiable


def test_where_every_resample_scales_perfectly_the_largest_batch_is_the_bound():
    perfect = bootstrap_law({b: [1e5 / b**1.1] * 2 for b in (8, 64, 512)}, replicates=20)
    assert perfect.critical == (math.inf, math.inf)
    assert perfect.describe() == "not identifiable: B_crit > 512"


def test_one_trial_a_cell_gives_a_fit_without_intervals():
    scaling = bootstrap_law({b: [1e5 / b + 100] for b in (8, 64, 2048)})
    assert scaling.c1 is scaling.c2 is scaling.critical is scaling.band(np.array([8.0])) is None
    assert scaling.describe() == "B_crit = 1000"
    assert (
        bootstrap_law({b: [1e5 / b + 100] for b in (8, 32, 64)}).describe()
        == "not identifiable: B_crit > 64"
    )


def test_too_few_batch_sizes_are_said_so():
    scaling = bootstrap_law({8: [100, None], 16: [None, None], 32: []})
    assert scaling == Scaling({8: 100})
    assert scaling.describe() == "needs complete trials at 3 batch sizes; has 1"
    assert scaling.bound is None
    assert not scaling.identifiable
    assert scaling.band(np.array([8.0])) is None


def test_two_points_meet_any_law_and_give_none():
    scaling = bootstrap_law({b: [1e5 / b + 100, 2e5 / b + 300] for b in (8, 2048)})
    assert (
        scaling.fit is scaling.c1 is scaling.critical is scaling.bound is None
        and not scaling.identifiable
    )
    assert scaling.describe() == "needs complete trials at 3 batch sizes; has 2"


def test_a_floor_reached_before_the_smallest_batch_is_said_so():
    assert (
        bootstrap_law({8: [100], 16: [100], 64: [100]})
        .describe()
        .endswith(", below the smallest batch size")
    )


def test_scaling_of_a_study_is_by_sparsity():
    storage = optuna.storages.InMemoryStorage()
    cells = {Cell(b, s): [] for b in (8, 64, 512) for s in (0.0, 0.9)}
    for cell in cells:
        c1, c2 = (1e5, 100) if cell.sparsity == 0 else (3e5, 200)
        cells[cell] = [
            result(cell, i, round(k * (c1 / cell.batch_size + c2)))
            for i, k in enumerate((1.2, 1, 1.1))
        ]
    cells[Cell(8, 0.9)] = [
        result(Cell(8, 0.9), 0, None),
        result(Cell(8, 0.9), 1, None, "infeasible"),
    ]
    write_study(storage, cells)
    dense, sparse = (
        Analysis(read_study(storage, "fake"), replicates=50).scalings[Series(s)] for s in (0.0, 0.9)
    )
    assert dense.k_star == {8: 12600, 64: 1662, 512: 295}
    assert [dense.fit.c1, dense.fit.c2] == pytest.approx(
        [1e5, 100], rel=0.01
    )  # K* are rounded to whole steps
    assert sparse.k_star == {64: 4888, 512: 786}


def test_numbers_are_written_with_three_digits():
    numbers = (42363.9, 0.12345, 583.4, 7357.9, 4.2444e9, 99.96, math.inf)
    assert [three_digits(x) for x in numbers] == [
        "42400",
        "0.123",
        "583",
        "7360",
        "4.24e+09",
        "100",
        "inf",
    ]
    assert estimate(583.4, Interval(546.3, 638.1)) == "583 [546, 638]"
    assert estimate(583.4, None) == "583"
