"""Trials that an error, their module or a callback ended: what they still tell, and where they are
left out."""

import dataclasses

import numpy as np
import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.observations import AT_LEAST, observations_of_cells
from lit_dps.analysis.other_goals import at_goal
from lit_dps.analysis.summary import is_comparable, summarize
from lit_dps.analysis.term_comparisons import measured_terms
from lit_dps.core.racing import longest_attempt, truncate_at_race_limit
from lit_dps.core.search_space import Range
from lit_dps.core.statistic import MINIMUM
from lit_dps.core.trial import Cell, Series, Status
from lit_dps.report.figures import lipschitz, metaparameters
from lit_dps.storage.read import read_study
from tests.support.claims import judged
from tests.support.fake_study import result, theory_terms, write_study
from tests.support.texts import numbers_in

CELL = Cell(8, 0.0)


def read(cells, **kw):
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, cells, **{"space": {}, **kw})
    return read_study(storage, "fake")


def curve(steps, error=0.5):
    checks = list(range(16, steps + 1, 16))
    return {"step": checks, "val_error": [error] * len(checks), "train_loss": [1.0] * len(checks)}


def ended(point, status, run=0, cell=CELL, **kept):
    return result(cell, point, None, status, curve=curve(run), **kept)


def test_any_later_attempt_replaces_a_failed_one():
    failed = ended(0, "failed", 160)
    for later in (
        ended(0, "outraced", 32),
        ended(0, "failed", 16),
        ended(0, "stopped"),
        result(CELL, 0, 48),
    ):
        assert longest_attempt(failed, later) is later
    done = result(CELL, 0, 48)
    assert longest_attempt(done, failed) is done
    stopped = ended(0, "stopped", 32)
    assert longest_attempt(stopped, ended(0, "failed", 160)) is stopped


def test_a_failed_attempt_replaces_the_outraced_one_that_it_went_on_from():
    """It ran because the other had not come far enough, and may have failed before its next
    check."""
    outraced = ended(0, "outraced", 64)
    for failed in (ended(0, "failed", 96), ended(0, "failed", 32)):
        assert longest_attempt(outraced, failed) is failed


def test_the_stored_attempts_at_a_failed_point_are_read_as_the_last():
    record = read(
        {
            CELL: [
                ended(0, "failed", failure="OSError: disk full"),
                result(CELL, 0, 96),
                ended(1, "failed"),
            ]
        }
    )
    assert [(r.trial.point, r.status) for r in record.results[CELL]] == [
        (0, Status.COMPLETE),
        (1, Status.FAILED),
    ]
    (cell,) = summarize(record)
    assert (cell.counts[Status.COMPLETE], cell.counts[Status.FAILED]) == (1, 1)


def test_a_cell_with_failed_trials_and_no_k_star_has_no_lower_bound():
    """What the failed trials would have needed is unknown."""
    missed = [ended(point, "incomplete", 160) for point in range(3)]
    for last, bounds in ((ended(3, "incomplete", 160), [AT_LEAST]), (ended(3, "failed"), [])):
        record = read({CELL: [*missed, last]}, trials=4)
        observations = observations_of_cells(record, summarize(record))
        assert [each.bound for each in observations] == bounds


def test_beyond_the_race_they_are_outraced_as_all_others():
    found = [
        result(CELL, 0, 48, curve=curve(48)),
        ended(1, "stopped", 160),
        ended(2, "failed", 160),
    ]
    found += [ended(3, "stopped", 32), ended(4, "failed", 32)]
    assert [(r.status, r.steps_run) for r in truncate_at_race_limit(found, 2, MINIMUM)] == [
        ("complete", 48),
        ("outraced", 96),
        ("outraced", 96),
        ("stopped", 32),
        ("failed", 32),
    ]


def test_a_goal_that_was_met_before_counts():
    record = read({CELL: [ended(i, status, 64) for i, status in enumerate(("stopped", "failed"))]})
    met = [dataclasses.replace(r, curve=curve(64, 0.2)) for r in record.results[CELL]]
    at = at_goal(dataclasses.replace(record, results={CELL: met}), 0.2)
    assert [(r.status, r.steps) for r in at.results[CELL]] == [("complete", 16), ("complete", 16)]


def steps_of(cell, *steps):
    return [result(cell, i, k) for i, k in enumerate(steps)]


LARGE, SPARSE = Cell(64, 0.0), Cell(8, 0.9)
FOUND = {
    CELL: steps_of(CELL, 800, 960, None, 1600),
    Cell(16, 0.0): steps_of(Cell(16, 0.0), 480, 640, None, None),
    LARGE: steps_of(LARGE, 160, 320, None, None),
    SPARSE: steps_of(SPARSE, 1600, 3200, None, None),
    Cell(16, 0.9): [],
    Cell(64, 0.9): [],
}


