"""A finished study that is opened again stays as it is: in Optuna, in MLflow, and in its files."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
from optuna.storages import RDBStorage

from lit_dps.report.no_result import NO_RESULT
from lit_dps.study.finished import NOTE
from tests.e2e.commands import FAST, run, run_here
from tests.e2e.test_commands import run_without
from tests.support.tiny import gray, write_idx

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
        assert done.stderr == ("study fast: nothing left to run\n" if again is few else "")
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

    (unbroken / "mlruns" / "figures" / "fast" / NOTE).unlink(
        missing_ok=True
    )  # else it is not even checked
    monkeypatch.setattr("lit_dps.study.preflight.check.dry_run", dry_run)
    opened, open_once = [], RDBStorage.__init__

    def counted(storage: RDBStorage, url: str, *args, **kw) -> None:
        opened.append(url)
        open_once(storage, url, *args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(RDBStorage, "__init__", counted)
        done = run_here(unbroken, *STUDY)
    assert (done.returncode, done.stderr) == (0, "study fast: nothing left to run\n")
    assert len(opened) == 7, (
        "box, what is left, header, environment, declaration, what counts, outcomes"
    )
    with pytest.raises(AssertionError, match="dry run"):
        run_here(unbroken, *STUDY, "--study.trials", 5)
    refused = run_here(unbroken, *STUDY, "--goal.error", 0.3)
    assert refused.returncode == 2 and "goal.error was 0.2 and is 0.3" in refused.stderr
    (unbroken / "mlruns" / "figures" / "fast" / NOTE).unlink()
    monkeypatch.setattr("lit_dps.data.Digits.digest", "another")
    refused = run_here(unbroken, *STUDY)
    assert refused.returncode == 2 and "data_digest was" in refused.stderr


CODE = """
from lit_dps.module import ImageClassifier


class Mine(ImageClassifier):
    pass
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished study of a module and of data files of its own; its command, and what this
    said."""
    folder = tmp_path_factory.mktemp("finished")
    write_idx(folder / "data" / "MNIST" / "raw", gray(600, 0), gray(50, 1))
    (folder / "mine.py").write_text(CODE)
    text = FAST.read_text().replace("lit_dps.module.ImageClassifier", "mine.Mine")
    (folder / "mine.yaml").write_text(text.replace("lit_dps.data.Digits", "lit_dps.data.MNIST"))
    command = ("study", "--config", "mine.yaml", "--study.trials", "1")
    done = run(folder, *command)
    assert done.returncode == NO_RESULT, done.stderr  # gray images teach nothing
    return folder, command, done.stdout


def test_the_same_command_says_so_at_once_without_torch(finished):
    folder, command, said = finished
    before = content(folder)
    done = run_without({"torch", "mlflow"}, folder, *command)
    assert (done.returncode, done.stderr) == (NO_RESULT, "study fast: nothing left to run\n")
    assert done.stdout == said[said.index("\nstudy fast: No trial") :]
    assert content(folder) == before
    shown = run_without({"torch", "mlflow"}, folder, *command, "--show=files")
    assert "\nwritten:\n" in shown.stdout and shown.stdout.startswith(
        done.stdout.split("\nreport:")[0]
    )
    assert content(folder) == before


def test_files_beside_those_that_the_study_wrote_are_watched(finished, tmp_path):
    """Of a configuration, a module and data in the storage folder the long way is taken once they
    change."""
    folder, command, _ = finished
    shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("mlruns"))
    folder, command = tmp_path / "copy", (*command, "--storage.folder", ".")
    assert run(folder, *command).returncode == NO_RESULT
    for changed in (
        folder / "mine.yaml",
        folder / "mine.py",
        next((folder / "data").rglob("train-labels*")),
    ):
        done, was = run_without({"torch"}, folder, *command), changed.stat()
        assert (done.returncode, done.stderr) == (NO_RESULT, "study fast: nothing left to run\n")
        os.utime(changed)
        done = run_without({"torch"}, folder, *command)
        assert done.returncode not in (0, NO_RESULT) and "blocked" in done.stderr, changed.name
        os.utime(changed, ns=(was.st_atime_ns, was.st_mtime_ns))


ALWAYS, CHANGES = (
    ("option", "module", "folder"),
    ("configuration", "data", "storage", "tracking", "note"),
)


@pytest.mark.parametrize(
    "change", [*ALWAYS, *(pytest.param(each, marks=pytest.mark.long) for each in CHANGES)]
)
def test_whatever_changed_the_long_way_is_taken(finished, tmp_path, change):
    folder, command, _ = finished
    changed = {
        "configuration": folder / "mine.yaml",
        "module": folder / "mine.py",
        "data": next((folder / "data").rglob("train-labels*")),
        "storage": folder / "mlruns" / "study.db",
        "tracking": folder / "mlruns" / "mlflow.db",
        "note": folder / "mlruns" / "figures" / "fast" / NOTE,
    }.get(change)
    if change == "folder":
        shutil.copytree(folder, tmp_path / "copy")
        folder = tmp_path / "copy"
    elif change == "option":
        command = (*command, "--study.threads", "1")
    else:
        kept = tmp_path / "kept"
        shutil.copy2(changed, kept)
        if change == "storage":
            with closing(sqlite3.connect(changed)) as connection, connection:
                last = "select max(trial_id) from trial_user_attributes where key = 'point'"
                connection.execute(f"delete from trials where trial_id = ({last})")
        elif change in ("tracking", "note"):
            changed.unlink()
        else:
            os.utime(changed)
    done = run_without({"torch"}, folder, *command)
    assert done.returncode not in (0, NO_RESULT) and "blocked" in done.stderr, done.stderr
    if changed is not None:
        shutil.copy2(kept, changed)
        assert run_without({"torch"}, folder, *command).returncode == NO_RESULT
