"""ProgressLine and StageLine: print the progress of a long computation on stderr."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from lit_dps.core.text import WIDTH, wrap

# A shorter wait, and a shorter part of a long wait, need no line.
FIRST_SECONDS = 2.0
PART_SECONDS = 0.5
ERASE_TO_END = "\x1b[K"  # erases the rest of a line of a terminal
# Between two lines of a log file.
PIPE_SECONDS = 30.0

Item = TypeVar("Item")
# Begin of the wait that `one_wait` counts; None outside of it.
_waiting_since: float | None = None


@contextmanager
def one_wait(begin: float) -> Iterator[None]:
    """Count everything in the body as one wait, from `begin` on the monotonic clock.

    A command of many short parts is a long wait. Elsewhere each ProgressLine is a separate wait.
    """
    global _waiting_since
    _waiting_since = begin
    try:
        yield
    finally:
        _waiting_since = None


def stderr_columns() -> int:
    """Return COLUMNS, or the columns of the terminal of stderr; `WIDTH` if they are unknown.

    stdout may be a file, so its width does not count.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
    except (OSError, ValueError):  # no terminal, or no file
        return WIDTH


def print_wrapped(text: str) -> None:
    """Print a line on stderr; a terminal gets it in lines that break between words."""
    if sys.stderr.isatty():
        indent = " " * (len(text) - len(text.lstrip()) + 2)
        text = "\n".join(wrap(text, stderr_columns(), indent))
    print(text, file=sys.stderr, flush=True)


def replace_line(line: str) -> None:
    """Write a line over the last line of a terminal, cut at its width."""
    # A line of the full width would wrap, and the next one would not replace it.
    line = line[: stderr_columns() - 1]
    print(f"\r{line}{ERASE_TO_END}", end="", file=sys.stderr, flush=True)


class _Line:
    """A line that is replaced on a terminal; elsewhere there is a new line every `PIPE_SECONDS`.

    Args:
        first: When the first line is due, on the monotonic clock.
        seconds: Seconds between two lines on a terminal.
    """

    def __init__(self, first: float, seconds: float):
        self._next = first
        self._seconds = seconds
        self._is_shown = False  # on a terminal

    def show(self, line: str, now: float) -> None:
        """Print a line that is due."""
        if sys.stderr.isatty():
            replace_line(line)
            self._next = now + self._seconds
            self._is_shown = True
        else:
            print(line, file=sys.stderr, flush=True)
            self._next = now + PIPE_SECONDS

    def end(self) -> None:
        """Remove the line from a terminal, so that other lines may follow."""
        if self._is_shown:
            replace_line("")
            self._is_shown = False


class ProgressLine(_Line):
    """Prints the progress of a computation that takes longer than `FIRST_SECONDS`.

    Args:
        what: The computation, such as "MLflow: trials logged".
        total: The number of items.
        in_logs: Whether to print lines also if stderr is no terminal.
    """

    def __init__(self, what: str, total: int, in_logs: bool = True):
        self.what = what
        self.total = total
        self.in_logs = in_logs
        now = time.monotonic()
        begin = now
        if _waiting_since is not None:
            begin = _waiting_since
        super().__init__(max(begin + FIRST_SECONDS, now + PART_SECONDS), FIRST_SECONDS)

    def update(self, done: int) -> None:
        """Set the number of finished items, and print the line if it is due."""
        now = time.monotonic()
        if now >= self._next and (self.in_logs or sys.stderr.isatty()):
            self.show(f"{self.what}: {done} of {self.total}", now)


class StageLine(_Line):
    """Shows the state of a stage that lasts longer than `FIRST_SECONDS`, as a context manager.

    Args:
        what: The stage, such as "probe 2: B = 64".
        seconds: The most seconds that the stage may take; None if that is unknown.
    """

    def __init__(self, what: str, seconds: float | None = None):
        self.what = what
        self.seconds = seconds
        self._began = time.monotonic()
        super().__init__(self._began + FIRST_SECONDS, PART_SECONDS)

    def __enter__(self) -> StageLine:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def update(self, state: str) -> None:
        """Show a state such as "step 120", with the time so far, if a line is due."""
        now = time.monotonic()
        if now < self._next:
            return
        elapsed = f"{now - self._began:.0f} s"
        if self.seconds is not None:
            elapsed += f" of at most {math.ceil(self.seconds)} s"
        self.show(f"{self.what}: {state}, {elapsed}", now)


def with_progress(what: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items; print on a terminal how many are finished."""
    line = ProgressLine(what, len(items), in_logs=False)
    for done, item in enumerate(items):
        line.update(done)
        yield item
    line.end()