def test_failed_trials_are_no_trials_of_a_resample_and_stopped_ones_are_not_successful():
    plain = read(FOUND)
    failed = read(FOUND | {CELL: [*FOUND[CELL], ended(4, "failed")]})
    stopped = read(FOUND | {CELL: [*FOUND[CELL], ended(4, "stopped", 160)]})
    incomplete = read(FOUND | {CELL: [*FOUND[CELL], result(CELL, 4, None)]})
    assert [len(record.results_without_failed(CELL)) for record in (plain, failed, stopped)] == [
        4,
        4,
        5,
    ]
    law, of_failed, of_stopped, of_incomplete = (
        Analysis(record).laws[Series(0.0)] for record in (plain, failed, stopped, incomplete)
    )
    assert law == of_failed
    assert of_stopped.observations == of_incomplete.observations != law.observations

    whole = {
        cell: steps_of(cell, *(cell.batch_size * k for k in range(50, 60)))
        for cell in (CELL, SPARSE)
    }
    plain, failed, stopped = (
        Analysis(read(whole | {CELL: [*whole[CELL], *more]})).ratios
        for more in ([], [ended(10, "failed")], [ended(10, "stopped", 160)])
    )
    assert failed == plain != stopped and plain[0].interval is not None


SIZES = (4, 16, 64, 256)


def test_failed_trials_do_not_count_for_the_region_of_successful_ones():
    # Point 7 failed at B = 4: 7 points are common, of which 3, and at B = 256 6, are complete.
    cells = {
        Cell(b, 0.0): [result(Cell(b, 0.0), i, 160 if i < n else None) for i in range(8)]
        for b, n in zip(SIZES, (3, 4, 5, 6), strict=True)
    }
    small = Cell(4, 0.0)
    of_failed, of_stopped = (
        judged(
            "region-grows",
            Analysis(read(cells | {small: [*cells[small][:7], ended(7, status, cell=small)]})),
        ).measured
        for status in ("failed", "stopped")
    )
    assert numbers_in(of_failed)[-2:] == [0.429, 0.857]
    assert numbers_in(of_stopped)[-2:] == [0.375, 0.75]


def test_failed_trials_do_not_count_for_the_best_rate():
    space = {"model.learning_rate": Range(1e-4, 10, "log")}
    cells = {}
    for i, b in enumerate(SIZES):
        at = [{"model.learning_rate": 10.0 ** -(i + 1)}, {"model.learning_rate": 1.0}]
        cells[Cell(b, 0.0)] = [
            result(Cell(b, 0.0), p, 160 + 16 * (p % 2), params=at[p % 2]) for p in range(4)
        ]
    params = {"model.learning_rate": 5.0}
    more = {
        c: [*found, *(ended(p, "failed", cell=c, params=params) for p in (4, 5))]
        for c, found in cells.items()
    }
    records = [read(found, space=space) for found in (cells, more)]
    plain, with_failed = (judged("rate-grows", Analysis(record)) for record in records)
    assert plain == with_failed


@pytest.mark.parametrize(
    ("status", "kept"),
    [("complete", True), ("incomplete", True), ("outraced", True), ("infeasible", False)]
    + [("stopped", False), ("failed", False)],
)
def test_means_over_a_run_are_those_of_runs_that_the_study_ended(status, kept):
    found = result(CELL, 0, 160 if status == "complete" else None, status, **theory_terms(160))
    assert is_comparable(found) is kept
    record = dataclasses.replace(read({CELL: []}), results={CELL: [found]})
    assert bool(measured_terms(record, Series(0.0))) is kept
    assert {*lipschitz.rows(Analysis(record))["drawn"]} == {kept}


def test_the_metaparameter_figure_has_marks_of_theirs_only_where_there_are_any():
    space = {"model.width": Range(1, 9, integer=True)}
    done = [result(CELL, 0, 320, params={"model.width": 4})]
    early = [
        ended(1, "stopped", 160, params={"model.width": 2}),
        ended(2, "failed", params={"model.width": 3}),
    ]

    def drawn(found):
        record = read({CELL: found}, space=space)
        study = Analysis(record)
        figure = metaparameters.draw(
            metaparameters.rows(study), study, metaparameters.axes_of(record)[0]
        )
        (ax,) = figure.axes
        names = [text.get_text() for text in figure.legends[0].get_texts()]
        places = [
            np.asarray(marks.get_offsets()).tolist() for marks in ax.collections[: len(names)]
        ]
        return ax, dict(zip(names, places, strict=True))

    _, marks = drawn(done)
    assert list(marks) == ["met goal", "missed goal", "diverged", "K*"]
    ax, marks = drawn(done + early)
    assert list(marks) == [
        "met goal",
        "missed goal",
        "diverged",
        "ended by callback",
        "failed",
        "K*",
    ]
    assert marks["ended by callback"] == [[2, 160]]  # where it was stopped
    assert marks["failed"] == [[3, 16]]  # it had no check: at the first one, inside the axes
    assert ax.get_ylim()[0] < 16
    assert list(drawn([*done, early[0]])[1]) == [
        "met goal",
        "missed goal",
        "diverged",
        "ended by callback",
        "K*",
    ]
