"""Detects a broken MLflow database file and renames it, so that a new one can be made.

MLflow only shows what Optuna's storage holds. So a broken file loses no result of a study. The file
is kept, because it may hold runs of `fit`, or of other users.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

HEADER = b"SQLite format 3\x00"
# Words in SQLite's messages about a file with damaged pages.
DAMAGED = ("malformed", "not a database", "disk image")
NEEDED = {"experiments", "runs", "metrics", "params", "tags", "alembic_version"}


def move_broken(file: Path) -> Path | None:
    """Rename a broken MLflow database and return its new path; None if the file is intact.

    The caller holds the lock of `open_experiment`. MLflow has not opened the file yet.
    """
    why = why_broken(file)
    return move_aside(file, why) if why else None


def why_broken(file: Path) -> str:
    """Return why a file is no intact MLflow database; "" if it is intact, empty or missing.

    A database of an older MLflow is intact: `mlflow db upgrade` converts it.
    """
    if not file.is_file() or file.stat().st_size == 0:
        return ""
    with file.open("rb") as stream:
        head = stream.read(100)
    if not head.startswith(HEADER):
        return "it is not an SQLite database"
    page_size = int.from_bytes(head[16:18], "big")
    if page_size == 1:
        # SQLite stores 65,536 as 1, because it does not fit into two bytes.
        page_size = 65_536
    pages = int.from_bytes(head[28:32], "big")
    if file.stat().st_size < pages * page_size:
        return "it is truncated"
    try:
        address = f"{file.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            return _why_tables_broken(database)
    except sqlite3.DatabaseError as error:
        # Other errors, such as a locked or unreadable file, say nothing about the content.
        return str(error) if is_damage(str(error)) else ""


def is_damage(message: str) -> bool:
    """Return True if SQLite's message means that the content of the file is damaged."""
    return any(words in message for words in DAMAGED)


def _why_tables_broken(database: sqlite3.Connection) -> str:
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    names = {name for (name,) in rows}
    if not names:
        return ""
    missing = NEEDED - names
    if missing:
        return f"tables are missing: {', '.join(sorted(missing))}"
    if not database.execute("SELECT COUNT(*) FROM alembic_version").fetchone()[0]:
        return "its tables are incomplete: it has no version"
    # MLflow adds the first experiment once all tables exist.
    if not database.execute("SELECT COUNT(*) FROM experiments").fetchone()[0]:
        return "its tables are incomplete: it has no experiment"
    return ""


def move_aside(file: Path, why: str) -> Path:
    """Rename a database with its journal files, print a warning, and return the new path."""
    number = 1
    while (target := file.with_name(f"{file.stem}.broken-{number}{file.suffix}")).exists():
        number += 1
    os.replace(file, target)
    for ending in ("-journal", "-wal", "-shm"):
        beside = file.with_name(file.name + ending)
        if beside.exists():
            os.replace(beside, target.with_name(target.name + ending))
    print(
        f"warning: {file} was broken ({why}) and was renamed to {target.name}; "
        "MLflow's runs are made again from the study",
        file=sys.stderr,
        flush=True,
    )
    return target
