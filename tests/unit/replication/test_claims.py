"""The paper's claims on K*, judged on studies for which the verdict is known."""

import dataclasses
import math

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import three_digits
from lit_dps.core.trial import Cell, Series
from lit_dps.replication.rules import Verdict
from lit_dps.replication.scaling import (
    _deviation,
    examples_ratio,
    exponent,
    exponent_at_small_batches,
    law_misfit,
    sparse_critical_ratio,
    sparse_ratio_trend,
    sparse_steps_ratio,
    steps_per_doubling,
)
from tests.support.claims import judged
from tests.support.fake_study import analysis_of, result
from tests.support.texts import numbers_in

SEEN, NOT_SEEN, UNDECIDABLE = Verdict
PARAMS = {"model.learning_rate": 0.1, "model.momentum": 0.9}
POWERS = [2**i for i in range(1, 15)]  # the batch sizes of the paper
MOMENTUM = {
    "model": {"init_args": {"optimizer": "momentum", "network": "cnn"}},
    "data": {"class_path": "MNIST"},
}
SGD = {
    "model": {"init_args": {"optimizer": "sgd", "network": "cnn"}},
    "data": {"class_path": "MNIST"},
}


def study_of(steps, name="fake", **kw):
    """A study of the given steps to result: by (batch size, sparsity), or by batch size for a dense
    one."""
    cells = {
        Cell(*key) if isinstance(key, tuple) else Cell(key): found for key, found in steps.items()
    }
    results = {
        c: [result(c, i, k, params=PARAMS) for i, k in enumerate(found)]
        for c, found in cells.items()
    }
    return analysis_of(results, name, **kw)


def sure(k):
    """Eight trials, several of which have K*, so that it has no noise."""
    return [round(k)] * 5 + [round(1.5 * k)] * 3


def vague(k):
    """Eight trials whose K* hangs on one of them."""
    return [round(k), *[4 * round(k)] * 7]


def law(c1, c2, batch_sizes, sparsity=0.0, trials=sure):
    """Steps of cells whose K* are c1 / B + c2."""
    return {(b, sparsity): trials(c1 / b + c2) for b in batch_sizes}


@pytest.mark.usefixtures("certain_searches")
def test_the_exponent_between_two_batch_sizes():
    study = study_of(
        {8: sure(3200), 32: sure(400)}
    )  # 8 times fewer steps at 4 times the batch: 4^-1.5
    number = exponent(study, Series(0.0), 8, 32)
    assert number.value == pytest.approx(-1.5)
    # Within one check interval, 16 steps: log_4 of 384 / 3200 = -1.5294 and of 400 / 3184 = -1.4964,
    # of which 2.5 % of uniform places between checks are beyond these.
    assert number.interval == pytest.approx((-1.5272, -1.4988), abs=1e-3)


@pytest.mark.usefixtures("certain_searches")
@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        (law(1e5, 100, (4, 8, 16, 64)), SEEN),
        ({2: sure(900), 4: sure(880), 8: sure(850)}, NOT_SEEN),  # the paper's smallest batch size
        (
            {64: sure(900), 128: sure(880), 256: sure(850)},
            UNDECIDABLE,
        ),  # smaller ones may yet be linear
        (
            law(6.4e6, 1e5, POWERS[2:]),
            UNDECIDABLE,
        ),  # the law itself, from B_crit / 8 = 8 on: e = -0.792
        (law(7.4e6, 1e5, POWERS[2:]), SEEN),  # from B_crit / 9.25 on
        (law(1.8e4, 1e3, (2, 16, 128)), UNDECIDABLE),  # e = -0.75 over three doublings
        (law(1e5, 100, (4, 8, 16, 64), trials=vague), UNDECIDABLE),
        (
            law(3e4, 10, (4, 16), 0.0) | law(3e4, 10, (4,), 0.9) | {(16, 0.9): [None] * 8},
            UNDECIDABLE,
        ),
        (
            {(2, 0.0): sure(800), (8, 0.0): sure(200), (2, 0.9): sure(900), (8, 0.9): sure(900)},
            NOT_SEEN,
        ),
    ],
)
def test_linear_scaling(steps, verdict):
    assert judged("linear-scaling", study_of(steps)).verdict is verdict


