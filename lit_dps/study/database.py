"""The database of a study, opened by one process at a time."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import optuna
from filelock import FileLock

from lit_dps.analysis.results import storage_errors
from lit_dps.storage import sqlite_file

LOCKED_TIMEOUT = 20  # seconds to wait for a database that another process writes to


def open_storage(url: str) -> optuna.storages.RDBStorage:
    """Opens an Optuna storage, making it where there is none; safe for several processes at once.

    Raises:
        StorageError: if it cannot be opened or made.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with storage_errors(url):
        file = sqlite_file(url)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        with storage_lock(url):
            timeout = {"connect_args": {"timeout": LOCKED_TIMEOUT}} if file is not None else {}
            return optuna.storages.RDBStorage(url, engine_kwargs=timeout)


def storage_lock(url: str) -> FileLock:
    """The lock of this machine's processes on a storage; may be taken again by the thread that holds it."""
    file = sqlite_file(url)
    if file is None:
        digest = hashlib.sha256(url.encode()).hexdigest()[:16]
        file = Path(tempfile.gettempdir()) / f"lit_dps-{os.getuid()}-{digest}"
    return FileLock(f"{file}.lock", is_singleton=True)
