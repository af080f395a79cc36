"""Locks between the processes that share a storage, and tests whether these processes are alive.

Both use locks that end with their process, also after a kill. They need no host names and clocks.

- `MachinePeers`, beside a file storage: lock files. The storage's lock is FILE.lock. Each process
  that runs trials holds a lock on a file in the folder FILE.workers. The owner that is stored with
  a trial names this file.
- `ServerPeers`, on a PostgreSQL server: advisory locks of a session. The server releases them when
  the process ends, or when its machine has been silent for a minute.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import StrEnum
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from lit_dps.storage.urls import is_postgresql, sqlite_file, without_link

# Locks are held for milliseconds; for a second or two if many trials are stored at once.
ANNOUNCE_SECONDS = 10


class Liveness(StrEnum):
    """Whether a process that runs a trial is alive, as far as can be determined."""

    ALIVE = "alive"
    DEAD = "dead"
    # The file system has no locks, or the owner is of another kind of storage.
    UNKNOWN = "unknown"


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
    """Return the lock of all processes that share a storage. Its holder may acquire it again."""
    return peers(url).lock("storage")


# ---- File storages ----


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


def _announce(holder: str, lock: str, remedy: str) -> None:
    text = f"waiting for {holder}, which holds the lock {lock}; if it is suspended, {remedy}"
    print(text, file=sys.stderr, flush=True)


# (device, inode) of each file that a process has locked -> id of this process. The id is needed
# because a fork inherits the dictionary, but not the locks.
_held: dict[tuple[int, int], int] = {}


class MachinePeers:
    """The processes that share a file storage, as one of them sees them, by files beside it.

    Each process that runs trials has a lock file. The locks are record locks (`fcntl.lockf`). The
    kernel releases them when the process ends, also after a kill; a stopped process keeps them. A
    fork does not inherit them, unlike locks of flock(2). So a DataLoader's worker that survives a
    killed trial holds no lock. A process loses its record lock as soon as it closes any descriptor
    of the file. Therefore a process opens its file only once, and never opens it for a test.

    Args:
        file: The file of the storage.
    """

    def __init__(self, file: Path):
        self._named_file = file
        self._token = ""
        self._descriptor: int | None = None
        self._process = 0

    @property
    def _file(self) -> Path:
        """The file, without a link; its absolute path depends on the working directory."""
        return without_link(self._named_file)

    @property
    def _folder(self) -> Path:
        """The folder of the lock files; the first one creates it."""
        file = self._file
        return file.with_name(f"{file.name}.workers")

    @property
    def owner(self) -> str:
        """The name of this process, as trials store it; the caller holds the storage's lock.

        The first use creates the lock file of this process.
        """
        # The file is missing if the working directory changed, or if a user deleted it.
        if self._process != os.getpid() or not (self._folder / self._token).exists():
            self._leave()
            self._enter()
        return f"{self._token}@{socket.gethostname()}:{self._process}"

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
            return Liveness.UNKNOWN
        return self._liveness_of(token)

    def alive(self, owner: str | None) -> bool:
        """Return True unless the owner is known to be dead; False if there is no owner."""
        return self.liveness(owner) is not Liveness.DEAD

    def others(self) -> list[str]:
        """Return the other processes that work on the storage, unless they are known to be dead.

        The caller holds the storage's lock.
        """
        if not self._folder.is_dir():
            return []
        names = []
        for file in sorted(self._folder.iterdir()):
            is_ours = self._is_held and file.name == self._token
            if not is_ours and self._liveness_of(file.name) is not Liveness.DEAD:
                names.append(f"the process with the file {file}")
        return names

    def leave(self) -> None:
        """Remove the file of this process, which runs no more trials."""
        if self._is_held:
            with self.lock("storage"):
                self._leave()

    @property
    def _is_held(self) -> bool:
        """Whether this process has a file."""
        return self._descriptor is not None and self._process == os.getpid()

    def _leave(self) -> None:
        if self._descriptor is None or not self._is_held:
            return
        stat = os.fstat(self._descriptor)
        _held.pop((stat.st_dev, stat.st_ino), None)
        _remove(self._folder / self._token)
        os.close(self._descriptor)
        self._descriptor = None
        self._process = 0
        with suppress(OSError):
            self._folder.rmdir()

    def _liveness_of(self, token: str) -> Liveness:
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
            self._liveness_of(file.name)
        token = secrets.token_hex(8)
        descriptor = os.open(self._folder / token, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        # Without locks in the file system, other processes get UNKNOWN, and the user decides by
        # --take-over.
        with suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stat = os.fstat(descriptor)
        _held[stat.st_dev, stat.st_ino] = os.getpid()
        self._token = token
        self._descriptor = descriptor
        self._process = os.getpid()


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()


# ---- Names of owners ----

# TOKEN@host:pid. Only the token is compared; host and process id are for people.
_OWNER = re.compile(r"([0-9a-f]{16})@(.*):(\d+)")
# host:pid:SESSION, on PostgreSQL.
_UNTOKENED = re.compile(r"(.*):(\d+):(\w*)")


def token_of(owner: str) -> str | None:
    """Return the token of an owner; None for owners on servers."""
    match = _OWNER.fullmatch(owner)
    if match is None:
        return None
    return match[1]


def describe_owner(owner: str) -> str:
    """Return an owner in words: "process 123 on HOST"."""
    match = _OWNER.fullmatch(owner)
    if match:
        return f"process {match[3]} on {match[2]}"
    match = _UNTOKENED.fullmatch(owner)
    if match:
        return f"process {match[2]} on {match[1]}"
    return f"{owner!r}"


# ---- PostgreSQL servers ----

# Both ends detect that the other one has ended: they probe after 30 seconds of silence, and close
# the connection 30 seconds later.
CONNECT = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "connect_timeout": 30,
}
_SERVER_SETTINGS = (
    "set tcp_keepalives_idle = 30",
    "set tcp_keepalives_interval = 10",
    "set tcp_keepalives_count = 3",
    f"set lock_timeout = '{ANNOUNCE_SECONDS}s'",
)
_LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's error code
_OTHERS = """
select distinct application_name from pg_locks join pg_stat_activity using (pid)
where locktype = 'advisory' and granted and pid <> pg_backend_pid()
  and pg_stat_activity.datname = current_database() and application_name like 'process % on %'
