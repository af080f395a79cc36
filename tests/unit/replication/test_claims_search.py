"""The paper's claims on the search of metaparameters, judged on studies for which the verdict is
known."""

import dataclasses
import math

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.search_space import Range
from lit_dps.core.trial import SCHEDULE, Cell
from lit_dps.optim import RateSchedule
from lit_dps.replication.rules import Verdict
from lit_dps.replication.search import (
    correlation_interval,
    mean_share_of_linear,
    rank_correlation,
    rate_trend,
    success_trend,
)
from tests.support.claims import judged
from tests.support.fake_study import analysis_of, result
from tests.support.texts import numbers_in

SEEN, NOT_SEEN, UNDECIDABLE = Verdict
SPACE = {"model.learning_rate": Range(1e-4, 10, "log")}
SIZES = (4, 16, 64, 256, 1024)


GROWING = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6)


def searched(best, space=SPACE, momentum=None, **kw):
    """Eight trials a cell at B = 4, 8, 16, ...: one is best at the given rate, the others are
    slower at other rates."""
    cells = {}
    for i, rate in enumerate(best):
        cell = Cell(4 * 2**i, 0.0)
        cells[cell] = []
        for point in range(8):
            params = {"model.learning_rate": rate if point == 0 else 10 ** -((3 * i + point) % 4.0)}
            params |= {} if momentum is None else {"model.momentum": momentum[i]}
            cells[cell].append(result(cell, point, 1600 if point else 800, params=params))
    return analysis_of(cells, space=space, **kw)


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        (GROWING, SEEN),
        ((0.01, 0.02, 0.05, 0.2, 0.1, 0.3, 0.4, 0.6), SEEN),  # rank correlation 0.976
        ((0.01, 0.3, 0.05, 0.1, 0.02, 0.2, 0.4, 0.6), UNDECIDABLE),  # 0.667
        (GROWING[::-1], NOT_SEEN),
        ((0.1,) * 64, UNDECIDABLE),  # one point
        ((0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.4, 0.8), UNDECIDABLE),  # four points
        (GROWING[:4], UNDECIDABLE),
        (GROWING[:3], UNDECIDABLE),
    ],
)
def test_rate_grows(rates, verdict):
    assert judged("rate-grows", searched(rates)).verdict is verdict


LINEAR = {"schedule": "linear", "decay_steps": 400, "end_factor": 0.0}


def decaying(rates, steps, schedule=LINEAR, flags=None):
    """A trial a cell at B = 4, 8, 16, ... that reaches the goal after these steps."""
    cells = {}
    for i, (rate, count) in enumerate(zip(rates, steps, strict=True)):
        cell = Cell(4 * 2**i, 0.0)
        params = {"model.learning_rate": rate}
        cells[cell] = [result(cell, 0, count, params=params, flags=flags or {})]
    return analysis_of(cells, space=SPACE, config={"model": {"init_args": schedule}})


FALLING_STEPS = (25_600, 12_800, 6400, 3200, 1600, 800, 400, 200)


def test_a_rate_that_decays_counts_at_its_start_and_on_average():
    """At the start the rates fall with B. On average over the K* steps they grow."""
    study = decaying([0.9**i for i in range(8)], FALLING_STEPS)
    measured = rate_trend(study)["S=0"]
    assert measured.number.value == -1
    assert measured.number.interval.low == -1 and measured.number.interval.high == 1
    # 400 steps of decay: a mean of 401 / 2 / 25600 at the first, and 1 - 199 / 800 at the last.
    numbers = numbers_in(measured.sentence)
    assert numbers[-1] == pytest.approx(0.9**7 * (1 - 199 / 800), rel=5e-3)
    assert numbers[-2] == pytest.approx(401 / 2 / 25_600, rel=5e-3)
    assert judged("rate-grows", study).verdict is UNDECIDABLE


