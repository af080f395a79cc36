"""ProgressLine: says on stderr how far a long computation is."""

from __future__ import annotations

import sys
import time

FIRST_SECONDS = 2.0  # a shorter wait needs no line
PIPE_SECONDS = 30.0  # between two lines of a log file


class ProgressLine:
    """Prints how far something is, from two seconds after its begin on.

    On a terminal the line is written again and again; elsewhere there is a new line now and then.

    Args:
        what: What is done, such as "MLflow: trials logged".
        total: How many there are.
        in_logs: Whether lines are printed also where stderr is no terminal.
    """

    def __init__(self, what: str, total: int, in_logs: bool = True):
        self.what, self.total, self.in_logs = what, total, in_logs
        self._next = time.monotonic() + FIRST_SECONDS
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
