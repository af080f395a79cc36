"""Which process runs a trial, and whether that process is alive: without host names and without clocks.

A file storage has a folder `FILE.workers` beside it. Each process that runs trials holds a lock on a
file of its own in there. The owner that is stored with a trial names this file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
from enum import StrEnum
from pathlib import Path

# TOKEN@host:pid. Host and process id are for people; the token alone decides.
_OWNER = re.compile(r"([0-9a-f]{16})@(.*):(\d+)")
# host:pid:rest, as PostgreSQL's owners are, and those of files in earlier versions
_UNTOKENED = re.compile(r"(.*):(\d+):(\w*)")


class Liveness(StrEnum):
    """What is known of a process that runs a trial."""

    ALIVE = "alive"
    DEAD = "dead"
    # Another host's process of an earlier version, or a file system without locks.
    UNKNOWN = "unknown"


# The files that this process has locked, as (device, inode), and its process id: a fork inherits
# the dictionary, but no lock.
_held: dict[tuple[int, int], int] = {}


class WorkerFile:
    """The file of this process beside one storage, and the test of the files of others.

    All methods are called under the storage's lock.

    The locks are record locks (`fcntl.lockf`). The kernel ends them with the process, however it
    ends; a stopped process keeps them. Unlike those of flock(2), they are not inherited by a fork,
    such as a DataLoader's worker that survives a killed trial. But a process loses its record lock
    as soon as it closes any descriptor of the file. Therefore a process opens its own file once,
    and never to test it.

    Args:
        folder: Where the files are. It is made with the first one.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._token = ""
        self._descriptor: int | None = None
        self._process = 0

    def owner(self) -> str:
        """Return the name of this process, as trials store it; make and lock its file if needed."""
        # The file is gone if the working directory changed, or if somebody deleted it.
        if self._process != os.getpid() or not (self._folder / self._token).exists():
            self.leave()
            self._enter()
        return f"{self._token}@{socket.gethostname()}:{self._process}"

    @property
    def is_held(self) -> bool:
        """Whether this process has a file."""
        return self._descriptor is not None and self._process == os.getpid()

    def leave(self) -> None:
        """Remove the file of this process, which runs no trial any more."""
        if not self.is_held:
            return
        found = os.fstat(self._descriptor)
        _held.pop((found.st_dev, found.st_ino), None)
        _remove(self._folder / self._token)
        os.close(self._descriptor)
        self._descriptor, self._process = None, 0
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def liveness(self, token: str) -> Liveness:
        """Return whether the process of a token is alive; remove its file if the process is dead."""
        file = self._folder / token
        try:
            found = file.stat()
            if _held.get((found.st_dev, found.st_ino)) == os.getpid():
                return Liveness.ALIVE
            descriptor = os.open(file, os.O_RDWR)
        except FileNotFoundError:
            return Liveness.DEAD
        except OSError:
            return Liveness.UNKNOWN
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(file)
            return Liveness.DEAD
        except (BlockingIOError, PermissionError):
            return Liveness.ALIVE
        except OSError:
            return Liveness.UNKNOWN
        finally:
            os.close(descriptor)

    def _enter(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            self.liveness(file.name)
        token = secrets.token_hex(8)
        descriptor = os.open(self._folder / token, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        # Where the file system has no locks, others get UNKNOWN, and --take-over decides.
        with contextlib.suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        _held[found.st_dev, found.st_ino] = os.getpid()
        self._token, self._descriptor, self._process = token, descriptor, os.getpid()


def token_of(owner: str) -> str | None:
    """Return the token of an owner; None for the owners of servers and of earlier versions."""
    match = _OWNER.fullmatch(owner)
    return match[1] if match else None


def describe_owner(owner: str) -> str:
    """Return an owner for people: "process 123 on HOST"."""
    match = _OWNER.fullmatch(owner)
    if match:
        return f"process {match[3]} on {match[2]}"
    match = _UNTOKENED.fullmatch(owner)
    if match:
        return f"process {match[2]} on {match[1]}"
    return f"{owner!r}"


def liveness_without_token(owner: str) -> Liveness:
    """Return what is known of an owner "host:pid:start", as earlier versions stored it.

    On this host, the process is alive if one with its number and its start time is there. Nothing is
    known of another host's process.
    """
    match = _UNTOKENED.fullmatch(owner)
    if match is None or match[1] != socket.gethostname():
        return Liveness.UNKNOWN
    process = int(match[2])
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return Liveness.DEAD
    except PermissionError:
        pass
    return Liveness.ALIVE if start_of(process) == match[3] else Liveness.DEAD


def start_of(process: int) -> str:
    """Return the start time of a process in clock ticks; "" without /proc, "dead" for a zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rsplit(")", 1)[1].split()
    return "dead" if state == "Z" else fields[18]


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
