"""Text for messages: numbers and times with few digits, text that is safe for a terminal, and near
matches of mistyped names.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TextIO

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


def duration_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which a time is written, and its seconds; s for 0 and below 1 ns."""
    for unit, size, smallest in DURATION_UNITS:
        if seconds >= smallest:
            return unit, size
    return "s", 1.0


def format_interval(seconds: float, low: float, high: float, digits: int = 3) -> str:
    """Return a time with its limits in one unit, such as 2.31 [1.98, 2.70] s."""
    unit, size = duration_unit(seconds)
    value, *limits = [number_text(x / size, digits) for x in (seconds, low, high)]
    return f"{value} [{', '.join(limits)}] {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 trial, 5,000 trials."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def every(steps: int) -> str:
    """Return an interval in steps: every step, every 5 steps."""
    if steps == 1:
        return "every step"
    return f"every {steps} steps"


WIDTH = 100  # columns of a text that no terminal shows


def terminal_width() -> int:
    """Return the columns of the terminal that shows stdout; `WIDTH` without a terminal."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def wrap(text: str, width: int, indent: str = "  ") -> list[str]:
    """Return a text in lines of at most `width` columns; the later ones are indented.

    Words longer than a line stay whole, since paths and commands are copied. An equation such as
    B = 8 and a share such as 95 % stay on one line.
    """
    lines = textwrap.wrap(
        text.replace(" = ", "\xa0=\xa0").replace(" %", "\xa0%"),
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\xa0", " ") for line in lines]


def for_terminal(text: str, indent: str = "  ", stream: TextIO | None = None) -> str:
    """Return a text for a stream: at a terminal, its long lines are wrapped between words.

    Args:
        text: The text.
        indent: What begins all lines of a paragraph but its first.
        stream: Where the text is printed; None for stdout.
    """
    if not (stream or sys.stdout).isatty():
        return text
    lines = []
    for line in text.splitlines():
        lines += wrap(line, terminal_width(), indent) or [""]
    return "\n".join(lines)


def prose_for_terminal(text: str) -> str:
    """Return a text like `for_terminal`; rows of tables, with wide gaps, keep their lines."""
    lines = []
    for line in text.splitlines():
        if "   " in line:
            lines.append(line)
        else:
            lines.append(for_terminal(line))
    return "\n".join(lines)


VALUE_LENGTH = 200  # characters of a value in a message
MIN_SIMILARITY = 0.7  # of a mistyped name to the name that is suggested, as difflib measures it

# Control characters, marks of writing direction, halves of characters, and separators of lines.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)


def shorten(text: str) -> str:
    """Return a text of at most `VALUE_LENGTH` characters, with dots in place of the middle."""
    if len(text) <= VALUE_LENGTH:
        return text
    half = (VALUE_LENGTH - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def shorten_message(text: str) -> str:
    """Return the beginning and the end of another library's message, if it is long."""
    if len(text) <= 3 * VALUE_LENGTH:
        return text
    return f"{text[: 2 * VALUE_LENGTH]} ... {text[-VALUE_LENGTH:]}"


def escape(text: str) -> str:
    r"""Return a text with control characters replaced by escapes such as \x1b.

    A terminal would obey control characters. Line breaks and tabs are kept.
    """
    return _UNPRINTABLE.sub(_escape_match, text)


def _escape_match(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def escape_json(value: Any) -> Any:
    """Return plain JSON with `escape` applied to all strings and keys.

    The strings may come from a stranger's database.
    """
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(key): escape_json(item) for key, item in value.items()}
    if isinstance(value, list):
        is_numeric = set(map(type, value)) <= {int, float}
        if is_numeric:
            return value
        return [escape_json(item) for item in value]
    return value


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that a mistyped one is most similar to; None if no name is similar."""
    matches = get_close_matches(name, sorted(names), n=1, cutoff=MIN_SIMILARITY)
    return matches[0] if matches else None


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """Return the hint for a mistyped name; None if no name is similar."""
    near = closest_name(name, names)
    return None if near is None else f"Did you mean {near}?"


def closest_key(key: str, keys: Iterable[str]) -> str | None:
    """Return the dotted key that a mistyped one is most similar to; None if no key is similar.

    A key of a known section is compared with the other names of this section only. Otherwise the
    name of the section would make all keys of the section similar.
    """
    parent, _, name = key.rpartition(".")
    keys = list(keys)
    siblings = []
    for each in keys:
        section, _, last = each.rpartition(".")
        if parent and section == parent:
            siblings.append(last)
    if not siblings:
        return closest_name(key, keys)
    near = closest_name(name, siblings)
    if near is None:
        return None
    return f"{parent}.{near}"
