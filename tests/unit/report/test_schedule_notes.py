"""Goals that are met within the warm-up, or early in the schedule, of the learning rate are
named."""

from __future__ import annotations

from lit_dps.core.trial import SCHEDULE, WARM_UP, Cell
from lit_dps.report.notes import lines_of
from lit_dps.report.trial_notes import SCHEDULES, warm_up_notes
from lit_dps.report.warnings import study_notes
from tests.support.fake_study import analysis_of, result
from tests.support.texts import numbers_in


def cells(**observed):
    found = {Cell(b): [result(Cell(b), 0, steps, **observed)] for b, steps in ((8, 320), (64, 48))}
    return analysis_of(found)


def test_a_goal_within_the_warm_up_is_named():
    study = cells(flags={WARM_UP: 48, SCHEDULE: 400})
    (line,) = lines_of(SCHEDULES, study)
    assert "B=64 S=0 " in line and "B=8 " not in line and numbers_in(line) == [48, 48]
    assert line in study_notes(study)


def test_a_warm_up_that_is_longer_than_a_predicted_k_is_named():
    trials = [
        result(Cell(8), point, 320, flags={WARM_UP: 100, SCHEDULE: 400}) for point in range(2)
    ]
    (line,) = warm_up_notes(trials, {8: 320.0, 64: 100.0, 32: 140.0, 128: 60.0})
    assert numbers_in(line) == [64, 128, 100]
    assert warm_up_notes(trials, {8: 320.0}) == [] == warm_up_notes(trials, {})
    assert warm_up_notes([result(Cell(8), 0, 320)], {64: 1.0}) == []
    other = result(Cell(8), 2, 320, flags={WARM_UP: 50, SCHEDULE: 400})
    assert warm_up_notes([*trials, other], {64: 60.0}) == [], "a warm-up that is searched"


def test_a_goal_early_in_the_schedule_is_named():
    (line,) = lines_of(SCHEDULES, cells(flags={WARM_UP: 10, SCHEDULE: 1000}))
    assert "B=64 S=0 " in line and "B=8 " not in line and numbers_in(line) == [4.8, 1000]


def test_nothing_is_said_of_constant_rates_and_of_a_warm_up_that_is_over():
    assert lines_of(SCHEDULES, cells()) == []
    assert lines_of(SCHEDULES, cells(flags={WARM_UP: 40, SCHEDULE: 41})) == []
    assert lines_of(SCHEDULES, cells(flags={WARM_UP: 0, SCHEDULE: 400})) == []
