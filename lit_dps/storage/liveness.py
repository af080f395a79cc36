"""Determines whether the process that runs a trial is alive, without host names and clocks.

A file storage has a folder `FILE.workers` beside it. Each process that runs trials creates one file
in this folder and holds a lock on it. The owner that is stored with a trial names this file.
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

# TOKEN@host:pid. Only the token is compared; host and process id are for people.
_OWNER = re.compile(r"([0-9a-f]{16})@(.*):(\d+)")
# host:pid:rest. PostgreSQL storages have such owners; file storages of earlier versions, too.
_UNTOKENED = re.compile(r"(.*):(\d+):(\w*)")


class Liveness(StrEnum):
    """Whether a process that runs a trial is alive, as far as can be determined."""

    ALIVE = "alive"
    DEAD = "dead"
    # The process runs an earlier version on another host, or the file system has no locks.
    UNKNOWN = "unknown"


# (device, inode) of each file that a process has locked -> id of this process. The id is needed
# because a fork inherits the dictionary, but not the locks.
_held: dict[tuple[int, int], int] = {}


class WorkerFile:
    """The lock file of this process beside one storage. Also tests the files of other processes.

    The caller of each method holds the storage's lock.

    The locks are record locks (`fcntl.lockf`). The kernel releases them when the process ends, also
    after a kill; a stopped process keeps them. A fork does not inherit them, unlike locks of
    flock(2). So a DataLoader's worker that survives a killed trial holds no lock. A process loses
    its record lock as soon as it closes any descriptor of the file. Therefore a process opens its
    file only once, and never opens it for a test.

    Args:
        folder: The folder of the files. The first file creates it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._token = ""
        self._descriptor: int | None = None
        self._process = 0

    def owner(self) -> str:
        """Return the name of this process, as trials store it; create its lock file if needed."""
        # The file is missing if the working directory changed, or if a user deleted it.
        if self._process != os.getpid() or not (self._folder / self._token).exists():
            self.leave()
            self._enter()
        return f"{self._token}@{socket.gethostname()}:{self._process}"

    @property
    def is_held(self) -> bool:
        """Whether this process has a file."""
        return self._descriptor is not None and self._process == os.getpid()

    def leave(self) -> None:
        """Remove the file of this process, which runs no more trials."""
        if not self.is_held:
            return
        stat = os.fstat(self._descriptor)
        _held.pop((stat.st_dev, stat.st_ino), None)
        _remove(self._folder / self._token)
        os.close(self._descriptor)
        self._descriptor, self._process = None, 0
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def liveness(self, token: str) -> Liveness:
        """Return whether the process of a token is alive; remove the file of a dead process."""
        file = self._folder / token
        try:
            stat = file.stat()
            if _held.get((stat.st_dev, stat.st_ino)) == os.getpid():
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
        # Without locks in the file system, other processes get UNKNOWN, and the user decides by
        # --take-over.
        with contextlib.suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stat = os.fstat(descriptor)
        _held[stat.st_dev, stat.st_ino] = os.getpid()
        self._token = token
        self._descriptor = descriptor
        self._process = os.getpid()


def token_of(owner: str) -> str | None:
    """Return the token of an owner; None for owners on servers and of earlier versions."""
    match = _OWNER.fullmatch(owner)
    return match[1] if match else None


def describe_owner(owner: str) -> str:
    """Return an owner in words: "process 123 on HOST"."""
    match = _OWNER.fullmatch(owner)
    if match:
        return f"process {match[3]} on {match[2]}"
    match = _UNTOKENED.fullmatch(owner)
    if match:
        return f"process {match[2]} on {match[1]}"
    return f"{owner!r}"


def liveness_without_token(owner: str) -> Liveness:
    """Return whether an owner "host:pid:start" is alive, as earlier versions stored it.

    A process of this host is alive if a process with the same number and start time exists. A
    process of another host is UNKNOWN.
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
