"""check_goal: the conformance test of a rule of the goal."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from lit_dps.core.goal import Goal, GoalRule
from lit_dps.core.registry import DESCRIPTION, description_error
from lit_dps.testing.failure import require

VALUE = 0.2
EASIER = 0.3
CURVES = 40
QUICK_CURVES = 10
CHECKS = 12
UNDEFINED = (math.nan, math.inf)


def check_goal(goal: GoalRule | type[GoalRule], quick: bool = False) -> None:
    """Raise ConformanceError if a rule of the goal does not do what lit_dps requires.

    - It decides from the values alone: the same values give the same decision in every order of
      questions, and are not changed.
    - An undefined or infinite value raises no error.
    - The goal is not met before `min_checks` checks.
    - An easier value of the goal is met at the same check or an earlier one.
    - With `pointwise`, values that miss the goal may be any other values that miss it.
    - `describe` returns a text of one line.

    Args:
        goal: The rule, or its class if it takes no arguments.
        quick: Whether to try fewer curves.
    """
    rule = goal() if isinstance(goal, type) else goal
    wrong = description_error(rule)
    name = type(rule).__name__
    require("description", wrong is None, f"{name}.{wrong}", DESCRIPTION, f"{name}.describe()")
    generator = random.Random(0)
    count = QUICK_CURVES if quick else CURVES
    for i in range(count):
        # Every fourth curve has undefined values.
        values = [generator.uniform(0, 2 * VALUE) for _ in range(CHECKS)]
        if i % 4 == 3:
            values[generator.randrange(CHECKS)] = UNDEFINED[i // 4 % 2]
        for at_least in (False, True):
            _check_curve(rule, values, Goal(VALUE, metric="metric", at_least=at_least))


def _check_curve(rule: GoalRule, values: list[float], goal: Goal) -> None:
    decisions = []
    for i in range(len(values)):
        decisions.append(_decide(rule, values[: i + 1], goal))
    shown_by = f"values {_text(values)}, {goal}"
    again = []
    for i in reversed(range(len(values))):
        again.insert(0, _decide(rule, values[: i + 1], goal))
    require(
        "order",
        decisions == again,
        f"{rule} decides otherwise when checks are asked for in another order",
        "a decision from the values alone, without state of the rule",
        shown_by,
    )
    early = [i + 1 for i in range(min(rule.min_checks - 1, len(values))) if decisions[i]]
    require(
        "min_checks",
        not early,
        f"{rule} meets the goal at check {min(early, default=0)}",
        f"not before check {rule.min_checks}, its min_checks",
        shown_by,
    )
    value = EASIER if not goal.at_least else 2 * VALUE - EASIER
    _check_easier(rule, values, decisions, goal, replace(goal, value=value))
    if rule.pointwise:
        _check_pointwise(rule, values, decisions, goal)


def _decide(rule: GoalRule, values: Sequence[float], goal: Goal) -> bool:
    """Return the decision at the last check, as `Goal` asks for it."""
    start = 0 if rule.window is None else max(0, len(values) - rule.window)
    given = list(values[start:])
    before = repr(given)
    try:
        is_met = rule.is_met(given, goal)
    except Exception as error:
        text = f"{rule} raises {type(error).__name__}: {error}"
        expected = "True or False, also at the first checks, which have few values"
        require("raises", False, text, expected, f"values {_text(given)}, {goal}")
        raise
    require(
        "returns",
        is_met in (True, False),
        f"{rule} returns {is_met!r}",
        "True or False",
        f"values {_text(given)}, {goal}",
    )
    require(
        "values",
        repr(given) == before,
        f"{rule} changes the values that it receives",
        "values are only read",
        f"values {before}, {goal}",
    )
    return bool(is_met)


def _check_easier(
    rule: GoalRule, values: Sequence[float], decisions: list[bool], goal: Goal, easier: Goal
) -> None:
    if True not in decisions:
        return
    first = decisions.index(True)
    is_met = [_decide(rule, values[: i + 1], easier) for i in range(first + 1)]
    require(
        "easier",
        True in is_met,
        f"{rule} meets {goal} at check {first + 1} and not {easier} until then",
        "an easier goal is met at the same check or an earlier one",
        f"values {_text(values)}",
    )


def _check_pointwise(
    rule: GoalRule, values: Sequence[float], decisions: list[bool], goal: Goal
) -> None:
    changed = []
    for value in values:
        if goal.is_reached(value):
            changed.append(value)
        elif goal.at_least:
            changed.append(goal.value - 1)
        else:
            changed.append(goal.value + 1)
    others = [_decide(rule, changed[: i + 1], goal) for i in range(len(changed))]
    require(
        "pointwise",
        decisions == others,
        f"{rule} is pointwise, and its decision depends on how far a value misses the goal",
        "the same decisions; otherwise set pointwise = False",
        f"values {_text(values)} and {_text(changed)}, {goal}",
    )


def _text(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values) + "]"
