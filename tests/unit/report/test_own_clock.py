"""Times to the goal by the clock of the runs are of the machines of the runs."""

import dataclasses

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.step_seconds import OWN_CLOCK, QUIET
from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.core.trial import Cell
from lit_dps.core.unit import SECONDS
from lit_dps.report.document import study_document
from lit_dps.report.html.cost_table import timed_devices
from lit_dps.report.timing_notes import place_of, several_machines, steps_of_trials
from tests.unit.analysis.test_median_bounds import study
from tests.unit.analysis.test_ramps import CONSTANT, RAMP
from tests.unit.analysis.test_ramps import study as growing_study

A = "machine A"
B = "machine B"


def quiet_timing(cells, ranks=1):
    """Return times of steps that were measured alone on machine A."""
    timings = tuple(CellTiming(cell, (0.002,) * 3, 0.1) for cell in cells)
    return StepTiming(A, "2026-11-30", 1, ranks, timings)


def on(analysis, *machines, timing=None, validate_every=None):
    """Return a study whose trials ran on some machines."""
    environments = tuple({"key": machine, "hardware": machine} for machine in machines)
    record = dataclasses.replace(analysis.record, environments=environments, step_timing=timing)
    return Analysis(record, validate_every=validate_every)


def machines_of(analysis, time_steps=False):
    """Return the machines whose times cannot be compared.

    Args:
        analysis: The study.
        time_steps: Whether times of steps that are measured anew can be compared.
    """
    (note,) = several_machines(analysis)
    assert ("--time-steps" in note["action"]) == time_steps
    return note["machines"].split(" and on ")


def test_k_star_in_seconds_is_by_the_clock_of_the_trials():
    searched = study(SECONDS)
    timing = quiet_timing(searched.record.cells)
    analysis = on(searched, A, B, timing=timing)
    assert set(analysis.answer["timing"]) == {OWN_CLOCK}
    document = study_document(analysis, []).to_dict()
    assert {cell["timing"] for cell in document["cells"]} == {OWN_CLOCK}
    # The seconds of a step are still those of the timing.
    assert document["cells"][0]["step_seconds"] == pytest.approx(0.002)
    assert document["step_timing"]["machine"] == A
    assert machines_of(analysis) == [A, B]
    assert place_of(analysis) not in (A, B)
    assert not list(steps_of_trials(analysis))

    other = on(searched, B, timing=timing)
    assert place_of(other) == B
    assert not list(several_machines(other))
    # Validations were timed on machine A.
    validated = on(searched, B, timing=timing, validate_every=8)
    assert machines_of(validated, time_steps=True) == [A, B]


def test_steps_that_were_timed_alone_are_of_one_machine():
    searched = study()
    analysis = on(searched, A, B, timing=quiet_timing(searched.record.cells))
    assert set(analysis.answer["timing"]) == {QUIET}
    assert place_of(analysis) == A
    assert not list(several_machines(analysis))


def test_growing_batches_on_two_machines_cannot_be_compared():
    searched = growing_study({Cell(64, 0.0, RAMP): 28}, schedules=("doubling",))
    analysis = on(searched, A, B)
    assert set(analysis.answer["timing"]) == {OWN_CLOCK}
    assert machines_of(analysis) == [A, B]
    assert not list(several_machines(on(searched, A)))


def test_growing_batches_are_not_of_the_machine_that_timed_the_constant_ones():
    searched = growing_study()
    constant = [cell for cell in searched.record.cells if cell.series.axes == CONSTANT]
    analysis = on(searched, B, timing=quiet_timing(constant, ranks=4))
    assert set(analysis.answer["timing"]) == {OWN_CLOCK, QUIET}
    assert machines_of(analysis, time_steps=True) == [A, B]
    assert timed_devices(analysis) == [1, 4]
    assert place_of(on(searched, A, timing=quiet_timing(constant))) == A
