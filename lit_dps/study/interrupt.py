"""How a process is asked to leave: by Ctrl-C or SIGTERM, once or twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code of a process that Ctrl-C ended


class Interrupted(BaseException):
    """The process was asked to leave. No Exception, so that nothing on the way takes it for a failed trial.

    Attributes:
        now: Whether it was raised by a second signal, wherever the process was: other ranks know nothing of it.
    """

    def __init__(self, by: str, now: bool = False):
        super().__init__(by)
        self.now = now


class Leave:
    """Whether this process was asked to leave.

    An exception out of a signal handler is lost where Python happens to run a destructor, and cuts whatever runs in
    two. So a first signal is only remembered, and raised where somebody asks.

    Args:
        others: Whether another process asks this one to leave.

    Attributes:
        signal: Name of the first signal, or None.
        now: Whether there was a second.
    """

    def __init__(self, others: Callable[[], bool] = lambda: False):
        self.others, self.signal, self.now = others, None, False

    def __bool__(self) -> bool:
        return self.signal is not None or self.others()

    def check(self) -> None:
        """Raises Interrupted if the process was asked to leave."""
        if self:
            raise Interrupted(self.signal or "another process")


@contextmanager
def interruptible(leave: Leave, said: str = "") -> Iterator[None]:
    """In here a first Ctrl-C or SIGTERM is left to `leave`; the second raises `Interrupted` at once.

    Args:
        leave: Remembers the first.
        said: What to tell the user then, on standard error.
    """

    def handler(signum, frame):
        name = signal.Signals(signum).name
        if leave.signal is not None:
            leave.now = True
            raise Interrupted(name, now=True)
        leave.signal = name
        os.write(2, said.format(name).encode())  # print() is not to be called where it may have been interrupted

    before = {s: signal.signal(s, handler) for s in SIGNALS}
    try:
        yield
    finally:
        for s, previous in before.items():
            signal.signal(s, previous)
