"""Storages of other machines, opened to be read: any URL, a sqlite file, or one that is compressed."""

from __future__ import annotations

import lzma
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from optuna.storages import BaseStorage

from lit_dps.errors import ConfigError, StorageError
from lit_dps.store.database import storage_errors
from lit_dps.store.read import open_to_read
from lit_dps.store.urls import check_place, sqlite_file, without_password


class Elsewhere(NamedTuple):
    """A storage to take trials over from.

    Attributes:
        place: What it was called, without passwords.
        storage: The opened storage, which nothing is written to.
    """

    place: str
    storage: BaseStorage


@contextmanager
def open_elsewhere(other: str, url: str) -> Iterator[Elsewhere]:
    """Another storage, for the time of the body.

    Args:
        other: Its URL, or the path of a sqlite file, which may be compressed: .db.xz.
        url: The URL of the study's own storage.

    Raises:
        ConfigError: if both are the same.
        StorageError: if it cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        theirs = other if "://" in other else f"sqlite:///{other}"
        if (file := sqlite_file(theirs)) is not None and not file.is_file():
            raise StorageError(f"no study database at {file}")
        if _same(theirs, url):
            allowed = f"another storage than --storage.optuna = {without_password(url)} expected"
            raise ConfigError("OTHER", without_password(other), allowed)
        if file is not None and file.suffix == ".xz":
            theirs = f"sqlite:///{folder}/study.db"
            _decompress(file, Path(folder) / "study.db")
        try:
            check_place(theirs)
            with storage_errors(theirs), open_to_read(theirs) as storage:
                yield Elsewhere(without_password(other), storage)
        except StorageError as error:  # nobody knows a temporary file
            raise StorageError(str(error).replace(f"sqlite:///{folder}/study.db", other)) from error


def _same(one: str, other: str) -> bool:
    files = sqlite_file(one), sqlite_file(other)
    if None in files:
        return one == other
    return files[1].exists() and files[0].samefile(files[1])


def _decompress(file: Path, to: Path) -> None:
    try:
        with lzma.open(file) as packed, to.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise StorageError(f"cannot read {file}: {error}") from error
