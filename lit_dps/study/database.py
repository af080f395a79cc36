"""The database of a study, opened by one process at a time, and the processes that share it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import optuna

from lit_dps.analysis.database_errors import storage_errors
from lit_dps.server_lock import CONNECT, ServerPeers
from lit_dps.storage import is_postgresql, sqlite_file
from lit_dps.study.owner import MachinePeers

LOCKED_TIMEOUT = 20  # seconds to wait for a database that another process writes to


class Peers(Protocol):
    """The processes that share a storage, as one of them sees them.

    Attributes:
        owner: The name of this process, which no other has.
    """

    owner: str

    def lock(self, name: str) -> AbstractContextManager:
        """A lock among them; may be taken again by who holds it."""

    def alive(self, who: str | None) -> bool:
        """Whether the process of that name still runs; nobody does not."""


@cache
def peers(url: str) -> Peers:
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


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """Opens an Optuna storage, making it where there is none; safe for several processes at once.

    Raises:
        StorageError: if it cannot be opened or made.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    engine: dict[str, Any] = {}
    with storage_errors(url):
        file = sqlite_file(url)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            engine = {"connect_args": {"timeout": LOCKED_TIMEOUT}}
        elif is_postgresql(url):  # a connection may lie idle for the hours of a trial
            engine = {"connect_args": CONNECT, "pool_pre_ping": True}
        with storage_lock(url):
            return optuna.storages.RDBStorage(url, engine_kwargs=engine)


@contextmanager
def storage_for_now(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """The same, for the time of the body: a server has so many connections."""
    storage = open_storage(url)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()
