"""Whatever is lost around a study, the same command goes on and ends with the table of an unbroken
one."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
from collections import Counter
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import mlflow
import pytest

from lit_dps.core.exit_codes import ExitCode
from lit_dps.study import run as study_run
from tests.e2e.commands import (
    FAST,
    FAST_TRIALS,
    results,
    run,
    run_here,
    start,
    table,
    wait_for_results,
)
from tests.support import schema
from tests.support.postgres import free_port

pytestmark = pytest.mark.slow
STUDY = ("study", "--config", FAST)


def logged(uri: str) -> Counter:
    """How often each (cell, point) has a run in MLflow."""
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs(
        [e.experiment_id for e in client.search_experiments()], max_results=500
    )
    trials = [run.data.tags for run in runs if run.data.tags.get("lit_dps.kind") == "trial"]
    return Counter((f"fast | {tags['lit_dps.cell']}", tags["lit_dps.point"]) for tags in trials)


@contextmanager
def full_disk(folder: Path):
    """A small file system at a folder, with no room left in it."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with (folder / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(b"x" * 4096)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.parametrize("kind", ["no server", pytest.param("full disk", marks=pytest.mark.long)])
def test_a_study_goes_on_without_mlflow_and_can_be_logged_later(tmp_path, call, unbroken, kind):
    if kind == "no server":
        uri, why_unusable = f"http://127.0.0.1:{free_port()}", nullcontext()
    else:
        uri, why_unusable = f"sqlite:///{tmp_path}/disk/mlflow.db", full_disk(tmp_path / "disk")
    with why_unusable:
        done = call(*STUDY, "--storage.mlflow", uri)
    assert done.code == 0, done.err
    assert done.err.count("warning: MLflow at") == 1, done.err
    assert "analyze --sync logs the study" in done.out
    assert table(tmp_path) == table(unbroken)
    again = f"sqlite:///{tmp_path}/again.db"
    assert call("analyze", "--config", FAST, "--sync", "--storage.mlflow", again).code == 0
    assert logged(again) == dict.fromkeys(FAST_TRIALS, 1)


@pytest.mark.long
def test_a_power_cut_that_puts_the_database_back(tmp_path, unbroken):
    database, copy = tmp_path / "mlruns" / "study.db", tmp_path / "copy.db"
    process = start(tmp_path, *STUDY)
    wait_for_results(database, 3, process)
    with (
        closing(sqlite3.connect(database, timeout=30)) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)
    before = results(copy)
    wait_for_results(database, 8, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    shutil.copy(copy, database)
    database.with_name("study.db-journal").unlink(missing_ok=True)
    assert len(before) < 8
    done = run(tmp_path, *STUDY)
    assert done.returncode == 0, done.stderr
    assert before <= results(database) == dict.fromkeys(FAST_TRIALS, 1)
    assert table(tmp_path) == table(unbroken)
    assert logged(f"sqlite:///{tmp_path}/mlruns/mlflow.db") == dict.fromkeys(FAST_TRIALS, 1)


def test_a_database_that_may_not_grow_is_one_line_and_loses_nothing(tmp_path, call, unbroken):
    one = ("--study.batch_sizes", "[64]", "--study.sparsities", "[0]", "--study.trials", "1")
    assert call(*STUDY, *one).code == ExitCode.NO_RESULT
    database = tmp_path / "mlruns" / "study.db"
    before, (soft, hard) = results(database), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (database.stat().st_size + 8192, hard))
    try:
        full = call(*STUDY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.code == 2
    assert sum(line.startswith("lit-dps: error") for line in full.err.splitlines()) == 1
    assert "Traceback" not in full.err and "the same command resumes the study" in full.err
    assert call(*STUDY).code == 0
    assert before <= results(database) == dict.fromkeys(FAST_TRIALS, 1)
    assert table(tmp_path) == table(unbroken)


def test_the_answer_is_printed_though_nothing_can_be_written_after_the_last_trial(
    tmp_path, monkeypatch
):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    claim = study_run.claim_report

    def claim_on_a_full_disk(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        return claim(*args)

    monkeypatch.setattr(study_run, "claim_report", claim_on_a_full_disk)
    one = ("--study.batch_sizes", "[64]", "--study.sparsities", "[0]", "--study.trials", "2")
    try:
        full = run_here(tmp_path, *STUDY, *one)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.returncode == 0, full.stderr
    assert "Traceback" not in full.stderr
    assert full.stderr.count("two processes may write the report") == 1
    assert full.stderr.count("the best trial of each cell could not be stored") == 1
    again = run_here(tmp_path, *STUDY, *one)
    # The time of a step is measured again, since it could not be stored.
    answer = [line.split()[:2] for line in again.stdout.splitlines() if line.startswith("64  ")]
    assert again.returncode == 0 and len(answer) == 1
    assert f"\n{'  '.join(answer[0])} " in full.stdout
    assert "with batch size 64 at" in full.stdout and "with batch size 64 at" in again.stdout
    with closing(sqlite3.connect(tmp_path / "mlruns" / "study.db")) as connection:
        query = "select count(*) from trial_user_attributes where key = 'best_point'"
        assert connection.execute(query).fetchone() == (1,), (
            "the next command stores what was refused"
        )


@pytest.mark.long
def test_three_processes_begin_at_once_in_an_empty_folder(tmp_path, unbroken, monkeypatch):
    monkeypatch.delenv(schema.KEY)
    processes = [start(tmp_path, *STUDY) for _ in range(3)]
    codes = [process.wait(400) for process in processes]
    said = (tmp_path / "output.txt").read_text()
    assert 0 in codes and {*codes} <= {0, ExitCode.WAITING}, said
    assert "Traceback" not in said
    assert results(tmp_path / "mlruns" / "study.db") == dict.fromkeys(FAST_TRIALS, 1)
    assert logged(f"sqlite:///{tmp_path}/mlruns/mlflow.db") == dict.fromkeys(FAST_TRIALS, 1)
    assert table(tmp_path) == table(unbroken)
