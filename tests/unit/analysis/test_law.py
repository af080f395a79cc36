"""The law with bounds, weights, intervals and refusals, against curves whose constants are
known."""

import math
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from lit_dps.analysis.critical_prior import CriticalPrior
from lit_dps.analysis.law import fit_law
from lit_dps.analysis.law_fit import fit_scaling
from lit_dps.analysis.law_verdict import Trust
from lit_dps.analysis.observations import AT_LEAST, AT_MOST, Observation, medians
from tests.support.errors import raises_about, refuses

BATCH = 2.0 ** np.arange(3, 13)


def curve(c1=4e4, c2=60.0, batch=BATCH, noise=0.0, seed=0):
    errors = (
        np.random.default_rng(seed).normal(0, noise, len(batch)) if noise else np.zeros(len(batch))
    )
    steps = (c1 / batch + c2) * np.exp(errors)
    return [Observation(b, k) for b, k in zip(batch, steps, strict=True)]


def test_a_weight_of_two_is_a_point_given_twice():
    batch, steps = [4, 8, 16, 32], np.array([110, 64, 48, 30])
    doubled = fit_scaling([4, 8, 8, 16, 32], [110, 64, 64, 48, 30])
    weighted = fit_scaling(batch, steps, weights=np.array([1, 2, 1, 1]))
    assert [weighted.c1, weighted.c2] == pytest.approx([doubled.c1, doubled.c2], rel=1e-6)
    assert weighted.c2 != pytest.approx(fit_scaling(batch, steps).c2, rel=1e-3)


def test_a_bound_that_the_law_keeps_changes_nothing_and_one_that_it_breaks_pulls():
    batch, steps = (
        np.array([4.0, 8, 16, 32, 64]),
        np.array([1010.0, 510, 260, 135, 72.5]),
    )  # 4000 / B + 10
    bare = fit_scaling(batch[:4], steps[:4])
    for bound, value in ((AT_LEAST, 50), (AT_MOST, 100)):
        kept = fit_scaling(batch, [*steps[:4], value], bounds=np.array([0, 0, 0, 0, bound]))
        assert [kept.c1, kept.c2] == pytest.approx([bare.c1, bare.c2], rel=1e-6)
    raised = fit_scaling(batch, [*steps[:4], 150], bounds=np.array([0, 0, 0, 0, AT_LEAST]))
    lowered = fit_scaling(batch, [*steps[:4], 40], bounds=np.array([0, 0, 0, 0, AT_MOST]))
    assert raised.steps(64) > 1.2 * bare.steps(64)
    assert lowered.steps(64) < 0.9 * bare.steps(64)


def test_a_broken_bound_counts_as_a_point_would():
    batch, steps = [4.0, 8, 16, 32], [1010.0, 510, 260, 500]
    as_point = fit_scaling(batch, steps)
    as_bound = fit_scaling(batch, steps, bounds=np.array([0, 0, 0, AT_LEAST]))
    assert [as_point.c1, as_point.c2] == pytest.approx([as_bound.c1, as_bound.c2], rel=1e-6)


def test_recovers_an_exact_law_and_its_interval_widens_beyond_the_data():
    law = fit_law(curve())
    assert law.is_b_crit_known and law.verdict.reason == ""
    assert law.fit.c1 == pytest.approx(4e4, rel=1e-5)
    value = law.fit.critical_batch_size
    assert law.b_crit_interval.low < value < law.b_crit_interval.high
    assert value == pytest.approx(4e4 / 60, rel=1e-5)
    table = law.predict([64, 4096, 8192, 16384, 32768, 4096 * 17])
    assert list(table["known"]) == [
        "law",
        "law",
        "extrapolated",
        "extrapolated",
        "extrapolated",
        "refused",
    ]
    assert table["steps"][0] == pytest.approx(4e4 / 64 + 60, rel=1e-5)
    widths = np.log(table["high"] / table["low"])
    assert (np.diff(widths[1:5]) > 0.002).all()
    assert table["steps"].isna().tolist() == [False] * 5 + [True]


def test_the_interval_of_b_crit_covers():
    batch = 2.0 ** np.arange(3, 11)
    hits = 0
    for seed in range(30):
        law = fit_law(curve(batch=batch, noise=0.08, seed=seed))
        hits += law.b_crit_interval.low <= 4e4 / 60 <= law.b_crit_interval.high
    assert hits >= 25  # of 30 at 95 %: fewer have a probability of 0.2 %


