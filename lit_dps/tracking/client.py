"""MLflow, opened: its experiments, made by one process at a time, the addresses of their pages, a
run's artifacts."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
    without_password,
)
from lit_dps.tracking.repair import is_damage, move_aside, move_broken
from lit_dps.tracking.views import CURVES

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# By default MLflow tries 7 times for 120 seconds. A study would wait for a server that has ended or
# hangs.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
warnings.filterwarnings(
    "ignore", message='.*"noload".*'
)  # MLflow 3.17 under SQLAlchemy 2.1; harmless

import mlflow  # noqa: E402
from mlflow.entities import Experiment  # noqa: E402

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").setLevel(
    logging.CRITICAL
)  # a traceback; mlflow_errors says it in a line
logging.getLogger("alembic").setLevel(logging.WARNING)


def open_experiment(uri: str, folder: str, name: str) -> tuple[mlflow.MlflowClient, str]:
    """A client and the experiment's id, made where there is none, restored where it was deleted.

    Safe for several processes at once. The artifacts go to the folder, unless the tracking URI is a
    server that keeps them itself. Raises StorageError if MLflow cannot be used.
    """
    root = Path(folder).absolute()
    with mlflow_errors(uri), _lock(uri):
        client = _client(uri)
        found: Experiment | None = client.get_experiment_by_name(name)
        if found is None:
            location = (
                None if is_http(uri) else (root / "artifacts" / artifact_folder(name)).as_uri()
            )
            try:
                return client, client.create_experiment(name, artifact_location=location)
            except (
                mlflow.exceptions.MlflowException
            ):  # on a server, another process may have been faster
                if (found := client.get_experiment_by_name(name)) is None:
                    raise
        if found.lifecycle_stage != "active":
            client.restore_experiment(found.experiment_id)
        return client, found.experiment_id


def _client(uri: str) -> mlflow.MlflowClient:
    """Return a client whose tables exist. A broken file is renamed and made again."""
    file = sqlite_file(uri)
    if file is None:
        return mlflow.MlflowClient(tracking_uri=absolute(uri))
    move_broken(file)
    is_new = not file.exists() or file.stat().st_size == 0
    try:
        client = mlflow.MlflowClient(tracking_uri=absolute(uri))
        client.search_experiments(max_results=1)  # makes the tables
    except Exception:
        if is_new:
            # MLflow never completes tables that were made in part, such as on a full disk.
            for ending in ("", "-journal", "-wal", "-shm"):
                file.with_name(file.name + ending).unlink(missing_ok=True)
        raise
    return client


def artifact_folder(experiment: str) -> str:
    """Return the name of the folder of an experiment's artifacts, within the folder of all
    artifacts."""
    name = experiment.replace("/", "_")
    return folder_name(name) if not name.strip(".") or "\\" in name else name


def experiments(uri: str) -> list[Experiment]:
    """The experiments that hold runs. Raises StorageError if the tracking store cannot be read or
    does not exist."""
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        raise StorageError(
            f"no MLflow database at {file}: run a study first, or name it by --storage.folder"
        )
    with mlflow_errors(uri):
        client = mlflow.MlflowClient(tracking_uri=absolute(uri))
        found = client.search_experiments(order_by=["name ASC"])
        return [e for e in found if client.search_runs([e.experiment_id], max_results=1)]


def page_address(uri: str, experiment_id: str, port: int = 5000, view: str | None = None) -> str:
    """The page of an experiment's runs on an MLflow server, else on the one of `ui`.

    With the key of a `view` (`lit_dps.tracking.views`) the page of runs shows that; that of curves
    is a page of charts.

    Without the workflow type MLflow 3 opens its pages for language models.
    """
    server = without_password(uri).rstrip("/") if is_http(uri) else f"http://127.0.0.1:{port}"
    shown = f"&viewStateShareKey={view}" if view else ""
    shown += "&compareRunsMode=CHART" if view and view.endswith(CURVES) else ""
    return f"{server}/#/experiments/{experiment_id}/runs?workflowType=machine_learning{shown}"


def log_artifacts(
    client: mlflow.MlflowClient, run: str, files: Sequence[Path], texts: Mapping[str, str]
) -> None:
    """Logs files, and texts by their names, to a run unless they are there with the same content.

    Files keep their places below the folder that holds them all; texts have none.
    """
    root = os.path.commonpath([path.parent for path in files]) if files else ""
    folders: dict[str, dict[str, int]] = {}  # the sizes of what is there

    def differs(name: str, content: bytes) -> bool:
        folder = os.path.dirname(name)
        if folder not in folders:
            folders[folder] = {
                item.path: item.file_size for item in client.list_artifacts(run, folder or None)
            }
        if folders[folder].get(name) != len(content):
            return True
        with tempfile.TemporaryDirectory() as temporary:
            return Path(client.download_artifacts(run, name, temporary)).read_bytes() != content

    for path in files:
        name = os.path.relpath(path, root)
        if differs(name, path.read_bytes()):
            client.log_artifact(run, str(path), os.path.dirname(name) or None)
    for name, text in texts.items():
        if differs(name, text.encode()):
            client.log_text(run, text, name)


@contextmanager
def mlflow_errors(uri: str) -> Iterator[None]:
    """Raises StorageError, in one line and without passwords, for whatever MLflow and the layers
    below it raise."""
    try:
        yield
    except UserError:
        raise
    except (
        Exception
    ) as error:  # theirs are of many kinds: MLflow, requests, alembic, SQLAlchemy, drivers
        said = (
            getattr(error, "orig", None) or error
        )  # what the database said, without the statement
        text = " ".join(f"{'' if str(said) else type(said).__name__}{said}".split())
        file = sqlite_file(uri)
        if file is not None and file.exists() and is_damage(text):
            move_aside(file, "damaged pages")
        raise StorageError(
            f"MLflow at {without_password(uri)}: {scrubbed(text, uri)[:300]}"
        ) from error


@contextmanager
def _lock(uri: str) -> Iterator[None]:
    """What keeps two processes from making the tables at once; a server sees to that itself."""
    if (file := sqlite_file(uri)) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with AnnouncedLock(file.with_name(f".{file.stem}.lock")):
            yield
    elif is_postgresql(uri):
        with closing(ServerPeers(uri)) as server, server.lock("mlflow"):
            yield
    else:
        yield
