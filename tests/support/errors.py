"""Asserts that a call is refused, by the fields of the error instead of its wording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import ANY

import pytest

from lit_dps.core.errors import ConfigError, UserError

ERROR_PREFIX = "lit-dps: error: "


@contextmanager
def refuses(
    key: str | None, value: Any = ANY, error: type[UserError] = ConfigError
) -> Iterator[pytest.ExceptionInfo]:
    """Assert that the body raises an error about this key and value.

    Args:
        key: The configuration key that the error names; None for an error without a key.
        value: The value that is refused; ANY matches every value.
        error: The expected class of the error.

    Yields:
        The exception's information, as from `pytest.raises`. It is complete after the body.
    """
    with pytest.raises(error) as info:
        yield info
    assert info.value.key == key
    # In a list, NaN equals itself.
    assert [info.value.value] == [value]


def refusals_in(text: str) -> list[tuple[str, str]]:
    """Return key and value of each ConfigError that a command printed, as it printed them."""
    return re.findall(r"^lit-dps: error: (?:\S+: )?(\S+) is (.+?); it must be ", text, re.MULTILINE)


def error_line(text: str) -> str:
    """Return the only error line that a command printed, without its prefix."""
    lines = [line for line in text.splitlines() if line.startswith(ERROR_PREFIX)]
    assert len(lines) == 1, text
    return lines[0].removeprefix(ERROR_PREFIX)


@contextmanager
def raises_about(error: type[BaseException], *facts: object) -> Iterator[pytest.ExceptionInfo]:
    """Assert that the body raises an error whose text contains these names and numbers.

    For errors without fields, such as ValueError of a function.
    """
    with pytest.raises(error) as info:
        yield info
    for fact in facts:
        assert str(fact) in str(info.value)