def test_bounds_narrow_what_is_known():
    batch = np.array([8.0, 16, 32, 64])
    few = curve(batch=batch)
    bare = fit_law(few)
    bounded = fit_law(
        [*few, Observation(512, 100, bound=AT_LEAST), Observation(1024, 120, bound=AT_MOST)]
    )
    assert not bare.is_b_crit_known
    assert bounded.b_crit_interval.high < bare.b_crit_interval.high
    assert bounded.range == (8, 64)


def at(batch, steps, noise=0.0):
    return [Observation(b, k, noise) for b, k in zip(batch, steps, strict=True)]


LINEAR = curve(c2=1e-9)
MISSED = at((4, 8, 16, 32, 64), (900, 300, 290, 80, 75))
RISING = at((4, 8, 16, 32, 64), (900, 480, 250, 240, 400))


@pytest.mark.parametrize(
    ("observations", "trust"),
    [
        (curve()[:2], Trust.MEASURED),
        ([*curve()[:2], Observation(4096, 70, bound=AT_LEAST)], Trust.MEASURED),
        (curve(batch=np.array([100.0, 108, 119])), Trust.MEASURED),
        (LINEAR, Trust.PREDICTED),
        (curve(c2=4e4 / 4096 / 3), Trust.PREDICTED),
        (curve(c1=1.0), Trust.PREDICTED),
        (MISSED, Trust.INTERPOLATED),
        (RISING, Trust.MEASURED),
        ([Observation(8.0, 100.0)], Trust.MEASURED),
        ([], Trust.MEASURED),
    ],
)
def test_refuses_what_cannot_be_identified(observations, trust):
    law = fit_law(observations)
    assert law.verdict.trust is trust and law.verdict.reason
    assert not law.is_b_crit_known
    assert law.describes_k is (trust is Trust.PREDICTED)
    assert law.predict([1e6])["known"].tolist() == ["refused"]


def test_a_law_whose_b_crit_is_not_known_predicts_k_beyond_its_range():
    law = fit_law(LINEAR)
    table = law.predict([48, 4096, 8192, 65536, 65537])
    assert table["known"].tolist() == ["law", "law", "extrapolated", "extrapolated", "refused"]
    assert law.verdict.bound == law.b_crit_interval.low > 1000
    widths = np.log(table["high"] / table["low"])
    assert widths[3] > 2 * widths[2] > 2 * widths[1], "a floor may still appear"


def test_k_that_follows_no_law_is_interpolated_between_its_batch_sizes():
    law = fit_law(MISSED)
    table = law.predict([8, 11.313708, 65, 3])
    assert table["known"].tolist() == ["measured", "interpolated", "refused", "refused"]
    assert table["steps"][0] == 300
    assert table["steps"][1] == pytest.approx(math.sqrt(300 * 290), rel=1e-6)
    assert math.log(table["high"][1] / table["steps"][1]) > 1.96 * 0.2
    samples = law.samples([8, 11.313708])
    assert np.median(samples, axis=0) == pytest.approx(table["steps"][:2], rel=0.01)


def test_the_noise_of_single_k_is_no_misfit():
    exact = fit_law(MISSED)
    noisy = fit_law(at((4, 8, 16, 32, 64), (900, 300, 290, 80, 75), noise=0.4))
    assert exact.misfit_beyond_noise > 0.2 > noisy.misfit_beyond_noise
    assert noisy.misfit == pytest.approx(exact.misfit, rel=0.1)
    assert exact.verdict.trust < Trust.PREDICTED <= noisy.verdict.trust


def test_a_rising_k_leaves_only_what_was_measured():
    table = fit_law(RISING).predict([8, 12])
    assert table["known"].tolist() == ["measured", "refused"]
    assert table["steps"][0] == 480
    assert table["low"][0] < 480 < table["high"][0]


def test_a_lower_bound_that_contradicts_the_law_ends_the_prediction():
    steps = (450, 250, 150, 100, 75, 62, 56, 53)
    measured = []
    for batch_size, k in zip(2.0 ** np.arange(3, 11), steps, strict=True):
        measured.append(Observation(batch_size, k, resolution=1.0))
    law = fit_law([*measured, Observation(2048.0, 1000.0, bound=AT_LEAST)])
    assert law.verdict.trust is Trust.INTERPOLATED
    table = law.predict([1024, 700, 2048])
    assert table["known"].tolist() == ["measured", "interpolated", "refused"]
    kept = fit_law([*measured, Observation(2048.0, 50.0, bound=AT_LEAST)])
    assert kept.predict([2048])["known"].tolist() == ["extrapolated"]


