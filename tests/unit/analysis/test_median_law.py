"""Intervals of the law from repeats on fresh seeds, and the law of the medians."""

from __future__ import annotations

import numpy as np
import pytest

from lit_dps.analysis.law_bootstrap import (
    FEWEST_SEEDS,
    bootstrap_law,
    bootstrap_median_law,
    k_star_limits,
    medians_outside,
)
from lit_dps.core.trial import Series
from lit_dps.report.repeat_notes import outside_of_laws
from lit_dps.report.repeats import intervals_of, outside_text

SIZES = [4, 16, 64, 256]
K_STAR = {b: 4096 // b * 16 + 160 for b in SIZES}  # c1 = 65536, c2 = 160
TRIALS = {b: [k, 2 * k, None] for b, k in K_STAR.items()}


def test_equal_repeats_leave_the_law_as_certain_as_its_checks():
    found = bootstrap_law(
        TRIALS, check_interval=16, seeds={b: [float(3 * k)] * 5 for b, k in K_STAR.items()}
    )
    assert found.over == "seeds" and (found.fit.c1, found.fit.c2) == pytest.approx(
        (65536, 160), rel=1e-3
    )
    assert 65536 * 0.99 < found.c1.low < found.c1.high < 65536 * 1.01
    assert 143 < found.c2.low < found.c2.high <= 161


def test_intervals_from_seeds_do_not_lean():
    luck = np.exp(np.array([-0.4, -0.2, 0.0, 0.2, 0.4]))
    over = {b: (k * luck).tolist() for b, k in K_STAR.items()}
    found, leaning = bootstrap_law(TRIALS, seeds=over), bootstrap_law(TRIALS)
    assert leaning.over == "trials" and leaning.c1 != found.c1
    low, high = found.c1
    assert low < 65536 * 0.9 and high > 65536 * 1.1
    assert np.log(high / 65536) == pytest.approx(np.log(65536 / low), rel=0.35)


@pytest.mark.parametrize(
    "seeds", [{}, {4: [1.0] * 9}, {b: [1.0] * (FEWEST_SEEDS - 1) for b in SIZES}]
)
def test_without_enough_repeats_they_are_those_of_trials(seeds):
    assert bootstrap_law(TRIALS, seeds=seeds) == bootstrap_law(TRIALS)


def test_the_law_of_medians_has_the_intervals_of_resampled_medians():
    # exact at two batch sizes; at the largest one, which alone tells c2, 3 of 5 draws are the least
    # one, or the most, with probability 0.058 each: more than 2.5 %
    found = bootstrap_median_law(
        {4: [25_010.0] * 5, 16: [6_260.0] * 5, 2**20: [4.0, 10.1, 10.1, 10.1, 45.0]}, 0
    )
    assert found.fit.steps(np.array([4.0, 2.0**20])) == pytest.approx([25_010, 10.1], rel=1e-3)
    low, high = found.band(np.array([2.0**20]))
    assert (low[0], high[0]) == pytest.approx((4.0, 45.0), rel=0.01)


def test_medians_at_the_first_check_are_bounds():
    found = bootstrap_median_law({4: [320.0] * 3, 16: [96.0] * 3, 64: [16.0] * 3}, 16)
    assert found.at_first_check == {64} and found.resolved == {4: 320, 16: 96}
    assert bootstrap_median_law({4: [320.0] * 3, 16: [16.0] * 3}, 16).fit is None


def test_the_words_say_what_was_resampled():
    seeds, trials = bootstrap_median_law({4: [320.0] * 3}, 16), bootstrap_law(TRIALS)
    assert intervals_of({Series(): seeds}) == "intervals over seeds"
    assert intervals_of({Series(): trials}) == "bootstrap intervals over trials, which lean upward"
    both = intervals_of({Series(): trials, Series(0.5): seeds})
    assert both.startswith(
        "intervals over seeds, or where a cell lacks repeats or one missed the goal bootstrap"
    )


def limits(trials, repeats=None, check_interval=0):
    return k_star_limits(trials, repeats, check_interval, 1000, (0, 4), "fake")


def test_limits_of_one_k_star_are_those_of_its_repeats():
    assert limits([120, 300], [100.0, 120.0, 150.0]) == pytest.approx((100, 150))
    assert limits([120, 300], [100.0, 120.0, np.inf]) == pytest.approx((100, np.inf))
    low, high = limits([120], [120.0] * 3, check_interval=16)
    assert 104 <= low < 106 and high == 120


def test_limits_of_one_k_star_without_enough_repeats_are_those_of_its_trials():
    """Of resamples of 4 trials a share of (1 / 2)^4 has no better one than 300, and (1 / 4)^4 none
    than 400."""
    assert (
        limits([100, 200, 300, 400]) == limits([100, 200, 300, 400], [100.0, 900.0]) == (100, 300)
    )


@pytest.mark.parametrize("trials", [[100], [100, None, None], [None, None]])
def test_too_few_complete_trials_tell_no_limits(trials):
    assert limits(trials) is None


def test_the_law_has_the_limits_of_each_k_star_that_is_no_bound():
    found = bootstrap_law({4: [1000, 1100], 16: [16, 32], 64: [100, None]}, check_interval=16)
    assert {*found.limits} == {4} and found.fit is None
    with_law = bootstrap_law(TRIALS, seeds={4: [1.0, 2.0, 4.0]})
    assert with_law.limits == {4: pytest.approx((K_STAR[4] / 2, K_STAR[4] * 2))}, (
        "a third of the trials misses"
    )


@pytest.mark.parametrize(("factor", "side"), [(1.2, "above"), (0.8, "below"), (1.0, "")])
def test_medians_beside_the_band_are_noted_with_series_and_batch_sizes(factor, side):
    law = bootstrap_law(
        TRIALS, check_interval=16, seeds={b: [float(k)] * 5 for b, k in K_STAR.items()}
    )
    medians = bootstrap_median_law({b: [factor * k] * 5 for b, k in K_STAR.items()}, 16)
    outside = medians_outside(law, medians, 16)
    notes = [*outside_of_laws({Series(0.9): law}, {Series(0.9): medians}, 16)]
    if not side:
        assert outside == {} and notes == []
        return
    assert outside == {b: pytest.approx(factor, rel=0.01) for b in SIZES}
    assert outside_text(outside) == f"{side} at B = 4, 16, 64, 256"
    assert notes[0]["places"] == f"S=0.9 {side} at B = 4, 16, 64, 256"
    assert f"x{factor}" in notes[0]["most"]


def test_medians_are_compared_where_both_are_known_and_a_check_interval_is_no_departure():
    repeats = {b: [float(k)] * 5 for b, k in K_STAR.items()}
    law = bootstrap_law(TRIALS, check_interval=16, seeds=repeats)
    near = bootstrap_median_law({b: [k + 15.0] * 5 for b, k in K_STAR.items()}, 16)
    assert medians_outside(law, near, 16) == {}
    assert (
        medians_outside(
            bootstrap_law(TRIALS | {256: [None]}), bootstrap_median_law({256: [9000.0] * 5}, 16), 16
        )
        == {}
    )
    assert medians_outside(bootstrap_law({4: [320]}), near, 16) == {}, "no law, no band"
    assert outside_text({2: 0.8, 8: 1.5, 16: 1.2}) == "above at B = 8, 16, below at B = 2"