def test_a_rate_that_decays_and_grows_in_both_ways_is_seen():
    assert judged("rate-grows", decaying(GROWING, FALLING_STEPS)).verdict is SEEN
    falling = [0.3**i for i in range(8)]
    assert judged("rate-grows", decaying(falling, FALLING_STEPS)).verdict is NOT_SEEN


def test_a_constant_rate_has_one_trend():
    constant = decaying(GROWING, FALLING_STEPS, schedule={})
    assert rate_trend(constant)["S=0"].number.interval == pytest.approx((0.902, 1), abs=5e-4)
    assert "decays" not in rate_trend(constant)["S=0"].sentence


def test_a_rate_of_an_unknown_schedule_is_not_judged():
    study = decaying(GROWING, FALLING_STEPS, schedule={}, flags={SCHEDULE: 100})
    assert rate_trend(study)["S=0"].number is None
    assert judged("rate-grows", study).verdict is UNDECIDABLE


@pytest.mark.parametrize("steps", [1, 7, 10, 25])
def test_the_mean_of_a_linear_decay(steps):
    factors = [RateSchedule("linear", 10, 0.2).factor(step) for step in range(steps)]
    assert mean_share_of_linear(steps, 10, 0.2) == pytest.approx(np.mean(factors))


def test_a_race_leaves_the_best_rate_known():
    assert judged("rate-grows", searched(GROWING, race_factor=1.0)) == judged(
        "rate-grows", searched(GROWING)
    )


def test_the_interval_of_a_rank_correlation():
    # Bonett and Wright (2000): tanh(atanh(rho) -+ 1.96 sqrt((1 + rho^2 / 2) / (n - 3)));
    # tanh(0.6931) = 0.6
    half = 1.959964 * math.sqrt(1.18 / 97)
    assert correlation_interval(0.6, 100) == pytest.approx(
        (math.tanh(0.693147 - half), math.tanh(0.693147 + half))
    )
    # In perfect order of 8: halfway between 1 and 1 - 12 / (8^3 - 8), the next lower one
    half = 1.959964 * math.sqrt(1.5 / 5)
    assert correlation_interval(1.0, 8) == pytest.approx(
        (math.tanh(math.atanh(1 - 6 / 504) - half), 1)
    )
    assert correlation_interval(-1.0, 8) == pytest.approx((-1, -correlation_interval(1.0, 8).low))


def test_the_interval_of_a_rank_correlation_covers():
    # of pairs with a normal copula, whose rank correlation is 6 / pi asin(r / 2)
    rng, r = np.random.default_rng(0), 0.9
    true, hits = 6 / math.pi * math.asin(r / 2), 0
    for _ in range(400):
        x, noise = rng.standard_normal((2, 10))
        rho = float(
            rank_correlation((r * x + math.sqrt(1 - r * r) * noise)[None, np.argsort(x)])[0]
        )
        interval = correlation_interval(rho, 10)
        hits += interval.low <= true <= interval.high
    assert hits >= 0.93 * 400


def test_the_rate_that_counts_is_the_effective_one():
    space = SPACE | {"model.momentum": Range(0.5, 0.999, "reverse_log")}
    study = searched(
        [0.1] * 8, space=space, momentum=[0.5, 0.9, 0.95, 0.98, 0.99, 0.992, 0.995, 0.998]
    )
    assert judged("rate-grows", study).verdict is SEEN
    measured = rate_trend(study)["S=0"]
    assert measured.number.value == pytest.approx(1)
    assert measured.number.interval == pytest.approx((0.902, 1), abs=5e-4)
    assert "effective" in measured.sentence and measured.sentence.endswith("0.200, 50.0")


def test_rate_grows_is_for_studies_that_search_a_rate():
    cell = Cell(8, 0.0)
    width = {"model.width": Range(1, 64)}
    assert (
        judged(
            "rate-grows",
            analysis_of({cell: [result(cell, 0, 16, params={"model.width": 8})]}, space=width),
        )
        is None
    )
    assert judged("rate-grows", searched([0.1])) is None  # one batch size


