"""The paper's claims on steps where best points were repeated on fresh seeds: the medians are
judged."""

import dataclasses
import math

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.observations import noise_of_search
from lit_dps.analysis.tables import cell_of
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.trial import Series
from lit_dps.replication.estimates import k_star_draws, laws_of
from lit_dps.replication.rules import Verdict
from lit_dps.replication.scaling import exponent, exponent_at_small_batches, sparse_steps_ratio
from tests.support.claims import judged
from tests.support.fake_study import result
from tests.unit.replication.test_claims import MOMENTUM, PARAMS, POWERS, law, study_of, vague

SEEN, _, UNDECIDABLE = Verdict
WIDE = [0.6, 0.8, 1.0, 1.3, 1.7]


def with_repeats(study, seeds):
    """The study with repeats of each cell's best point: K* times each of these factors; None for
    one that missed."""
    repeats = {}
    for cell, summary in study.by_cell.items():
        ended = []
        for f in seeds:
            steps = f and round(f * summary.k_star)
            # One that missed spent the budget.
            curve = {} if f else {"step": [study.record.goal.max_steps], "val_error": [1.0]}
            point = summary.best.trial.point
            ended.append(result(cell, point, steps, params=PARAMS, curve=curve))
        trials = [dataclasses.replace(r.trial, repeat=i) for i, r in enumerate(ended, 1)]
        repeats[cell] = [
            dataclasses.replace(r, trial=t) for r, t in zip(ended, trials, strict=True)
        ]
    return Analysis(
        dataclasses.replace(study.record, repeats=repeats, plan=RepeatPlan(len(seeds), 1, None))
    )


@pytest.mark.usefixtures("certain_searches")
def test_where_best_points_were_repeated_the_medians_are_judged():
    steps = law(3.2e5, 160, POWERS[:10]) | law(6.4e5, 320, POWERS[:10], 0.9)
    lucky = study_of({cell: vague(found[0]) for cell, found in steps.items()}, config=MOMENTUM)
    assert judged("linear-scaling", lucky).verdict is UNDECIDABLE
    repeated = with_repeats(lucky, [1.0, 1.19, 1.2, 1.2, 1.21])
    number = exponent(repeated, Series(0.0), 2, 8)
    assert number.value == pytest.approx(exponent(lucky, Series(0.0), 2, 8).value, abs=1e-3)
    # The standard deviation of log K over seeds is 0.083, so that of a median of 5 is 0.047.
    half = 1.96 * 0.047 * math.sqrt(2) / math.log(4)
    assert number.interval == pytest.approx(
        (number.value - half, number.value + half), abs=0.2 * half
    )
    assert judged("linear-scaling", repeated).verdict is SEEN
    for measured in exponent_at_small_batches(repeated).values():
        assert measured.uses_medians and "(K*: -0.998)" in measured.sentence
    assert judged("steps-of-sparse", repeated).verdict is SEEN
    assert judged("critical-no-earlier", repeated) is not None


def test_medians_allow_for_the_luck_of_the_points_that_were_searched():
    steps = law(3.2e5, 160, POWERS[:10])
    lucky = study_of({cell: vague(found[0]) for cell, found in steps.items()}, config=MOMENTUM)
    for trials, luck in ((4, 0.5), (100, 0.1)):
        found = {
            cell: [round(found[0]), *[4 * round(found[0])] * (trials - 1)]
            for cell, found in steps.items()
        }
        study = with_repeats(study_of(found, config=MOMENTUM), [1.2] * 5)
        value, (low, high) = exponent(study, Series(0.0), 2, 8)
        half = 1.96 * luck * math.sqrt(2) / math.log(4)
        assert (low, high) == pytest.approx((value - half, value + half), abs=0.1 * half)
        assert judged("linear-scaling", study).verdict is (SEEN if trials == 100 else UNDECIDABLE)
        (fitted,) = laws_of(study, Series(0.0))
        of_study = study.median_laws[Series(0.0)]
        assert fitted.uses_medians and fitted.fit.c1 == pytest.approx(of_study.fit.c1, rel=1e-3)
        spread = np.log(fitted.b_crit_interval.high / fitted.b_crit_interval.low)
        assert spread > 2 * 1.96 * luck * math.sqrt(2 / 10), "of ten batch sizes"
    results = {
        cell: found[:4] if cell.batch_size == 64 else found
        for cell, found in study.record.results.items()
    }
    least = Analysis(dataclasses.replace(study.record, results=results))
    assert judged("linear-scaling", least).verdict is UNDECIDABLE, (
        "100 are to be run, but one cell has 4"
    )
    assert judged("critical-no-earlier", lucky) is None


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_draws_have_the_noise_of_searches_of_25_points(sparsity):
    steps = law(3.2e5, 160, POWERS[:4], sparsity)
    found = {cell: [round(found[0]), *[4 * round(found[0])] * 24] for cell, found in steps.items()}
    study = with_repeats(
        study_of(found, config=MOMENTUM), [1.2] * 5
    )  # of seeds without a spread of their own
    (medians,) = laws_of(study, Series(sparsity))
    draws = [np.log(k_star_draws(study, medians, cell).high) for cell in study.by_cell]
    spread = np.std([each - each.mean() for each in draws])
    assert spread == pytest.approx(noise_of_search(25, 2), rel=0.05)