def test_linear_scaling_that_bends_too_early_for_the_fitted_law():
    # Halving at 4 times the batch, where the law through all says B_crit = 1000: 16 is within reach
    # of linear scaling.
    study = study_of(
        {
            16: 8 * sure(6350),
            64: 8 * sure(2690),
            128: 8 * sure(1200),
            512: 8 * sure(295),
            2048: 8 * sure(149),
            8192: 8 * sure(112),
        }
    )
    assert study.laws[Series(0.0)].is_b_crit_known
    assert study.laws[Series(0.0)].fit.critical_batch_size >= 8 * 16
    assert judged("linear-scaling", study).verdict is NOT_SEEN


def test_linear_scaling_has_its_number_and_its_batch_sizes():
    study = study_of({8: sure(3200), 32: sure(400), 512: sure(100)})
    (measurement,) = exponent_at_small_batches(study).values()
    assert measurement.number == exponent(study, Series(0.0), 8, 32)
    assert not measurement.uses_medians
    assert str(measurement.number) in judged("linear-scaling", study).measured


@pytest.mark.usefixtures("certain_searches")
@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        (law(1e5, 100, (8, 64, 1024)), SEEN),
        (law(1e7, 0, (8, 64, 512)), UNDECIDABLE),  # perfect scaling, and larger batches to come
        (law(1e8, 0, POWERS), NOT_SEEN),
        (law(1e5, 100, (8, 64, 1024), trials=vague), UNDECIDABLE),
    ],
)
def test_diminishing_returns(steps, verdict):
    assert judged("diminishing-returns", study_of(steps)).verdict is verdict


@pytest.mark.usefixtures("certain_searches")
def test_diminishing_returns_in_numbers():
    # B K* is 8 x 1000 and 512 x 100: 6.4 times the examples, at least 512 x 84 / 8000 = 5.38, at
    # most 51200 / 7872 = 6.50
    measured = examples_ratio(study_of({8: sure(1000), 512: sure(100)}))["S=0"]
    assert measured.number.value == pytest.approx(6.4)
    assert measured.number.interval == pytest.approx((5.44, 6.45), abs=0.03)
    assert not measured.can_refute


@pytest.mark.usefixtures("certain_searches")
@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        (law(1e5, 1000, POWERS), SEEN),
        (
            law(1e5, 1000, (4, 16, 64, 128)),
            UNDECIDABLE,
        ),  # B_crit = 100 is seen, 8 times that is not
        (
            law(1e7, 1000, POWERS),
            NOT_SEEN,
        ),  # B_crit = 10,000 bends, and the paper's batches end at 16,384
        (law(1e5, 60, POWERS), UNDECIDABLE),  # K* of 66 steps, known to 16
        (law(1e5, 1000, POWERS, trials=vague), UNDECIDABLE),
        (law(1e8, 0, (4, 16, 64)), UNDECIDABLE),  # B_crit is not identifiable
        (
            law(1.28e7, 1e5, POWERS[:10]),
            UNDECIDABLE,
        ),  # the law itself up to 8 B_crit: x0.866 a doubling
        (law(8.2e6, 1e5, POWERS[:10]), SEEN),  # up to 12.5 B_crit
    ],
)
def test_plateau(steps, verdict):
    assert judged("plateau", study_of(steps)).verdict is verdict


@pytest.mark.usefixtures("certain_searches")
def test_a_plateau_that_is_not_where_the_law_has_it():
    flat = {
        4: sure(26000),
        16: sure(7250),
        64: sure(2560),
        256: sure(1390),
        1024: sure(1098),
        4096: sure(1024),
    }
    study = study_of(flat | {8192: sure(700)})
    assert study.laws[Series(0.0)].fit.critical_batch_size < 8192 / 8
    assert judged("plateau", study).verdict is NOT_SEEN


