"""Formats numbers with few significant digits, and with an exponent only if it is needed."""

from __future__ import annotations

import math

# Numbers in this range are written in digits, all others with an exponent.
LEAST_IN_DIGITS = 1e-4
MOST_IN_DIGITS = 1e7


def number_text(x: float, digits: int = 2) -> str:
    """Return a number with `digits` significant digits, such as 24, 0.0031, 1200, 3.1e-05 or
    inf."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    rounded = float(f"{x:.{digits - 1}e}")
    if not LEAST_IN_DIGITS <= abs(rounded) < MOST_IN_DIGITS:
        return f"{x:.{digits - 1}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(decimals, 0)}f}"


def time_text(seconds: float) -> str:
    """Return a time with two significant digits, such as 2.1 s, 31 ms, 4.1 us or "less than 1
    ns"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= size:
            return f"{number_text(seconds / size)} {unit}"
    return "less than 1 ns"