def test_a_series_that_was_not_repeated_whole_is_judged_on_k_star():
    steps = law(3.2e5, 160, POWERS[:10])
    few = with_repeats(
        study_of({cell: vague(found[0]) for cell, found in steps.items()}), [1.0, 1.2, 1.3]
    )
    assert judged("linear-scaling", few).verdict is UNDECIDABLE
    assert not exponent_at_small_batches(few)["S=0"].uses_medians


def test_repeats_of_two_series_are_resampled_independently():
    # Equal spreads of both: drawn alike they would cancel, and the ratio would seem known to a
    # check.
    steps = law(3.2e5, 160, POWERS[:10]) | law(6.4e5, 320, POWERS[:10], 0.9)
    study = with_repeats(
        study_of({cell: vague(found[0]) for cell, found in steps.items()}, config=MOMENTUM), WIDE
    )
    dense, sparse = (Series(s) for s in (0.0, 0.9))
    draws = {}
    for series in (dense, sparse):
        (medians,) = laws_of(study, series)
        assert medians.uses_medians
        draws[series] = k_star_draws(study, medians, cell_of(series, 64)).high
    assert abs(np.corrcoef(*draws.values())[0, 1]) < 0.1
    low, high = np.percentile(np.log(draws[sparse] / draws[dense]), [2.5, 97.5])
    assert low < math.log(2) - 0.5 and high > math.log(2) + 0.5
    number = sparse_steps_ratio(study)[""].number
    assert number.value == pytest.approx(2, rel=0.05)
    assert number.interval.low < 1.8 and number.interval.high > 2.2


@pytest.mark.parametrize(
    "missed, of_medians", [(2, True), (3, False)], ids=["few missed", "most missed"]
)
def test_medians_are_judged_unless_most_repeats_missed_the_goal(missed, of_medians):
    steps = law(3.2e5, 160, POWERS[:10])
    study = with_repeats(
        study_of({cell: vague(found[0]) for cell, found in steps.items()}),
        [1.0] * (5 - missed) + [None] * missed,
    )
    (judged_on,) = laws_of(study, Series(0.0))
    assert judged_on.uses_medians is of_medians
    assert judged_on.fit is not None
    cell = cell_of(Series(0.0), 64)
    drawn = k_star_draws(study, judged_on, cell).high
    assert np.median(drawn) == pytest.approx(study.by_cell[cell].k_star, rel=0.05)


def test_series_that_are_compared_are_judged_alike():
    # The truth is x1.2 and the luck of K* 1.6: a median over a K* would be x1.92, and the claim
    # seen.
    steps = law(1e6, 100, POWERS) | law(1.2e6, 120, POWERS, 0.9)
    study = study_of({cell: vague(found[0]) for cell, found in steps.items()})
    both = with_repeats(study, [1.6] * 5)
    repeats = {
        c: [] if c.sparsity == 0.0 and c.batch_size == 64 else r
        for c, r in both.record.repeats.items()
    }
    one = Analysis(dataclasses.replace(both.record, repeats=repeats))
    for each, of_medians in ((both, True), (one, False)):
        measured = sparse_steps_ratio(each)[""]
        assert measured.number.value == pytest.approx(1.2, abs=5e-3)
        assert measured.uses_medians is of_medians
