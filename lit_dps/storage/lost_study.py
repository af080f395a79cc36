"""Refuses to start a study whose database is missing although its figures or MLflow runs exist."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import StorageError
from lit_dps.storage.schema import KIND_TAG, NAME_TAG
from lit_dps.storage.urls import sqlite_file

RESTORE = (
    "restore the file from a copy; trials stored after the copy are run again. Without a copy the "
    "trials are lost: figures and MLflow show them, but a study cannot be resumed from these"
)
_RUNS = """
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
            f"{file} is {state}, but study {name!r} is known to {places}: {RESTORE}. "
            f"To start again, choose another study.name, or move {file.parent} away"
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
    trials = _trials_in_mlflow(storage.mlflow_uri, name)
    if trials:
        traces.append(f"MLflow ({sqlite_file(storage.mlflow_uri)}, trials: {trials})")
    if traces:
        state = "empty" if file.exists() else "missing"
        raise StudyLost(file, name, state, traces)


def _trials_in_mlflow(uri: str, name: str) -> int:
    """Return the number of a study's trials in a local MLflow database; 0 if it is unreadable."""
    file = sqlite_file(uri)
    if file is None or not file.is_file():
        return 0
    try:
        address = f"file:{file.absolute()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            return connection.execute(_RUNS, (NAME_TAG, name, KIND_TAG)).fetchone()[0]
    except sqlite3.Error:
        return 0
