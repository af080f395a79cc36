"""Goal: the one place that decides when a trial has reached its goal and when it has diverged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Status

# A share of the goal's value, a few roundings of float32. A validation error arrives as a float32
# mean: 840 mistakes of 6000 read 0.14000000060, and 720 read 0.12000000477. With the tolerance the
# comparison is one of integers, mistakes <= error x N, for every N below a million. Other metrics
# are compared as float32 numbers.
#
# The authors' TensorFlow code compares the rounded floats: there 720 mistakes of 6000 do *not* meet
# the goal 0.12. Shallue et al. (2019, batch_science) require a value strictly below the goal: if
# the goal is a whole number of mistakes, they require one mistake fewer.
TOLERANCE = 4e-7

VALIDATION_ERROR = "val_error"  # default metric: share of the validation split that is wrong
RESERVED_NAMES = ("step", "train_loss", "exact")  # keys of a curve that no metric can have


def resolve_value(
    error: float | None, at_most: float | None, at_least: float | None, metric: str | None
) -> float:
    """Return the value of a goal, which the user sets in exactly one of three ways.

    Args:
        error: A validation error; only if the metric is one.
        at_most: An upper limit of the metric.
        at_least: A lower limit of the metric.
        metric: Name of the metric; None for the validation error.

    Raises:
        ConfigError: if not exactly one way is used, or an error is set for another metric.
    """
    ways = {"error": error, "at_most": at_most, "at_least": at_least}
    values = {key: value for key, value in ways.items() if value is not None}
    if len(values) != 1:
        raise ConfigError("goal", values, "one of goal.error, goal.at_most and goal.at_least")
    if error is not None and metric not in (None, VALIDATION_ERROR):
        raise ConfigError(
            "goal.error",
            error,
            f"goal.at_most or goal.at_least of goal.metric {metric}; of an error of another name "
            "set goal.monitor",
        )
    (value,) = values.values()
    return value


@dataclass(frozen=True)
class Goal:
    """When a trial stops (Lee et al. 2021, Section 2).

    Attributes:
        value: Value of the metric that ends a trial, finite.
        check_interval: Optimizer steps between two checks of the entire validation split.
        max_steps: Step budget, a multiple of `check_interval`.
        metric: Name of the metric.
        at_least: Whether the metric must be at least `value`; otherwise at most.

    Raises:
        ConfigError: for a value out of its range.
    """

    value: float
    check_interval: int = 16
    max_steps: int = 40_000
    metric: str = VALIDATION_ERROR
    at_least: bool = False

    def __post_init__(self):
        self._check_value()
        if self.metric in RESERVED_NAMES:
            names = ", ".join(RESERVED_NAMES)
            raise ConfigError("goal.metric", self.metric, f"another name than {names}")
        if self.check_interval < 1:
            raise ConfigError("goal.check_interval", self.check_interval, "at least 1 step")
        if self.max_steps < 1 or self.max_steps % self.check_interval != 0:
            below = self.max_steps // self.check_interval * self.check_interval
            example = max(below, self.check_interval)
            raise ConfigError(
                "goal.max_steps",
                self.max_steps,
                f"a positive multiple of goal.check_interval = {self.check_interval}, such as "
                f"{example}: a budget that ends between two checks ends unchecked",
            )

    def _check_value(self) -> None:
        if self.is_validation_error and not 0 < self.value < 1:
            allowed = "a validation error strictly between 0 and 1"
            raise ConfigError("goal.error", self.value, allowed)
        if not math.isfinite(self.value):
            key = "goal.at_least" if self.at_least else "goal.at_most"
            raise ConfigError(key, self.value, "a finite number")

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Goal:
        """Return the goal that `to_dict` stored."""
        values = dict(stored)
        if "error" in values:
            values["value"] = values.pop("error")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the goal as plain JSON."""
        steps = {"check_interval": self.check_interval, "max_steps": self.max_steps}
        if self.is_validation_error:
            return {"error": self.value, **steps}
        return {"value": self.value, **steps, "metric": self.metric, "at_least": self.at_least}

    def __str__(self) -> str:
        if self.is_validation_error:
            return f"goal error {self.value:g}"
        sign = ">=" if self.at_least else "<="
        return f"goal {self.metric} {sign} {self.value:g}"

    @property
    def is_validation_error(self) -> bool:
        """Whether the goal is a validation error, which must be small enough."""
        return self.metric == VALIDATION_ERROR and not self.at_least

    def with_value(self, value: float) -> Goal:
        """Return the same goal at another value of the metric."""
        return replace(self, value=value)

    def is_easier(self, value: float) -> bool:
        """Return True if every run meets another value of the metric before this goal."""
        if self.at_least:
            return value < self.value
        return value > self.value

    def is_reached(self, value: float) -> bool:
        """Return True if a value of the metric meets the goal; False if it is not finite.

        Args:
            value: The metric over the entire validation split.
        """
        if not math.isfinite(value):
            return False
        tolerance = TOLERANCE * abs(self.value)
        if self.at_least:
            return value >= self.value - tolerance
        return value <= self.value + tolerance

    def max_mistakes(self, examples: int) -> int:
        """Return the most mistakes among `examples` that meet the goal, a validation error.

        Returns:
            -1 if not even 0 mistakes meet the goal.
        """
        limit = (self.value + TOLERANCE * abs(self.value)) * examples
        mistakes = min(int(limit), examples)
        # `is_reached` decides, because the product above may be rounded across an integer.
        while mistakes < examples and self.is_reached((mistakes + 1) / examples):
            mistakes += 1
        while mistakes >= 0 and not self.is_reached(mistakes / examples):
            mistakes -= 1
        return mistakes

    def judge(
        self,
        step: int,
        value: float,
        loss: float,
        weights_finite: bool,
        train_past_goal: bool = False,
        met_before: bool = False,
    ) -> Status | None:
        """Return how a trial ends at the check of a step; None if the trial continues.

        The goal is judged before divergence, as in the authors' code. A trial diverges if its loss
        or its weights are not finite. A metric can be undefined without divergence, such as a
        correlation of equal predictions. Such a check does not meet the goal.

        Args:
            step: Optimizer steps so far.
            value: The metric over the entire validation split.
            loss: Training loss of the last step's batch.
            weights_finite: Whether all weights are finite.
            train_past_goal: Whether the trial continues to `max_steps` after it has met the goal.
            met_before: Whether an earlier check met the goal.
        """
        has_diverged = not (math.isfinite(loss) and weights_finite)
        can_continue = not has_diverged and step < self.max_steps
        if met_before or self.is_reached(value):
            if train_past_goal and can_continue:
                return None
            return Status.COMPLETE
        if has_diverged:
            return Status.INFEASIBLE
        if can_continue:
            return None
        return Status.INCOMPLETE


