"""Text for messages: shortened, safe for a terminal, and near matches of mistyped names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

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
        return value if is_numeric else [escape_json(item) for item in value]
    return value


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that a mistyped one is most similar to; None if no name is similar."""
    matches = get_close_matches(name, sorted(names), n=1, cutoff=MIN_SIMILARITY)
    return matches[0] if matches else None