def counted(shares, points=16, unfinished=0):
    cells = {}
    for b, share in zip(SIZES, shares, strict=False):
        complete = round(share * points)
        cells[Cell(b, 0.0)] = [
            result(Cell(b, 0.0), i, 160 if i < complete else None) for i in range(points)
        ]
    cells[Cell(SIZES[0], 0.0)] = cells[Cell(SIZES[0], 0.0)][: points - unfinished]
    return analysis_of(cells, space={}, trials=points)


@pytest.mark.parametrize(
    ("study", "verdict"),
    [
        (counted([0.1, 0.3, 0.5, 0.7, 0.9], points=64), SEEN),
        (counted([0.9, 0.7, 0.5, 0.3, 0.1], points=64), NOT_SEEN),
        (
            counted([1, 1, 1, 1, 1]),
            UNDECIDABLE,
        ),  # nobody knows how much easier the larger ones find it
        (counted([0, 0, 0, 0, 0]), UNDECIDABLE),
        (counted([0.4, 0.5, 0.5, 0.6, 0.5]), UNDECIDABLE),
        (counted([0.1, 0.5, 0.9], points=64), UNDECIDABLE),
        (
            counted([0.1, 0.3, 0.5, 0.7, 0.9], points=64, unfinished=62),
            UNDECIDABLE,
        ),  # two points are common to all
    ],
)
def test_region_grows(study, verdict):
    assert judged("region-grows", study).verdict is verdict


def test_the_region_is_counted_over_points_that_all_cells_have():
    study = counted([0.25, 0.5, 0.5, 0.5, 1.0], points=16, unfinished=8)
    sentence = success_trend(study)["S=0"].sentence
    assert " 40,000" in sentence and numbers_in(sentence)[-2:] == [0.5, 1]
    assert "B=4 " in sentence and sentence.endswith("B=1024")
    assert success_trend(counted([0, 0, 0, 0]))["S=0"].number is None


def test_a_budget_beside_the_papers_is_told():
    record = counted([0.25, 0.5, 0.5, 1.0]).record
    network = {"class_path": "lit_dps.models.SimpleCNN"}
    config = {
        "data": {"class_path": "lit_dps.data.MNIST"},
        "model": {"init_args": {"network": network}},
    }
    short = dataclasses.replace(
        record, config=config, goal=dataclasses.replace(record.goal, max_steps=2000)
    )
    sentence = success_trend(Analysis(short))["S=0"].sentence
    assert "2,000" in sentence and "40,000" in sentence
    own = Analysis(dataclasses.replace(record, config=config))
    assert "budget" not in success_trend(own)["S=0"].sentence


def test_a_race_is_no_study_of_the_region():
    cells = {Cell(b, 0.0): [result(Cell(b, 0.0), i, 160) for i in range(8)] for b in SIZES}
    assert judged("region-grows", analysis_of(cells, space={}, race_factor=2.0)) is None


def test_the_share_by_twice_each_k_star_is_told_where_the_budget_goes_so_far():
    # K* = 1600 / B^(1/2): by twice that the same half of all trials, at every batch size; all are
    # complete in the end
    cells = {}
    for b in SIZES:
        k = round(16000 / math.sqrt(b))
        steps = [k, 2 * k, 3 * k, None if b == SIZES[0] else 4 * k]
        cells[Cell(b, 0.0)] = [result(Cell(b, 0.0), i, each) for i, each in enumerate(steps)]
    study = analysis_of(cells, space={})
    (note,) = success_trend(study)["S=0"].notes
    assert numbers_in(note)[-2:] == [0.5, 0.5] and "B=4 " in note and note.endswith("B=1024")
    goal = dataclasses.replace(study.record.goal, max_steps=14992)
    (note,) = success_trend(Analysis(dataclasses.replace(study.record, goal=goal)))["S=0"].notes
    assert numbers_in(note)[-2:] == [0.5, 0.5] and "B=16 " in note and note.endswith("B=1024")
