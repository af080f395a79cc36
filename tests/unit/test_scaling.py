"""The fit of K* = c1 / B + c2, its intervals, and what it says where the data cannot tell B_crit."""

import math
import time

import numpy as np
import optuna
import pytest
from scipy.optimize import least_squares

from lit_dps.analysis.fit import LOSS_SCALE, Fit, fit_many, fit_scaling, overhead_batch_size
from lit_dps.analysis.results import read_study
from lit_dps.analysis.scaling import NEGLIGIBLE, Interval, Scaling, estimate, scale, scaling_of, three_digits
from lit_dps.trial import Cell
from tests.unit.fake_study import law_results, result, write_study

POWERS = 2.0 ** np.arange(1, 15)  # the batch sizes of the paper, 2 to 16384


@pytest.mark.parametrize(("c1", "c2"), [(4e4, 60), (1e3, 1e-2), (5, 100), (1e5, 1e5), (3e7, 2.5)])
@pytest.mark.parametrize("batch", [POWERS, np.array([16.0, 64.0]), np.array([2.0, 3.0, 500.0])])
def test_recovers_the_constants_of_an_exact_curve(c1, c2, batch):
    fit = fit_scaling(batch, c1 / batch + c2)
    assert fit.c1 == pytest.approx(c1, rel=1e-6)
    assert fit.c2 == pytest.approx(c2, rel=1e-6)
    assert fit.critical_batch_size == pytest.approx(c1 / c2, rel=1e-6)
    assert fit.steps(batch) == pytest.approx(c1 / batch + c2, rel=1e-6)


def test_perfect_scaling_has_no_c2():
    fit = fit_scaling(POWERS, 4e4 / POWERS)
    assert fit.c1 == pytest.approx(4e4, rel=1e-9)
    assert fit.c2 * POWERS[-1] / fit.c1 < 1e-9
    steeper = fit_scaling(POWERS, 4e4 / POWERS**1.2)  # would want a negative c2
    assert steeper.c2 == 0.0
    assert steeper.critical_batch_size == math.inf


def test_a_flat_or_rising_curve_keeps_c1_above_zero():
    for steps in ([100, 100, 100], [100, 150, 200]):
        fit = fit_scaling([2, 16, 128], steps)
        assert 0 < fit.c1 / 2 < 2e-3 * fit.c2


def soft_l1(c1, c2, batch, steps, axis=None):
    z = (np.log(steps) - np.log(c1 / batch + c2)) / LOSS_SCALE
    return LOSS_SCALE**2 * np.sum(2 * (np.sqrt(1 + z**2) - 1), axis=axis)


def scipy_fit(batch, steps):
    """The same problem by scipy from many starts in (log c1, log c2)."""

    def residual(p):
        return np.log(steps) - np.logaddexp(p[0] - np.log(batch), p[1])

    best = None
    for start in np.log(steps.min()) + np.array([-12, -6, -3, -1, -0.1, 0.1]):
        x0 = [np.median(np.log(steps * batch)), start]
        tried = least_squares(residual, x0, loss="soft_l1", f_scale=LOSS_SCALE, xtol=1e-15, ftol=1e-15, gtol=1e-15)
        best = tried if best is None or tried.cost < best.cost else best
    return np.exp(best.x), 2 * best.cost


@pytest.mark.parametrize("noise", [0.03, 0.2, 0.6])
def test_agrees_with_scipy_on_noisy_curves(noise):
    rng = np.random.default_rng(0)
    for count in (3, 6, 14):
        batch = POWERS[:count]
        curves = np.exp(np.log(1e3 / batch + 5) + noise * rng.standard_t(2, size=(5, count)))
        for steps, (c1, c2) in zip(curves, fit_many(batch, curves), strict=True):
            theirs, cost = scipy_fit(batch, steps)
            ours = soft_l1(c1, c2, batch, steps)
            if c1 / batch[0] < 2e-3 * c2:  # at the end of the search, where steps do not fall with the batch size
                assert ours <= cost * 1.001
                continue
            assert ours <= cost * (1 + 1e-9) + 1e-12
            if abs(ours - cost) <= 1e-9 * cost and c2 * batch[-1] / c1 > 1e-3:  # where c2 is felt, the same minimum
                assert [c1, c2] == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    "steps",
    [[96, 578, 119, 127, 9, 11], [278, 24, 98, 28, 13, 1], [1734, 189, 850, 45, 240, 40], [91, 267, 179, 30, 6, 5]],
)
def test_of_several_minima_finds_the_lowest(steps):
    batch, steps = 4.0 ** np.arange(1, 7), np.array(steps, float)
    fit = fit_scaling(batch, steps)
    c1, c2 = np.meshgrid(np.geomspace(1, 1e5, 1500), np.concatenate([[0], np.geomspace(1e-2, 1e3, 1500)]))
    anywhere = min(soft_l1(a[:, None], b[:, None], batch, steps, axis=1).min() for a, b in zip(c1, c2, strict=True))
    assert soft_l1(fit.c1, fit.c2, batch, steps) <= anywhere


