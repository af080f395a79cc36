"""Locks between the processes that share a storage, and tests whether these processes are alive.

On a PostgreSQL server, both use advisory locks of a session. The server releases them when the
process ends, also after a kill, or when its machine has been silent for a minute. Beside a file
storage, the processes lock files (`lit_dps.storage.liveness`). Neither needs host names or clocks.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from lit_dps.storage.liveness import Liveness, WorkerFile, liveness_without_token, token_of
from lit_dps.storage.urls import is_postgresql, sqlite_file

# Both ends detect that the other one has ended: they probe after 30 seconds of silence, and close
# the connection 30 seconds later.
CONNECT = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "connect_timeout": 30,
}
_SERVER = (
    "set tcp_keepalives_idle = 30; set tcp_keepalives_interval = 10; set tcp_keepalives_count = 3"
)
# Locks are held for milliseconds; for a second or two if many trials are stored at once.
ANNOUNCE_SECONDS = 10
_LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's error code
_HOLDER = """
select application_name, pid from pg_locks join pg_stat_activity using (pid)
where locktype = 'advisory' and granted and (classid::bigint << 32 | objid::bigint) = :key
"""


def _announce(holder: str, lock: str, remedy: str) -> None:
    text = f"waiting for {holder}, which holds the lock {lock}; if it is suspended, {remedy}"
    print(text, file=sys.stderr, flush=True)


class AnnouncedLock(FileLock):
    """A `FileLock` that prints which process holds it, after a wait of `ANNOUNCE_SECONDS`.

    A suspended process keeps its locks. The lock file contains the name of its holder.
    """

    def acquire(self, timeout: float | None = None, **options):
        """Acquire the lock as `FileLock` does; wait without a limit unless `timeout` is given."""
        limit = ANNOUNCE_SECONDS if timeout is None else timeout
        try:
            proxy = super().acquire(limit, **options)
        except Timeout:
            if timeout is not None:
                raise
            self._announce()
            proxy = super().acquire(**options)
        if self.lock_counter == 1:
            with suppress(OSError):
                Path(self.lock_file).write_text(f"{os.getpid()} {socket.gethostname()}")
        return proxy

    def _announce(self) -> None:
        process, host = "", ""
        with suppress(OSError, ValueError):
            process, host = Path(self.lock_file).read_text().split()
        if process:
            remedy = f"let it continue (kill -CONT {process}) or end it (kill -KILL {process})"
            _announce(f"process {process} on {host}", self.lock_file, remedy)
        else:
            _announce("another process", self.lock_file, "let it continue or end it")


class ServerPeers:
    """The processes that share a PostgreSQL database, as one of them sees them.

    Its session begins with its first use. Where that breaks off, whatever was asked raises
    SQLAlchemy's OperationalError, and the next use begins another one.

    Args:
        url: SQLAlchemy URL of the database; a connection pooler in between must keep sessions
            apart.

    Attributes:
        owner: The name of this process, which it has for itself alone.
    """

    def __init__(self, url: str):
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._url, self._connection = url, None
        self._thread = threading.RLock()

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Wait for a lock, and hold it in the block. Its holder may take it again."""
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
        """Return True if the owner is alive; False if there is no owner."""
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
            statement, key = text(f"select {function}(:key)"), {"key": _key(name)}
            try:
                return self._connection.execute(statement, key).scalar()
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                    raise
            self._announce(name)
            self._connection.execute(text("set lock_timeout = 0"))
            self._connection.execute(statement, key)
            self._connection.execute(text(f"set lock_timeout = '{ANNOUNCE_SECONDS}s'"))
            return None
        except (
            BaseException
        ):  # also one of a signal's, which leaves the connection amid a statement
            self.close()
            raise

    def _announce(self, name: str) -> None:
        row = self._connection.execute(text(_HOLDER), {"key": _key(name)}).first()
        if row is None:  # released in the meantime
            return
        remedy = f"let it continue, or end its session (select pg_terminate_backend({row.pid}))"
        _announce(row.application_name or "another program", f"{name!r} of the server", remedy)

    def _connected(self) -> Connection:
        engine = create_engine(
            self._url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=CONNECT
        )
        connection = engine.connect()
        for statement in _SERVER.split(";"):
            connection.execute(text(statement))
        connection.execute(text(f"set lock_timeout = '{ANNOUNCE_SECONDS}s'"))
        # The server cuts names to 63 bytes.
        name = f"process {os.getpid()} on {socket.gethostname()}"
        connection.execute(
            text("select set_config('application_name', :name, false)"), {"name": name}
        )
        return connection


def _key(name: str) -> int:
    """A lock's number: 64 bits, signed, as PostgreSQL has them."""
    return int.from_bytes(hashlib.sha256(f"lit_dps {name}".encode()).digest()[:8], signed=True)


class MachinePeers:
    """Like `ServerPeers`, for a file storage: by lock files beside the file."""

    def __init__(self, file: Path):
        self._file = file
        self._worker = WorkerFile(file.with_name(f"{file.name}.workers"))

    @property
    def owner(self) -> str:
        """The name of this process. The first use creates its file, under the storage's lock."""
        return self._worker.owner()

    def lock(self, name: str) -> AnnouncedLock:
        """Return a lock. The thread that holds it may acquire it again."""
        middle = "" if name == "storage" else f".{name}"
        return AnnouncedLock(f"{self._file}{middle}.lock", is_singleton=True)

    def liveness(self, owner: str | None) -> Liveness:
        """Return whether the owner of a trial is alive; the caller holds the storage's lock."""
        if owner is None:
            return Liveness.DEAD
        token = token_of(owner)
        if token is None:
            return liveness_without_token(owner)
        return self._worker.liveness(token)

    def alive(self, owner: str | None) -> bool:
        """Return True unless the owner is known to be dead; False if there is no owner."""
        return self.liveness(owner) is not Liveness.DEAD

    def leave(self) -> None:
        """Remove the file of this process, which runs no more trials."""
        if self._worker.is_held:
            with self.lock("storage"):
                self._worker.leave()


@cache
def peers(url: str) -> ServerPeers | MachinePeers:
    """Return the processes that share a storage: by PostgreSQL, or by lock files beside a file."""
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