@pytest.mark.usefixtures("certain_searches")
def test_a_plateau_is_not_known_where_the_critical_batch_size_is_not():
    study = study_of(law(1e8, 0, (4, 16, 64)))
    measured = steps_per_doubling(study)["S=0"]
    assert measured.number is None
    assert f"x0.5 {[0.5, 0.5]}" in measured.sentence
    bound = study.laws[Series(0.0)].verdict.bound
    assert bound is not None and f"B_crit > {three_digits(bound)}" in measured.sentence


@pytest.mark.parametrize("claim", ["linear-scaling", "diminishing-returns", "plateau"])
def test_one_batch_size_is_no_curve(claim):
    assert judged(claim, study_of({(8, 0.0): sure(100), (8, 0.9): sure(200)})) is None


def ratio(k, trials=sure):
    """Dense and sparse cells at three batch sizes whose K* are apart by the given factors."""
    dense = {8: 3200, 32: 800, 128: 320}
    return law(0, 0, ()) | {
        cell: found
        for (b, steps), factor in zip(dense.items(), k, strict=True)
        for cell, found in (
            ((b, 0.0), sure(steps)),
            ((b, 0.9), trials(factor * steps) if factor else [None] * 8),
        )
    }


@pytest.mark.usefixtures("certain_searches")
@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        (ratio([2, 2.5, 3]), SEEN),
        (ratio([1, 2, 4]), SEEN),  # on average x2
        (ratio([1, 1.1, 1.2]), NOT_SEEN),
        (ratio([6, 7, 8]), NOT_SEEN),
        (ratio([1.5, 1.6, 1.7]), SEEN),
        (ratio([1.5, 1.6, 1.7], trials=vague), UNDECIDABLE),
        (ratio([2, 2.5, None]), NOT_SEEN),  # the third is at least x125
        (ratio([1, 1, None]), NOT_SEEN),  # x5 at least
        (ratio([2, None, None]), NOT_SEEN),
        # Three of eight trials: this K* is an upper bound, and left out.
        (ratio([2, 2.5, 3]) | {(8, 0.9): sure(6400)[:3]}, SEEN),
    ],
)
def test_steps_of_sparse(steps, verdict):
    assert judged("steps-of-sparse", study_of(steps)).verdict is verdict


@pytest.mark.usefixtures("certain_searches")
@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        (ratio([6, 7, 8]), SEEN),
        (ratio([2, 2.5, None]), SEEN),
        (ratio([0.9, 1, 1.1]), NOT_SEEN),
        (ratio([1, 1.1, 1.2]), UNDECIDABLE),  # x1.097 by the checks, more between them
        (ratio([2, 2.5, 3]) | {(8, 0.9): sure(6400)[:3]}, SEEN),
        (ratio([None, None, None]), UNDECIDABLE),
    ],
)
def test_more_steps_of_sparse(steps, verdict):
    assert judged("more-steps-of-sparse", study_of(steps)).verdict is verdict


@pytest.mark.usefixtures("certain_searches")
def test_steps_of_sparse_in_numbers():
    cells = {
        (8, 0.0): sure(16000),
        (8, 0.9): sure(64000),
        (32, 0.0): sure(16000),
        (32, 0.9): sure(16000),
    }
    measured = sparse_steps_ratio(study_of(cells))[""]
    assert measured.number.value == pytest.approx(2)
    assert measured.number.interval == pytest.approx((2, 2), abs=5e-3)
    # With 40,000 / 320 = 125 at least where none met the goal, (2 x 2.5 x 125)^(1/3) = 8.55
    measured = sparse_steps_ratio(study_of(ratio([2, 2.5, None])))[""]
    assert measured.number.value == pytest.approx(8.55, abs=5e-3)
    assert measured.number.interval == pytest.approx((8.55, math.inf), abs=0.02)
    (note,) = measured.notes
    assert numbers_in(note)[:2] == [2, 3]


