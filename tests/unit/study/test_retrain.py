"""Whether a trial that was trained again ended like the stored one."""

from __future__ import annotations

import pytest

from lit_dps.core.attempt import Attempt, Validation
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.study.retrain import compare_with_stored
from tests.support.fake_study import result

GOAL = Goal(0.1, check_interval=16, max_steps=32)
TRIAL = Trial(Cell(4), 0, {})


def again(*values: float, goal: Goal = GOAL) -> Attempt:
    """An attempt that validated after each 16 steps; it diverged if the last value is nan."""
    attempt = Attempt(TRIAL, goal)
    for i, value in enumerate(values, start=1):
        spent = {"seconds": 1.0}
        attempt.record(
            Validation(16 * i, value, loss=1.0, weights_finite=value == value, spent=spent)
        )
    return attempt


def stored(status: str, *values: float, exact: int = 1):
    steps = [16 * i for i in range(1, len(values) + 1)]
    curve = {"step": steps, "val_error": [*values], "exact": [exact] * len(values)}
    return result(TRIAL.cell, 0, None, status, curve=curve)


@pytest.mark.parametrize(
    ("attempt", "of_study", "is_equal"),
    [
        (again(0.5, float("nan")), stored("infeasible", 0.5, float("nan")), True),
        (again(0.5, float("nan")), stored("infeasible", float("nan")), False),
        (again(0.5, 0.4), stored("incomplete", 0.5, 0.4), True),
        (again(0.5, 0.4), stored("incomplete", 0.5, 0.400001), True),
        (again(0.5, 0.4), stored("incomplete", 0.5, 0.3), False),
        (again(0.5, 0.4), stored("incomplete", 0.5, 0.3, exact=0), True),
        (again(0.5, 0.4), stored("incomplete", 0.5), False),
        (again(0.5, 0.4), stored("infeasible", 0.5, 0.4), False),
    ],
)
def test_trials_without_k_are_compared_by_their_last_check(attempt, of_study, is_equal):
    line = compare_with_stored(attempt, of_study)
    assert line.startswith("warning") is not is_equal
    if not is_equal:
        assert f"{of_study.status} after {of_study.steps_run} steps" in line


def test_a_bound_of_a_stopped_validation_is_no_value():
    line = compare_with_stored(again(0.5, 0.4), stored("outraced", 0.31, exact=0))
    assert "outraced after 16 steps" in line and "0.31" not in line


def test_steps_within_a_budget_of_seconds_are_not_compared():
    goal = Goal(0.1, check_interval=16, max_steps=320, max_seconds=2.0)
    attempt = again(0.5, 0.4, goal=goal)
    line = compare_with_stored(attempt, stored("incomplete", 0.5))
    assert attempt.status is Status.INCOMPLETE
    assert not line.startswith("warning")