def test_unknown_noise_counts_as_ten_percent_also_between_checks():
    law = fit_law(
        [Observation(8.0, 400.0, resolution=1.0), Observation(16.0, 300.0, resolution=1.0)]
    )
    table = law.predict([8])
    assert table["known"].tolist() == ["measured"]
    assert table["low"][0] == pytest.approx(400 * math.exp(-0.196), rel=1e-3)
    assert table["high"][0] == pytest.approx(400 * math.exp(0.196), rel=1e-3)
    assert law.draw_observations(10, "name").shape == (0, 2)
    known = fit_law([Observation(8.0, 400.0, noise=0.01), Observation(16.0, 300.0, noise=0.01)])
    assert known.predict([8])["high"][0] == pytest.approx(400 * math.exp(0.0196), rel=1e-3)
    assert known.draw_observations(10, "name").shape == (10, 2)


def test_a_noise_scale_narrows_the_posterior_alone():
    few = curve(batch=np.array([8.0, 16, 32, 64]), noise=0.03)
    bare, told = fit_law(few), fit_law(few, prior=CriticalPrior(4e4 / 60, 0.5))
    assert told.fit == bare.fit
    widths = [law.b_crit_interval.high / law.b_crit_interval.low for law in (told, bare)]
    assert widths[0] < 0.5 * widths[1]


def test_medians_of_seeds_with_misses():
    runs = pd.DataFrame(
        {
            "batch_size": [8] * 4 + [16] * 3 + [32] * 2,
            "steps": [100, 110, 120, 130, 50, 60, 200, 300, 400],
            "censored": [0, 0, 0, 0, 0, 0, 1, 1, 1],
            "check": [10] * 7 + [20] * 2,
        }
    )
    eight, sixteen, thirty_two = medians(runs)
    assert (eight.k, eight.bound) == (115, 0)
    spread = math.sqrt(
        (4 * np.var(np.log([100, 110, 120, 130])) + 2 * np.var(np.log([50, 60]))) / 4
    )  # pooled, of 3 + 1 degrees of freedom
    assert eight.noise == pytest.approx(math.sqrt(math.pi / 2) * spread / 2)
    assert eight.variance == pytest.approx(eight.noise**2 + (10 / 115) ** 2 / 12)
    assert (sixteen.k, sixteen.bound) == (60, 0)  # the run that missed is above
    # The median is the quantile 3 / 4 of the 2 of 3 runs that met the goal.
    density = 2 / 3 * NormalDist().pdf(NormalDist().inv_cdf(3 / 4))
    assert sixteen.noise == pytest.approx(spread / (2 * density * math.sqrt(3)))
    assert (thirty_two.k, thirty_two.bound) == (350, AT_LEAST)  # of both limits


@pytest.mark.parametrize(
    ("steps", "censored", "expected"),
    [
        ([10, 100], [0, 1], (55, AT_LEAST)),  # the other may have met it at 101
        ([300, 400, 100], [0, 0, 1], (400, AT_MOST)),  # it may have met it at 150: a median of 300
        ([300, 400, 350], [0, 0, 1], (400, AT_MOST)),
        ([300, 400, 400], [0, 0, 1], (400, 0)),
        ([300, 400, math.nan], [0, 0, 1], (400, 0)),  # it never met it
        ([300, math.nan, 400], [1, 1, 1], (400, AT_LEAST)),
        ([300, math.nan], [1, 1], (300, AT_LEAST)),
        ([300, 400, 500], [0, None, math.nan], (400, 0)),  # a blank means that it met the goal
    ],
)
def test_a_median_with_misses_is_a_bound_where_a_miss_may_lie_on_either_side(
    steps, censored, expected
):
    (found,) = medians(
        pd.DataFrame({"batch_size": 8, "steps": steps, "censored": censored, "check": 10})
    )
    assert (found.k, found.bound) == expected
    assert found.resolution == (0 if found.bound else 10)


def test_a_table_of_runs_that_contradicts_itself_is_refused():
    without = pd.DataFrame({"batch_size": 8, "steps": [10, math.nan], "censored": [0, None]})
    with refuses("runs.steps", None):
        medians(without)
    words = pd.DataFrame({"batch_size": 8, "steps": [10, 20], "censored": ["no", "yes"]})
    with refuses("runs.censored", ["no", "yes"]):
        medians(words)


def test_best_rates_on_an_edge_are_told():
    known = curve()
    known[0] = Observation(known[0].batch_size, known[0].k, boundary="learning_rate low")
    assert "B = 8 (learning_rate low)" in fit_law(known).notes[0]


@pytest.mark.parametrize("bad", [(0, 10), (8, 0), (8, math.nan), (math.inf, 5)])
def test_observations_are_positive_and_finite(bad):
    with raises_about(ValueError, *bad):
        Observation(*bad)


def test_one_observation_a_batch_size():
    with raises_about(ValueError, "medians"):
        fit_law([*curve(), Observation(8, 5)])
