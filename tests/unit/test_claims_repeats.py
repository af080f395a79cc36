"""The paper's claims on steps where best points were repeated on fresh seeds: the medians are judged."""

import dataclasses

import pytest

from lit_dps.analysis import Analysis
from lit_dps.repeats import RepeatPlan
from lit_dps.replication import Verdict, critical_no_earlier, exponent, linear_scaling, steps_of_sparse
from lit_dps.trial import Series
from tests.unit.fake_study import result
from tests.unit.test_claims import MOMENTUM, PARAMS, POWERS, law, study_of, vague

SEEN, _, UNDECIDABLE = Verdict


def with_repeats(study, seeds):
    """The study with repeats of each cell's best point: K* times each of these factors."""
    record = study.record
    repeats = {}
    for cell, summary in study.by_cell.items():
        ended = [result(cell, summary.best.trial.point, round(f * summary.k_star), params=PARAMS) for f in seeds]
        trials = [dataclasses.replace(r.trial, repeat=i) for i, r in enumerate(ended, 1)]
        repeats[cell] = [dataclasses.replace(r, trial=t) for r, t in zip(ended, trials, strict=True)]
    return Analysis(dataclasses.replace(record, repeats=repeats, plan=RepeatPlan(len(seeds), 1, None)))


def test_where_best_points_were_repeated_the_medians_are_judged():
    steps = law(3.2e5, 160, POWERS[:10]) | law(6.4e5, 320, POWERS[:10], 0.9)
    lucky = study_of({cell: vague(found[0]) for cell, found in steps.items()}, config=MOMENTUM)
    assert linear_scaling(lucky).verdict is UNDECIDABLE
    repeated = with_repeats(lucky, [1.0, 1.19, 1.2, 1.2, 1.21])
    number = exponent(repeated, Series(0.0), 2, 8)
    assert number.value == pytest.approx(exponent(lucky, Series(0.0), 2, 8).value, abs=1e-3)
    # 3 of 5 draws are the least one with probability 0.058, more than 2.5 %: a median lower by 1.2, so log_4 1.2 = 0.13
    assert number.interval == pytest.approx((number.value - 0.1315, number.value + 0.1315), abs=1e-3)
    finding = linear_scaling(repeated)
    assert finding.verdict is SEEN and "(medians)" in finding.measured
    assert steps_of_sparse(repeated).verdict is SEEN
    assert critical_no_earlier(repeated).measured.count("B_crit") == 2


def test_a_series_that_was_not_repeated_whole_is_judged_on_k_star():
    steps = law(3.2e5, 160, POWERS[:10])
    few = with_repeats(study_of({cell: vague(found[0]) for cell, found in steps.items()}), [1.0, 1.2, 1.3])
    assert linear_scaling(few).verdict is UNDECIDABLE and "median" not in linear_scaling(few).measured
