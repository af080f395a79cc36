"""How the columns of a trial's curves are stored: a few numbers in place of long lists.

A column is stored in one of four forms. `decode_columns` returns the same numbers for all of them,
except for the training loss, of which `LOSS_DIGITS` significant digits are stored.

    {"first": 16, "interval": 16, "length": 250}    equidistant steps
    {"runs": [12, 3, 235]}                          12 zeros, 3 ones, 235 zeros
    {"counts": [731, 702], "of": 6000, "bits": 32}  shares of counted examples: float32(731 / 6000)
    [2.30259, 1.91234, "nan"]                       all others

Numbers that are not finite are stored as "nan", "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from numbers import Integral
from typing import Any

import numpy as np

STEP = "step"
LOSS = "train_loss"
LOSS_DIGITS = 6  # The loss is of a single batch, so the next digits are noise.
# The most examples of which shares are stored as counts. The validation split of ImageNet has half.
MAX_EXAMPLES = 100_000
# Fewer numbers of 32 bits are shares of some number of examples by chance.
MIN_DISTINCT_SHARES = 4
MAX_TESTED_SHARES = 50  # enough to reject all wrong numbers of examples


def encode_columns(columns: Mapping[str, Iterable[float]]) -> dict[str, Any]:
    """Return columns of a curve as plain JSON; see the module's docstring."""
    encoded = {}
    for name, values in columns.items():
        numbers = [_to_number(value) for value in values]
        encoded[name] = _encode_column(name, numbers)
    return encoded


def decode_columns(columns: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the columns that `encode_columns` has encoded.

    Raises:
        KeyError, TypeError or ValueError: for any other input.
    """
    return {name: _decode_column(column) for name, column in columns.items()}


def last_value(columns: Mapping[str, Any], name: str = STEP) -> float:
    """Return the last value of an encoded column; minus infinity if it is empty."""
    values = _decode_column(columns.get(name, []))
    if not values:
        return -math.inf
    return values[-1]


def encode_values(values: Mapping[str, float]) -> dict[str, float | str]:
    """Return numbers by name as plain JSON."""
    return {name: _to_json(_to_number(value)) for name, value in values.items()}


def decode_values(values: Mapping[str, float | str]) -> dict[str, float]:
    """Return the numbers that `encode_values` has encoded."""
    return {name: _from_json(value) for name, value in values.items()}


def _encode_column(name: str, values: list[int | float]) -> Any:
    if name == LOSS:
        return [_to_json(_round(value)) for value in values]
    whole_numbers = [value for value in values if isinstance(value, int)]
    if len(whole_numbers) == len(values):
        return _encode_whole_numbers(whole_numbers)
    return _encode_shares(values) or [_to_json(value) for value in values]


def _decode_column(column: Any) -> list[float]:
    if isinstance(column, list):
        # Most columns hold no text; they are copied, because a study has millions of values.
        if str in set(map(type, column)):
            return [_from_json(value) for value in column]
        return list(column)
    if "counts" in column:
        return _decode_shares(column)
    if "runs" in column:
        values = []
        for i, length in enumerate(column["runs"]):
            values += [i % 2] * length
        return values
    first, interval = column["first"], column["interval"]
    return list(range(first, first + interval * column["length"], interval))


# ---- Whole numbers ----


def _encode_whole_numbers(values: list[int]) -> Any:
    if len(values) > 1 and set(values) <= {0, 1}:
        runs = [len(list(group)) for _, group in groupby(values)]
        if values[0] == 1:
            runs = [0, *runs]
        return {"runs": runs}
    if len(values) > 1 and values[1] > values[0]:
        interval = values[1] - values[0]
        last = values[0] + interval * len(values)
        if values == list(range(values[0], last, interval)):
            return {"first": values[0], "interval": interval, "length": len(values)}
    return values


# ---- Shares of examples ----


def _encode_shares(values: Sequence[float]) -> dict[str, Any] | None:
    """Return shares as counts of examples; None if they are not shares of the same number."""
    finite = np.array([value for value in values if math.isfinite(value)], dtype=float)
    if not finite.size or finite.min() < 0 or finite.max() > 1 or np.signbit(finite).any():
        return None
    # Metrics of torch are float32.
    bits = 32 if np.array_equal(finite.astype(np.float32), finite) else 64
    examples = _smallest_denominator(finite, bits)
    if examples is None:
        return None
    counts: list[int | str] = []
    for value in values:
        if math.isfinite(value):
            counts.append(round(value * examples))
        else:
            counts.append(str(value))
    return {"counts": counts, "of": examples, "bits": bits}


def _smallest_denominator(shares: np.ndarray, bits: int) -> int | None:
    """Return the smallest number of examples whose shares these are; None if no number fits."""
    distinct = np.unique(shares)
    if distinct.size < MIN_DISTINCT_SHARES:
        return None
    candidates = np.arange(1, MAX_EXAMPLES + 1)
    for share in distinct[:MAX_TESTED_SHARES]:
        candidates = candidates[_nearest_share(share, candidates, bits) == share]
    for examples in candidates.tolist():
        if np.array_equal(_nearest_share(distinct, examples, bits), distinct):
            return examples
    return None


def _nearest_share(shares: Any, examples: Any, bits: int) -> np.ndarray:
    return _share(np.round(shares * examples), examples, bits)


def _share(counts: np.ndarray, examples: Any, bits: int) -> np.ndarray:
    shares = counts / examples
    if bits == 32:
        return shares.astype(np.float32).astype(float)
    return shares


def _decode_shares(column: Mapping[str, Any]) -> list[float]:
    counts = np.array([_from_json(count) for count in column["counts"]], dtype=float)
    return _share(counts, column["of"], column["bits"]).tolist()


# ---- Numbers ----


def _round(value: int | float) -> int | float:
    """Return a training loss rounded to the digits that are stored."""
    if isinstance(value, int) or not math.isfinite(value):
        return value
    return float(f"{value:.{LOSS_DIGITS}g}")


def _to_number(value: Any) -> int | float:
    """Return a number of Python for one of torch or NumPy."""
    if isinstance(value, Integral):
        return int(value)
    return float(value)


def _to_json(value: int | float) -> int | float | str:
    if math.isfinite(value):
        return value
    return str(value)


def _from_json(value: float | str) -> float:
    if isinstance(value, str):
        return float(value)
    return value
