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
from sqlalchemy import NullPool, create_engine
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import StorageError, UserError
from lit_dps.core.text import shorten
from lit_dps.storage.locks import CONNECT, storage_lock
from lit_dps.storage.schema import KIND_TAG, NAME_TAG
from lit_dps.storage.urls import (
    is_postgresql,
    scrubbed,
    sqlite_file,
    without_link,
    without_password,
)

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
            _prepare_sqlite(url, file, engine, make)
            return RDBStorage(url, engine_kwargs=engine, skip_table_creation=True)
        # Optuna writes version rows into a new database, even without creating its tables.
        with storage_lock(url):
            if file is not None:
                _prepare_sqlite(url, file, engine, make)
            # PostgreSQL creates all tables in one transaction.
            skip = file is not None or not make
            return RDBStorage(url, engine_kwargs=engine, skip_table_creation=skip)


def _may_be_written(file: Path) -> bool:
    """Return True if a process of lit_dps may be writing to a SQLite file.

    Each process that creates a file has locked it before. So a file without a lock file, such as a
    copy, is only read. Reading must not create a lock file beside it.
    """
    file = without_link(file)
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
    if tables and _OPTUNA_TABLES.keys().isdisjoint(tables):
        names = shorten(", ".join(tables))
        raise StorageError(
            f"{file} is a database of another program, with the tables {names}. Set "
            "storage.optuna to another file.",
            key=str(file),
            value=names,
        )


# ---- Tables in a SQLite file ----

_OPTUNA_TABLES = models.BaseModel.metadata.tables
_OPTUNA_INDICES = [index for table in _OPTUNA_TABLES.values() for index in table.indexes]
_UNIQUE_NAMES = "ix_studies_study_name"  # the index that refuses a second study of one name


def _prepare_sqlite(url: str, file: Path, options: dict[str, Any], make: bool) -> None:
    """Create the tables and indices of Optuna that a SQLite file lacks, or check the file.

    The caller holds the lock of the storage, unless no process may write to the file.

    Args:
        url: Optuna storage URL.
        file: Its file.
        options: Options of SQLAlchemy's engine.
        make: Whether to create what is missing.

    Raises:
        StorageError: if two studies have one name, or if a file without a study is only read.
    """
    engine = create_engine(url, poolclass=NullPool, **options)
    with engine.connect() as connection:
        statement = "select name from sqlite_master where sql is not null"
        names = set(connection.exec_driver_sql(statement).scalars())
        if "studies" in names and _UNIQUE_NAMES not in names:
            _refuse_equal_names(connection, file)
        known = {*_OPTUNA_TABLES, *(index.name for index in _OPTUNA_INDICES)}
        if make and not names >= known:
            _create_missing(connection)
        if not make and names <= known and not _has_version(connection, names):
            raise StorageError(
                f"{file} has no study. If its creation was interrupted, run the study again: it "
                "completes the file.",
                key=str(file),
            )


def _create_missing(connection: Connection) -> None:
    """Create the tables and indices of Optuna that a SQLite file lacks, all or none.

    In SQLite, SQLAlchemy commits each statement of `create_all`. After a kill between a table and
    its unique index, `create_all` skips both, and one name gets two studies. Therefore all
    statements are one transaction here.
    """
    connection.exec_driver_sql("begin immediate")
    models.BaseModel.metadata.create_all(connection)
    for index in _OPTUNA_INDICES:
        index.create(connection, checkfirst=True)
    connection.commit()


def _has_version(connection: Connection, names: set[str]) -> bool:
    """Return True if a database has a row of Optuna's version, which follows its tables."""
    if "version_info" not in names:
        return False
    return connection.exec_driver_sql("select count(*) from version_info").scalar() != 0


def _refuse_equal_names(connection: Connection, file: Path) -> None:
    """Raise StorageError if two studies of a database have one name."""
    name = connection.exec_driver_sql(
        "select study_name from studies group by study_name having count(*) > 1"
    ).scalar()
    if name is not None:
        raise StorageError(
            f"{file} has two studies {name!r}, because its creation was interrupted, and trials "
            f"are divided between them. Move {file.parent.absolute()} away and run the study "
            "again.",
            key=str(file),
            value=name,
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
