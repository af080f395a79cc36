"""The paper's claims on K*, judged on studies for which the verdict is known."""

import dataclasses
import math

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.trial import Cell, Series
from lit_dps.replication.claims_critical import critical_later, critical_no_earlier
from lit_dps.replication.claims_scaling import (
    diminishing_returns,
    exponent,
    linear_scaling,
    more_steps_of_sparse,
    plateau,
    steps_of_sparse,
)
from lit_dps.replication.rules import Verdict
from tests.support.fake_study import analysis_of, result

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
    """Eight trials whose resamples all but always have the same K*."""
    return [round(k)] * 5 + [round(1.5 * k)] * 3


def vague(k):
    """Eight trials whose K* hangs on one of them."""
    return [round(k), *[4 * round(k)] * 7]


def law(c1, c2, batch_sizes, sparsity=0.0, trials=sure):
    """Steps of cells whose K* are c1 / B + c2."""
    return {(b, sparsity): trials(c1 / b + c2) for b in batch_sizes}


def test_the_exponent_between_two_batch_sizes():
    study = study_of(
        {8: sure(3200), 32: sure(400)}
    )  # 8 times fewer steps at 4 times the batch: 4^-1.5
    number = exponent(study, Series(0.0), 8, 32)
    assert number.value == pytest.approx(-1.5)
    # To one check interval, 16 steps: log_4 of 384 / 3200 and of 400 / 3184
    assert number.interval == pytest.approx((-1.5294, -1.4964), abs=1e-4)


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
    assert linear_scaling(study_of(steps)).verdict is verdict


def test_linear_scaling_that_bends_too_early_for_the_fitted_law():
    # Halving at 4 times the batch, where the law through all says B_crit = 1000: 16 is within reach
    # of linear scaling.
    study = study_of(
        {
            16: sure(6350),
            64: sure(3175),
            128: sure(881),
            512: sure(295),
            2048: sure(149),
            8192: sure(112),
        }
    )
    assert study.scalings[Series(0.0)].identifiable
    assert study.scalings[Series(0.0)].fit.critical_batch_size >= 8 * 16
    assert linear_scaling(study).verdict is NOT_SEEN


def test_linear_scaling_says_what_it_measured():
    said = linear_scaling(study_of({8: sure(3200), 32: sure(400), 512: sure(100)})).measured
    assert said == "S=0: K* goes as B^e from B=8 to B=32, e = -1.5 [-1.53, -1.5]"


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
    assert diminishing_returns(study_of(steps)).verdict is verdict


def test_diminishing_returns_in_numbers():
    # B K* is 8 x 1000 and 512 x 100: 6.4 times the examples, at least 512 x 84 / 8000 = 5.38, at
    # most 51200 / 7872
    found = diminishing_returns(study_of({8: sure(1000), 512: sure(100)}))
    assert found.measured == "S=0: examples at B=512 over those at B=8: x6.4 [5.38, 6.5]"


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
        (law(1e5, 20, POWERS), UNDECIDABLE),  # K* of 26 steps, known to 16
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
    assert plateau(study_of(steps)).verdict is verdict


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
    assert study.scalings[Series(0.0)].fit.critical_batch_size < 8192 / 8
    assert plateau(study).verdict is NOT_SEEN


def test_plateau_says_why_it_cannot_tell():
    said = plateau(study_of(law(1e8, 0, (4, 16, 64)))).measured
    assert said.startswith(
        "S=0: K* a doubling from B=16 to B=64: x0.5 [0.5, 0.5]; B_crit not identifiable: B_crit > "
    )


@pytest.mark.parametrize("of", [linear_scaling, diminishing_returns, plateau])
def test_one_batch_size_is_no_curve(of):
    assert of(study_of({(8, 0.0): sure(100), (8, 0.9): sure(200)})) is None


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


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        (ratio([2, 2.5, 3]), SEEN),
        (ratio([1, 2, 4]), SEEN),  # on average x2
        (ratio([1, 1.1, 1.2]), NOT_SEEN),
        (ratio([6, 7, 8]), NOT_SEEN),
        (ratio([2, 2.5, 3], trials=vague), UNDECIDABLE),
        (ratio([2, 2.5, None]), NOT_SEEN),  # the third is at least x125
        (ratio([1, 1, None]), NOT_SEEN),  # x5 at least
        (ratio([2, None, None]), NOT_SEEN),
        (ratio([2, 2.5, 3]) | {(8, 0.9): sure(6400)[:3]}, UNDECIDABLE),  # three trials
    ],
)
def test_steps_of_sparse(steps, verdict):
    assert steps_of_sparse(study_of(steps)).verdict is verdict


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        (ratio([6, 7, 8]), SEEN),
        (ratio([2, 2.5, None]), SEEN),
        (ratio([0.9, 1, 1.1]), NOT_SEEN),
        (ratio([1, 1.1, 1.2]), UNDECIDABLE),  # x1.097 by the checks, more between them
        (ratio([2, 2.5, 3]) | {(8, 0.9): sure(6400)[:3]}, UNDECIDABLE),
        (ratio([None, None, None]), UNDECIDABLE),
    ],
)
def test_more_steps_of_sparse(steps, verdict):
    assert more_steps_of_sparse(study_of(steps)).verdict is verdict


