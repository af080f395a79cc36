"""Goals on any metric that a module logs: at most or at least, any finite value, any name."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.cli.fit import CALLBACKS
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status
from lit_dps.core.trial_config import GoalConfig
from lit_dps.report import figures
from lit_dps.training import GoalErrorCallback
from tests.support.errors import refuses
from tests.support.fake_study import analysis_of, result
from tests.support.tiny import Plain, fit, loader
from tests.unit.study.test_grid import setup


def run(values, **goal):
    callback = GoalErrorCallback(check_interval=1, max_steps=4, **goal)
    fit(Plain(errors=values, name=callback.monitor), loader(), loader(), callbacks=[callback])
    return callback


@pytest.mark.parametrize(
    ("values", "goal", "steps"),
    [
        ((0.5, 0.9, 0.98, 0.99), {"metric": "val/acc", "at_least": 0.98}, 3),
        ((9.0, 7.5, 6.0, 5.0), {"metric": "val/ppl", "at_most": 7.5}, 2),
        ((-3.0, -1.0, -0.4, 0.0), {"metric": "log_likelihood", "at_least": -0.5}, 3),
        ((3.0, 1.0, -2.5, 0.0), {"metric": "loss", "at_most": -2.0}, 3),
        ((0.5, 0.3, 0.2, 0.1), {"error": 0.2}, 3),
        ((0.5, 0.3, 0.2, 0.1), {"metric": "val_error", "at_most": 0.2}, 3),
    ],
)
def test_a_run_stops_at_the_first_check_that_meets_its_goal(values, goal, steps):
    found = run(values, **goal)
    assert (found.status, found.steps_to_result) == (Status.COMPLETE, steps)
    assert found.curve[found.goal.metric] == pytest.approx(values[:steps])


def test_a_value_that_is_not_finite_meets_no_goal():
    assert run((math.inf,) * 4, metric="val/psnr", at_least=30).status is Status.INCOMPLETE
    assert run((-math.inf,) * 4, metric="loss", at_most=1).status is Status.INCOMPLETE
    assert run((0.1, 0.2), metric="val/acc", at_least=0.9).status is Status.INCOMPLETE


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_yet_finite_does_not_end_a_run(missing):
    rising = run((missing, missing, 0.5, 0.95), metric="val_pearson", at_least=0.9)
    assert (rising.status, rising.steps_to_result) == (Status.COMPLETE, 4)
    falling = run((missing, 0.5, 0.05, 0.05), metric="val_gap", at_most=0.1)
    assert (falling.status, falling.steps_to_result) == (Status.COMPLETE, 3)
    never = run((missing,) * 4, metric="val_pearson", at_least=0.9)
    assert (never.status, never.steps_to_result) == (Status.INCOMPLETE, None)
    assert never.curve["step"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("goal", "key", "value"),
    [
        ({}, "goal", {}),
        ({"error": 0.1, "at_most": 0.1}, "goal", {"error": 0.1, "at_most": 0.1}),
        ({"metric": "val_acc", "at_most": 0.9}, "goal.metric", "val_acc"),
        ({"error": 0.1, "monitor": "val_acc"}, "goal.monitor", "val_acc"),
        ({"error": 0.5, "metric": "val_loss"}, "goal.error", 0.5),
        ({"metric": "val/ppl", "at_most": math.inf}, "goal.at_most", math.inf),
        ({"metric": "train_loss", "at_most": 0.1}, "goal.metric", "train_loss"),
        ({"metric": "val_error", "at_most": 1.5}, "goal.error", 1.5),
    ],
)
def test_a_goal_that_is_not_allowed_is_refused_by_key(goal, key, value):
    with refuses(key, value):
        GoalErrorCallback(**goal)


@pytest.mark.parametrize(
    ("goal", "key"),
    [
        ({"metric": "val/psnr", "at_least": 30}, "goal.metric"),
        ({"monitor": "val/gap", "error": 0.1}, "goal.monitor"),
    ],
)
def test_a_metric_that_is_not_logged_is_named_under_the_key_that_names_it(goal, key):
    callback = GoalErrorCallback(check_interval=1, max_steps=4, **goal)
    with refuses(key, callback.monitor):
        fit(Plain(errors=(0.5,) * 4), loader(), loader(), callbacks=[callback])


@pytest.mark.parametrize(
    ("goal", "logged", "key", "value"),
    [
        ({"error": 0.02}, 97.0, "goal.monitor", "val_error"),
        ({"error": 0.02}, 3.0, "goal.monitor", "val_error"),
        ({"error": 0.02}, -0.5, "goal.monitor", "val_error"),
        ({"metric": "val_error", "at_most": 0.02}, 3.0, "goal.metric", "val_error"),
        ({"metric": "val/acc", "at_least": 0.98}, 97.0, "goal.at_least", 0.98),
    ],
)
def test_a_metric_in_percent_is_refused_where_the_goal_is_a_share(goal, logged, key, value):
    with refuses(key, value) as refused:
        run((logged,) * 4, **goal)
    assert f"{logged:g}" in str(refused.value) and "percent" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("goal", "logged"),
    [
        ({"error": 0.02}, 1.0 + 1e-7),  # a mean of float32
        ({"metric": "val/acc", "at_least": 98.0}, 97.0),
        ({"metric": "reward", "at_least": 0.5}, 0.4),
        ({"metric": "val/loss", "at_most": 0.5}, 97.0),
    ],
)
def test_a_metric_in_the_unit_of_the_goal_is_recorded(goal, logged):
    assert run((logged,) * 4, **goal).status is Status.INCOMPLETE


def test_a_goal_is_stored_and_read_and_one_of_earlier_versions_is_a_validation_error():
    goals = [Goal(0.1, 4, 16), Goal(0.98, 4, 16, "val/acc", True), Goal(-3.5, 4, 16, "ppl")]
    assert [Goal.from_dict(goal.to_dict()) for goal in goals] == goals
    assert goals[0].to_dict() == {"error": 0.1, "check_interval": 4, "max_steps": 16}
    texts = [str(goal).split() for goal in goals]
    assert texts == [
        ["goal", "error", "0.1"],
        ["goal", "val/acc", ">=", "0.98"],
        ["goal", "ppl", "<=", "-3.5"],
    ]
    assert [goal.is_easier(goal.value + 0.1) for goal in goals] == [True, False, True]


def test_all_ways_to_write_a_validation_error_are_one_identity():
    made = setup({}, batch_sizes=[16], sparsities=[0.5])
    base = {"check_interval": 4, "max_steps": 16, "monitor": "val_error", "early_reject": True}
    empty = {"error": None, "metric": None, "at_most": None, "at_least": None}

    def of(**goal):
        return dataclasses.replace(made, goal=GoalConfig(**(base | empty | goal))).identity(None)[
            "goal"
        ]

    assert of(error=0.1) == of(at_most=0.1) == of(metric="val_error", at_most=0.1)
    assert of(error=0.1) == {
        "error": 0.1,
        "check_interval": 4,
        "max_steps": 16,
        "monitor": "val_error",
    }
    assert of(metric="a", at_least=0.1) != of(metric="a", at_most=0.1) != of(error=0.1, monitor="a")
    assert CALLBACKS["goal"] is GoalErrorCallback


def test_a_study_answers_goals_that_are_easier():
    curve = {"step": [4, 8, 12], "val/acc": [0.5, 0.8, 0.9], "train_loss": [1.0] * 3}
    cell, goal = Cell(16, 0.0), Goal(0.9, 4, 16, "val/acc", True)
    study = analysis_of({cell: [result(cell, 0, 12, curve=curve)]}, goal=goal, goals=[0.8, 0.6])
    assert study.record.goal == goal
    assert [each.cells[0].k_star for each in study.at_each_goal] == [12, 8, 8]
    with refuses("goals", 0.95):
        study.at_goal(0.95)
    logs = figures.logs.rows(study)
    assert logs["val/acc"].tolist() == [0.5, 0.8, 0.9] and "val_error" not in logs


def test_a_monitored_loss_may_be_above_1():
    losses = (3.0, 1.5, 0.01, 0.01)
    callback = GoalErrorCallback(error=0.02, monitor="val_loss", check_interval=1, max_steps=4)
    fit(Plain(errors=losses, name="val_loss"), loader(), loader(), callbacks=[callback])
    assert (callback.status, callback.steps_to_result) == (Status.COMPLETE, 3)
