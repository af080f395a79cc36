"""A broken MLflow database is moved aside and made anew; a sound one is left alone."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import StorageError
from lit_dps.storage.database import open_storage
from lit_dps.tracking.client import move_broken, open_experiment, why_broken
from tests.support.errors import refuses
from tests.unit.tracking.test_tracking import empty, result, runs, tracker  # noqa: F401


def half_made(file) -> None:
    """The first tables only, as a full disk leaves them."""
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE experiments (experiment_id INTEGER, name TEXT)")
        database.execute("CREATE TABLE runs (run_uuid TEXT)")
        database.commit()


def without_experiment(file) -> None:
    """All tables, before MLflow added the first experiment."""
    with closing(sqlite3.connect(file)) as database:
        database.execute("DELETE FROM experiments")
        database.commit()


def without_version(file) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.execute("DELETE FROM alembic_version")
        database.commit()


BREAKS = {
    "half made": lambda file: (file.unlink(), half_made(file)),
    "garbage": lambda file: file.write_bytes(b"no database" * 100),
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "truncated in its last page": lambda file: os.truncate(file, file.stat().st_size - 1),
    "no experiment": without_experiment,
    "no version": without_version,
}


@pytest.mark.parametrize("breaks", BREAKS)
def test_what_is_broken_is_told_and_kept(empty, tmp_path, capsys, breaks):  # noqa: F811
    file = tmp_path / "mlflow.db"
    shutil.copy(empty / "mlflow.db", file)
    assert why_broken(file) == ""
    BREAKS[breaks](file)
    content = file.read_bytes()
    assert why_broken(file)
    target = move_broken(file)
    assert (target.read_bytes(), file.exists()) == (content, False)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and target.name in said


def test_a_missing_an_empty_and_a_sound_file_stay(empty, tmp_path):  # noqa: F811
    file = tmp_path / "mlflow.db"
    assert why_broken(file) == ""
    file.touch()
    assert why_broken(file) == ""
    assert move_broken(empty / "mlflow.db") is None


def test_a_link_to_the_file_has_the_lock_of_the_file(empty, tmp_path):  # noqa: F811
    file = tmp_path / "here" / "mlflow.db"
    link = tmp_path / "there" / "link.db"
    for each in (file, link):
        each.parent.mkdir()
    shutil.copy(empty / "mlflow.db", file)
    link.symlink_to(file)
    open_experiment(f"sqlite:///{link}", str(tmp_path), "e")
    assert [path.name for path in link.parent.iterdir()] == ["link.db"]
    assert (file.parent / ".mlflow.lock").exists()


def test_a_broken_file_that_a_link_names_is_renamed_and_the_link_stays(tmp_path):
    file = tmp_path / "here" / "mlflow.db"
    link = tmp_path / "there" / "link.db"
    for each in (file, link):
        each.parent.mkdir()
    file.write_bytes(b"no database" * 100)
    link.symlink_to(file)
    open_experiment(f"sqlite:///{link}", str(tmp_path), "e")
    assert link.readlink() == file and why_broken(file) == ""
    assert (file.parent / "mlflow.broken-1.db").read_bytes() == b"no database" * 100
    assert [path.name for path in link.parent.iterdir()] == ["link.db"]


def test_a_loop_of_links_is_an_error_of_mlflow(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # MLflow tries for 100 s
    one, other = tmp_path / "one.db", tmp_path / "other.db"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(StorageError):
        open_experiment(f"sqlite:///{one}", str(tmp_path), "e")
    assert (one.readlink(), other.readlink()) == (other, one)


def test_tables_made_in_part_are_removed_from_the_file_that_a_link_names(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    file = tmp_path / "here" / "mlflow.db"
    link = tmp_path / "link.db"
    link.symlink_to(file)

    def fails(*args, **kwargs):
        file.write_bytes(b"a part")
        raise OSError("disk full")

    monkeypatch.setattr("mlflow.MlflowClient.search_experiments", fails)
    with pytest.raises(StorageError, match="disk full"):
        open_experiment(f"sqlite:///{link}", str(tmp_path), "e")
    assert link.is_symlink() and not file.exists()


def test_two_broken_files_are_both_kept(tmp_path):
    file = tmp_path / "mlflow.db"
    names = []
    for _ in range(2):
        file.write_bytes(b"no database")
        names.append(move_broken(file).name)
    assert names == ["mlflow.broken-1.db", "mlflow.broken-2.db"]


def test_a_study_is_shown_again_after_its_database_broke(tmp_path):
    half_made(tmp_path / "mlflow.db")
    tracker(tmp_path).log_trial(result(3))
    (run,) = runs(tmp_path, "trial")[1]
    assert run.data.metrics["steps_to_result"] == 48


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from lit_dps.tracking.sync import MlflowSync
from lit_dps.core.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    MlflowSync(f"sqlite:///{sys.argv[1]}/mlflow.db", sys.argv[1], "workload", "s", {}).logged()
except StorageError:
    sys.exit(7)
"""


def test_a_full_disk_leaves_no_half_of_a_database(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 7, done.stderr
    assert not (tmp_path / "mlflow.db").exists()


def test_the_database_of_another_program_is_refused_and_not_renamed(tmp_path):
    file = tmp_path / "study.db"
    open_storage(f"sqlite:///{file}")
    content = file.read_bytes()
    with refuses(str(file), error=StorageError):
        open_experiment(f"sqlite:///{file}", "e", str(tmp_path))
    assert file.read_bytes() == content
    assert not list(tmp_path.glob("*broken*"))


def test_results_and_their_display_need_two_files(tmp_path):
    with refuses("storage.mlflow", f"sqlite:///{tmp_path}/study.db"):
        StorageConfig(folder=str(tmp_path), mlflow=f"sqlite:///{tmp_path}/study.db")
    with refuses("storage.mlflow", "sqlite:///b.db"):
        StorageConfig(optuna="sqlite:///./b.db", mlflow="sqlite:///b.db")
    StorageConfig(optuna="postgresql://host/a", mlflow="sqlite:///a.db")
