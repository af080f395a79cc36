"""The checks of runs at the ends of intervals, and their outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lit_dps.training.early_validation import MistakeCount


class MeasuredCheck(NamedTuple):
    """A check by a metric that a module logs; used as a `MistakeCount`."""

    value: float
    exact: bool = True

    def error(self, size: int) -> float:
        """Return the metric."""
        return self.value


class Intervals(NamedTuple):
    """Intervals that were trained one after another, and then checked.

    Attributes:
        live: The rows that were live.
        losses: Training loss of the last step of each interval, by row.
        finite: Whether all weights were finite, by the number of the kept row.
        checks: The check of each live row after the first interval, then after the second, and so
            on. A check that stopped early knows only whether the network has more mistakes than the
            row's first check allows.
        metrics: Values of the further metrics, in the order of the checks.
        examples: Examples of each interval, by row.
        seconds: Seconds of each interval.
    """

    live: list[int]
    losses: list[list[float]]
    finite: list[bool]
    checks: Sequence[MistakeCount | MeasuredCheck]
    metrics: Sequence[Mapping[str, float]]
    examples: list[dict[int, int]]
    seconds: float


class ValidationOutcome(NamedTuple):
    """The result of the check of one run at the end of an interval.

    Attributes:
        row: The row of the run in its stack; 0 for a single network.
        value: The validation error, or a lower bound of it.
        exact: Whether the value is no bound.
        loss: Training loss of the last batch, before its update.
        finite: Whether all weights are finite.
        metrics: Values of the further metrics, and the examples and seconds of the interval.
        number: Number of the kept row that was checked (`StackedNetworks.number`).
    """

    row: int
    value: float
    exact: bool
    loss: float
    finite: bool
    metrics: Mapping[str, float]
    number: int
