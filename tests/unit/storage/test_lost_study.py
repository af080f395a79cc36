"""Databases that are gone, cut short or closed: the line names cause and remedy, and no new study
is begun."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import StorageError
from lit_dps.storage.database import StudyLost, refuse_lost, storage_errors
from lit_dps.storage.header import seed_of_trials
from lit_dps.storage.read import read_study
from lit_dps.storage.urls import check_writable, without_password
from tests.e2e.commands import FAST, run_here
from tests.support.errors import refuses
from tests.support.runs import trials_of
from tests.unit.storage.test_store import ended
from tests.unit.storage.test_store_shared import SPACE, declared, opened

# The columns of MLflow's tables that tell whose a run is
MLFLOW = """
    create table runs (run_uuid text, lifecycle_stage text);
    create table tags (key text, value text, run_uuid text);
    insert into runs values ('a', 'active'), ('b', 'deleted'), ('c', 'active'), ('d', 'active');
    insert into tags values ('lit_dps.study', 's', 'a'), ('lit_dps.kind', 'trial', 'a'),
        ('lit_dps.study', 's', 'b'), ('lit_dps.kind', 'trial', 'b'),
        ('lit_dps.study', 's', 'c'), ('lit_dps.kind', 'study', 'c'),
        ('lit_dps.study', 'another', 'd'), ('lit_dps.kind', 'trial', 'd');"""


@pytest.fixture
def storage(tmp_path):
    return StorageConfig(
        folder=str(tmp_path),
        optuna=f"sqlite:///{tmp_path}/study.db",
        mlflow=f"sqlite:///{tmp_path}/mlflow.db",
    )


def traces_of(storage: StorageConfig, name: str = "s") -> tuple[list[str], str]:
    try:
        refuse_lost(storage, name, Path(storage.folder, "figures", name))
    except StudyLost as error:
        return error.traces, str(error)
    return [], ""


@pytest.mark.parametrize("state", ["missing", "empty"])
def test_a_study_that_figures_or_mlflow_know_is_not_begun_anew(storage, tmp_path, state):
    if state == "empty":
        (tmp_path / "study.db").touch()
    assert traces_of(storage) == ([], ""), "nothing knows it"
    (tmp_path / "figures" / "s").mkdir(parents=True)
    assert traces_of(storage) == ([], ""), "an empty folder"
    (tmp_path / "figures" / "s" / "table.txt").touch()
    traces, said = traces_of(storage)
    assert traces == [f"{tmp_path}/figures/s"]
    assert f"{tmp_path}/study.db" in said and state in said and "restore" in said
    assert "\n" not in said
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.executescript(MLFLOW)
    traces, _ = traces_of(storage)
    (in_mlflow,) = traces[1:]
    assert f"{tmp_path}/mlflow.db" in in_mlflow and "trials: 1" in in_mlflow
    assert traces_of(storage, "another")[0] == [in_mlflow]
    assert traces_of(storage, "unknown") == ([], "")
    declared(f"sqlite:///{tmp_path}/other.db")
    (tmp_path / "other.db").replace(tmp_path / "study.db")
    assert traces_of(storage) == ([], ""), "it is there"


@pytest.mark.parametrize("state", ["missing", "empty"])
@pytest.mark.parametrize("verb", ["study", "analyze"])
def test_a_command_says_what_is_lost_and_makes_nothing(tmp_path, state, verb):
    figures = tmp_path / "mlruns" / "figures" / "fast"
    figures.mkdir(parents=True)
    (figures / "table.txt").touch()
    database = tmp_path / "mlruns" / "study.db"
    if state == "empty":
        database.touch()
    done = run_here(tmp_path, verb, "--config", FAST)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"mlruns/study.db is {state}" in done.stderr and "mlruns/figures/fast" in done.stderr
    assert (
        sorted(path.name for path in database.parent.iterdir())
        == ["figures"] + ["study.db"] * database.exists()
    )


def cut_in_half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_header(data: bytes) -> bytes:
    return bytes(len(data))


def one_page_overwritten(data: bytes) -> bytes:
    return data[:4096] + b"x" * 4096 + data[8192:]


@pytest.mark.parametrize("damage", [cut_in_half, without_header, one_page_overwritten])
def test_a_damaged_database_is_one_line_with_the_remedy(tmp_path, damage):
    url, file = f"sqlite:///{tmp_path}/study.db", tmp_path / "study.db"
    store = opened(url, declared(url))
    store.store_result(ended(next(trials_of(store))))
    store.leave()
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    for use in (lambda: read_study(url, "s"), lambda: declared(url)):
        with pytest.raises(StorageError) as caught:
            use()
        said = str(caught.value)
        assert "damaged" in said and "restore" in said and "\n" not in said, said
    assert file.read_bytes() == damaged


def test_what_cannot_be_written_is_refused_with_the_remedy(tmp_path, monkeypatch):
    closed = {str(tmp_path)}
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in closed)
    (tmp_path / "study.db").touch()
    with refuses(f"sqlite:///{tmp_path}/study.db", str(tmp_path), error=StorageError):
        check_writable(f"sqlite:///{tmp_path}/study.db")
    closed.clear()
    check_writable(f"sqlite:///{tmp_path}/study.db")


@pytest.mark.parametrize("url", ["mysql+pymysql://me@host/db", "mssql://host/db", "sqlite://"])
def test_a_database_where_nobody_knows_who_is_alive_is_refused(url):
    with refuses(without_password(url), url.partition(":")[0], error=StorageError):
        check_writable(url)
    check_writable("postgresql+psycopg://me@host/db")


@pytest.mark.parametrize("said", ["database or disk is full", "disk I/O error"])
def test_a_full_disk_is_named_with_the_remedy(said):
    """SQLite calls a file that may not grow, as under a quota, an I/O error."""
    place = "sqlite:///study.db"
    with refuses(place, error=StorageError) as refused, storage_errors(place):
        raise OperationalError("insert", {}, sqlite3.OperationalError(said))
    assert said in refused.value.value and "space" in str(refused.value)


def test_a_worker_of_a_study_that_was_deleted_names_the_cause(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    declared(url)
    study = StudyConfig(name="s", space=SPACE, batch_sizes=[4], sparsities=[0.0], trials=3)
    assert seed_of_trials(url, study) == study.seed
    (tmp_path / "study.db").unlink()
    with refuses("study.name", "s", StorageError):
        seed_of_trials(url, study)