def test_luck_of_a_search_that_batch_sizes_share_does_not_cancel_in_the_mean():
    """The best point of all cells is one, so its luck at B = 2 is that at B = 128."""
    study = study_of(ratio([2, 2, 2]))
    low, high = sparse_steps_ratio(study)[""].number.interval
    # Of two searches, dense and sparse; independent searches at three batch sizes have a third.
    noise = study.laws[Series(0.0)].observation(8).noise
    assert noise <= study.search_noise
    variance = 2 * noise**2
    assert math.log(high / low) == pytest.approx(2 * 1.96 * math.sqrt(variance), rel=0.15)


def test_an_unfinished_sparse_cell_has_no_ratio():
    cells = ratio([2, 2.5, 3])
    complete = study_of({key: found for key, found in cells.items() if key[0] < 128})
    unfinished = study_of({**cells, (128, 0.9): []})
    expected = sparse_steps_ratio(complete)[""].number
    measured = sparse_steps_ratio(unfinished)[""]
    assert measured.number.value == pytest.approx(expected.value)
    assert measured.number.interval == pytest.approx(expected.interval)
    (note,) = measured.notes
    assert numbers_in(note)[:2] == [2, 3]


def two(dense, sparse, batch_sizes=POWERS, sparse_trials=sure, **kw):
    return study_of(
        law(*dense, batch_sizes, 0.0) | law(*sparse, batch_sizes, 0.9, sparse_trials), **kw
    )


@pytest.mark.parametrize(
    ("study", "no_earlier", "later"),
    [
        (two((1e6, 1000), (4e6, 2000)), SEEN, SEEN),  # B_crit 1000 and 2000
        (two((1e6, 1000), (2e6, 2000)), UNDECIDABLE, UNDECIDABLE),  # equal
        (two((2e6, 1000), (2e6, 2000)), NOT_SEEN, NOT_SEEN),
        (two((1e6, 1000), (1.1e6, 1000), sparse_trials=vague), UNDECIDABLE, UNDECIDABLE),
        (two((1e6, 1000), (1e7, 0), POWERS[:10]), SEEN, SEEN),  # beyond the largest batch size
        (two((1e8, 0), (1e6, 1000), POWERS[:10]), UNDECIDABLE, UNDECIDABLE),
    ],
)
def test_critical_batch_sizes_of_sparse_and_dense(study, no_earlier, later):
    assert judged("critical-no-earlier", study).verdict is no_earlier
    assert (
        judged(
            "critical-later-with-momentum",
            Analysis(dataclasses.replace(study.record, config=MOMENTUM)),
        ).verdict
        is later
    )


def test_a_law_that_misses_its_k_star_tells_no_critical_batch_size():
    study = two((1e6, 1000), (4e6, 2000))
    bent = {cell: results for cell, results in study.record.results.items()}
    for b, factor in ((8, 2.5), (512, 0.4)):
        cell = Cell(b, 0.9)
        bent[cell] = [dataclasses.replace(r, steps=round(factor * r.steps)) for r in bent[cell]]
    off = Analysis(dataclasses.replace(study.record, results=bent))
    law = off.laws[Series(0.9)]
    residuals = [math.log(k / (law.fit.c1 / b + law.fit.c2)) for b, k in law.k_star.items()]
    assert law.misfit == pytest.approx(math.sqrt(sum(r * r for r in residuals) / (len(POWERS) - 2)))
    assert law.misfit > 0.3 and study.laws[Series(0.9)].misfit < 0.001
    measured = sparse_critical_ratio(off)[""]
    assert measured.number is None
    (note,) = measured.notes
    assert f"{law.misfit:.0%}" in note and note.endswith(" S=0.9")
    assert judged("critical-no-earlier", off).verdict is UNDECIDABLE
    # A plateau is relative to B_crit.
    assert study.laws[Series(0.9)].is_b_crit_known
    numbers = {series: each.number for series, each in steps_per_doubling(off).items()}
    assert numbers["S=0"] is not None and numbers["S=0.9"] is None


