"""The processes that share a storage: the locks among them, and who of them still lives.

On a PostgreSQL server both are advisory locks of a session: it frees them when the process ends, however it ends, or
when it has not heard of its machine for a minute. On one machine they are files, and process ids.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

from filelock import FileLock
from sqlalchemy import Connection, NullPool, create_engine, text

from lit_dps.store.urls import is_postgresql, sqlite_file

# How both ends find out that the other one is gone: asked after 30 seconds of silence, given up 30 seconds later.
CONNECT = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "connect_timeout": 30}
_SERVER = "set tcp_keepalives_idle = 30; set tcp_keepalives_interval = 10; set tcp_keepalives_count = 3"


class ServerPeers:
    """The processes that share a PostgreSQL database, as one of them sees them.

    Its session begins with its first use. Where that breaks off, whatever was asked raises SQLAlchemy's
    OperationalError, and the next use begins another one.

    Args:
        url: SQLAlchemy URL of the database; a connection pooler in between must keep sessions apart.

    Attributes:
        owner: The name of this process, which it has for itself alone.
    """

    def __init__(self, url: str):
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._url, self._connection = url, None
        self._thread = threading.RLock()

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Waits for a lock and holds it in the body; whoever holds it may take it again."""
        with self._thread:  # threads share the session, and the server's lock with it
            self._ask("pg_advisory_lock", name)
            try:
                yield
            finally:
                if self._connection is not None:  # else the server has freed it with the session
                    self._ask("pg_advisory_unlock", name)

    def alive(self, who: str | None) -> bool:
        """Whether the process of that name still runs; nobody does not."""
        if who is None or who == self.owner:
            return who is not None
        with self._thread:
            return not self._ask("pg_try_advisory_xact_lock_shared", who)

    def close(self) -> None:
        """Ends the session: to all others this process has ended."""
        with self._thread:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.invalidate()  # whatever the state that it was left in
                connection.close()

    def _ask(self, function: str, name: str) -> bool | None:
        try:
            if self._connection is None:
                self._connection = self._connected()
                self._ask("pg_advisory_lock", self.owner)  # for as long as the session lasts
            return self._connection.execute(text(f"select {function}(:key)"), {"key": _key(name)}).scalar()
        except BaseException:  # also one of a signal's, which leaves the connection amid a statement
            self.close()
            raise

    def _connected(self) -> Connection:
        engine = create_engine(self._url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=CONNECT)
        connection = engine.connect()
        for statement in _SERVER.split(";"):
            connection.execute(text(statement))
        return connection


def _key(name: str) -> int:
    """A lock's number: 64 bits, signed, as PostgreSQL has them."""
    return int.from_bytes(hashlib.sha256(f"lit_dps {name}".encode()).digest()[:8], signed=True)


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


class MachinePeers:
    """The processes that share a storage on one machine: as `ServerPeers`, by lock files beside a file."""

    alive = staticmethod(alive)

    def __init__(self, file: Path):
        self.owner, self._file = owner(), file

    def lock(self, name: str) -> FileLock:
        """A lock; may be taken again by the thread that holds it."""
        middle = "" if name == "storage" else f".{name}"
        return FileLock(f"{self._file}{middle}.lock", is_singleton=True)


@cache
def peers(url: str) -> ServerPeers | MachinePeers:
    """The processes that share a storage: on any machines through PostgreSQL, else those of this machine."""
    if is_postgresql(url):
        return ServerPeers(url)
    file = sqlite_file(url)
    if file is None:
        digest = hashlib.sha256(url.encode()).hexdigest()[:16]
        file = Path(tempfile.gettempdir()) / f"lit_dps-{os.getuid()}-{digest}"
    return MachinePeers(file)


def storage_lock(url: str) -> AbstractContextManager:
    """The lock of all processes that share a storage; may be taken again by who holds it."""
    return peers(url).lock("storage")
