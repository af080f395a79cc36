"""Goals that are met within the warm-up, or early in the schedule, of the learning rate are named."""

from __future__ import annotations

from lit_dps.analysis.notes import notes, schedule_notes
from lit_dps.trial import SCHEDULE, WARM_UP, Cell
from tests.unit.fake_study import analysis_of, result


def cells(**observed):
    found = {Cell(b): [result(Cell(b), 0, steps, **observed)] for b, steps in ((8, 320), (64, 48))}
    return analysis_of(found)


def test_a_goal_within_the_warm_up_is_named():
    study = cells(observed={WARM_UP: 48, SCHEDULE: 400})
    (line,) = schedule_notes(study.cells)
    assert "within the warm-up" in line and "B=64 " in line and "(step 48 of 48)" in line and "B=8 " not in line
    assert line in notes(study.record, study.cells)


def test_a_goal_early_in_the_schedule_is_named():
    (line,) = schedule_notes(cells(observed={WARM_UP: 10, SCHEDULE: 1000}).cells)
    assert "early in the schedule" in line and "(4.8 % of 1000 steps)" in line and "B=8 " not in line


def test_nothing_is_said_of_constant_rates_and_of_a_warm_up_that_is_over():
    assert schedule_notes(cells().cells) == []
    assert schedule_notes(cells(observed={WARM_UP: 40, SCHEDULE: 41}).cells) == []
    assert schedule_notes(cells(observed={WARM_UP: 0, SCHEDULE: 400}).cells) == []