# Lightning adds this suffix if there are several validation dataloaders.
_LOADER_SUFFIX = re.compile(r"/dataloader_idx_\d+$")

# Words in names of metrics that rise, such as val_acc, val/top1 and MulticlassF1Score.
_RISING = re.compile(
    r"acc(uracy)?|top_?\d+|f1(score)?|auc|auroc|precision|recall|iou|jaccard|dice|map|ap|r2(score)?"
    r"|psnr|ssim|bleu|rouge|reward|return|likelihood|correct|hits?",
    re.IGNORECASE,
)
# Words in names of metrics that fall, also beside a word above: "1" is for 1 - accuracy.
_FALLING = re.compile(
    r"error|err|loss|nll|neg|negative|minus|inv|miss|wrong|1|mse|mae|rmse|mape|distance|dist|gap"
    r"|regret|kl|ce|bce|perplexity|ppl"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


def is_rising(metric: str) -> bool:
    """Return True if the name of a metric suggests that higher values are better."""
    name = _LOADER_SUFFIX.sub("", metric)
    parts = [*_WORD.findall(name), *re.split(r"[^A-Za-z0-9]+", name)]
    words = {part.lower() for part in parts}
    if any(_FALLING.fullmatch(word) for word in words):
        return False
    return any(_RISING.fullmatch(word) for word in words)
