"""Opens MLflow: creates experiments, reports errors, and replaces a broken database file.

MLflow only shows what Optuna's storage holds. So a broken file loses no result of a study. It is
renamed and kept, because it may hold runs of `fit`, or of other users.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from lit_dps.core.config import folder_name
from lit_dps.core.errors import StorageError, UserError
from lit_dps.storage.locks import AnnouncedLock, ServerPeers
from lit_dps.storage.urls import (
    absolute,
    is_http,
    is_postgresql,
    scrubbed,
    sqlite_file,
    without_link,
    without_password,
)

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# By default MLflow tries 7 times for 120 seconds. A study would wait for a server that has ended or
# hangs.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
# MLflow 3.17 with SQLAlchemy 2.1 gives this warning, which is harmless.
warnings.filterwarnings("ignore", message='.*"noload".*')

import mlflow  # noqa: E402
from mlflow.entities import Experiment, Metric, Run  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

logging.getLogger("mlflow").setLevel(logging.WARNING)
# It logs tracebacks, which `mlflow_errors` reports in one line.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
logging.getLogger("alembic").setLevel(logging.WARNING)


MAX_MESSAGE_CHARACTERS = 300
RUNS_PER_PAGE = 1000  # of a search


def metric_entry(name: str, value: float, milliseconds: int, step: int) -> Metric:
    """Return the entry of a metric in a run of MLflow."""
    return Metric(name, value, milliseconds, step)


def open_experiment(uri: str, folder: str, name: str) -> tuple[mlflow.MlflowClient, str]:
    """Return a client and an experiment's id; create or restore the experiment if needed.

    Several processes may do so at once.

    Args:
        uri: Tracking URI.
        folder: Folder of the artifacts, unless the tracking URI is a server that stores them.
        name: Name of the experiment.

    Raises:
        StorageError: if MLflow cannot be used.
    """
    with mlflow_errors(uri), _lock(uri):
        client = _client(uri)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            location = None
            if not is_http(uri):
                artifacts = Path(folder).absolute() / "artifacts" / artifact_folder(name)
                location = artifacts.as_uri()
            try:
                return client, client.create_experiment(name, artifact_location=location)
            except MlflowException:
                # On a server, another process may have created it meanwhile.
                experiment = client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            client.restore_experiment(experiment.experiment_id)
        return client, experiment.experiment_id


def search_runs(client: mlflow.MlflowClient, experiment_id: str, terms: str = "") -> Iterator[Run]:
    """Yield all runs of an experiment that a filter selects."""
    token = None
    while token != "":
        page = client.search_runs(
            [experiment_id], terms, max_results=RUNS_PER_PAGE, page_token=token
        )
        yield from page
        token = page.token or ""


def _client(uri: str) -> mlflow.MlflowClient:
    """Return a client whose tables exist. A broken file is renamed and made again."""
    file = _database_file(uri)
    if file is None:
        return mlflow.MlflowClient(tracking_uri=absolute(uri))
    move_broken(file)
    is_new = not file.exists() or file.stat().st_size == 0
    try:
        client = mlflow.MlflowClient(tracking_uri=absolute(uri))
        client.search_experiments(max_results=1)  # makes the tables
    except Exception:
        # A file that is still a link is a loop of links. It has no tables.
        if is_new and not file.is_symlink():
            # MLflow never completes tables that were made in part, such as on a full disk.
            for ending in ("", "-journal", "-wal", "-shm"):
                file.with_name(file.name + ending).unlink(missing_ok=True)
        raise
    return client


def artifact_folder(experiment: str) -> str:
    """Return the name of an experiment's folder within the folder of all artifacts."""
    name = experiment.replace("/", "_")
    if not name.strip(".") or "\\" in name:
        return folder_name(name)
    return name


def experiments(uri: str) -> list[Experiment]:
    """Return the experiments that have runs.

    Raises:
        StorageError: if the tracking store does not exist, or if it cannot be read.
    """
    check_exists(uri, "Run a study first, or name its folder by --storage.folder.")
    with_runs = []
    with mlflow_errors(uri):
        client = mlflow.MlflowClient(tracking_uri=absolute(uri))
        for experiment in client.search_experiments(order_by=["name ASC"]):
            if client.search_runs([experiment.experiment_id], max_results=1):
                with_runs.append(experiment)
    return with_runs


