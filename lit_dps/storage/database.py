"""Opens Optuna storages, and turns the errors of databases into messages for users."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._rdb import models
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import StorageError, UserError
from lit_dps.core.text import shorten
from lit_dps.storage.locks import CONNECT, storage_lock
from lit_dps.storage.schema import KIND_TAG, NAME_TAG
from lit_dps.storage.urls import is_postgresql, scrubbed, sqlite_file, without_password

LOCKED_TIMEOUT_SECONDS = 20  # how long to wait for a database that another process writes to
RESTORE = (
    "restore the file from a copy; trials stored after the copy are run again. Without a copy the "
    "trials are lost: figures and MLflow show them, but a study cannot be resumed from these"
)


# ---- Opening ----


def open_storage(url: str, make: bool = True) -> RDBStorage:
    """Open an Optuna storage; several processes may do so at once.

    Args:
        url: Optuna storage URL.
        make: Whether to create the database if it does not exist. Reading must not turn a database
            of another program into an Optuna database.

    Raises:
        StorageError: if the storage cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    engine: dict[str, Any] = {}
    with storage_errors(url):
        file = sqlite_file(url)
        if file is not None:
            if make:
                _refuse_other_tables(file)
                file.parent.mkdir(parents=True, exist_ok=True)
            engine["connect_args"] = {"timeout": LOCKED_TIMEOUT_SECONDS}
        elif is_postgresql(url):
            engine["connect_args"] = CONNECT
            # A connection may be idle for the hours of a trial.
            engine["pool_pre_ping"] = True
        if file is not None and not make and not _may_be_written(file):
            return RDBStorage(url, engine_kwargs=engine, skip_table_creation=True)
        # Optuna writes version rows into a new database, even without creating its tables.
        with storage_lock(url):
            return RDBStorage(url, engine_kwargs=engine, skip_table_creation=not make)


def _may_be_written(file: Path) -> bool:
    """Return True if a process of lit_dps may be writing to a SQLite file.

    Each process that creates a file has locked it before. So a file without a lock file, such as a
    copy, is only read. Reading must not create a lock file beside it.
    """
    return os.access(file.parent, os.W_OK) and Path(f"{file}.lock").exists()


def _refuse_other_tables(file: Path) -> None:
    """Raise StorageError if a SQLite file has tables, and none of Optuna's."""
    if not file.is_file():
        return
    with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as connection:
        try:
            rows = connection.execute("select name from sqlite_master where type = 'table'")
            tables = sorted(name for (name,) in rows.fetchall())
        except sqlite3.Error:
            # Optuna's own attempt to open the file names the cause.
            return
    optuna_tables = models.BaseModel.metadata.tables.keys() - {"alembic_version"}
    if tables and optuna_tables.isdisjoint(tables):
        names = shorten(", ".join(tables))
        raise StorageError(
            f"{file} is a database of another program, with the tables {names}. Set "
            "storage.optuna to another file.",
            key=str(file),
            value=names,
        )


@contextmanager
def temporary_storage(url: str, make: bool = True) -> Iterator[RDBStorage]:
    """Open an Optuna storage, and close its connections at the end, because servers limit them.

    Args:
        url: Optuna storage URL.
        make: As in `open_storage`.
    """
    storage = open_storage(url, make)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


# ---- Errors ----

# What the libraries raise if a storage cannot be used.
UNUSABLE = (
    SQLAlchemyError,
    StorageInternalError,
    OSError,
    ImportError,
    RuntimeError,
    json.JSONDecodeError,
)
# Words in their messages -> what the user can do.
HINTS = {
    "version_info": "it is not an Optuna database",
    "malformed": f"the file is damaged or cut short: {RESTORE}",
    "file is not a database": f"if it was one, the file is damaged: {RESTORE}",
    "readonly database": "make the file and its folder writable, or copy the file to a writable "
    "folder",
    "unable to open database file": "make the file and its folder readable and writable",
    "disk is full": "free some space; the same command resumes the study",
    "disk I/O error": "the disk may be full: free some space; the same command resumes the study",
    "Expecting value": f"a stored value is damaged: {RESTORE}",
    "locked": "another process is writing to it",
    "No module named 'psycopg": "pip install 'lit_dps[postgres]', and begin the URL with "
    "postgresql+psycopg://",
}
# Optuna's KeyError for a study or a trial that does not exist.
MISSING_RECORD = "Record does not exist."


