"""What Optuna, SQLAlchemy and the drivers below them say in many lines, as a StorageError of one, without passwords."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from lit_dps.errors import StorageError, UserError
from lit_dps.storage import scrubbed, shown

# What they raise where a storage cannot be used, and what to make of what they say.
UNUSABLE = (SQLAlchemyError, StorageInternalError, OSError, ImportError, RuntimeError, json.JSONDecodeError)
HINTS = {
    "version_info": "it is not an Optuna database",
    "locked": "another process is writing to it",
    "No module named 'psycopg": "pip install 'lit_dps[postgres]', and begin the URL with postgresql+psycopg://",
}
GONE = "Record does not exist."  # Optuna's KeyError for a study or a trial that it does not find


@contextmanager
def storage_errors(storage: BaseStorage | str) -> Iterator[None]:
    """Raises StorageError for whatever goes wrong with an Optuna storage, or with the one at a URL, in the body."""
    where = place(storage).rpartition("@")[2]  # of what is no URL, nobody knows which part is the password
    no_url = f"{where!r} is not a storage URL such as sqlite:///mlruns/study.db"
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
        raise StorageError(f"{place(storage)}: what was there is gone, deleted or put back from a copy") from error
    except UNUSABLE as error:
        said = scrubbed(first_line(error), _url(storage))
        hint = next((f" ({hint})" for sign, hint in HINTS.items() if sign in said), "")
        raise StorageError(f"cannot use {place(storage)}: {said}{hint}") from error


def place(storage: BaseStorage | str) -> str:
    """The URL of a storage, without its secrets."""
    return shown(_url(storage)) or "the storage"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, named where it would say too little.

    Optuna calls any trouble with a database one of committing; what the database itself said is the cause of that.
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
    return getattr(storage, "url", None) or getattr(getattr(storage, "_backend", None), "url", None) or ""