def test_one_bad_cell_does_not_bend_the_curve():
    steps = 4e4 / POWERS + 60
    steps[6] *= 5  # a search that found nothing good at B = 128
    robust, plain = fit_scaling(POWERS, steps), fit_scaling(POWERS, steps, loss_scale=1e4)
    assert robust.c1 == pytest.approx(4e4, rel=0.02)
    assert robust.c2 == pytest.approx(60, rel=0.02)
    assert plain.c1 > 1.1 * 4e4


def test_neither_order_nor_company_changes_a_fit():
    steps = np.exp(np.log(4e4 / POWERS + 60) + np.random.default_rng(3).normal(0, 0.2, POWERS.size))
    alone = fit_scaling(POWERS, steps)
    back = fit_scaling(POWERS[::-1], steps[::-1])
    assert [back.c1, back.c2] == pytest.approx([alone.c1, alone.c2], rel=1e-9)
    holed = steps.copy()
    holed[[2, 9]] = np.nan  # cells that a resample has no complete trial of
    both = fit_many(POWERS, np.stack([holed, steps]))
    known = np.isfinite(holed)
    without = fit_scaling(POWERS[known], steps[known])
    assert both[0] == pytest.approx([without.c1, without.c2], rel=1e-9)
    assert both[1] == pytest.approx([alone.c1, alone.c2], rel=1e-9)


@pytest.mark.parametrize(
    ("batch", "steps", "said"),
    [
        ([16, 16], [100, 90], "at least 2 different batch sizes, not 1"),
        ([], [], "at least 2 different batch sizes, not 0"),
        ([16, 32], [100], r"shapes \(2,\) and \(1,\)"),
        ([16, 32], [100, 0], "positive and finite"),
        ([16, 32], [100, math.nan], "positive and finite"),
        ([0, 32], [100, 50], "positive and finite"),
    ],
)
def test_says_what_cannot_be_fitted(batch, steps, said):
    with pytest.raises(ValueError, match=said):
        fit_scaling(batch, steps)


# H. Zhang et al. 2024, "How Does Critical Batch Size Scale in Pre-training?": by model size, the steps to a
# validation-loss goal at batch sizes 64 to 16384 and the fit a + b / B as (a = c2, b = c1, batch size of 20 % overhead
# over B = 256). From github.com/hlzhang109/critical-batch-size (MIT), plots/chinchilla.ipynb.
ZHANG = {
    "85M": (
        [46000, 23000, 13282, 7000, 3840, 2528, 1917, 1600, 1600],
        (1293.8268694659337, 2834258.0888740215, 745.3201466381583),
    ),
    "151M": (
        [96000, 49000, 24000, 12000, 7128, 4350, 2940, 2400, 2300],
        (1752.4211962796799, 5677478.783007255, 955.1582414387951),
    ),
    "302M": (
        [196000, 90000, 46000, 23400, 13300, 7224, 4980, 3400, 2879],
        (2095.3497601960876, 11383269.891870424, 1393.726947253441),
    ),
    "604M": (
        [311000, 166000, 81000, 37440, 21320, 11400, 7199, 4700, 3800],
        (2459.9274969089824, 19449688.58779496, 1888.5221009346358),
    ),
    "1.2B": (
        [642000, 331000, 176000, 94000, 46500, 25000, 15360, 8900, 6500],
        (3897.306597333535, 43381130.22429582, 2533.4108017868743),
    ),
}


