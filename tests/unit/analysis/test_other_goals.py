"""A study at a higher goal: what its curves say of goals above the one that stopped it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.other_goals import at_goal
from lit_dps.analysis.summary import summarize
from lit_dps.core.goal import Goal
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.search_space import Choices
from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.core.trial import Cell, Status
from lit_dps.report.notes import lines_of
from lit_dps.report.repeats import (
    REPEATS,
    samples_without_repeats,
    unreached_by_repeats,
)
from lit_dps.report.warnings import (
    first_check_bounds,
    pending_trials,
    study_notes,
    undetermined_trials,
)
from lit_dps.storage.read import read_study
from tests.support.errors import refuses
from tests.support.fake_study import analysis_of, result, write_study
from tests.support.texts import numbers_in

CELL = Cell(16, 0.0)
GOAL = Goal(0.1, check_interval=16, max_steps=64)


@pytest.fixture
def record(tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"

    def curve(*errors):
        steps = [16 * (i + 1) for i in range(len(errors))]
        return {"step": steps, "val_error": list(errors), "train_loss": [1.0] * len(errors)}

    measured = {
        "step": [10, 20, 40],
        "lipschitz": [1.0, 2.0, 3.0],
        "squared_gradient": [4.0, 5.0, 6.0],
    }
    trials = [
        result(CELL, 0, 48, curve=curve(0.5, 720 / 6000, 0.1), readings={"lipschitz": measured}),
        result(CELL, 1, None, curve=curve(0.5, 0.11, 0.3, 0.2)),
        result(CELL, 2, None, curve=curve(0.5, 0.4, 0.3, 0.2)),
        result(CELL, 3, None, "infeasible", curve=curve(0.12, math.nan)),
        result(CELL, 4, None, "infeasible", curve=curve(math.nan)),
    ]
    write_study(storage, {CELL: trials}, goal=GOAL, goals=[0.12])
    return read_study(storage, "fake")


def test_the_first_check_that_meets_a_goal_counts(record):
    at = at_goal(record, 0.12)
    assert [(r.status, r.steps) for r in at.results[CELL]] == [
        (Status.COMPLETE, 32),
        (Status.COMPLETE, 32),
        (Status.INCOMPLETE, None),
        (Status.COMPLETE, 16),  # it met the goal before it diverged
        (Status.INFEASIBLE, None),
    ]
    assert at.goal == Goal(0.12, 16, 64)
    assert summarize(at)[0].best.trial.point == 3
    assert at.results[CELL][1].curve["val_error"] == [0.5, 0.11]
    assert at.results[CELL][0].readings["lipschitz"]["step"] == [10, 20]


def test_the_studys_own_goal_changes_nothing(record):
    assert at_goal(record, 0.1).results == record.results
    assert record.goals == (0.12,)


def test_a_lower_goal_is_refused(record):
    with refuses("goals", 0.05):
        at_goal(record, 0.05)


def early(*checks, point=0):
    """A trial by its checks (step, error, exact); the goal is met at the last one."""
    steps, errors, exact = (list(column) for column in zip(*checks, strict=True))
    curve = {"step": steps, "val_error": errors, "train_loss": [1.0] * len(steps), "exact": exact}
    return result(CELL, point, steps[-1], curve=curve)


def test_trials_whose_check_stopped_early_are_told_and_may_be_faster():
    whole, goal = early((32, 0.24, 1), (48, 0.1, 1)), Goal(0.1, 16, 640)
    sooner, later = (early((step, 0.2, 0), (64, 0.1, 1), point=1) for step in (16, 32))
    cells = [CELL, Cell(32), Cell(64)]

    def study(other, points=2):
        return analysis_of(
            {
                cell: [
                    dataclasses.replace(r, trial=dataclasses.replace(r.trial, cell=cell))
                    for r in (whole, other)
                ]
                for cell in cells
            },
            space={},
            goal=goal,
            trials=points,
        )

    for other, bound in ((sooner, True), (later, False)):
        at = study(other).at_goal(0.25)
        assert [(c.k_star, c.is_upper_bound, c.pending) for c in at.cells] == [(32, bound, 0)] * 3
        assert at.table["floor"].tolist() == [bound] * 3
        assert (at.laws[CELL.series].fit is None) == bound, "the law takes no bound"
        assert at.best_of_n_table["floor"].tolist() == [bound] * 3
        (note,) = undetermined_trials(at)
        assert (note["count"], note["declared"], note["goal"]) == (3, 6, at.record.goal)
        assert numbers_in(note["consequence"]) == [3, 3] * bound
        assert [*pending_trials(at)] == []
        assert [*first_check_bounds(at)] == []
    own = study(sooner)
    assert [*undetermined_trials(own)] == [], "at its own goal all is known"
    more = study(later, points=3).at_goal(0.25)
    assert more.cells[0].pending == 1
    assert [*pending_trials(more)] == [{"pending": 3, "declared": 9, "running": 0}]


def repeated(run_on: bool = False):
    """Point 0 is the best at goal 0.1, point 1 at 0.2; two repeats of the former, of which one
    missed."""

    def trial(point, *errors, repeat=0):
        steps = [16 * (i + 1) for i in range(len(errors))]
        met = next((step for step, error in zip(steps, errors, strict=True) if error <= 0.1), None)
        found = result(
            CELL,
            point,
            met,
            curve={"step": steps, "val_error": errors, "train_loss": [1.0] * len(errors)},
        )
        return dataclasses.replace(found, trial=dataclasses.replace(found.trial, repeat=repeat))

    rest = (0.05, 0.05) if run_on else ()
    found = analysis_of(
        {CELL: [trial(0, 0.3, 0.1, *rest), trial(1, 0.2, 0.15, 0.1)]}, space={}, goal=GOAL, trials=2
    )
    repeats = [trial(0, 0.3, 0.2, 0.1, repeat=1), trial(0, 0.3, 0.3, 0.2, 0.2, repeat=2)]
    record = dataclasses.replace(
        found.record, repeats={CELL: repeats}, plan=RepeatPlan(2), train_past_goal=run_on
    )
    return Analysis(record)


def test_a_repeat_beyond_the_limit_at_an_easier_goal_missed_it():
    study = repeated()
    record = dataclasses.replace(study.record, plan=RepeatPlan(2, slack=2.0))
    for value in (0.1, 0.2, 0.3):
        at = Analysis(record).at_goal(value)
        (k_star,) = [cell.k_star for cell in at.cells]
        for repeat in at.record.repeats[CELL]:
            assert repeat.steps is None or repeat.steps <= 2 * k_star


def test_repeats_are_of_the_points_that_are_best_at_the_studys_own_goal():
    study = repeated()
    assert not any("repeat" in line for line in study_notes(study))
    (own,) = study.repeats
    assert (own.point, own.costs_over_seeds, own.planned) == (0, [48, math.inf], 2)
    at = study.at_goal(0.2)
    (best,) = at.repeats
    assert (best.point, best.costs_over_seeds, best.planned) == (1, [], 0)
    assert [*samples_without_repeats(at)] == [
        {"without": 1, "samples": 1, "goal": study.record.goal}
    ]
    assert sum("repeats" in line for line in study_notes(at)) == 1
    (same,) = study.at_goal(0.11).repeats  # where the same point is the best its repeats serve
    assert (same.point, same.costs_over_seeds, same.planned) == (0, [48, math.inf], 2)
    assert not any("repeat" in line for line in study_notes(study.at_goal(0.11)))


def test_at_a_harder_goal_there_are_no_repeats_since_they_ended_before():
    harder = repeated(run_on=True).at_goal(0.05)
    assert harder.cells[0].k_star == 48
    assert harder.repeats[0].results == []
    assert [*unreached_by_repeats(harder)] == [{"goal": harder.original.goal}]
    assert lines_of(REPEATS, harder) == lines_of(REPEATS[:1], harder)


def of_width(point, width, steps, easier_at, step_seconds):
    """A trial of a network of a width that meets 0.2 at step `easier_at`, and 0.1 at its end."""
    checks = list(range(16, steps + 1, 16))
    errors = [0.19 if step >= easier_at else 0.5 for step in checks]
    curve = {"step": checks, "val_error": [*errors[:-1], 0.1], "train_loss": [1.0] * len(checks)}
    timed = {"steps": steps, "training": steps * step_seconds, "checks": 1, "checking": 0.001}
    return result(CELL, point, steps, params={"model.width": width}, curve=curve, timed=timed)


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_step_takes_as_long_as_in_the_network_that_is_best_at_the_goal(is_quiet):
    """The narrow network is the first at an error of 0.2, and the wide one at 0.1."""
    trials = [of_width(0, 64, 320, 80, 0.001), of_width(1, 1024, 160, 112, 0.05)]
    space = {"model.width": Choices([64, 1024])}
    record = analysis_of({CELL: trials}, goal=GOAL, goals=[0.2], space=space).record
    if is_quiet:
        timing = CellTiming(CELL, (0.04,) * 3, 0.001, {"model.width": 1024})
        record = dataclasses.replace(record, step_timing=StepTiming("CPU", "", 1, 1, (timing,)))
    wide, narrow = Analysis(record).at_each_goal
    assert (wide.table["width"].tolist(), narrow.table["width"].tolist()) == ([1024], [64])
    assert wide.answer["step_seconds"].tolist() == pytest.approx([0.04 if is_quiet else 0.05])
    assert narrow.answer["step_seconds"].tolist() == pytest.approx([0.001])
    assert narrow.answer["seconds"].tolist() == pytest.approx([0.08])
