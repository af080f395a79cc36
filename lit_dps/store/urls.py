"""Database URLs: the file of a sqlite one, whether it can be made, and how to show one without its secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

import lit_dps
from lit_dps.config import StorageConfig
from lit_dps.errors import StorageError

MAGIC = b"SQLite format 3\0"
# The password before the host, with all that may stand in one, and those among the options.
_PASSWORD = re.compile(r"(?<=://)([^:/@]*):(.*)(?=@)")
_OPTION = re.compile(r"(?<=[?&])(\w*(?:password|passwd|secret|token|key))=([^&\s]*)", re.IGNORECASE)


def sqlite_file(url: str) -> Path | None:
    """The file that a sqlite URL names; None for a server."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", url)
    return Path(match[1]) if match else None


def absolute(url: str) -> str:
    """The URL with the whole path of a sqlite file: MLflow keeps its connection to one by the URL's text alone."""
    file = sqlite_file(url)
    return url if file is None else url.replace(f":///{file}", f":///{file.absolute()}", 1)


def is_postgresql(url: str) -> bool:
    """Whether a URL names a PostgreSQL database."""
    return re.match(r"postgres(ql)?(\+\w+)?://", url) is not None


def is_http(url: str) -> bool:
    """Whether a URL names a web server."""
    return re.match(r"https?://", url) is not None


def without_password(url: str) -> str:
    """A URL with *** for the passwords in it."""
    return _OPTION.sub(r"\1=***", _PASSWORD.sub(r"\1:***", url))


def ui_command(uri: str) -> str:
    """The command that shows what a tracking URI has: make's in a checkout, whose package need not be installed."""
    if uri != StorageConfig().mlflow_uri:
        return f"lit-dps ui --storage.mlflow {without_password(uri)}"
    here = Path.cwd()
    checkout = Path(lit_dps.__file__).parents[1] == here and (here / "Makefile").is_file()
    return "make ui" if checkout else "lit-dps ui"


def scrubbed(text: str, url: str) -> str:
    """What a database said, with *** for the passwords of its URL, which drivers quote as they please."""
    for _, secret in _PASSWORD.findall(url) + _OPTION.findall(url):
        for form in filter(None, (secret, unquote(secret))):
            text = text.replace(form, "***")
    return text


def check_place(url: str) -> None:
    """Raises StorageError if a sqlite file is something else, or cannot be made where it should be. Creates nothing."""
    file = sqlite_file(url)
    if file is None:
        return
    there = _nearest(file)
    if there != file and not there.is_dir():
        raise StorageError(f"cannot use {url}: {there} is not a folder")
    if there == file and not file.is_file():
        raise StorageError(f"cannot use {url}: it is not a file")
    if there == file and there.stat().st_size and there.open("rb").read(len(MAGIC)) != MAGIC:
        raise StorageError(
            f"cannot use {url}: file is not a database; if it was one, it is damaged: restore it from a copy"
        )


def check_writable(url: str) -> None:
    """Raise StorageError for an Optuna storage that studies cannot be written to. Creates nothing.

    Studies are kept in a sqlite file or on PostgreSQL: with these, it is known which workers are alive.
    """
    file = sqlite_file(url)
    if file is None:
        if is_postgresql(url) or not re.match(r"\w+(\+\w+)?://", url):
            return
        kind = url.partition(":")[0]
        raise StorageError(
            f"cannot use a database of kind {kind!r}: studies are kept in a sqlite file "
            "(sqlite:///mlruns/study.db) or on PostgreSQL (postgresql+psycopg://USER@HOST/DATABASE)"
        )
    # SQLite writes a journal into the folder.
    for path in (_nearest(file), _nearest(file.parent)):
        if not os.access(path, os.W_OK):
            raise StorageError(
                f"cannot use {url}: {path} is not writable; make it writable, or copy the file to another folder"
            )


def _nearest(file: Path) -> Path:
    """The file, or the nearest folder above it that is there."""
    return next(path for path in (file, *file.absolute().parents) if path.exists())
