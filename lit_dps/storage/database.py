"""The database of a study, opened by one process at a time, and what is said where that fails."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage
from optuna.storages._rdb import models
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from lit_dps.core.errors import StorageError, UserError
from lit_dps.core.text import shorten
from lit_dps.storage.locks import CONNECT, storage_lock
from lit_dps.storage.lost_study import RESTORE
from lit_dps.storage.urls import is_postgresql, scrubbed, sqlite_file, without_password

LOCKED_TIMEOUT = 20  # seconds to wait for a database that another process writes to


def open_storage(url: str, make: bool = True) -> optuna.storages.RDBStorage:
    """Opens an Optuna storage; safe for several processes at once. Raises StorageError if that
    cannot be.

    Args:
        url: Where it is.
        make: Whether to make it where there is none. Reading must not turn somebody else's database
            into an Optuna one; but even so Optuna writes versions into a new one, hence the lock.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    engine: dict[str, Any] = {}
    with storage_errors(url):
        file = sqlite_file(url)
        if file is not None:
            if make:
                _refuse_other_tables(file)
                file.parent.mkdir(parents=True, exist_ok=True)
            engine = {"connect_args": {"timeout": LOCKED_TIMEOUT}}
        elif is_postgresql(url):  # a connection may lie idle for the hours of a trial
            engine = {"connect_args": CONNECT, "pool_pre_ping": True}
        # who makes a file has locked it before: where no lock lies, as beside a copy, none is left
        # either
        made = (
            file is not None
            and not make
            and not (os.access(file.parent, os.W_OK) and Path(f"{file}.lock").exists())
        )
        with nullcontext() if made else storage_lock(url):
            return optuna.storages.RDBStorage(
                url, engine_kwargs=engine, skip_table_creation=not make
            )


def _refuse_other_tables(file: Path) -> None:
    """Raise StorageError if a SQLite file has tables, and none of Optuna's."""
    if not file.is_file():
        return
    with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as connection:
        try:
            rows = connection.execute(
                "select name from sqlite_master where type = 'table'"
            ).fetchall()
        except sqlite3.Error:  # Optuna's own attempt names the cause
            return
    tables = sorted(name for (name,) in rows)
    if tables and not set(tables) & models.BaseModel.metadata.tables.keys() - {"alembic_version"}:
        names = shorten(", ".join(tables))
        raise StorageError(
            f"{file} is a database of another program, with the tables {names}: set storage.optuna"
        )


@contextmanager
def storage_for_now(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """The same, for the time of the body: a server has so many connections."""
    storage = open_storage(url)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


# What they raise where a storage cannot be used, and what to make of what they say.
UNUSABLE = (
    SQLAlchemyError,
    StorageInternalError,
    OSError,
    ImportError,
    RuntimeError,
    json.JSONDecodeError,
)
HINTS = {
    "version_info": "it is not an Optuna database",
    "malformed": f"the file is damaged or cut short: {RESTORE}",
    "file is not a database": f"if it was one, the file is damaged: {RESTORE}",
    "readonly database": "make the file and its folder writable, or copy the file to a writable "
    "folder",
    "unable to open database file": "the file and its folder have to be readable and writable",
    "disk is full": "free some space; the same command resumes the study",
    "disk I/O error": "the disk may be full: free some space; the same command resumes the study",
    "Expecting value": f"a stored value is damaged: {RESTORE}",
    "locked": "another process is writing to it",
    "No module named 'psycopg": "pip install 'lit_dps[postgres]', and begin the URL with "
    "postgresql+psycopg://",
}
GONE = "Record does not exist."  # Optuna's KeyError for a study or a trial that it does not find


@contextmanager
def storage_errors(storage: BaseStorage | str) -> Iterator[None]:
    """Raises StorageError for whatever goes wrong with an Optuna storage, or with the one at a URL,
    in the body."""
    no_url = f"{place(storage)!r} is not a storage URL such as sqlite:///mlruns/study.db"
    if isinstance(storage, str):
        try:
            make_url(storage)
        except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
            raise StorageError(no_url) from error
    try:
        yield
    except UserError:
        raise
    except ArgumentError as error:  # no such kind of database
        raise StorageError(no_url) from error
    except KeyError as error:
        if error.args != (GONE,):
            raise
        raise StorageError(
            f"{place(storage)}: what was there is gone, deleted or put back from a copy"
        ) from error
    except UNUSABLE as error:
        said = scrubbed(first_line(error), _url(storage))
        hint = next((f" ({hint})" for sign, hint in HINTS.items() if sign in said), "")
        raise StorageError(f"cannot use {place(storage)}: {said}{hint}") from error


def place(storage: BaseStorage | str) -> str:
    """The URL of a storage, without its secrets."""
    return without_password(_url(storage)) or "the storage"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, named where it would say too little.

    Optuna calls any trouble with a database one of committing; what the database itself said is the
    cause of that.
    """
    if isinstance(error, StorageInternalError):
        error = error.__cause__ or error
    if isinstance(error, DBAPIError):
        error = error.orig
    text = next(iter(str(error).splitlines()), "")
    tells = text and not isinstance(error, (KeyError, AttributeError))
    return text if tells else f"{type(error).__name__} {text}".strip()


def _url(storage: BaseStorage | str) -> str:
    if isinstance(storage, str):
        return storage
    return (
        getattr(storage, "url", None)
        or getattr(getattr(storage, "_backend", None), "url", None)
        or ""
    )