@pytest.mark.parametrize("size", ZHANG)
def test_reproduces_published_fits(size):
    steps, (a, b, critical) = ZHANG[size]
    batch = 2.0 ** np.arange(6, 15)
    # They use scipy's curve_fit on log steps: least squares, which a large loss scale is. What is left (1e-7) is the
    # tolerance at which their iteration stopped.
    plain = fit_scaling(batch, steps, loss_scale=1e4)
    assert [plain.c2, plain.c1] == pytest.approx([a, b], rel=1e-6)
    assert overhead_batch_size(plain, 0.2, 256) == pytest.approx(critical, rel=1e-6)
    # Our loss at its ordinary scale weighs their largest residuals, 0.06 to 0.10, by 0.86 to 0.71. That moves c1 by
    # 0.4 % at most (302M), c2 by 1.1 % (151M) and the critical batch size by 0.9 % (151M).
    ours = fit_scaling(batch, steps)
    assert ours.c1 == pytest.approx(b, rel=0.005)
    assert ours.c2 == pytest.approx(a, rel=0.015)
    assert overhead_batch_size(ours, 0.2, 256) == pytest.approx(critical, rel=0.015)


def test_overhead_is_what_it_is_called():
    fit = Fit(4e4, 60)
    batch = overhead_batch_size(fit, 0.5, 32)
    assert batch * fit.steps(batch) == pytest.approx(1.5 * 32 * fit.steps(32))


def test_resamples_take_the_best_complete_trial():
    # At the smaller batch K* is 1000 unless both draws are the second trial: in 3 of 4 resamples. At the larger it is
    # 300 unless both are the incomplete one. Two batch sizes give a law through both points: c1 = (K1 - K2) / 0.09.
    scaling = scale({10: [1000, 2000], 100: [300, None]}, replicates=4000)
    assert scaling.k_star == {10: 1000, 100: 300}
    c1 = np.round(scaling.replicates[:, 0], 6)
    first, second = 700 / 0.09, 1700 / 0.09
    assert set(c1) == {round(first, 6), round(second, 6)}
    # A quarter of the resamples has one point left, and is left out.
    assert len(c1) == pytest.approx(3000, abs=120)  # 4 standard deviations of a binomial
    assert np.mean(c1 == round(first, 6)) == pytest.approx(0.75, abs=0.035)
    assert scaling.c1 == pytest.approx((first, second))


def test_intervals_are_percentiles_that_hold_the_estimate():
    trials = {b: [r.steps for r in law_results(Cell(b, 0.0), 30, 4e4, 60)] for b in (4, 16, 64, 256, 1024)}
    scaling = scale(trials)
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
    assert scale(trials) == scaling
    assert scale(trials, seed=1).c1 != scaling.c1


def test_an_interval_never_misses_its_estimate():
    # The best of six trials is missing from a third of a cell's resamples: with 14 cells hardly any keeps them all.
    scaling = scale({int(b): [k * (4e4 / b + 60) for k in (1, *[1.05] * 5)] for b in POWERS})
    low, _ = np.percentile(scaling.replicates, 2.5, axis=0)
    assert low > 40_010
    assert scaling.c1.low == scaling.fit.c1 == pytest.approx(4e4)
    steps = scaling.replicates[:, 0] / 2 + scaling.replicates[:, 1]
    assert np.percentile(steps, 2.5) > 20_065
    assert scaling.band(np.array([2.0]))[0] == pytest.approx([20_060])


def test_the_order_of_cells_does_not_matter():
    trials = {10: [1000, 1500, 2000], 100: [300, 350], 1000: [200, 100]}
    shuffled = {b: trials[b] for b in (100, 1000, 10)}
    assert scale(trials, replicates=50) == scale(shuffled, replicates=50)


def trials_of(c1, c2, batch):
    """Four trials a cell, the best of which is on the law."""
    return {b: [k * (c1 / b + c2) for k in (1.3, 1.0, 1.1)] + [None] for b in batch}


def test_identifiable_from_half_of_b_crit_on():
    seen = scale(trials_of(1e5, 100, (8, 64, 512)), replicates=200)  # B_crit = 1000
    assert seen.identifiable
    assert seen.describe().startswith("B_crit = 1000 [")
    short = scale(trials_of(1e5, 100, (8, 64, 480)), replicates=200)
    assert short.c2.low * 480 / short.fit.c1 > NEGLIGIBLE
    assert not short.identifiable
    assert short.bound == short.critical.low < 1000
    assert short.describe() == f"not identifiable: B_crit > {three_digits(short.critical.low)}"


