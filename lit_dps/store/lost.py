"""Refuses to begin a study anew where its database is gone, but its figures or MLflow know its trials."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from lit_dps.config import StorageConfig
from lit_dps.errors import StorageError
from lit_dps.store.schema import KIND_TAG, NAME_TAG
from lit_dps.store.urls import sqlite_file

RESTORE = (
    "restore the file from a copy; trials stored since then are run again. Without a copy its trials are lost: "
    "figures and MLflow show them, but a study cannot be resumed from these"
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
        traces: Where the study is known.
    """

    def __init__(self, file: Path, name: str, state: str, traces: list[str]):
        known = " and ".join(traces)
        super().__init__(
            f"{file} is {state}, but study {name!r} is known to {known}: {RESTORE}. "
            f"To begin it anew, choose another study.name, or move {file.parent} away"
        )
        self.file, self.traces = file, traces


def refuse_lost(storage: StorageConfig, name: str, figures: Path) -> None:
    """Raise StudyLost if the sqlite file of a study is missing or empty, but something knows the study.

    Args:
        storage: Where the study is kept. Databases on servers are not checked.
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
        raise StudyLost(file, name, "empty" if file.exists() else "missing", traces)


def _trials_in_mlflow(uri: str, name: str) -> int:
    """Return how many trials of a study a local MLflow database shows; 0 if it cannot be read."""
    file = sqlite_file(uri)
    if file is None or not file.is_file():
        return 0
    try:
        with closing(sqlite3.connect(f"file:{file.absolute()}?mode=ro", uri=True)) as connection:
            return connection.execute(_RUNS, (NAME_TAG, name, KIND_TAG)).fetchone()[0]
    except sqlite3.Error:
        return 0
