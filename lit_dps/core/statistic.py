"""K* as a statistic of the trials of a cell: by default the fewest steps of any trial.

Everything that needs K* asks one `Statistic`: racing, repeats, tables, laws, resampling and texts.
A cost is in the unit of K* (`lit_dps.core.unit`): steps, examples or seconds.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from lit_dps.core.errors import ConfigError
from lit_dps.core.registry import Described, named
from lit_dps.core.unit import Cost, Unit

Costs = Sequence[Cost | None]

# K* is in whole steps or examples. What exceeds a whole number by less than this is rounding.
_ROUNDING = 1e-6
# A statistic that has no value for this number of complete trials never has one.
_MOST_NEEDED = 1000
# Random cells on which the class of a user is checked, and their largest numbers of steps.
_CHECKED_CELLS = 300
_CHECKED_STEPS = 12


class Statistic(Described):
    """A number that summarizes the costs to result of the trials of a cell.

    Subclasses define `value`. It must not depend on the order of the trials. Another trial, or
    a lower cost of a trial, must never raise it. A statistic without `race_limit` trains every
    trial to its goal or budget.

    Attributes:
        name: Its name in a configuration.
    """

    name: str = ""

    def value(self, costs: Costs) -> float | None:
        """Return the value of a cell; None if too few trials are complete.

        Args:
            costs: Costs to result of each trial; None for a trial that missed the goal.
        """
        raise NotImplementedError

    def race_limit(self, costs: Costs, factor: float) -> float:
        """Return the cost after which a running trial is stopped; infinity for none.

        With a factor of 1 it is the cost after which the trial cannot change the value, whatever
        trials follow.

        Args:
            costs: Costs to result of the trials so far.
            factor: The race factor, 1 or more. A larger factor stops trials later.
        """
        return math.inf

    def of_draws(self, costs: np.ndarray) -> np.ndarray:
        """Return the values (...) of cells (..., trials); infinity for a trial or value missing."""
        return np.apply_along_axis(self._value_of_row, -1, costs)

    def describe(self) -> str:
        """Return what K* is in words, as in "the fewest steps of any trial"."""
        return f"the value of {self.name or type(self).__name__} over the trials"

    # ---- What follows from the methods above ----

    def describe_in(self, unit: Unit) -> str:
        """Return `describe` in a unit of K*, as in "the fewest seconds of any trial"."""
        # A study that an earlier version stored may have a description of several lines.
        text = " ".join(self.describe().split())
        return re.sub(r"\bsteps\b", unit.name, text)

    def k_star(self, costs: Iterable[Cost | None]) -> Cost | None:
        """Return K* of a cell: the value, rounded up if the trials have whole numbers.

        None without a value.
        """
        listed = list(costs)
        value = self.value(listed)
        if value is None or any(isinstance(cost, float) for cost in listed):
            return value
        return math.ceil(value - _ROUNDING)

    def ranking(self, complete: Iterable[tuple[Cost, int]]) -> list[tuple[Cost, int]]:
        """Return complete trials, the trial of K* first and then the cheaper ones first.

        The trial of K* is the cheapest trial that costs at least K*. Of equal ones it is the lowest
        point. For the median of the best 3 it is the second best trial.

        Args:
            complete: (Cost to result, point) of each complete trial.

        Returns:
            The same pairs; none of them if the cell has no K*.
        """
        ranked = sorted(complete)
        k_star = self.k_star(cost for cost, _ in ranked)
        if k_star is None:
            return []
        for i, (cost, _) in enumerate(ranked):
            if cost >= k_star:
                return [ranked[i], *ranked[:i], *ranked[i + 1 :]]
        return ranked[::-1]

    @property
    def is_minimum(self) -> bool:
        """Whether K* is the fewest steps of any trial, as in the paper."""
        return self.name == "minimum"

    @property
    def label(self) -> str:
        """Its name in a few words, for axes: "median of best 3"."""
        return self.name.rpartition(".")[2].replace("_", " ")

    @property
    def needed_trials(self) -> int:
        """The fewest complete trials that have a value."""
        for count in range(1, _MOST_NEEDED + 1):
            if self.value([_CHECKED_STEPS] * count) is not None:
                return count
        raise ConfigError("study.statistic", self.name, "a statistic that has a value")

    @property
    def too_few(self) -> str:
        """How many trials met the goal in a cell without K*: "no trial"."""
        if self.needed_trials == 1:
            return "no trial"
        return f"fewer than {self.needed_trials} trials"

    @property
    def too_few_have(self) -> str:
        """`too_few` with its verb: "no trial has"."""
        verb = "has" if self.needed_trials == 1 else "have"
        return f"{self.too_few} {verb}"

    def __str__(self) -> str:
        # `describe` of a user may contain f"{self}".
        return self.name or type(self).__name__

    def __repr__(self) -> str:
        return self.name

    def _value_of_row(self, costs: np.ndarray) -> float:
        row: list[int | None] = []
        for k in costs.tolist():
            row.append(k if math.isfinite(k) else None)
        # numpy takes the type of all values from the first one, which may be a whole number.
        return float(_value_or_infinity(self, row))


class BestTrials(Statistic):
    """A weighted mean of the steps of the best trials.

    Args:
        weights: The weight of the best trial, of the second best, and so on.
        name: Name in a configuration.
        words: What it is in words.
    """

    def __init__(self, weights: Sequence[float], name: str, words: str):
        self.weights = tuple(weights)
        self.name = name
        self.words = words

    def value(self, costs: Costs) -> float | None:
        complete = sorted(k for k in costs if k is not None)
        if len(complete) < len(self.weights):
            return None
        value = 0.0
        for weight, k in zip(self.weights, complete, strict=False):
            value += weight * k
        return value

    def race_limit(self, costs: Costs, factor: float) -> float:
        """Return the factor times the cost of the last trial that has a weight.

        The value depends on the first `len(weights)` trials only. Further trials can only replace
        these by better ones, so a trial beyond their last one never becomes one of them.
        """
        complete = sorted(k for k in costs if k is not None)
        if len(complete) < len(self.weights):
            return math.inf
        return factor * complete[len(self.weights) - 1]

    def of_draws(self, costs: np.ndarray) -> np.ndarray:
        count = len(self.weights)
        if costs.shape[-1] < count:
            return np.full(costs.shape[:-1], math.inf)
        best = np.partition(costs, range(count), axis=-1)
        values = np.zeros(costs.shape[:-1])
        for i, weight in enumerate(self.weights):
            # Zero times infinity is no number.
            if weight:
                values = values + weight * best[..., i]
        return values

    def describe(self) -> str:
        return self.words


MINIMUM = BestTrials((1.0,), "minimum", "the fewest steps of any trial")


def median_of_best(count: int) -> BestTrials:
    """Return the median of the steps of the best trials of a cell.

    It depends less on the luck of one seed than the minimum. A trial that missed the goal counts as
    infinite. So the median of the best 3 needs two complete trials, and is the second best.

    Args:
        count: The number of best trials.
    """
    weights = [0.0] * (count // 2 + 1)
    weights[-1] = 1.0
    if count % 2 == 0:
        weights[-2:] = [0.5, 0.5]
    words = f"the median of the steps of the best {count} trials"
    return BestTrials(weights, f"median_of_best_{count}", words)


@cache
def statistic_named(name: str) -> Statistic:
    """Return the statistic that `study.statistic` names.

    Raises:
        ConfigError: if there is none, or if the class of a user breaks the rules of `Statistic`.
    """
    match = re.fullmatch(r"median_of_best_([1-9]\d*)", name)
    if match is not None:
        return median_of_best(int(match[1]))
    built_in: dict[str, Statistic | type[Statistic]] = {"minimum": MINIMUM}
    built_in["median_of_best_3"] = median_of_best(3)
    found = named("study.statistic", name, built_in, "Statistic without arguments", _is_class)
    if isinstance(found, Statistic):
        return found
    try:
        statistic = found()
    except TypeError as error:
        allowed = f"the class path of a Statistic without arguments: {error}"
        raise ConfigError("study.statistic", name, allowed) from error
    statistic.name = name
    broken = broken_rule(statistic)
    if broken is not None:
        raise ConfigError(
            "study.statistic",
            name,
            f"a Statistic that passes check_statistic ({broken.requirement}): {broken.what}; "
            f"expected: {broken.expected}; shown by: a cell of steps {list(broken.steps)}",
            hint=f"In a test call lit_dps.testing.check_statistic({name}())",
        )
    return statistic


def _is_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Statistic)


class BrokenRule(NamedTuple):
    """A rule of `Statistic` that a class breaks.

    Attributes:
        requirement: A short name of the rule.
        what: What the class does.
        expected: What it must do.
        steps: The steps of the cell that shows it.
    """

    requirement: str
    what: str
    expected: str
    steps: Sequence[int | None]


def broken_rule(statistic: Statistic) -> BrokenRule | None:
    """Return the first rule of `Statistic` that random cells break; None without any."""
    rng = random.Random(0)
    steps: list[int | None] = [_CHECKED_STEPS]
    try:
        most = statistic.needed_trials + 3
        for _ in range(_CHECKED_CELLS):
            steps = [_random_steps(rng) for _ in range(rng.randint(1, most))]
            broken = _broken_rule_of_value(statistic, steps, rng)
            broken = broken or _broken_rule_of_race(statistic, steps, rng)
            if broken is not None:
                return broken
    except ConfigError as error:
        return BrokenRule("has_value", "value is always None", str(error.allowed), steps)
    except Exception as error:
        what = f"value, race_limit or of_draws raises {type(error).__name__}: {error}"
        return BrokenRule("raises", what, "a number, or None for too few complete trials", steps)
    return None


def _random_steps(rng: random.Random) -> int | None:
    return rng.choice([None, *range(1, _CHECKED_STEPS)])


def _broken_rule_of_value(
    statistic: Statistic, steps: list[int | None], rng: random.Random
) -> BrokenRule | None:
    """Return the first rule of `value` and `of_draws` that a cell breaks; None without any."""
    value = _value_or_infinity(statistic, steps)
    given = list(steps)
    statistic.value(given)
    if given != steps:
        what = f"value changes the steps that it receives to {given}"
        return BrokenRule("only_read", what, "steps are only read", steps)
    if not value > 0:
        return BrokenRule("positive", f"value is {value:g}", "a value above 0", steps)
    shuffled = rng.sample(steps, len(steps))
    other = _value_or_infinity(statistic, shuffled)
    if not _is_same(value, other):
        what = f"value is {value:g}, and {other:g} in the order {shuffled}"
        return BrokenRule("order", what, "a value that no order of the trials changes", steps)
    further = rng.randint(1, _CHECKED_STEPS)
    other = _value_or_infinity(statistic, [*steps, further])
    if other > value + _ROUNDING:
        what = f"value rises from {value:g} to {other:g} by another trial of {further} steps"
        return BrokenRule("another_trial", what, "a value that another trial never raises", steps)
    faster = list(steps)
    faster[rng.randrange(len(steps))] = 1
    other = _value_or_infinity(statistic, faster)
    if other > value + _ROUNDING:
        what = f"value rises from {value:g} to {other:g} if the steps become {faster}"
        return BrokenRule("fewer_steps", what, "a value that fewer steps never raise", steps)
    row = np.array([math.inf if k is None else k for k in steps], dtype=float)
    drawn = float(statistic.of_draws(row[None])[0])
    if not _is_same(value, drawn):
        what = f"value is {value:g}, and of_draws returns {drawn:g}"
        return BrokenRule("of_draws", what, "of_draws that equals value", steps)
    return None


def _broken_rule_of_race(
    statistic: Statistic, steps: list[int | None], rng: random.Random
) -> BrokenRule | None:
    """Return the first rule of `race_limit` that a cell breaks; None without any."""
    value = _value_or_infinity(statistic, steps)
    first = [k for k in steps if rng.random() < 0.5]
    limit = statistic.race_limit(first, 1.0)
    raced = [k if k is not None and k <= limit else None for k in steps]
    other = _value_or_infinity(statistic, raced)
    if not _is_same(value, other):
        what = f"value is {value:g}, and {other:g} with race_limit {limit:g} of trials {first}"
        return BrokenRule("race_limit", what, "race_limit that never changes the value", steps)
    later = statistic.race_limit(first, 2.0)
    if not later >= limit:
        what = f"race_limit of trials {first} is {limit:g}, and {later:g} with a factor of 2"
        expected = "race_limit that a larger factor never lowers"
        return BrokenRule("race_factor", what, expected, steps)
    return None


def _value_or_infinity(statistic: Statistic, steps: list[int | None]) -> float:
    value = statistic.value(list(steps))
    return math.inf if value is None else value


def _is_same(value: float, other: float) -> bool:
    return value == other or math.isclose(value, other)