def check_exists(uri: str, advice: str, key: str | None = None) -> None:
    """Raise StorageError, with what to do, if the URI names a database file that does not exist."""
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        text = f"{file} does not exist, so there is no MLflow database. {advice}"
        raise StorageError(text, key=key or str(file))


@contextmanager
def mlflow_errors(uri: str) -> Iterator[None]:
    """Raise StorageError, without passwords, for all errors of MLflow and the layers below it.

    A database file with damaged pages is renamed.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # The types are many: MLflow, requests, alembic, SQLAlchemy, drivers. The original error of
        # SQLAlchemy is the message of the database without the statement.
        cause = getattr(error, "orig", None) or error
        text = " ".join(str(cause).split()) or type(cause).__name__
        file = _database_file(uri)
        if file is not None and file.exists() and is_damage(text):
            move_aside(file, "damaged pages")
        message = scrubbed(text, uri)[:MAX_MESSAGE_CHARACTERS]
        place = without_password(uri)
        raise StorageError(f"MLflow at {place} cannot be used: {message}", key=place) from error


def _database_file(uri: str) -> Path | None:
    """Return the file of an SQLite database, which a link may name; None for a server."""
    file = sqlite_file(uri)
    if file is None:
        return None
    return without_link(file)


@contextmanager
def _lock(uri: str) -> Iterator[None]:
    """Hold a lock, so that two processes do not create the tables at once."""
    file = _database_file(uri)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with AnnouncedLock(file.with_name(f".{file.stem}.lock")):
            yield
    elif is_postgresql(uri):
        with closing(ServerPeers(uri)) as server, server.lock("mlflow"):
            yield
    else:
        # A server creates its tables itself.
        yield


# ---- Broken database files ----

# Words in SQLite's messages about a file with damaged pages.
DAMAGED = ("malformed", "not a database", "disk image")
OWN_TABLES = {"experiments", "runs", "metrics", "params", "tags"}
# Optuna's databases have a table alembic_version, too.
NEEDED_TABLES = {*OWN_TABLES, "alembic_version"}


class ForeignDatabase(Exception):
    """The database of another program, such as Optuna's, which is not to be renamed."""


def move_broken(file: Path) -> Path | None:
    """Rename a broken MLflow database and return its new path; None if the file is intact.

    The caller holds the lock of `open_experiment`. MLflow has not opened the file yet.
    """
    try:
        why = why_broken(file)
    except ForeignDatabase:
        raise StorageError(
            f"{file} is a database of another program. Choose another file for storage.mlflow.",
            key=str(file),
        ) from None
    if not why:
        return None
    return move_aside(file, why)


def why_broken(file: Path) -> str:
    """Return why a file is no intact MLflow database; "" if it is intact, empty or missing.

    A database of an older MLflow is intact: `mlflow db upgrade` converts it.

    Raises:
        ForeignDatabase: if it has tables, and none of MLflow's.
    """
    if not file.is_file() or file.stat().st_size == 0:
        return ""
    try:
        address = f"{file.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            why = _why_tables_broken(database)
            (page,) = database.execute("PRAGMA page_size").fetchone()
            # SQLite reads the missing end of the last page as zeros.
            if not why and file.stat().st_size % page:
                why = "it is truncated"
            return why
    except sqlite3.DatabaseError as error:
        if is_damage(str(error)):
            return str(error)
        # Other errors, such as of a locked or unreadable file, do not mean that it is damaged.
        return ""


def is_damage(message: str) -> bool:
    """Return True if SQLite's message means that the content of the file is damaged."""
    return any(words in message for words in DAMAGED)


def _why_tables_broken(database: sqlite3.Connection) -> str:
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    names = {name for (name,) in rows}
    if not names:
        return ""
    if not names & OWN_TABLES and names != {"alembic_version"}:
        raise ForeignDatabase
    missing = NEEDED_TABLES - names
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
    target = file.with_name(f"{file.stem}.broken-1{file.suffix}")
    while target.exists():
        number += 1
        target = file.with_name(f"{file.stem}.broken-{number}{file.suffix}")
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
