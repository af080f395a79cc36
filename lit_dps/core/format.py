"""Formats numbers and times with few significant digits, and with exponents only if needed."""

from __future__ import annotations

import math

# Numbers in this range are written in digits, all others with an exponent.
LEAST_IN_DIGITS = 1e-4
MOST_IN_DIGITS = 1e7
# Units of time, their seconds, and the smallest time that is written in them.
DURATION_UNITS = (
    ("days", 86_400.0, 172_800.0),
    ("h", 3600.0, 7200.0),
    ("min", 60.0, 120.0),
    ("s", 1.0, 1.0),
    ("ms", 1e-3, 1e-3),
    ("us", 1e-6, 1e-6),
    ("ns", 1e-9, 1e-9),
)


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


def format_duration(seconds: float | None, digits: int = 3) -> str:
    """Return a time with its unit, such as 4.11 us, 8.10 ms, 42.0 s, 3.10 min, 2.50 h or 12.0 days.

    "-" stands for None and nan.
    """
    if seconds is None or math.isnan(seconds):
        return "-"
    if seconds == 0:
        return "0 s"
    for unit, size, smallest in DURATION_UNITS:
        if seconds >= smallest:
            return f"{number_text(seconds / size, digits)} {unit}"
    return "less than 1 ns"