def test_the_ratio_of_critical_batch_sizes():
    measured = sparse_critical_ratio(two((1e6, 1000), (4e6, 2000)))[""]
    assert measured.number.value == pytest.approx(2, rel=1e-3)
    low, high = measured.number.interval
    assert 1.2 < low < 1.5 and 2.7 < high < 3.3
    assert measured.can_refute and measured.sentence.count("B_crit = ") == 2
    measured = sparse_critical_ratio(two((1e6, 1000), (1e7, 0), POWERS[:10]))[""]
    assert not measured.can_refute and "B_crit > " in measured.sentence
    bare = study_of({(8, 0.0): sure(100), (8, 0.9): sure(200)})
    measured = sparse_critical_ratio(bare)[""]
    assert measured.number is None
    assert measured.sentence.count(bare.laws[Series(0.9)].describe()) == 2


def test_later_with_momentum_is_for_momentum():
    assert judged("critical-later-with-momentum", two((1e6, 1000), (2e6, 2000), config=SGD)) is None
    assert judged("critical-later-with-momentum", two((1e6, 1000), (2e6, 2000))) is None
    assert (
        judged(
            "critical-no-earlier",
            study_of(law(1e6, 1000, POWERS, 0.5) | law(1e6, 1000, POWERS, 0.9)),
        )
        is None
    )


def test_the_ratio_of_sparse_to_dense_along_batch_sizes():
    # The ratio is 4 B^-0.1: from B = 2 to 16,384 it falls to 8192^-0.1 of its value.
    dense = {(b, 0.0): sure(1e8 / b) for b in POWERS}
    falls = dense | {(b, 0.9): sure(4e8 * b**-1.1) for b in POWERS}
    measured = sparse_ratio_trend(study_of(falls))[""]
    assert measured.number.value == pytest.approx(8192**-0.1, rel=1e-3)
    assert judged("sparse-ratio-falls", study_of(falls)).verdict is SEEN
    grows = dense | {(b, 0.9): sure(4e8 * b**-0.9) for b in POWERS}
    assert judged("sparse-ratio-falls", study_of(grows)).verdict is NOT_SEEN
    few = {key: steps for key, steps in falls.items() if key[0] < 16}
    assert sparse_ratio_trend(study_of(few))[""].number is None


def test_the_deviation_of_k_from_the_law():
    """K* is off by a factor of 1.3 in turn; without noise this is the deviation."""
    exact = study_of(law(1e8, 1e5, POWERS))
    number = law_misfit(exact)["S=0"].number
    assert number is None or number.value < 0.02
    off = {}
    for i, batch_size in enumerate(POWERS):
        off[batch_size] = sure((1e8 / batch_size + 1e5) * 1.3 ** (-1) ** i)
    number = law_misfit(study_of(off))["S=0"].number
    assert number.value < number.interval.high
    assert judged("law-describes", study_of(off)).verdict is NOT_SEEN
    assert law_misfit(study_of(law(1e8, 1e5, POWERS[:2])))["S=0"].number is None


def test_the_deviation_solves_the_equation_of_paule_and_mandel():
    residuals, variance = np.array([0.3, -0.4, 0.2, 0.1]), np.array([0.01, 0.02, 0.01, 0.03])
    deviation = _deviation(residuals, variance, 2.0)
    assert (residuals**2 / (variance + deviation**2)).sum() == pytest.approx(2.0)
    assert _deviation(residuals / 100, variance, 2.0) == 0
    # Equal variances: the mean square of the residuals, less the variance.
    even = _deviation(residuals, np.full(4, 0.01), 2.0)
    assert even**2 == pytest.approx((residuals**2).sum() / 2 - 0.01)
