"""Finds an MLflow database file that is broken, and moves it aside so that a new one can be made.

MLflow only shows what Optuna's storage has, so that a broken file costs no result of a study. The file
is kept under another name: it may hold runs of `fit`, or of other people.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

HEADER = b"SQLite format 3\x00"
# What SQLite says of a file whose pages are damaged
DAMAGED = ("malformed", "not a database", "disk image")
NEEDED = {"experiments", "runs", "metrics", "params", "tags", "alembic_version"}


def move_broken(file: Path) -> Path | None:
    """Move a broken MLflow database aside and print a line; return its new path, or None if it is sound.

    To be called under the lock that `open_experiment` takes, before MLflow opens the file.
    """
    why = why_broken(file)
    return move_aside(file, why) if why else None


def why_broken(file: Path) -> str:
    """Return why a file cannot be MLflow's database; empty if it can, is empty, or does not exist.

    A database of an older MLflow, which `mlflow db upgrade` serves, is not broken.
    """
    if not file.is_file() or file.stat().st_size == 0:
        return ""
    with file.open("rb") as stream:
        head = stream.read(100)
    if not head.startswith(HEADER):
        return "it is not an SQLite database"
    # A page size of 65,536 bytes does not fit into the two bytes and is stored as 1.
    page_size = int.from_bytes(head[16:18], "big")
    pages = int.from_bytes(head[28:32], "big")
    if file.stat().st_size < pages * (65_536 if page_size == 1 else page_size):
        return "it is truncated"
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return _why_tables_broken(database)
    except sqlite3.DatabaseError as error:
        # A locked file is in use, and an unreadable one is no matter of its content.
        return str(error) if is_damage(str(error)) else ""


def is_damage(said: str) -> bool:
    """Return True if a message of SQLite means that the content of the file is damaged."""
    return any(words in said for words in DAMAGED)


def _why_tables_broken(database: sqlite3.Connection) -> str:
    names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not names:
        return ""
    missing = NEEDED - names
    if missing:
        return f"its tables were not all made: {', '.join(sorted(missing))}"
    if not database.execute("SELECT COUNT(*) FROM alembic_version").fetchone()[0]:
        return "its tables were not all made: it has no version"
    # MLflow adds the first experiment when all tables are there.
    if not database.execute("SELECT COUNT(*) FROM experiments").fetchone()[0]:
        return "its tables were not all made: it has no experiment"
    return ""


def move_aside(file: Path, why: str) -> Path:
    """Rename a database and the files beside it, print a line, and return the new path."""
    number = 1
    while (target := file.with_name(f"{file.stem}.broken-{number}{file.suffix}")).exists():
        number += 1
    os.replace(file, target)
    for ending in ("-journal", "-wal", "-shm"):
        beside = file.with_name(file.name + ending)
        if beside.exists():
            os.replace(beside, target.with_name(target.name + ending))
    said = f"warning: {file} was broken ({why}) and is {target.name} now; MLflow's runs are made again from the study"
    print(said, file=sys.stderr, flush=True)
    return target
