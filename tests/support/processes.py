"""The processes that a command starts, by /proc: a server, and the workers or ranks that it
forks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def _children(parent: int) -> dict[int, str]:
    """Process id -> command line."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            fields, line = (
                path.read_text().rsplit(")", 1)[1].split(),
                (path.parent / "cmdline").read_text(),
            )
            if int(fields[1]) == parent and fields[0] != "Z":
                found[int(path.parent.name)] = line
    return found


def servers_of(parent: int) -> list[int]:
    """The server of a command; none before it has one."""
    return [pid for pid, line in _children(parent).items() if "multiprocessing.forkserver" in line]


def forked_by(parent: int) -> list[int]:
    """The workers or ranks of a command, in the order in which they started, but for what those
    started themselves."""
    return sorted(pid for server in servers_of(parent) for pid in _children(server))


def started_by_torchrun(parent: int) -> list[int]:
    """The ranks that torchrun started of a command of ours."""
    return sorted(pid for pid, line in _children(parent).items() if "cli.py" in line)


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
