"""K* as a statistic of the trials of a cell: by default the fewest steps of any trial.

Everything that needs K* asks one `Statistic`: racing, repeats, tables, laws, resampling and texts.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from lit_dps.core.errors import ConfigError
from lit_dps.core.registry import named

Steps = Sequence[int | None]

# K* is in whole steps. A value that exceeds a whole number by less than this is rounding.
_ROUNDING = 1e-6
# A statistic that has no value for this number of complete trials never has one.
_MOST_NEEDED = 1000
# Random cells on which the class of a user is checked, and their largest numbers of steps.
_CHECKED_CELLS = 300
_CHECKED_STEPS = 12


class Statistic:
    """A number that summarizes the steps to result of the trials of a cell.

    Subclasses define `value`. It must not depend on the order of the trials. Another trial, or
    fewer steps of a trial, must never raise it. A statistic without `race_limit` trains every trial
    to its goal or budget.

    Attributes:
        name: Its name in a configuration.
    """

    name: str = ""

    def value(self, steps: Steps) -> float | None:
        """Return the value of a cell; None if too few trials are complete.

        Args:
            steps: Steps to result of each trial; None for a trial that missed the goal.
        """
        raise NotImplementedError

    def race_limit(self, steps: Steps, factor: float) -> float:
        """Return the step after which a running trial is stopped; infinity for none.

        With a factor of 1 it is the step after which the trial cannot change the value, whatever
        trials follow.

        Args:
            steps: Steps to result of the trials so far.
            factor: The race factor, 1 or more. A larger factor stops trials later.
        """
        return math.inf

    def of_draws(self, steps: np.ndarray) -> np.ndarray:
        """Return the values (...) of cells (..., trials); infinity for a trial or value missing."""
        return np.apply_along_axis(self._value_of_row, -1, steps)

    def describe(self) -> str:
        """Return what K* is in words, as in "the fewest steps of any trial"."""
        return f"the value of {self.name} over the trials"

    # ---- What follows from the methods above ----

    def k_star(self, steps: Iterable[int | None]) -> int | None:
        """Return K* of a cell: the value, rounded up to whole steps; None without a value."""
        value = self.value(list(steps))
        if value is None:
            return None
        return math.ceil(value - _ROUNDING)

    def ranking(self, complete: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return complete trials, the trial of K* first and then those of fewer steps first.

        The trial of K* has the fewest steps of those that need K* steps or more, and of these the
        lowest point. For the median of the best 3 it is the second best trial.

        Args:
            complete: (Steps to result, point) of each complete trial.

        Returns:
            The same pairs; none of them if the cell has no K*.
        """
        ranked = sorted(complete)
        k_star = self.k_star(steps for steps, _ in ranked)
        if k_star is None:
            return []
        for i, (steps, _) in enumerate(ranked):
            if steps >= k_star:
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

    def __repr__(self) -> str:
        return self.name

    def _value_of_row(self, steps: np.ndarray) -> float:
        row: list[int | None] = []
        for k in steps.tolist():
            row.append(k if math.isfinite(k) else None)
        value = self.value(row)
        return math.inf if value is None else value


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

    def value(self, steps: Steps) -> float | None:
        complete = sorted(k for k in steps if k is not None)
        if len(complete) < len(self.weights):
            return None
        value = 0.0
        for weight, k in zip(self.weights, complete, strict=False):
            value += weight * k
        return value

    def race_limit(self, steps: Steps, factor: float) -> float:
        """Return the factor times the steps of the last trial that has a weight.

        The value depends on the first `len(weights)` trials only. Further trials can only replace
        these by better ones, so a trial beyond their last one never becomes one of them.
        """
        complete = sorted(k for k in steps if k is not None)
        if len(complete) < len(self.weights):
            return math.inf
        return factor * complete[len(self.weights) - 1]

    def of_draws(self, steps: np.ndarray) -> np.ndarray:
        count = len(self.weights)
        if steps.shape[-1] < count:
            return np.full(steps.shape[:-1], math.inf)
        best = np.partition(steps, range(count), axis=-1)
        values = np.zeros(steps.shape[:-1])
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
    statistic = found()
    statistic.name = name
    check_statistic(statistic)
    return statistic


def _is_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Statistic)


def check_statistic(statistic: Statistic) -> None:
    """Check the rules of `Statistic` on random cells.

    Raises:
        ConfigError: naming the rule that is broken, and the cell.
    """
    rng = random.Random(0)
    most = statistic.needed_trials + 3
    for _ in range(_CHECKED_CELLS):
        steps: list[int | None] = []
        for _ in range(rng.randint(1, most)):
            steps.append(rng.choice([None, *range(1, _CHECKED_STEPS)]))
        rule = _broken_rule(statistic, steps, rng)
        if rule is not None:
            raise ConfigError(
                "study.statistic",
                statistic.name,
                f"a Statistic whose {rule}; it does not hold for a cell of steps {steps}",
            )


def _broken_rule(statistic: Statistic, steps: list[int | None], rng: random.Random) -> str | None:
    """Return the first rule that a cell breaks; None without any."""
    value = _value_or_infinity(statistic, steps)
    if not value > 0:
        return "value is above 0"
    if not _is_same(value, _value_or_infinity(statistic, rng.sample(steps, len(steps)))):
        return "value does not depend on the order of the trials"
    more = [*steps, rng.randint(1, _CHECKED_STEPS)]
    if _value_or_infinity(statistic, more) > value + _ROUNDING:
        return "value never rises with another trial"
    faster = list(steps)
    faster[rng.randrange(len(steps))] = 1
    if _value_or_infinity(statistic, faster) > value + _ROUNDING:
        return "value never rises if a trial needs fewer steps"
    first = [k for k in steps if rng.random() < 0.5]
    limit = statistic.race_limit(first, 1.0)
    raced = [k if k is not None and k <= limit else None for k in steps]
    if not _is_same(value, _value_or_infinity(statistic, raced)):
        return "race_limit never changes the value"
    return None


def _value_or_infinity(statistic: Statistic, steps: list[int | None]) -> float:
    value = statistic.value(steps)
    return math.inf if value is None else value


def _is_same(value: float, other: float) -> bool:
    return value == other or math.isclose(value, other)
