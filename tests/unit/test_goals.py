"""A study at a higher goal: what its curves say of goals above the one that stopped it."""

from __future__ import annotations

import math

import pytest

from lit_dps.analysis import at_goal, summarize
from lit_dps.errors import ConfigError
from lit_dps.goal import Goal
from lit_dps.store import read_study
from lit_dps.trial import Cell, Status
from tests.unit.fake_study import result, write_study

CELL = Cell(16, 0.0)
GOAL = Goal(0.1, check_interval=16, max_steps=64)


@pytest.fixture
def record(tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"

    def curve(*errors):
        steps = [16 * (i + 1) for i in range(len(errors))]
        return {"step": steps, "val_error": list(errors), "train_loss": [1.0] * len(errors)}

    measured = {"step": [10, 20, 40], "lipschitz": [1.0, 2.0, 3.0], "squared_gradient": [4.0, 5.0, 6.0]}
    trials = [
        result(CELL, 0, 48, curve=curve(0.5, 720 / 6000, 0.1), smoothness=measured),
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
    assert at.results[CELL][0].smoothness["step"] == [10, 20]


def test_the_studys_own_goal_changes_nothing(record):
    assert at_goal(record, 0.1).results == record.results
    assert record.goals == (0.12,)


def test_a_lower_goal_is_refused(record):
    with pytest.raises(ConfigError, match="goals: 0.05 is not allowed; at least 0.1"):
        at_goal(record, 0.05)
