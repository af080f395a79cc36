"""How a number with an interval becomes a verdict, and where the intervals come from."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from lit_dps.analysis.intervals import Interval
from lit_dps.analysis.law import fit_law
from lit_dps.analysis.observations import Observation
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Series
from lit_dps.replication.estimates import (
    Draws,
    Estimate,
    estimate_of,
    k_star_draws,
    log_ratio,
    ratio_of_laws,
)
from lit_dps.replication.rules import (
    ClaimRange,
    Measurement,
    Verdict,
    combined,
    decide,
    judge,
    together,
)
from lit_dps.replication.search import rank_correlation
from tests.support.fake_study import analysis_of, result

SEEN, NOT_SEEN, UNDECIDABLE = Verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.1, 1.9, SEEN),
        (1.1, 2.0, SEEN),  # the upper end belongs to the range
        (1.0, 1.9, UNDECIDABLE),  # the lower end does not
        (1.5, 2.1, UNDECIDABLE),
        (0.5, 2.5, UNDECIDABLE),
        (0.5, 1.0, NOT_SEEN),
        (2.01, 2.5, NOT_SEEN),
        (2.0, 2.5, UNDECIDABLE),
        (-math.inf, math.inf, UNDECIDABLE),
    ],
)
def test_a_range_is_met_by_the_whole_interval_or_by_none_of_it(low, high, verdict):
    assert decide(Estimate(1.5, Interval(low, high)), ClaimRange(1.0, 2.0)) is verdict


def test_no_number_decides_nothing():
    assert decide(None, ClaimRange(above=0)) is UNDECIDABLE


def test_verdicts_on_several_sparsities():
    assert combined([SEEN, SEEN]) is SEEN
    assert combined([SEEN, UNDECIDABLE]) is UNDECIDABLE
    assert combined([SEEN, UNDECIDABLE, NOT_SEEN]) is NOT_SEEN
    assert combined([]) is UNDECIDABLE
    above_1 = ClaimRange(above=1.0)
    seen, not_seen, open_ = (
        Measurement(f"e = {value}", Estimate(value, Interval(value, high)))
        for value, high in ((2.0, 3.0), (0.0, 1.0), (0.5, 3.0))
    )
    finding = judge({"S=0": not_seen, "S=0.9": seen}, above_1)
    assert finding.verdict is NOT_SEEN
    assert finding.measured.endswith("; seen at S=0.9, not seen at S=0")
    finding = judge({"S=0": seen, "S=0.5": open_, "S=0.9": open_}, above_1)
    assert finding.verdict is UNDECIDABLE
    assert finding.measured.endswith("; seen at S=0, undecided at S=0.5, S=0.9")


def test_a_number_outside_of_what_a_study_reaches_refutes_nothing():
    number = Estimate(0.5, Interval(0.4, 0.6))
    for can_refute, verdict in ((True, NOT_SEEN), (False, UNDECIDABLE)):
        measured = {"": Measurement("x", number, can_refute=can_refute)}
        assert judge(measured, ClaimRange(above=1.0)).verdict is verdict
        assert judge(measured, ClaimRange(at_most=1.0)).verdict is SEEN


def test_the_papers_number_is_outside_of_an_interval():
    number = Estimate(0.5, Interval(0.4, 0.6))
    for paper, is_outside in ((None, False), (0.5, False), (0.7, True)):
        finding = judge({"": Measurement("x", number)}, ClaimRange(above=0.1), paper)
        assert finding.paper_is_outside is is_outside
        assert ("x0.7" in finding.measured) is is_outside
    assert not judge({"": Measurement("x")}, ClaimRange(above=0.1), 0.7).paper_is_outside


def test_medians_are_named_once_where_all_series_rest_on_them():
    of_medians = Measurement("e = 1", uses_medians=True, notes=("note",))
    of_k_star = Measurement("e = 2")
    texts = [
        judge(measured, ClaimRange()).measured
        for measured in (
            {"S=0": of_medians, "S=0.9": of_medians},
            {"S=0": of_medians, "S=0.9": of_k_star},
            {"": of_medians},
        )
    ]
    assert [text.count("medians") for text in texts] == [1, 1, 1]
    assert texts[0].startswith("medians: ") and texts[2] == "e = 1 (medians); note"


def test_what_several_sparsities_share_is_said_once():
    def said(*sentences):
        return together({str(Series(i / 10)): each for i, each in enumerate(sentences)})

    assert (
        said("from B=2, e = -1 [-2, 0]", "from B=2, e = -1 [-3, 0]")
        == "from B=2, e = -1 [-2, 0] at S=0; -1 [-3, 0] at S=0.1"
    )
    assert (
        said("from B=2, e = -1", "from B=4, e = -1")
        == "S=0: from B=2, e = -1; S=0.1: from B=4, e = -1"
    )
    same = "share by step 9 with B: -1"
    assert (
        said(f"{same} [-2, 0]", f"{same} [-3, 0]")
        == "share by step 9 with B: -1 [-2, 0] at S=0; -1 [-3, 0] at S=0.1"
    )
    assert (
        said("B_crit = 5 at sgd", "B_crit = 6 at sgd")
        == "S=0: B_crit = 5 at sgd; S=0.1: B_crit = 6 at sgd"
    )
    assert said("in all: 0.5", "at 2 sizes") == "S=0: in all: 0.5; S=0.1: at 2 sizes"
    assert said("in all steps: 0.5") == "S=0: in all steps: 0.5"
    assert said("in all steps: 0.5", "in all steps: 0.5") == "S=0, S=0.1: in all steps: 0.5"
    assert (
        said("in all steps: 0.5", "in all steps: 0.5 and")
        == "in all steps: 0.5 at S=0; 0.5 and at S=0.1"
    )


def test_intervals_are_percentiles_that_hold_the_value():
    drawn = np.arange(1000.0)
    assert estimate_of(500, drawn).interval == (24, 974)
    assert estimate_of(5, drawn).interval == (5, 974)
    assert estimate_of(500, drawn, drawn + 10).interval == (24, 984)
    assert str(estimate_of(500, drawn)) == "500 [24, 974]"
    assert estimate_of(1.0, np.zeros(9)).map(lambda x: 2 * x) == Estimate(2.0, Interval(0.0, 2.0))


def test_what_is_unknown_could_be_anything():
    drawn = np.arange(1000.0)
    drawn[:20] = np.nan  # 2 %: the percentiles move by as many places, on both sides
    assert estimate_of(500, drawn).interval == (24, 994)
    drawn[:30] = np.nan
    assert estimate_of(500, drawn).interval == (-math.inf, math.inf)


def study_of(steps, slack=None, **goal):
    cells = {
        cell: [result(cell, i, k) for i, k in enumerate(found)] for cell, found in steps.items()
    }
    return analysis_of(cells, goal=Goal(0.1, **goal), race_factor=slack)


def draws_at(study, batch_size):
    """Draws of K* of a dense cell."""
    return k_star_draws(study, study.laws[Series(0.0)], Cell(batch_size, 0.0))


def test_draws_of_k_star_have_its_noise_and_the_checks():
    study = study_of({Cell(8, 0.0): [320, 640, None, None]}, check_interval=20, max_steps=1000)
    low, high = draws_at(study, 8)
    assert low.shape == (1000,) and (low == high).all()
    noise = study.laws[Series(0.0)].observation(8).noise
    assert np.log(low).std() == pytest.approx(noise, rel=0.1)
    assert np.median(low) == pytest.approx(310, rel=0.05), "between the checks at 300 and 320"


def test_k_star_of_a_cell_that_missed_the_goal_is_above_max_steps():
    study = study_of({Cell(8, 0.0): [None] * 4}, check_interval=20, max_steps=1000)
    assert {*zip(*draws_at(study, 8), strict=True)} == {(1000, math.inf)}


@pytest.mark.parametrize("steps", [[100, 100, 100], [None, None, None]])
def test_few_trials_leave_k_star_open(steps):
    study = study_of({Cell(16, 0.0): steps}, check_interval=20, max_steps=1000)
    assert {*zip(*draws_at(study, 16), strict=True)} == {(0, math.inf)}


def test_ratios_of_limits():
    low, high = log_ratio(
        Draws(np.array([30.0, 0]), np.array([40.0, np.inf])),
        Draws(np.array([10.0, 10]), np.array([20.0, 20])),
    )
    assert np.exp(low) == pytest.approx([1.5, 0])
    assert np.exp(high) == pytest.approx([4, np.inf])


def test_ratios_of_laws_are_of_independent_draws():
    steps = {10: 1000, 30: 400, 100: 150}
    law = fit_law([Observation(b, k, 0.1) for b, k in steps.items()])
    twice = fit_law([Observation(b, 2 * k, 0.1) for b, k in steps.items()])
    ratio, drawn = ratio_of_laws(twice, law, lambda c1, c2: c1)
    assert ratio == pytest.approx(2)
    assert np.median(drawn) == pytest.approx(2, rel=0.05)
    spread = np.log(law.draws[:, 0]).std()
    assert np.log(drawn).std() == pytest.approx(math.sqrt(2) * spread, rel=0.1)
    few = fit_law([Observation(8, 100)])
    assert ratio_of_laws(few, law, lambda c1, c2: c1) is None
    assert ratio_of_laws(law, few, lambda c1, c2: c1) is None


def test_rank_correlation_is_spearmans():
    rows = np.random.default_rng(0).integers(0, 4, size=(50, 6)).astype(float)  # with ties
    expected = [spearmanr(range(6), row).statistic for row in rows]
    assert rank_correlation(rows) == pytest.approx(np.array(expected))


def test_rank_correlation_leaves_out_what_is_missing():
    nan = math.nan
    rows = np.array([[1, nan, 5, 3, 9], [nan, nan, 5, 3, 9], [2, 2, 2, 2, 2], [9, 7, 5, 3, 1]])
    rho = rank_correlation(rows)
    assert rho[[0, 2, 3]] == pytest.approx([spearmanr([0, 2, 3, 4], [1, 5, 3, 9]).statistic, 0, -1])
    assert math.isnan(rho[1])  # three values
