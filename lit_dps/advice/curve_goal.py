"""The goal of runs whose loss curves are given: `CurveGoal`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import is_value_reached
from lit_dps.core.metric_names import is_rising

_GOAL = re.compile(r"\s*(?P<metric>\S+)\s*(?P<sign><=|>=)\s*(?P<value>\S+)\s*")


class CurveGoal(NamedTuple):
    """The goal of runs whose loss curves are given.

    Attributes:
        metric: The column of the metric.
        value: The value that meets the goal.
        at_least: Whether the metric must be at least `value`; otherwise at most.
    """

    metric: str
    value: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.value:g}"

    def is_met(self, values: np.ndarray) -> np.ndarray:
        """Return (n,): whether each of the values (n,) meets the goal, as in a study."""
        is_met = [is_value_reached(value, self.value, self.at_least) for value in values]
        return np.array(is_met, bool)


def read_goal(text: str) -> CurveGoal:
    """Return the goal of a text such as "val_loss <= 0.2".

    Raises:
        ConfigError: for any other text.
    """
    match = _GOAL.fullmatch(text)
    try:
        value = float(match["value"]) if match is not None else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise ConfigError("goal", text, 'a metric and a value, such as "val_loss <= 0.2"')
    at_least = match["sign"] == ">="
    return goal_of(match["metric"], None if at_least else value, value if at_least else None, ())


def goal_of(
    metric: str | None, at_most: float | None, at_least: float | None, metrics: Sequence[str]
) -> CurveGoal:
    """Return the goal of loss curves, with a guessed metric if there is only one candidate.

    Args:
        metric: The metric; None to guess it.
        at_most, at_least: The value of the goal; one of them.
        metrics: The metrics of the runs.

    Raises:
        ConfigError: for a missing value, several possible metrics, or the wrong direction.
    """
    if metric is None:
        candidates = [name for name in metrics if re.split(r"[/_.]", name)[0].startswith("val")]
        if len(candidates) != 1:
            listed = ", ".join(candidates or metrics) or "none"
            raise ConfigError("goal.metric", None, f"the name of a metric; there are {listed}")
        metric = candidates[0]
    if (at_most is None) == (at_least is None):
        key = "goal.at_least" if is_rising(metric) else "goal.at_most"
        raise ConfigError(key, None, f"the value of {metric} that ends a run")
    if at_least is not None:
        return CurveGoal(metric, float(at_least), at_least=True)
    assert at_most is not None
    if is_rising(metric):
        raise ConfigError(
            "goal.at_most", at_most, f"omitted, because {metric} rises", "Set goal.at_least."
        )
    return CurveGoal(metric, float(at_most))
