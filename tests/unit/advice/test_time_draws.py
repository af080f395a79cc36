"""The recommendation by the mean time over draws of K and of the step time."""

import math

import numpy as np
import pytest

from lit_dps.advice.answer import answer
from lit_dps.advice.step_time import Timed, fit_step_time
from lit_dps.advice.time_draws import draw_step_seconds, near_probability
from lit_dps.analysis.critical_prior import CriticalPrior
from lit_dps.analysis.law import fit_law
from lit_dps.analysis.observations import Observation

SIZES = [8, 16, 32, 64, 128, 256, 512, 1024]
FLAT = fit_step_time([Timed(m, 0.01 + 1e-7 * m) for m in (8, 64, 1024)])


def law_of(sizes, c2=10.0):
    return fit_law([Observation(b, 4e4 / b + c2) for b in sizes])


def test_the_probability_to_be_near_counts_draws():
    hours = np.array([[1.0, 1.05, 3.0], [2.0, 1.0, 1.11]])
    assert near_probability(hours).tolist() == [0.5, 1.0, 0.0]


def test_draws_of_seconds_have_the_limits_that_they_are_given():
    draws = draw_step_seconds((1.0, 0.8, 2.0), 4)
    low, middle, high = np.percentile(draws, (2.5, 50, 97.5))
    assert (low, middle, high) == pytest.approx((0.8, 1.0, 2.0), rel=0.06)


def test_an_extrapolated_batch_size_is_recommended_if_its_mean_time_is_the_least():
    law = law_of((8, 16, 32, 64), c2=60.0)
    found = answer(law, FLAT, SIZES)
    assert found.best["batch_size"] == 1024 and found.best["steps_known"] == "extrapolated"
    table = found.table.set_index("batch_size")
    assert found.best["hours_mean"] == table["hours_mean"].min()
    assert table.loc[8, "near_probability"] == 0
    assert found.best["near_probability"] > 0.9
    hours = law.samples([1024])[:, 0].mean() * FLAT.at(1024).value / 3600
    assert table.loc[1024, "hours_mean"] == pytest.approx(hours, rel=0.01)


def test_uncertainty_counts_in_the_mean_and_not_in_the_median():
    prior = CriticalPrior(300.0, 1.5, "public runs")
    known = answer(law_of(SIZES, c2=4e4 / 300), FLAT, SIZES).table.set_index("batch_size")
    few = fit_law([Observation(32, 4e4 / 32 + 4e4 / 300)], prior)
    unknown = answer(few, FLAT, SIZES).table.set_index("batch_size")
    excess = [math.log(t.loc[512, "hours_mean"] / t.loc[512, "hours"]) for t in (known, unknown)]
    assert excess[0] < 0.05 < 0.1 < excess[1]
    assert 0 < unknown.loc[256, "near_probability"] < 1


def test_an_answer_says_what_a_k_from_a_prior_rests_on():
    few = fit_law([Observation(32, 1400.0)], CriticalPrior(300.0, 0.5, "the noise scale"))
    found = answer(few, FLAT, SIZES)
    assert set(found.table["steps_known"]) == {"prior"}
    assert sum("the noise scale" in line for line in found.assumed) == 1
    assert any("rests on a prior" in line for line in found.changes)
    enough = answer(law_of(SIZES), FLAT, SIZES)
    assert not any("mark ^" in line for line in enough.assumed)