order by application_name
"""
_HOLDER = """
select application_name, pid from pg_locks join pg_stat_activity using (pid)
where locktype = 'advisory' and granted and (classid::bigint << 32 | objid::bigint) = :key
"""


class ServerPeers:
    """The processes that share a PostgreSQL database, as one of them sees them.

    The session begins with the first use. If the connection breaks, the methods raise SQLAlchemy's
    OperationalError, and the next use begins another session.

    Args:
        url: SQLAlchemy URL of the database. A connection pooler in between must not mix sessions.

    Attributes:
        owner: The name of this process, which no other process has.
    """

    def __init__(self, url: str):
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._url = url
        self._connection: Connection | None = None
        self._thread = threading.RLock()

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Wait for a lock, and hold it in the block. Its holder may acquire it again."""
        # Threads share the session, and therefore the locks of the server.
        with self._thread:
            self._ask("pg_advisory_lock", name)
            try:
                yield
            finally:
                # Without a session, the server has released the lock.
                if self._connection is not None:
                    self._ask("pg_advisory_unlock", name)

    def liveness(self, owner: str | None) -> Liveness:
        """Return whether the owner of a trial is alive: whether its session holds its lock."""
        if owner is None:
            return Liveness.DEAD
        if owner == self.owner:
            return Liveness.ALIVE
        with self._thread:
            free = self._ask("pg_try_advisory_xact_lock_shared", owner)
        if free:
            return Liveness.DEAD
        return Liveness.ALIVE

    def alive(self, owner: str | None) -> bool:
        """Return True if the owner is alive; False if there is no owner."""
        return self.liveness(owner) is Liveness.ALIVE

    def others(self) -> list[str]:
        """Return the other processes that work on the database; the caller holds its lock."""
        with self._thread:
            assert self._connection is not None, "the lock needs a session"
            return list(self._connection.execute(text(_OTHERS)).scalars())

    def leave(self) -> None:
        """Do nothing: the session ends with the process."""

    def close(self) -> None:
        """End the session. The other processes then regard this process as dead."""
        with self._thread:
            connection, self._connection = self._connection, None
            if connection is not None:
                # The connection may be within a statement.
                connection.invalidate()
                connection.close()

    def _ask(self, function: str, name: str) -> bool | None:
        """Call a lock function of the server; None for functions that only wait."""
        try:
            if self._connection is None:
                self._connection = self._connect()
                # This lock lasts as long as the session and shows that this process is alive.
                self._ask("pg_advisory_lock", self.owner)
            return self._call(self._connection, function, name)
        except BaseException:
            # Also for exceptions of signal handlers, after which the connection is within a
            # statement.
            self.close()
            raise

    def _call(self, connection: Connection, function: str, name: str) -> bool | None:
        statement, key = text(f"select {function}(:key)"), {"key": _key(name)}
        try:
            return connection.execute(statement, key).scalar()
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
        self._announce_holder(connection, name)
        connection.execute(text("set lock_timeout = 0"))
        connection.execute(statement, key)
        connection.execute(text(f"set lock_timeout = '{ANNOUNCE_SECONDS}s'"))
        return None

    def _announce_holder(self, connection: Connection, name: str) -> None:
        row = connection.execute(text(_HOLDER), {"key": _key(name)}).first()
        if row is None:
            # The lock was released in the meantime.
            return
        remedy = f"let it continue, or end its session (select pg_terminate_backend({row.pid}))"
        _announce(row.application_name or "another program", f"{name!r} of the server", remedy)

    def _connect(self) -> Connection:
        engine = create_engine(
            self._url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=CONNECT
        )
        connection = engine.connect()
        for statement in _SERVER_SETTINGS:
            connection.execute(text(statement))
        # The server cuts names to 63 bytes.
        name = f"process {os.getpid()} on {socket.gethostname()}"
        connection.execute(
            text("select set_config('application_name', :name, false)"), {"name": name}
        )
        return connection


def _key(name: str) -> int:
    """Return the number of a lock, a signed integer of 64 bits as PostgreSQL requires."""
    return int.from_bytes(hashlib.sha256(f"lit_dps {name}".encode()).digest()[:8], signed=True)
