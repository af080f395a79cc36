"""Errors that the user can fix, and where an error of the user's code comes from.

The commands print errors that the user can fix as one line, and exit with 2.
"""

from __future__ import annotations

import os
import re
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lit_dps
from lit_dps.core.text import shorten
from lit_dps.core.user_code import is_user_file


class UserError(Exception):
    """Base class of errors that the user can fix: by other input, other files or other storage.

    Attributes:
        key: The configuration key, option or file that the error is about; None without one.
        value: The value of the key.
        allowed: What the value must be, as text; None if it is part of the message.
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


def is_number(value: object) -> bool:
    """Return True for an integer or a float; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_whole(key: str, value: object, least: int, what: str) -> None:
    """Raise ConfigError about `key` unless a value is an integer of at least `least`.

    Args:
        key: The key.
        value: Its value.
        least: The smallest allowed value.
        what: What is counted, such as "steps".
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(key, value, f"a whole number of {what}, {least} or more")


def is_about(message: str, key: str) -> bool:
    """Return True if a message is the text of a ConfigError about a key."""
    return message.startswith(f"{key} is ")


def describe_value(key: str, value: object) -> str:
    """Return a value as it is written in a configuration; a missing option is "missing"."""
    if value is None:
        if key.startswith("--"):
            return "missing"
        return "null"
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
            "a script that calls lit_dps.study, lit_dps.run, lit_dps.advise or lit_dps.cli.main "
            "is run again by each process that it starts: call the function below "
            "if __name__ == '__main__':"
        )


_FRAME = re.compile(r' *File "(.+)", line (\d+), in (.+)')


def find_user_error(error: BaseException | None) -> UserError | None:
    """Return the UserError that another error was raised from; None without one."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its class if it has no text."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]


def is_loader_worker_error(error: BaseException) -> bool:
    """Return True if a worker of a DataLoader raised the error.

    The text of the error then contains the traceback of the worker.
    """
    return "in DataLoader worker process" in str(error) and "Original Traceback" in str(error)


def error_text(error: BaseException) -> str:
    """Return the text of an error; of an error in a worker of a DataLoader, the original text."""
    text = str(error)
    if not is_loader_worker_error(error):
        return text
    lines = text.strip().splitlines()
    last_frame = 0
    for i, line in enumerate(lines):
        if line.startswith((" ", "Original Traceback")):
            last_frame = i
    original = " ".join(lines[last_frame + 1 :])
    return original.removeprefix(f"{type(error).__name__}: ")


def has_user_frame(error: BaseException) -> bool:
    """Return True if an error went through code that is not installed."""
    for frame in _foreign_frames(error):
        # "<frozen importlib._bootstrap>" is no file.
        if not frame.filename.startswith("<") and is_user_file(frame.filename):
            return True
    return False


def _foreign_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error outside of this package and its libraries."""
    libraries = tuple(f"{folder}{os.sep}" for folder in _library_folders())
    return [frame for frame in _frames_of(error) if not frame.filename.startswith(libraries)]


def place_in_user_code(error: BaseException) -> str:
    """Return the last place of an error in the user's code, as " (file, line, in function)".

    Returns:
        "" if no frame is in the user's code.
    """
    frames = _foreign_frames(error)
    if not frames:
        return ""
    # The user's call of another library is more useful than a line within that library.
    user_frames = [frame for frame in frames if is_user_file(frame.filename)]
    last = (user_frames or frames)[-1]
    return f" ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def _library_folders() -> list[Path]:
    """Return the folders of the libraries whose frames are never the user's."""
    folders = [Path(lit_dps.__file__).parent]
    for name in ("lightning", "torch"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent)
    return folders


def _frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback, then the frames of a worker of a DataLoader."""
    frames = list(traceback.extract_tb(error.__traceback__))
    if not is_loader_worker_error(error):
        return frames
    for line in str(error).splitlines():
        match = _FRAME.match(line)
        if match is not None:
            frames.append(traceback.FrameSummary(match[1], int(match[2]), match[3]))
    return frames
