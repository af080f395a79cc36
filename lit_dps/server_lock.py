"""Locks that processes on any machines share through a PostgreSQL server, and who of these processes still lives.

Both are advisory locks of a session: the server frees them when the process ends, however it ends, or when it has not
heard of its machine for a minute.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, NullPool, create_engine, text

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
