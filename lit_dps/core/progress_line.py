"""ProgressLine: says on stderr how far a long computation is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

FIRST_SECONDS = 2.0  # a shorter wait needs no line
PART_SECONDS = 0.5  # a shorter part of a long wait needs no line
PIPE_SECONDS = 30.0  # between two lines of a log file
Item = TypeVar("Item")
_waiting_since: float | None = None


@contextmanager
def one_wait(begin: float) -> Iterator[None]:
    """Count all that is done in the body as one wait, from `begin` on the monotonic clock.

    A command of many short parts is a long wait. Elsewhere each ProgressLine is a wait of its own.
    """
    global _waiting_since
    _waiting_since = begin
    try:
        yield
    finally:
        _waiting_since = None


class ProgressLine:
    """Prints how far something is, from two seconds after the begin of the wait on.

    On a terminal the line is written again and again; elsewhere there is a new line now and then.

    Args:
        what: What is done, such as "MLflow: trials logged".
        total: How many there are.
        in_logs: Whether lines are printed also where stderr is no terminal.
    """

    def __init__(self, what: str, total: int, in_logs: bool = True):
        self.what, self.total, self.in_logs = what, total, in_logs
        now = time.monotonic()
        begin = now if _waiting_since is None else _waiting_since
        self._next = max(begin + FIRST_SECONDS, now + PART_SECONDS)
        self._is_written = False

    def update(self, done: int) -> None:
        """Take in how many are done, and print the line if it is due."""
        now = time.monotonic()
        if now < self._next or not (self.in_logs or sys.stderr.isatty()):
            return
        line = f"{self.what}: {done} of {self.total}"
        if sys.stderr.isatty():
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
            self._next = now + FIRST_SECONDS
        else:
            print(line, file=sys.stderr, flush=True)
            self._next = now + PIPE_SECONDS
        self._is_written = True

    def end(self) -> None:
        """End the line of a terminal."""
        if self._is_written and sys.stderr.isatty():
            print(file=sys.stderr, flush=True)


def with_progress(what: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items; print on a terminal how many of them are done."""
    line = ProgressLine(what, len(items), in_logs=False)
    for done, item in enumerate(items):
        line.update(done)
        yield item
    line.end()
