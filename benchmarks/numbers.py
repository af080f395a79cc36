"""Repeated measurements: medians, spreads, ratios to a baseline, growth; and numbers known between
bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True)
class Sample:
    """Repeats of one measurement, in the order they were made; at least one."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def over(self, baseline: Sample) -> Sample:
        """The ratio of each repeat to the baseline's repeat of the same round.

        Rounds and not medians: what slows a machine down for a while then meets both sides of a
        ratio.
        """
        return Sample(tuple(x / y for x, y in zip(self.values, baseline.values, strict=True)))


@dataclass(frozen=True)
class Bounds:
    """A number that is known to lie between two others; an estimate of it where there is one."""

    lower: float
    estimate: float | None
    upper: float

    def __add__(self, other: Bounds) -> Bounds:
        estimate = None
        if self.estimate is not None and other.estimate is not None:
            estimate = self.estimate + other.estimate
        return Bounds(self.lower + other.lower, estimate, self.upper + other.upper)

    def over(self, divisor: float) -> Bounds:
        """All three divided by a number."""
        estimate = None if self.estimate is None else self.estimate / divisor
        return Bounds(self.lower / divisor, estimate, self.upper / divisor)


def interleaved(variants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Sample]:
    """Calls the variants in turn, A B A B ..., so many rounds, and keeps what they return."""
    rounds = [[measure() for measure in variants.values()] for _ in range(repeats)]
    return {
        name: Sample(values)
        for name, values in zip(variants, zip(*rounds, strict=True), strict=True)
    }


def growth(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent e of the least-squares line through log values over log sizes: values grow as
    size ** e.

    All numbers are above 0. One size alone tells nothing: nan.
    """
    if len(set(sizes)) < 2:
        return math.nan
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = fmean(x), fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
