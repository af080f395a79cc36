"""When the checks of a run meet its goal: by hand-written curves."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.observations import observations_of_cells
from lit_dps.analysis.other_goals import at_goal
from lit_dps.analysis.summary import summarize, trial_rows
from lit_dps.core.attempt import Attempt, Validation
from lit_dps.core.goal import Goal, GoalRule
from lit_dps.core.identity import one_spelling
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.core.trial_config import GoalConfig, plain
from lit_dps.report.warnings import study_notes
from lit_dps.storage.read import read_study
from lit_dps.study.identity import goal_of
from lit_dps.testing import check_goal
from tests.support.errors import refuses
from tests.support.fake_study import result, write_study

MEAN = {"rule": "mean_of_checks", "options": {"checks": 3}}
STAYS = {"rule": "stays_below", "options": {"checks": 2}}
NAN, INF = math.nan, math.inf


class Patience(GoalRule):
    """Meets the goal once the best value reaches it and is 2 checks old."""

    def is_met(self, values, goal):
        best = min(values)
        return goal.is_reached(best) and len(values) - 1 - values.index(best) >= 2


PATIENCE = {"rule": f"{__name__}.Patience"}


def curve_of(*values: float) -> dict[str, list[float]]:
    steps = [4.0 * (i + 1) for i in range(len(values))]
    return {"step": steps, "val_error": list(values)}


@pytest.mark.parametrize(
    ("rule", "values", "index"),
    [
        ({}, (0.5, 0.2, 0.3), 1),
        ({}, (0.5, 0.4, 0.3), None),
        (MEAN, (0.0, 0.0), None),  # no mean of 3 before the third check
        (MEAN, (0.0, 0.0, 0.6), 2),
        (MEAN, (0.5, 0.3, 0.2, 0.1, 0.3), 3),  # means 1/3, 0.2, 0.2
        (MEAN, (0.3, 0.2, 0.11, 0.2, 0.28), 3),  # 0.61/3 misses by a hair, then 0.51/3
        (MEAN, (NAN, 0.1, 0.1, 0.1), 3),
        (MEAN, (0.1, INF, 0.1, 0.1), None),
        (MEAN, (INF, -INF, 0.1, 0.1, 0.1), 4),  # the sum of inf and -inf is undefined
        (MEAN, (-1e308, -1e308, -1e308, 0.1, 0.1, 0.1), 4),  # until then the sum overflows
        (STAYS, (0.1,), None),
        (STAYS, (0.1, 0.2, 0.3), 1),
        (STAYS, (0.1, 0.3, 0.2, NAN, 0.2, 0.1), 5),
        (PATIENCE, (0.3, 0.15, 0.1, 0.2, 0.3, 0.4), 4),
        (PATIENCE, (0.5, 0.4, 0.6, 0.7, 0.8), None),
    ],
)
def test_the_first_check_that_meets_a_rule(rule, values, index):
    goal = Goal(0.2, check_interval=4, max_steps=400, **rule)
    curve = curve_of(*values)
    assert goal.first_met(curve) == index
    # The decision at a check does not depend on later ones: the run itself decides the same.
    attempt = Attempt(None, goal)
    for step, value in zip(curve["step"], values, strict=True):
        if attempt.status is None:
            attempt.record(Validation(int(step), value, True, 1.0, True))
    expected = None if index is None else 4 * (index + 1)
    assert attempt.steps_to_result == expected
    assert (attempt.status is Status.COMPLETE) is (index is not None)


@pytest.mark.parametrize(
    ("train_past_goal", "values", "status", "steps"),
    [
        (False, (0.5, 0.0), Status.INFEASIBLE, None),
        (True, (0.5, 0.0), Status.INFEASIBLE, None),
        (True, (0.1, 0.0), Status.COMPLETE, 4),  # the goal was met before the divergence
    ],
)
def test_weights_that_are_not_finite_have_no_metric(train_past_goal, values, status, steps):
    goal = Goal(0.2, check_interval=4, max_steps=400)
    attempt = Attempt(None, goal, train_past_goal=train_past_goal)
    attempt.enable_early_validations()
    attempt.record(Validation(4, values[0], True, 1.0, True))
    attempt.record(Validation(8, values[1], False, 1.0, False))
    assert (attempt.status, attempt.steps_to_result) == (status, steps)
    # So analyses of easier goals and of best values ignore this check too.
    assert math.isnan(attempt.curve["val_error"][1]) and attempt.curve["exact"][1] == 1
    assert goal.with_value(0.3).first_met(attempt.curve) == (0 if steps else None)


def test_a_metric_that_rises_stays_above():
    goal = Goal(0.9, 4, 400, "accuracy", at_least=True, **STAYS)
    assert goal.first_met({"accuracy": [0.95, 0.8, 0.9, 0.92]}) == 3


@pytest.mark.parametrize(("rule", "steps"), [({}, 4), (MEAN, 12), (STAYS, 8), (PATIENCE, 4)])
def test_the_first_check_that_can_meet_a_goal(rule, steps):
    assert Goal(0.2, check_interval=4, max_steps=400, **rule).first_possible_step == steps


def test_a_run_past_its_goal_keeps_the_check_that_met_it():
    goal = Goal(0.2, check_interval=4, max_steps=24, **MEAN)
    attempt = Attempt(None, goal, train_past_goal=True)
    for i, value in enumerate((0.3, 0.2, 0.1, 0.9, 0.9, 0.9), 1):
        attempt.record(Validation(4 * i, value, True, 1.0, True))
    assert (attempt.status, attempt.steps_to_result) == (Status.COMPLETE, 12)
    assert attempt.curve["step"] == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize(("rule", "early"), [({}, True), (STAYS, True), (MEAN, False)])
def test_only_a_rule_that_counts_checks_lets_them_stop_early(rule, early):
    assert GoalConfig(error=0.2, early_reject=True, **rule).stops_validations_early is early


def test_checks_may_stop_early_until_an_easier_goal_has_stayed_met():
    goal = Goal(0.1, check_interval=4, max_steps=400, **STAYS)
    attempt = Attempt(None, goal, other_goals=(0.3, 0.5))
    allowed = [attempt.max_mistakes(10)]
    for i, value in enumerate((0.5, 0.2, 0.3, 0.2), 1):
        attempt.record(Validation(4 * i, value, True, 1.0, True))
        allowed.append(attempt.max_mistakes(10))
    # 0.5 is met at the second check; 0.3 at the third, after 0.2 and 0.3.
    assert allowed == [5, 5, 3, 1, 1]


@pytest.mark.parametrize(
    ("key", "value", "arguments"),
    [
        ("goal.rule", "median", {"rule": "median"}),
        ("goal.rule", "lit_dps.core.goal.Goal", {"rule": "lit_dps.core.goal.Goal"}),
        ("goal.options", {}, {"rule": "stays_below"}),
        ("goal.options.checks", 2, {"options": {"checks": 2}}),
        ("goal.options.checks", 0, {**MEAN, "options": {"checks": 0}}),
        ("goal.options.checks", 2.5, {**MEAN, "options": {"checks": 2.5}}),
    ],
)
def test_a_rule_that_does_not_exist_is_refused(key, value, arguments):
    with refuses(key, value):
        GoalConfig(error=0.2, **arguments)


def test_a_goal_with_a_rule_is_another_study_in_each_spelling():
    default = GoalConfig(error=0.2)
    mean = GoalConfig(error=0.2, **MEAN)
    same = GoalConfig(error=0.2, rule="lit_dps.core.goal.MeanOfChecks", options={"checks": 3})
    other = GoalConfig(error=0.2, rule="mean_of_checks", options={"checks": 4})
    of_default, of_mean, of_same, of_other = (
        one_spelling({"goal": goal_of(goal)}, ()) for goal in (default, mean, same, other)
    )
    single = {**goal_of(default), "rule": "lit_dps.core.goal.SingleCheck"}
    assert one_spelling({"goal": single}, ()) == of_default
    assert of_mean == of_same != of_default
    assert of_other != of_mean
    assert not {"rule", "options"} & {*plain(default), *default.build().to_stored()}


def test_another_goal_of_a_stored_study_is_judged_by_the_rule(tmp_path):
    goal = Goal(0.2, check_interval=4, max_steps=24, **MEAN)
    cell = Cell(16)
    curves = [(0.6, 0.4, 0.2, 0.2, 0.2), (0.5, 0.3, 0.1, 0.5, 0.6, 0.7)]
    results = [
        result(cell, 0, 20, curve={**curve_of(*curves[0]), "train_loss": [1.0] * 5}),
        result(cell, 1, None, curve={**curve_of(*curves[1]), "train_loss": [1.0] * 6}),
    ]
    url = f"sqlite:///{tmp_path}/studies.db"
    write_study(url, {cell: results}, "mean", goal=goal)
    record = read_study(url, "mean")
    assert record.goal == goal
    assert [summary.k_star for summary in summarize(record)] == [20]
    # Means of 3 checks: 0.4, 0.267, 0.2 and 0.3, 0.3, 0.4, 0.6.
    easier = at_goal(record, 0.3)
    assert [each.steps for each in easier.results[cell]] == [16, 12]
    assert easier.results[cell][1].curve["step"] == [4, 8, 12]


def test_a_bound_among_the_checks_that_decide_is_no_decision():
    goal = Goal(0.1, check_interval=4, max_steps=400, **STAYS)
    curve = {**curve_of(0.3, 0.25, 0.2, 0.1), "exact": [1, 0, 1, 1]}
    assert [goal.with_value(0.3).is_exact_at(curve, i) for i in range(4)] == [
        True,
        False,
        False,
        True,
    ]


def test_the_verdict_says_the_rule():
    attempt = Attempt(Trial(Cell(16), 0), Goal(0.2, 4, 400, **MEAN))
    assert str(attempt.goal) == "goal error 0.2 (mean of 3 checks)"
    assert str(dataclasses.replace(attempt.goal, **PATIENCE, options={})).endswith("(Patience)")


class Described(Patience):
    def describe(self):
        return "two checks old"


class Printed(Patience):
    """A rule of an earlier version, whose words are its `__str__`."""

    def __str__(self):
        return f"{super().__str__()} of 2 checks"


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Patience, "Patience"), (Described, "two checks old"), (Printed, "Printed of 2 checks")],
)
def test_a_rule_describes_itself_in_one_text(kind, words):
    rule = kind()
    assert rule.describe() == str(rule) == words
    goal = Goal(0.2, rule=f"{__name__}.{kind.__name__}")
    assert str(goal) == f"goal error 0.2 ({words})"
    check_goal(rule)


@pytest.mark.parametrize("unit", ["examples", "seconds"])
@pytest.mark.parametrize(
    ("limit", "values", "status", "steps"),
    [
        (120, (0.5, 0.5, 0.1), Status.COMPLETE, 12),  # exactly at the budget
        (119, (0.5, 0.5, 0.1), Status.INCOMPLETE, None),  # a check beyond the budget is not met
        (80, (0.5, 0.5), Status.INCOMPLETE, None),
        (1000, (0.5, 0.1), Status.COMPLETE, 8),
        (1000, (0.5,) * 6, Status.INCOMPLETE, None),  # by its steps
    ],
)
def test_a_budget_ends_a_run_at_the_check_that_has_spent_it(unit, limit, values, status, steps):
    goal = Goal(0.2, check_interval=4, max_steps=24, **{f"max_{unit}": limit})
    attempt = Attempt(None, goal)
    for i, value in enumerate(values, 1):
        assert attempt.status is None
        attempt.record(Validation(4 * i, value, True, 1.0, True, spent={unit: 40}))
    assert (attempt.status, attempt.steps_to_result) == (status, steps)
    assert attempt.curve[unit] == [40 * (i + 1) for i in range(len(values))]
    assert goal.is_spent(attempt.curve) or status is Status.COMPLETE


@pytest.mark.parametrize(
    ("key", "value", "arguments"),
    [
        ("goal.max_examples", 0, {"max_examples": 0}),
        ("goal.max_seconds", -1.0, {"max_seconds": -1.0}),
        ("goal.max_seconds", INF, {"max_seconds": INF}),
        ("goal.metric", "seconds", {"metric": "seconds", "max_seconds": 1.0}),
        ("goal.metric", "examples", {"metric": "examples"}),
    ],
)
def test_a_budget_that_is_no_budget_is_refused(key, value, arguments):
    with refuses(key, value):
        Goal(0.2, **arguments)


def budgeted(tmp_path, **budget):
    """Return a study with a cell without K*, of 64 and 40 examples a check, and one with K*."""
    goal = Goal(0.2, check_interval=4, max_steps=400, **budget)
    (unit,) = goal.limits

    def trial(cell, point, values, cost, steps=None):
        curve = {**curve_of(*values), "train_loss": [1.0] * len(values)}
        curve[unit] = [cost * (i + 1) for i in range(len(values))]
        return result(cell, point, steps, curve=curve)

    missed = [trial(Cell(16), 0, [0.5] * 4, 64), trial(Cell(16), 1, [0.5] * 5, 40)]
    met = [trial(Cell(32), 0, [0.5, 0.1], 64, steps=8), trial(Cell(32), 1, [0.5] * 4, 64)]
    url = f"sqlite:///{tmp_path}/studies.db"
    write_study(url, {Cell(16): missed, Cell(32): met}, goal=goal)
    return read_study(url, "fake")


def test_a_budget_is_a_bound_of_the_law_and_the_trials_have_its_unit(tmp_path):
    record = budgeted(tmp_path, max_examples=200)
    cells = summarize(record)
    bound, exact = observations_of_cells(record, cells)
    # Trial 0 has 192 examples at step 12, trial 1 has 200 at step 20.
    assert (bound.k, bound.is_lower_bound) == (12, True)
    assert (exact.k, exact.bound) == (8, 0)
    table = trial_rows(record, cells)
    assert table["examples"].tolist()[2] == 128 and table["examples"].isna().sum() == 3
    assert not any("goal.max_seconds" in note for note in study_notes(Analysis(record)))


def test_a_budget_in_seconds_is_marked_at_the_table(tmp_path):
    record = budgeted(tmp_path, max_seconds=200.0)
    notes = study_notes(Analysis(record))
    assert sum("goal.max_seconds = 200" in note for note in notes) == 1
    assert str(record.goal.budget_text) == "400 steps or 200 s of training"


def test_a_budget_changes_the_identity():
    plain_goal = goal_of(GoalConfig(error=0.2))
    assert goal_of(GoalConfig(error=0.2, max_examples=100)) == {**plain_goal, "max_examples": 100}
    assert goal_of(GoalConfig(error=0.2, max_seconds=1.5)) == {**plain_goal, "max_seconds": 1.5}
