"""The processes that share a storage: the locks among them, and which of them are alive.

A PostgreSQL server has advisory locks of a session for both. It frees them when the process ends,
however it ends, or when it has not heard of its machine for a minute. A file storage has files
beside it, which the processes lock (`lit_dps.store.liveness`). Neither depends on host names or clocks.
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

from lit_dps.store.liveness import Liveness, WorkerFile, liveness_without_token, token_of
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

    def liveness(self, owner: str | None) -> Liveness:
        """Return whether the owner of a trial is alive: whether its session holds its lock."""
        if owner is None:
            return Liveness.DEAD
        if owner == self.owner:
            return Liveness.ALIVE
        with self._thread:
            free = self._ask("pg_try_advisory_xact_lock_shared", owner)
        return Liveness.DEAD if free else Liveness.ALIVE

    def alive(self, owner: str | None) -> bool:
        """Return True if the owner is alive; nobody is dead."""
        return self.liveness(owner) is Liveness.ALIVE

    def leave(self) -> None:
        """Do nothing: the session ends with the process."""

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


class MachinePeers:
    """The processes that share a file storage: as `ServerPeers`, by lock files beside the file."""

    def __init__(self, file: Path):
        self._file = file
        self._worker = WorkerFile(file.with_name(f"{file.name}.workers"))

    @property
    def owner(self) -> str:
        """The name of this process; its first use makes a file, so it needs the storage's lock."""
        return self._worker.owner()

    def lock(self, name: str) -> FileLock:
        """A lock; may be taken again by the thread that holds it."""
        middle = "" if name == "storage" else f".{name}"
        return FileLock(f"{self._file}{middle}.lock", is_singleton=True)

    def liveness(self, owner: str | None) -> Liveness:
        """Return whether the owner of a trial is alive; the caller holds the storage's lock."""
        if owner is None:
            return Liveness.DEAD
        token = token_of(owner)
        if token is None:
            return liveness_without_token(owner)
        return self._worker.liveness(token)

    def alive(self, owner: str | None) -> bool:
        """Return True unless the owner is known to be dead; nobody is dead."""
        return self.liveness(owner) is not Liveness.DEAD

    def leave(self) -> None:
        """End this process's part: it runs no trial any more."""
        if self._worker.is_held:
            with self.lock("storage"):
                self._worker.leave()


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
