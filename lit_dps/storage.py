"""Database URLs: the file of a sqlite one, and whether it can be made."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lit_dps.errors import StorageError

MAGIC = b"SQLite format 3\0"


def sqlite_file(url: str) -> Path | None:
    """The file that a sqlite URL names; None for a server."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", url)
    return Path(match[1]) if match else None


def check_place(url: str) -> None:
    """Raises StorageError if a sqlite file can be neither written nor made, or is something else. Creates nothing."""
    file = sqlite_file(url)
    if file is None:
        return
    there = next(path for path in (file, *file.absolute().parents) if path.exists())
    if there != file and not there.is_dir():
        raise StorageError(f"cannot use {url}: {there} is not a folder")
    if there == file and not file.is_file():
        raise StorageError(f"cannot use {url}: it is not a file")
    if there == file and there.stat().st_size and there.open("rb").read(len(MAGIC)) != MAGIC:
        raise StorageError(f"cannot use {url}: file is not a database")
    if not os.access(there, os.W_OK):
        raise StorageError(f"cannot use {url}: {there} is not writable")