@contextmanager
def storage_errors(storage: BaseStorage | str) -> Iterator[None]:
    """Raise StorageError for all errors of an Optuna storage, or of the storage at a URL."""
    place = storage_name(storage)
    no_url = f"{place!r} is no storage URL. Write a URL such as sqlite:///mlruns/study.db."
    if isinstance(storage, str):
        try:
            make_url(storage)
        except (ArgumentError, ValueError) as error:
            # SQLAlchemy raises ValueError for a port that is no number.
            raise StorageError(no_url, key=place) from error
    try:
        yield
    except UserError:
        raise
    except ArgumentError as error:
        # There is no database of this kind.
        raise StorageError(no_url, key=place) from error
    except KeyError as error:
        if error.args != (MISSING_RECORD,):
            raise
        raise StorageError(
            f"{place}: a stored study or trial no longer exists. The database was deleted "
            "or replaced by a copy. Start the command again.",
            key=place,
        ) from error
    except UNUSABLE as error:
        message = scrubbed(first_line(error), _url(storage))
        hint = ""
        for words, remedy in HINTS.items():
            if words in message:
                hint = f" ({remedy})"
                break
        raise StorageError(
            f"cannot use {place}: {message}{hint}", key=place, value=message
        ) from error


def storage_name(storage: BaseStorage | str) -> str:
    """Return the URL of a storage without its secrets; "the storage" if it has no URL."""
    return without_password(_url(storage)) or "the storage"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, after the error's type if it says too little.

    Optuna reports every database error as a failure to commit. Its cause is the real message.
    """
    if isinstance(error, StorageInternalError):
        error = error.__cause__ or error
    if isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig
    text = next(iter(str(error).splitlines()), "")
    if text and not isinstance(error, (KeyError, AttributeError)):
        return text
    return f"{type(error).__name__} {text}".strip()


def _url(storage: BaseStorage | str) -> str:
    if isinstance(storage, str):
        return storage
    backend = getattr(storage, "_backend", None)
    return getattr(storage, "url", None) or getattr(backend, "url", None) or ""


# ---- Lost databases ----

_COUNT_TRIALS = """
    select count(*) from runs r
    join tags n on n.run_uuid = r.run_uuid and n.key = ? and n.value = ?
    join tags k on k.run_uuid = r.run_uuid and k.key = ? and k.value = 'trial'
    where r.lifecycle_stage = 'active'"""


class StudyLost(StorageError):
    """The database of a study is missing or empty, but there are traces of the study.

    Attributes:
        file: The database.
        traces: The folders and databases that show the study.
    """

    def __init__(self, file: Path, name: str, state: str, traces: list[str]):
        places = " and ".join(traces)
        super().__init__(
            f"{file} is {state}, but study {name!r} has results in {places}: {RESTORE}. "
            f"To start a new study, choose another study.name, or move {file.parent} away."
        )
        self.file = file
        self.traces = traces


def refuse_lost(storage: StorageConfig, name: str, figures: Path) -> None:
    """Raise StudyLost if the database of a study is lost, but traces of the study exist.

    A lost database is an sqlite file that is missing or empty. Traces are figures and MLflow runs.

    Args:
        storage: The storage of the study. Databases on servers are not checked.
        name: The study's name.
        figures: The folder of its figures.
    """
    file = sqlite_file(storage.optuna_url)
    if file is None or (file.exists() and (not file.is_file() or file.stat().st_size > 0)):
        return
    traces = []
    if figures.is_dir() and any(figures.iterdir()):
        traces.append(str(figures))
    trials = _count_trials_in_mlflow(storage.mlflow_uri, name)
    if trials:
        traces.append(f"MLflow ({sqlite_file(storage.mlflow_uri)}, trials: {trials})")
    if traces:
        state = "empty" if file.exists() else "missing"
        raise StudyLost(file, name, state, traces)


def _count_trials_in_mlflow(uri: str, name: str) -> int:
    """Return the number of a study's trials in a local MLflow database; 0 if it is unreadable."""
    file = sqlite_file(uri)
    if file is None or not file.is_file():
        return 0
    try:
        address = f"file:{file.absolute()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            row = connection.execute(_COUNT_TRIALS, (NAME_TAG, name, KIND_TAG)).fetchone()
            return row[0]
    except sqlite3.Error:
        return 0
