"""The paper's claims on the search of metaparameters, judged on studies for which the verdict is known."""

import dataclasses

import pytest

from lit_dps.analysis import Analysis
from lit_dps.replication import (
    Verdict,
    rate_grows,
    region_grows,
)
from lit_dps.space import Range
from lit_dps.trial import Cell
from tests.unit.fake_study import analysis_of, result

SEEN, NOT_SEEN, UNDECIDABLE = Verdict
SPACE = {"model.learning_rate": Range(1e-4, 10, "log")}
SIZES = (4, 16, 64, 256, 1024)


def searched(best, doubt=False, space=SPACE, momentum=None, sizes=SIZES):
    """Eight trials a cell: five are best at the given rate, or with a doubt one; the others are slow at other rates."""
    cells = {}
    for i, (b, rate) in enumerate(zip(sizes, best, strict=False)):
        cell = cells[Cell(b, 0.0)] = []
        for point in range(8):
            off = point >= 5 or (doubt and point > 0)
            params = {"model.learning_rate": 10 ** -((3 * i + point) % 4.0) if off else rate}
            params |= {} if momentum is None else {"model.momentum": momentum[i]}
            cell.append(result(Cell(b, 0.0), point, 1600 if off else 800, params=params))
    return analysis_of(cells, space=space)


@pytest.mark.parametrize(
    ("rates", "doubt", "verdict"),
    [
        ([0.01, 0.02, 0.05, 0.1, 0.3], False, SEEN),
        ([0.01, 0.02, 0.05, 0.04, 0.3], False, SEEN),  # rank correlation 0.9
        ([0.3, 0.1, 0.05, 0.02, 0.01], False, NOT_SEEN),
        ([0.1, 0.1, 0.1, 0.1, 0.1], False, NOT_SEEN),
        ([0.01, 0.02, 0.05, 0.1, 0.3], True, UNDECIDABLE),  # each hangs on one trial
        ([0.01, 0.02, 0.05], False, UNDECIDABLE),  # three batch sizes
    ],
)
def test_rate_grows(rates, doubt, verdict):
    assert rate_grows(searched(rates, doubt)).verdict is verdict


@pytest.mark.parametrize("raced", [True, False])
def test_a_best_rate_that_no_other_trial_vouches_for_decides_nothing(raced):
    # 14 batch sizes at growing rates; raced, each cell has one complete trial, and a resample without it knows no rate
    cells = {}
    for i, b in enumerate(2**n for n in range(1, 15)):
        cell = Cell(b, 0.0)
        rates = [{"model.learning_rate": 1e-3 * 1.5**i * factor} for factor in (1, 1.01, 1.02, 1.03, 1.04, 1.05)]
        steps = [800 if point == 0 or not raced else None for point in range(6)]
        cells[cell] = [result(cell, point, steps[point], params=rates[point]) for point in range(6)]
    verdict, said = rate_grows(analysis_of(cells, space=SPACE))
    assert (verdict, "known at 0 of 14 batch sizes" in said) == ((UNDECIDABLE, True) if raced else (SEEN, False))


def test_the_rate_that_counts_is_the_effective_one():
    space = SPACE | {"model.momentum": Range(0.5, 0.999, "reverse_log")}
    study = searched([0.1] * 5, space=space, momentum=[0.5, 0.9, 0.95, 0.98, 0.99])
    verdict, said = rate_grows(study)
    assert verdict is SEEN
    number = "1 [1, 1], from 0.200 at B=4 to 10.0 at B=1024"
    assert said == f"S=0: rank correlation of the best effective learning rate with B: {number}"


def test_rate_grows_is_for_studies_that_search_a_rate():
    cell = Cell(8, 0.0)
    width = {"model.width": Range(1, 64)}
    assert rate_grows(analysis_of({cell: [result(cell, 0, 16, params={"model.width": 8})]}, space=width)) is None
    assert rate_grows(searched([0.1])) is None  # one batch size


def counted(shares, points=16, unfinished=0):
    cells = {}
    for b, share in zip(SIZES, shares, strict=False):
        complete = round(share * points)
        cells[Cell(b, 0.0)] = [result(Cell(b, 0.0), i, 160 if i < complete else None) for i in range(points)]
    cells[Cell(SIZES[0], 0.0)] = cells[Cell(SIZES[0], 0.0)][: points - unfinished]
    return analysis_of(cells, space={}, trials=points)


@pytest.mark.parametrize(
    ("study", "verdict"),
    [
        (counted([0.1, 0.3, 0.5, 0.7, 0.9], points=64), SEEN),
        (counted([0.9, 0.7, 0.5, 0.3, 0.1], points=64), NOT_SEEN),
        (counted([1, 1, 1, 1, 1]), UNDECIDABLE),  # nobody knows how much easier the larger ones find it
        (counted([0, 0, 0, 0, 0]), UNDECIDABLE),
        (counted([0.4, 0.5, 0.5, 0.6, 0.5]), UNDECIDABLE),
        (counted([0.1, 0.5, 0.9], points=64), UNDECIDABLE),
        (counted([0.1, 0.3, 0.5, 0.7, 0.9], points=64, unfinished=62), UNDECIDABLE),  # two points are common to all
    ],
)
def test_region_grows(study, verdict):
    assert region_grows(study).verdict is verdict


def test_the_region_is_counted_over_points_that_all_cells_have():
    said = region_grows(counted([0.25, 0.5, 0.5, 0.5, 1.0], points=16, unfinished=8)).measured
    assert said.startswith("S=0: rank correlation of the share of trials complete by step 40,000 with B: ")
    assert said.endswith(", from 0.500 at B=4 to 1.00 at B=1024")
    assert region_grows(counted([0, 0, 0, 0])).measured == "S=0: no trials are complete by step 40,000"


def test_a_budget_beside_the_papers_is_told():
    record = counted([0.25, 0.5, 0.5, 1.0]).record
    network = {"class_path": "lit_dps.models.SimpleCNN"}
    config = {"data": {"class_path": "lit_dps.data.MNIST"}, "model": {"init_args": {"network": network}}}
    short = dataclasses.replace(record, config=config, goal=dataclasses.replace(record.goal, max_steps=2000))
    assert "by step 2,000 (the paper's budget: 40,000) with B" in region_grows(Analysis(short)).measured
    assert "budget" not in region_grows(Analysis(dataclasses.replace(record, config=config))).measured


def test_a_race_is_no_study_of_the_region_and_one_at_k_star_none_of_the_best_rate():
    cells = {Cell(b, 0.0): [result(Cell(b, 0.0), i, 160) for i in range(8)] for b in SIZES}
    assert region_grows(analysis_of(cells, space={}, slack=2.0)) is None
    record = searched([0.01, 0.02, 0.05, 0.1, 0.3]).record
    raced = {slack: rate_grows(Analysis(dataclasses.replace(record, slack=slack))) for slack in (1.0, 2.0)}
    assert raced[1.0] is None and raced[2.0].verdict is SEEN
