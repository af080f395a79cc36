"""A finished study that is opened again stays as it is: in Optuna, in MLflow, and in its files."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
from optuna.storages import RDBStorage

from lit_dps.storage.read import read_study
from tests.e2e.commands import FAST, run_here
from tests.support.errors import error_line
from tests.support.texts import numbers_in

pytestmark = pytest.mark.slow
STUDY = ("study", "--config", FAST)


def rows(database: Path) -> dict[str, list[str]]:
    """All rows of a database as SQL, by table."""
    found: dict[str, list[str]] = {}
    with closing(sqlite3.connect(database)) as connection:
        for line in connection.iterdump():
            if line.startswith("INSERT INTO"):
                found.setdefault(line.split('"')[1], []).append(line)
    return found


def content(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder, without lock files, which name their
    holder."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def written(folder: Path) -> dict[Path, int]:
    """When every file below a folder was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def runs(folder: Path) -> dict[tuple, mlflow.entities.RunInfo]:
    """What MLflow says of each run, by kind, cell and point."""
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    found = client.search_runs(
        [e.experiment_id for e in client.search_experiments()], max_results=500
    )
    return {
        tuple(run.data.tags.get(f"lit_dps.{key}") for key in ("kind", "cell", "point")): run.info
        for run in found
    }


@pytest.mark.long
def test_a_finished_study_changes_nothing_and_one_that_goes_on_ends_later(tmp_path):
    few = (*STUDY, "--study.trials", 2)
    assert run_here(tmp_path, *few).returncode == 0
    mlruns = tmp_path / "mlruns"
    databases = [mlruns / "study.db", mlruns / "mlflow.db"]
    before = [rows(database) for database in databases]
    k_stars = 4
    assert len(before[0]["trials"]) == 8 + k_stars and len(before[1]["runs"]) == 1 + 4 + 8
    files, artifacts = content(mlruns / "figures"), written(mlruns / "artifacts")
    assert files and artifacts
    for again in (few, few, ("analyze", "--config", FAST, "--sync")):
        done = run_here(tmp_path, *again)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ("study fast: no trials remain\n" if again is few else "")
        for database, was in zip(databases, before, strict=True):
            now = rows(database)
            for table in was.keys() | now.keys():
                assert now.get(table) == was.get(table), (
                    f"{table} of {database.name} after {again[0]}"
                )
        assert content(mlruns / "figures") == files
        assert written(mlruns / "artifacts") == artifacts

    ended = runs(tmp_path)
    assert {info.status for info in ended.values()} == {"FINISHED"}
    assert run_here(tmp_path, *STUDY, "--study.trials", 3).returncode == 0
    extended = runs(tmp_path)
    assert len(extended) == 1 + 4 + 12
    assert {info.status for info in extended.values()} == {"FINISHED"}
    for kind, info in ended.items():
        assert (extended[kind].end_time > info.end_time) is (kind[0] != "trial"), kind
    study = extended["study", None, None]
    assert study.end_time >= max(
        info.end_time for (kind, *_), info in extended.items() if kind == "trial"
    )


def test_a_finished_study_is_checked_without_a_dry_run(unbroken, monkeypatch):
    def dry_run(*args) -> None:
        raise AssertionError("dry run")

    monkeypatch.setattr("lit_dps.study.preflight.check.dry_run", dry_run)
    opened, open_once = [], RDBStorage.__init__

    def counted(storage: RDBStorage, url: str, *args, **kw) -> None:
        opened.append(url)
        open_once(storage, url, *args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(RDBStorage, "__init__", counted)
        done = run_here(unbroken, *STUDY)
    assert (done.returncode, done.stderr) == (0, "study fast: no trials remain\n")
    assert len(opened) == 7, (
        "box, what is left, header, environment, declaration, what counts, outcomes"
    )
    with pytest.raises(AssertionError, match="dry run"):
        run_here(unbroken, *STUDY, "--study.trials", 5)
    refused = run_here(unbroken, *STUDY, "--goal.error", 0.3)
    assert refused.returncode == 2 and numbers_in(
        error_line(refused.stderr).partition("goal.error")[2]
    )[:2] == [0.2, 0.3]
    monkeypatch.setattr("lit_dps.data.Digits.digest", "another")
    refused = run_here(unbroken, *STUDY)
    assert refused.returncode == 2 and "data_digest" in error_line(refused.stderr)


def test_a_resumed_study_stays_in_its_experiment_unless_another_one_is_set(tmp_path):
    """The default name may differ between versions. Here the first run sets another name."""
    url = f"sqlite:///{tmp_path}/mlruns/study.db"

    def run_counts() -> dict[str, int]:
        """Return the number of runs of each experiment with runs."""
        client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
        counts = {}
        for experiment in client.search_experiments():
            logged = client.search_runs([experiment.experiment_id], max_results=500)
            if logged:
                counts[experiment.name] = len(logged)
        return counts

    for trials, options, name, counts in (
        (2, ("--study.workload", "Former"), "Former", {"Former": 13}),
        (3, (), "Former", {"Former": 17}),
        (3, ("--study.workload", "Other"), "Other", {"Former": 17, "Other": 17}),
    ):
        done = run_here(tmp_path, *STUDY, "--study.trials", trials, *options)
        assert done.returncode == 0, done.stderr
        assert read_study(url, "fast").workload == name
        assert run_counts() == counts