def test_not_identifiable_where_c2_may_be_zero():
    perfect = scale(trials_of(1e5, 0, (8, 64, 512)), replicates=200)
    assert not perfect.identifiable
    assert math.isfinite(perfect.bound)
    assert 0 < perfect.bound <= 512 / NEGLIGIBLE
    # B_crit by the estimate well inside the data, but some resamples see no floor at all.
    unsure = scale({8: [1000, 5000], 64: [400, 500], 512: [60, 350]}, replicates=500)
    assert unsure.fit.critical_batch_size < 2 * 512
    assert unsure.c2.low * 512 / unsure.fit.c1 < NEGLIGIBLE
    assert unsure.critical.high > 512 / NEGLIGIBLE
    assert unsure.describe() == f"not identifiable: B_crit > {three_digits(unsure.critical.low)}"


def test_a_c2_too_small_to_see_counts_as_zero():
    # Resamples with 5000 steps at B = 8 want c2 = 0.005: 0.04 % of the steps at B = 512.
    faint = scale({8: [1000, 5000], 512: [78.13, 78.13]}, replicates=200)
    assert faint.fit.critical_batch_size == pytest.approx(118, abs=1)
    assert 0 < faint.c2.low < 0.01
    assert not faint.identifiable


def test_where_every_resample_scales_perfectly_the_largest_batch_is_the_bound():
    perfect = scale({b: [1e5 / b**1.1] * 2 for b in (8, 64, 512)}, replicates=20)
    assert perfect.critical == (math.inf, math.inf)
    assert perfect.describe() == "not identifiable: B_crit > 512"


def test_one_trial_a_cell_gives_a_fit_without_intervals():
    scaling = scale({b: [1e5 / b + 100] for b in (8, 64, 2048)})
    assert scaling.c1 is scaling.c2 is scaling.critical is scaling.band(np.array([8.0])) is None
    assert scaling.describe() == "B_crit = 1000"
    assert scale({b: [1e5 / b + 100] for b in (8, 64)}).describe() == "not identifiable: B_crit > 64"


def test_too_few_batch_sizes_are_said_so():
    scaling = scale({8: [100, None], 16: [None, None], 32: []})
    assert scaling == Scaling({8: 100})
    assert scaling.describe() == "needs complete trials at 2 batch sizes; has 1"
    assert scaling.bound is None
    assert not scaling.identifiable
    assert scaling.band(np.array([8.0])) is None


def test_a_floor_reached_before_the_smallest_batch_is_said_so():
    assert scale({8: [100], 64: [100]}).describe().endswith(", below the smallest batch size")


def test_a_thousand_resamples_of_fourteen_batch_sizes_are_quick():
    trials = {int(b): [r.steps for r in law_results(Cell(int(b), 0.0), 50, 4e4, 60)] for b in POWERS}
    start = time.process_time()
    scale(trials)
    assert time.process_time() - start < 5  # 0.8 s on the machine it was written on


def test_scaling_of_a_study_is_by_sparsity():
    storage = optuna.storages.InMemoryStorage()
    cells = {Cell(b, s): [] for b in (8, 64, 512) for s in (0.0, 0.9)}
    for cell in cells:
        c1, c2 = (1e5, 100) if cell.sparsity == 0 else (3e5, 200)
        cells[cell] = [result(cell, i, round(k * (c1 / cell.batch_size + c2))) for i, k in enumerate((1.2, 1, 1.1))]
    cells[Cell(8, 0.9)] = [result(Cell(8, 0.9), 0, None), result(Cell(8, 0.9), 1, None, "infeasible")]
    write_study(storage, cells)
    dense, sparse = (scaling_of(read_study(storage, "fake"), replicates=50)[s] for s in (0.0, 0.9))
    assert dense.k_star == {8: 12600, 64: 1662, 512: 295}
    assert [dense.fit.c1, dense.fit.c2] == pytest.approx([1e5, 100], rel=0.01)  # K* are rounded to whole steps
    assert sparse.k_star == {64: 4888, 512: 786}


def test_numbers_are_written_with_three_digits():
    numbers = (42363.9, 0.12345, 583.4, 7357.9, 4.2444e9, 99.96, math.inf)
    assert [three_digits(x) for x in numbers] == ["42400", "0.123", "583", "7360", "4.24e+09", "100", "inf"]
    assert estimate(583.4, Interval(546.3, 638.1)) == "583 [546, 638]"
    assert estimate(583.4, None) == "583"
