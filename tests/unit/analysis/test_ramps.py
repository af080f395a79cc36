"""What a growing batch saves beside a constant one: ratios, limits and the sentence, by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import K_STAR, MEDIAN
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Series, Status, Trial, TrialResult
from lit_dps.report.answer import ramp_text
from lit_dps.report.publish import publish
from tests.support.texts import answer_text

SPACE = {"model.learning_rate": Range(1e-3, 10.0, "log")}
GOAL = Goal(0.1, check_interval=2, max_steps=400)
CONSTANT = (("batch.schedule", "constant"),)
# Of B = 64: 10 steps of 16, 10 of 32, then 64 examples.
RAMP = (("batch.schedule", "doubling"),)
SECTION = {"options": {"start": 0.25, "steps": 10}}
STEPS = {
    Cell(16, 0.0, CONSTANT): 60,  # 960 examples
    Cell(32, 0.0, CONSTANT): 40,  # 1,280
    Cell(64, 0.0, CONSTANT): 30,  # 1,920
    Cell(64, 0.0, RAMP): 28,  # 160 + 320 + 8 x 64 = 992
}


def run(cell, steps, point=0, repeat=0):
    trial = Trial(cell, point, {"model.learning_rate": 0.1}, repeat=repeat)
    status = Status.COMPLETE if steps else Status.INCOMPLETE
    curve = {"step": [steps or 400], "val_error": [0.5], "train_loss": [1.0]}
    timed = {"steps": steps or 400, "training": 1.0, "checks": 1, "checking": 0.1}
    return TrialResult(trial, status, steps, curve=curve, seconds=2.0, timed=timed)


def study(steps=STEPS, repeats=None, schedules=("constant", "doubling")):
    record = StudyRecord(
        name="made up",
        workload="digits",
        goal=GOAL,
        space=SPACE,
        batch_sizes=(16, 32, 64),
        sparsities=(0.0,),
        trials=1,
        seed=0,
        goals=(),
        race_factor=None,
        config={"batch": SECTION},
        results={},
        running={},
        axes={"batch.schedule": schedules},
    )
    results = {cell: [] for cell in record.cells}
    for cell, of_cell in steps.items():
        results[cell] = [run(cell, of_cell)]
    running = dict.fromkeys(record.cells, 0)
    record = dataclasses.replace(record, results=results, running=running)
    if repeats:
        runs = {cell: [] for cell in record.cells}
        for cell, of_seeds in repeats.items():
            runs[cell] = [run(cell, k, repeat=i) for i, k in enumerate(of_seeds, 1)]
        record = dataclasses.replace(record, plan=RepeatPlan(5), repeats=runs)
    return Analysis(record)


def test_a_ramp_is_compared_with_the_constant_batch_of_the_nearest_examples():
    (row,) = study().ramps.to_dict("records")
    assert (row["batch_size"], row["steps"], row["examples"]) == (64, 28, 992)
    assert (row["constant_batch_size"], row["constant_steps"]) == (16, 60)
    assert row["constant_examples"] == 960
    assert row["steps_ratio"] == pytest.approx(28 / 60)
    assert row["examples_ratio"] == pytest.approx(992 / 960)
    assert math.isnan(row["steps_low"]) or row["steps_low"] is None
    text = ramp_text(study(), Series(0.0, RAMP), 64)
    assert text == (
        "The batch schedule up to B = 64 needs 53 % fewer steps and 3 % more examples than the "
        "constant batch size nearest in examples, B = 16 (by K*)"
    )
    assert text in answer_text(study())


def test_with_repeats_the_ratio_is_of_medians_with_limits():
    # Medians of 60 and 30: 960 examples, and 480 + 10 x 64 = 1,120.
    repeats = {
        Cell(16, 0.0, CONSTANT): [50, 60, 60, 60, 80],
        Cell(64, 0.0, RAMP): [30, 30, 30, 30, 30],
    }
    found = study(repeats=repeats)
    (row,) = found.ramps.to_dict("records")
    assert (row["steps"], row["constant_steps"], row["examples"]) == (30, 60, 1120)
    assert row["steps_of"] == "the median K over seeds"
    assert row["steps_ratio"] == 0.5
    # All medians of the ramp are 30, and the medians of the constant batch are 50, 60 or 80.
    assert (row["steps_low"], row["steps_high"]) == pytest.approx((30 / 80, 30 / 50))
    assert row["examples_low"] == pytest.approx(1120 / (80 * 16))
    text = ramp_text(found, Series(0.0, RAMP), 64)
    assert "50 % fewer steps [-62 %, -40 %] and 17 % more examples [-12 %, +40 %]" in text


def test_what_cannot_be_compared_is_said():
    alone = study({Cell(64, 0.0, RAMP): 28}, schedules=("doubling",))
    assert not len(alone.ramps)
    text = ramp_text(alone, Series(0.0, RAMP), 64)
    assert "unknown: compare it with constant on an axis batch.schedule" in text
    at_first_check = STEPS | {Cell(64, 0.0, RAMP): 2}
    for steps in (at_first_check, {Cell(64, 0.0, RAMP): 28}):
        found = study(steps)
        assert not len(found.ramps)
        text = ramp_text(found, Series(0.0, RAMP), 64)
        assert "unknown: its K*, or each K* of a constant batch, is missing or a bound" in text


def test_repeats_that_miss_the_goal_widen_the_limits():
    # A third of the resampled medians of the ramp are infinite: 3 or more of 5 miss, at 2 in 5.
    repeats = {
        Cell(16, 0.0, CONSTANT): [60, 60, 60, 60, 60],
        Cell(64, 0.0, RAMP): [24, 30, 36, None, None],
    }
    (row,) = study(repeats=repeats).ramps.to_dict("records")
    assert row["steps_ratio"] == 36 / 60
    assert (row["steps_low"], row["steps_high"]) == (24 / 60, math.inf)
    # 160 + 320 + 4 x 64 = 736 examples of 24 steps.
    assert (row["examples_low"], row["examples_high"]) == (pytest.approx(736 / 960), math.inf)
    # Two infinite medians have an unknown ratio.
    repeats[Cell(16, 0.0, CONSTANT)] = [60, 60, 60, None, None]
    (row,) = study(repeats=repeats).ramps.to_dict("records")
    assert (row["steps_low"], row["steps_high"]) == (0.0, math.inf)


def test_a_limit_that_is_infinite_is_written_and_the_study_is_published(tmp_path):
    # One repeat of five missed the goal, so some resampled medians of the ramp are infinite.
    repeats = {
        Cell(16, 0.0, CONSTANT): [60, 60, 60, 60, 60],
        Cell(64, 0.0, RAMP): [24, 30, 36, 40, None],
    }
    found = study(repeats=repeats)
    text = ramp_text(found, Series(0.0, RAMP), 64)
    assert "40 % fewer steps [-60 %, +inf %] and 57 % more examples [-23 %, +inf %]" in text
    publish(found, tmp_path)
    assert text in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_median_at_the_first_check_is_a_bound_and_not_compared():
    repeats = {
        Cell(16, 0.0, CONSTANT): [60, 60, 60, 60, 60],
        Cell(32, 0.0, CONSTANT): [2, 2, 2, 40, 40],
        Cell(64, 0.0, RAMP): [30, 30, 30, 30, 30],
    }
    found = study(repeats=repeats)
    points = found.ramp_points.set_index(["constant", "batch_size"])
    assert points["floor"].to_dict() == {(1, 16): 0, (1, 32): 1, (1, 64): 0, (0, 64): 0}
    assert points.loc[(1, 32), "steps"] == 2
    (row,) = found.ramps.to_dict("records")
    assert (row["constant_batch_size"], row["steps_of"]) == (16, MEDIAN)
    # The median of the ramp is a bound, so K* is compared.
    repeats[Cell(64, 0.0, RAMP)] = [2, 2, 2, 30, 30]
    (row,) = study(repeats=repeats).ramps.to_dict("records")
    assert (row["steps"], row["constant_steps"], row["steps_of"]) == (28, 60, K_STAR)
    # K* is a bound and the median is exact.
    bounded = study(STEPS | {Cell(32, 0.0, CONSTANT): 2}, {Cell(32, 0.0, CONSTANT): [30, 40, 50]})
    points = bounded.ramp_points.set_index(["constant", "batch_size"])
    assert (points.loc[(1, 32), "steps"], points.loc[(1, 32), "floor"]) == (40, 0)
