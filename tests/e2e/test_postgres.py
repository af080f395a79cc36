"""Many processes on one study in a PostgreSQL server, and an MLflow server as its view."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path

import mlflow
import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError

from lit_dps.core.exit_codes import ExitCode
from tests.e2e.commands import FAST, FAST_TRIALS, environment, run, start, start_until_claim, table
from tests.support.postgres import free_port
from tests.torture import QUERY

pytestmark = pytest.mark.slow
RAN = "writes the analysis"  # what all processes but the last one say


@pytest.fixture
def begin():
    """Starts commands, and ends what is left of them with the test."""
    processes = []
    yield lambda *args: processes.append(start(*args)) or processes[-1]
    for process in processes:
        process.kill()
        process.wait()


def stored(url: str) -> Counter:
    """How often each (cell's study, point) has a stored result of a finished trial."""
    with suppress(DBAPIError), create_engine(url, poolclass=NullPool).connect() as connection:
        rows = connection.execute(text(QUERY)).all()
        return Counter((name, point) for name, point, result in rows if result is not None)
    return Counter()  # the tables are not made yet


def machines(tmp_path: Path, n: int) -> list[Path]:
    """A folder for each of n machines, as if they shared no file system."""
    folders = [tmp_path / f"machine-{i}" for i in range(n)]
    for folder in folders:
        folder.mkdir()
    return folders


def outputs(folders: list[Path]) -> list[str]:
    return [(folder / "output.txt").read_text() for folder in folders]


@pytest.mark.long
def test_eight_processes_finish_a_study_with_exactly_the_declared_points(
    tmp_path, postgres, unbroken, begin
):
    view = f"sqlite:///{tmp_path}/mlflow.db"
    folders = machines(tmp_path, 8)
    study = ("study", "--config", FAST, "--storage.optuna", postgres, "--storage.mlflow", view)
    processes = [begin(folder, *study) for folder in folders]
    codes = [process.wait(500) for process in processes]
    said = outputs(folders)
    assert {*codes} <= {0, ExitCode.WAITING}, said
    assert codes.count(ExitCode.WAITING) == sum("still run by process" in text for text in said)
    assert stored(postgres) == dict.fromkeys(FAST_TRIALS, 1), "a point was lost or run twice"
    assert not any("s3cret" in text for text in said), "a password was printed"
    wrote = [folder for folder in folders if (folder / "mlruns" / "figures").exists()]
    late = [text for text in said if "no trials remain" in text]
    assert len(wrote) == 1 + len(late), "the last one out writes the analysis, once"
    assert sum(RAN in text for text in said) == 8 - len(wrote)
    for folder in wrote:
        assert table(folder) == table(unbroken)
    client = mlflow.MlflowClient(view)
    runs = client.search_runs(
        [e.experiment_id for e in client.search_experiments()], max_results=200
    )
    kinds = Counter(r.data.tags["lit_dps.kind"] for r in runs)
    assert kinds == {"study": 1, "cell": 4, "trial": 16}
    assert all("s3cret" not in str(run.to_dictionary()) for run in runs)
    for folder in (tmp_path / "mlruns", *(f / "mlruns" for f in folders)):
        for file in folder.rglob("*"):
            assert not (file.is_file() and b"s3cret" in file.read_bytes()), file


def test_the_trial_of_a_killed_process_is_run_again_by_others(tmp_path, postgres, unbroken):
    study = ("study", "--config", FAST, "--storage.optuna", postgres, "--goal.max_steps", "80")
    folders = machines(tmp_path, 2)
    first = start_until_claim(folders[0], 4, *study)
    try:
        before = stored(postgres)
        assert sum(before.values()) == 3
        assert run(folders[1], *study).returncode == ExitCode.WAITING
        missing = Counter(FAST_TRIALS) - stored(postgres)
        assert sum(missing.values()) == 1, "nobody takes the trial of a process that lives"
    finally:
        first.kill()
    first.wait(60)
    assert run(folders[1], *study).returncode == 0
    assert before <= stored(postgres) == dict.fromkeys(FAST_TRIALS, 1)
    assert table(folders[1]) == table(unbroken)


@pytest.fixture
def mlflow_server(tmp_path):
    """An MLflow server as docs/scaling.md starts it; yields its address."""
    port, folder = free_port(), tmp_path / "server"
    folder.mkdir()
    options = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        folder / "artifacts",
    ]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        *options,
    ]
    env = environment() | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        command, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
    )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, (
                    folder / "log"
                ).read_text()
                time.sleep(0.05)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.long
def test_an_mlflow_server_shows_what_several_processes_log(tmp_path, mlflow_server, begin):
    study = ("study", "--config", FAST, "--storage.mlflow", mlflow_server)
    study += ("--study.batch_sizes", "[64]", "--study.trials", 2)
    processes = [begin(tmp_path, *study) for _ in range(2)]
    codes = [process.wait(300) for process in processes]
    assert 0 in codes and {*codes} <= {0, ExitCode.WAITING}, outputs([tmp_path])
    assert f"{mlflow_server}/#/experiments/" in outputs([tmp_path])[0]
    client = mlflow.MlflowClient(mlflow_server)
    experiments = [e.experiment_id for e in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=100)
    assert Counter(r.data.tags["lit_dps.kind"] for r in runs) == {"study": 1, "cell": 2, "trial": 4}
    (whole,) = [r.info.run_id for r in runs if r.data.tags["lit_dps.kind"] == "study"]
    assert "table.txt" in {item.path for item in client.list_artifacts(whole)}
    assert not (tmp_path / "mlruns" / "mlflow.db").exists()
    synced = run(tmp_path, "analyze", "--config", FAST, "--storage.mlflow", mlflow_server, "--sync")
    assert synced.returncode == 0, synced.stderr
    again = client.search_runs(experiments, max_results=100)
    assert {r.info.run_id for r in again} == {r.info.run_id for r in runs}, "what was logged stays"
    shown = run(tmp_path, "ui", "--storage.mlflow", mlflow_server)
    assert shown.returncode == 0 and f"{mlflow_server}/#/experiments/" in shown.stdout
