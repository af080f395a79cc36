"""Errors that the user can fix. The commands print them as one line and exit with 2."""

from __future__ import annotations

from typing import Any

from lit_dps.core.text import shorten


class UserError(Exception):
    """Base class of errors that the user can fix: by other input, other files or other storage.

    Attributes:
        key: The configuration key, option or file that the error is about; None if there is none.
        value: The value of the key.
        allowed: What the value must be, as text; None if the message says it.
        hint: What the user can do next, as text; None if there is no advice.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        value: Any = None,
        allowed: str | None = None,
        hint: str | None = None,
    ):
        super().__init__(message)
        self.key = key
        self.value = value
        self.allowed = allowed
        self.hint = hint

    def __reduce__(self) -> tuple:
        # Workers send errors to their parent. The default would call the constructor with the
        # message alone, but subclasses have constructors with other arguments.
        return _restore, (type(self), self.args, vars(self))


def _restore(kind: type[UserError], args: tuple, attributes: dict[str, Any]) -> UserError:
    """Return an unpickled error, without a call of its constructor."""
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class ConfigError(UserError, ValueError):
    """A configuration value that is not allowed: "KEY is VALUE; it must be ALLOWED. HINT"."""

    def __init__(self, key: str, value: object, allowed: str, hint: str | None = None):
        message = f"{key} is {describe_value(key, value)}; it must be {allowed}"
        if hint is not None:
            message += f". {hint}"
        super().__init__(message, key=key, value=value, allowed=allowed, hint=hint)


def is_about(message: str, key: str) -> bool:
    """Return True if a message is that of a ConfigError about a key."""
    return message.startswith(f"{key} is ")


def describe_value(key: str, value: object) -> str:
    """Return a value as it is written in a configuration; a missing option is "missing"."""
    if value is None:
        return "missing" if key.startswith("--") else "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shorten(repr(value))


class DataError(UserError):
    """A data set that is missing, unreadable or truncated."""


class StorageError(UserError):
    """A database or a file of an analysis that cannot be opened, read or written."""


class Unguarded(UserError):
    """A user's script calls a command without a guard: `if __name__ == "__main__":`.

    Every process that the command starts imports the script and would run the command again.
    """

    EXIT_CODE = 64  # of a process that would run the command again
    PROCESS_PREFIX = "lit-dps "  # the names of our processes begin with it

    def __init__(self):
        super().__init__(
            "a script that calls lit_dps.run or lit_dps.cli.main is run again by each process "
            "that this starts: call it below if __name__ == '__main__':"
        )
