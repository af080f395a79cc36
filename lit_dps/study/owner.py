"""The processes of one machine that share a study: who they are, whether they still live, and a lock among them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from filelock import FileLock


class MachinePeers:
    """The processes that share a storage on one machine, as one of them sees them.

    Args:
        file: Beside it lie the lock files.

    Attributes:
        owner: The name of this process.
    """

    def __init__(self, file: Path):
        self.owner, self._file = owner(), file

    def lock(self, name: str) -> FileLock:
        """A lock; may be taken again by the thread that holds it."""
        middle = "" if name == "storage" else f".{name}"
        return FileLock(f"{self._file}{middle}.lock", is_singleton=True)

    def alive(self, who: str | None) -> bool:
        """Whether the process of that name still runs; nobody does not."""
        return alive(who)


def owner() -> str:
    """This process as host:pid:start, which no later process with the same number shares."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


def alive(who: str | None) -> bool:
    """Whether the process of an `owner()` still runs; nobody does not.

    A process of another host counts as alive: nobody here knows.
    """
    if who is None:
        return False
    host, pid, started = who.rsplit(":", 2)
    if host != socket.gethostname():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """The start time of a process in clock ticks, or "" where /proc does not tell (then the pid alone decides)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rsplit(")", 1)[1].split()
    return "dead" if state == "Z" else fields[18]
