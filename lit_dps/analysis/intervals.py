"""Intervals: of resamples, as text, and as columns of a table."""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from lit_dps.analysis.tables import three_digits

# Resamples for an interval: its ends then vary by about 5 % of its width.
REPLICATES = 1000
# Ends of a 95 % interval.
PERCENTILES = (2.5, 97.5)
# Their distance from the mean of a normal distribution, in standard deviations.
NORMAL_95 = 1.96


class Interval(NamedTuple):
    """A 95 % interval; `high` may be infinite."""

    low: float
    high: float


def resampling_rng(*salts: int | str) -> np.random.Generator:
    """Return the random generator of a resampling; equal salts give equal numbers.

    Different salts, such as the batch size of a cell, make resamples independent. With other salts
    the tables of stored studies would change.
    """
    numbers = []
    for salt in salts:
        if isinstance(salt, str):
            numbers.append(crc32(salt.encode()))
        else:
            numbers.append(salt)
    return np.random.default_rng(numbers)


def estimate(value: float, interval: Interval | None) -> str:
    """Return a value with its interval, if it has one, to 3 digits: 583 [546, 638]."""
    if interval is None:
        return three_digits(value)
    return f"{three_digits(value)} [{three_digits(interval.low)}, {three_digits(interval.high)}]"


def percentile_interval(values: np.ndarray, estimate: float, method: Any = "linear") -> Interval:
    """Return the 95 % percentile interval of resampled values (n,), widened to the estimate.

    Args:
        values: The values. Infinite ones need a method that does not interpolate.
        estimate: The value of the sample itself.
        method: As of `numpy.percentile`.
    """
    low, high = np.percentile(values, PERCENTILES, method=method)
    return Interval(float(min(low, estimate)), float(max(high, estimate)))


def inverted(interval: Interval) -> Interval:
    """Return the interval of 1 / x from the interval of x >= 0; infinite where x is 0."""
    return Interval(_inverse(interval.high), _inverse(interval.low))


def _inverse(x: float) -> float:
    """Return 1 / x; infinity for 0."""
    if x > 0:
        return 1 / x
    return math.inf


def interval_columns(
    name: str, value: float | None, interval: Interval | None
) -> dict[str, float | None]:
    """Return the columns of a value and its limits: name, name_low and name_high."""
    columns: dict[str, float | None] = {name: value, f"{name}_low": None, f"{name}_high": None}
    if interval is not None:
        columns[f"{name}_low"], columns[f"{name}_high"] = interval
    return columns