def test_steps_of_sparse_in_numbers():
    said = steps_of_sparse(
        study_of(
            {
                (8, 0.0): sure(16000),
                (8, 0.9): sure(64000),
                (32, 0.0): sure(16000),
                (32, 0.9): sure(16000),
            }
        )
    )
    assert said.measured.startswith("K* x1 to x4 over B, mean x2 [2, 2]")
    # With 40,000 / 320 = 125 at least where none met the goal, (2 x 2.5 x 125)^(1/3) = 8.55;
    # to one check interval, (1.995 x 2.48 x 125)^(1/3) = 8.52
    said = steps_of_sparse(study_of(ratio([2, 2.5, None])))
    told = "2 of the 3 batch sizes with a dense K* have a sparse one"
    assert said.measured == f"K* x2 to x2.5 over B, mean at least x8.55 [8.52, inf]; {told}"


def two(dense, sparse, batch_sizes=POWERS, sparse_trials=sure, **kw):
    return study_of(
        law(*dense, batch_sizes, 0.0) | law(*sparse, batch_sizes, 0.9, sparse_trials), **kw
    )


@pytest.mark.parametrize(
    ("study", "no_earlier", "later"),
    [
        (two((1e6, 1000), (4e6, 2000)), SEEN, SEEN),  # B_crit 1000 and 2000
        (two((1e6, 1000), (2e6, 2000)), SEEN, NOT_SEEN),  # equal
        (two((2e6, 1000), (2e6, 2000)), NOT_SEEN, NOT_SEEN),
        (two((1e6, 1000), (1.1e6, 1000), sparse_trials=vague), UNDECIDABLE, UNDECIDABLE),
        (two((1e6, 1000), (1e7, 0), POWERS[:10]), SEEN, SEEN),  # beyond the largest batch size
        (two((1e8, 0), (1e6, 1000), POWERS[:10]), UNDECIDABLE, UNDECIDABLE),
    ],
)
def test_critical_batch_sizes_of_sparse_and_dense(study, no_earlier, later):
    assert critical_no_earlier(study).verdict is no_earlier
    assert (
        critical_later(Analysis(dataclasses.replace(study.record, config=MOMENTUM))).verdict
        is later
    )


def test_a_law_that_misses_its_k_star_tells_no_critical_batch_size():
    study = two((1e6, 1000), (4e6, 2000))
    bent = {cell: results for cell, results in study.record.results.items()}
    for b, factor in ((8, 2.5), (512, 0.4)):
        cell = Cell(b, 0.9)
        bent[cell] = [dataclasses.replace(r, steps=round(factor * r.steps)) for r in bent[cell]]
    off = Analysis(dataclasses.replace(study.record, results=bent))
    law = off.scalings[Series(0.9)]
    residuals = [math.log(k / (law.fit.c1 / b + law.fit.c2)) for b, k in law.k_star.items()]
    assert law.misfit == pytest.approx(math.sqrt(sum(r * r for r in residuals) / (len(POWERS) - 2)))
    assert law.misfit > 0.3 and study.scalings[Series(0.9)].misfit < 0.001
    verdict, said, _ = critical_no_earlier(off)
    assert verdict is UNDECIDABLE
    assert said.endswith(f"; c1 / B + c2 misses K* by {law.misfit:.0%} at S=0.9")


def test_the_critical_batch_sizes_in_words():
    said = critical_no_earlier(two((1e6, 1000), (4e6, 2000))).measured
    assert (
        said
        == "B_crit = 2000 [2000, 2010] at S=0.9, B_crit = 1000 [1000, 1010] at S=0, x2 [1.98, 2]"
    )
    said = critical_no_earlier(two((1e6, 1000), (1e7, 0), POWERS[:10])).measured
    assert said.startswith("B_crit > 1020 at S=0.9, B_crit = 1000 [1000, 1010] at S=0, x")
    said = critical_no_earlier(study_of({(8, 0.0): sure(100), (8, 0.9): sure(200)})).measured
    assert said.startswith(
        "no law (needs complete trials at 3 batch sizes; has 1) at S=0.9, no law ("
    )


def test_later_with_momentum_is_for_momentum():
    assert critical_later(two((1e6, 1000), (2e6, 2000), config=SGD)) is None
    assert critical_later(two((1e6, 1000), (2e6, 2000))) is None
    assert (
        critical_no_earlier(study_of(law(1e6, 1000, POWERS, 0.5) | law(1e6, 1000, POWERS, 0.9)))
        is None
    )
