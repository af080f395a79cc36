"""Laws that rest on a prior of B_crit: with one K, with two, and with none."""

import math

import numpy as np
import pytest

from lit_dps.advice.next_probe import law_with_prior
from lit_dps.analysis.critical_prior import CriticalPrior, default_prior
from lit_dps.analysis.law import fit_law, relative_law
from lit_dps.analysis.law_verdict import Trust
from lit_dps.analysis.observations import AT_LEAST, Observation

C1, C2 = 4e4, 100.0
PRIOR = CriticalPrior(C1 / C2, 0.5, "the noise scale")


def observed(*sizes):
    return [Observation(b, C1 / b + C2) for b in sizes]


def test_one_k_and_a_right_prior_predict_the_curve():
    law = fit_law(observed(32), PRIOR)
    assert law.rests_on_prior and law.fit is None
    assert law.verdict.trust is Trust.PREDICTED and "the noise scale" in law.verdict.reason
    sizes = [2, 8, 32, 128, 512, 513, 1]
    table = law.predict(sizes)
    assert table["known"].tolist() == ["prior"] * 5 + ["refused"] * 2
    truth = C1 / np.array(sizes[:5]) + C2
    assert table["steps"][:5].tolist() == pytest.approx(truth, rel=0.05)
    assert (table["low"][:5] < truth).all() and (truth < table["high"][:5]).all()
    widths = np.log(table["high"] / table["low"])
    assert widths[2] < widths[3] < widths[4], "wider with the distance"
    assert widths[4] > 1.3 * widths[0], "wider upward than downward"
    assert law.steps(128) == pytest.approx(table["steps"][3], rel=0.02)


def test_a_second_k_corrects_a_wrong_prior():
    wrong = CriticalPrior(C1 / C2 / 8, 0.5, "the noise scale")
    truth = C1 / 512 + C2
    one = fit_law(observed(32), wrong).predict([512])["steps"][0]
    two = fit_law(observed(32, 256), wrong).predict([512])["steps"][0]
    assert math.log(one / truth) > 0.6
    assert abs(math.log(two / truth)) < 0.15


def test_the_prior_is_not_needed_with_enough_k():
    sizes = (8, 32, 128, 512, 2048)
    law = fit_law(observed(*sizes), PRIOR)
    assert not law.rests_on_prior
    assert law.fit == fit_law(observed(*sizes)).fit
    assert law.predict([64])["known"].tolist() == ["law"]


def test_without_a_prior_few_k_are_refused_as_is_a_rise_with_one():
    assert fit_law(observed(32)).verdict.trust is Trust.MEASURED
    rising = [Observation(32, 100), Observation(128, 300)]
    law = fit_law(rising, PRIOR)
    assert law.verdict.trust is Trust.MEASURED and "rises" in law.verdict.reason
    assert law.predict([32, 64])["known"].tolist() == ["measured", "refused"]


def test_lower_bounds_alone_are_nothing_to_predict_from():
    law = fit_law([Observation(32, 100, bound=AT_LEAST)], PRIOR)
    assert law.verdict.trust is Trust.MEASURED and not law.rests_on_prior
    bounded = fit_law([*observed(32), Observation(256, 400.0, bound=AT_LEAST)], PRIOR)
    assert (
        bounded.predict([256])["steps"][0] > fit_law(observed(32), PRIOR).predict([256])["steps"][0]
    )


def test_the_relative_curve_is_one_at_the_batch_size_of_the_user():
    law = relative_law(64)
    table = law.predict([4, 64, 256, 1024, 1025])
    assert table["known"].tolist() == ["prior"] * 4 + ["refused"]
    assert table.loc[1, ["steps", "low", "high"]].tolist() == pytest.approx([1, 1, 1])
    critical = default_prior(64).value
    for size, row in zip((4, 256), (0, 2), strict=True):
        expected = (1 + critical / size) / (1 + critical / 64)
        assert table["steps"][row] == pytest.approx(expected, rel=0.02)
    assert table["low"][3] < 1 / 8 and table["high"][3] > 1 / 2, "between perfect scaling and none"
    narrow = relative_law(64, CriticalPrior(512, 0.1)).predict([1024])
    assert math.log(narrow["high"][0] / narrow["low"][0]) < 0.5 * math.log(
        table["high"][3] / table["low"][3]
    )


def test_where_the_law_does_not_fit_a_prior_gives_k_above_the_range():
    steps = {4: 900, 8: 300, 16: 290, 32: 80, 64: 75}
    observations = [Observation(b, k) for b, k in steps.items()]
    prior = CriticalPrior(64.0, 0.5, "public runs")
    law = fit_law(observations, prior)
    assert law.verdict.trust is Trust.INTERPOLATED and not law.rests_on_prior
    table = law.predict([2, 8, 20, 128, 1024, 1025])
    known = ["refused", "measured", "interpolated", "prior", "prior", "refused"]
    assert table["known"].tolist() == known
    one = fit_law(observations[-1:], prior)
    assert table["steps"][3] == one.predict([128])["steps"][0]
    samples = law.samples([20, 128])
    assert (samples[:, 1] == one.samples([128])[:, 0]).all()
    assert np.median(samples[:, 0]) == pytest.approx(table["steps"][2], rel=0.01)


def misfits(*bounds: float) -> list[Observation]:
    """Three K that c1 / B + c2 does not fit, and lower bounds at larger batch sizes."""
    measured = [Observation(1, 220, resolution=4), Observation(16, 16, resolution=4)]
    measured.append(Observation(64, 8, resolution=4))
    for batch_size, steps in zip((128, 256, 512), bounds, strict=True):
        measured.append(Observation(batch_size, steps, bound=AT_LEAST))
    return measured


def test_lower_bounds_above_the_largest_k_leave_no_prediction_beyond_it():
    law = law_with_prior(misfits(100, 100, 100))
    assert law.reach == (1, 64)
    assert list(law.predict([64, 128, 512])["known"]) == ["measured", "refused", "refused"]
    few = law_with_prior(misfits(100, 100, 100)[2:])
    assert few.verdict.trust is Trust.MEASURED
    assert list(few.predict([64, 128])["known"]) == ["measured", "refused"]


def test_lower_bounds_raise_the_prediction_beyond_a_misfit():
    steps = law_with_prior(misfits(12, 8, 4)).predict([128, 256])["steps"]
    without = law_with_prior(misfits(12, 8, 4)[:3]).predict([128, 256])["steps"]
    assert steps[0] >= 12 > without[0]
    assert steps[1] >= 8 > without[1]
