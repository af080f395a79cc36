"""A module that is edited after a study ran: `study` and `advise` refuse it, and `fit --of` names
it."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import yaml

from lit_dps.core.config import StorageConfig
from lit_dps.core.environment import UNKNOWN, Environment
from lit_dps.core.errors import UserError
from lit_dps.core.exit_codes import ExitCode
from lit_dps.parallel import fork_server as processes
from lit_dps.parallel.process import StopRequest
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.database import open_storage
from lit_dps.storage.stored_format import study_attributes
from lit_dps.study.workers import work_in_processes
from tests.e2e.commands import results, run, run_forked, start
from tests.e2e.test_checkpoint_study import wait_for_checkpoint
from tests.support.errors import error_line, refuses
from tests.unit.advice.test_step_probe import with_module

ROOT = Path(__file__).parents[2]
MODULE = """
from lit_dps.module import ImageClassifier

class Mine(ImageClassifier):
    def loss(self, batch):
        return super().loss(batch) * 1.0
"""
NETWORK = {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [8]}}
RATES = {"model.learning_rate": {"low": 0.03, "high": 0.3, "scale": "log"}}


def write(folder, name: str) -> None:
    """Write a module of the user, and a configuration `c.yaml` that names its class."""
    (folder / f"{name}.py").write_text(MODULE)
    config = {
        "model": {"class_path": f"{name}.Mine", "init_args": {"network": NETWORK}},
        "data": {"class_path": "lit_dps.data.Digits", "init_args": {"batch_size": 32}},
        "trainer": {"accelerator": "cpu"},
        "goal": {"error": 0.5, "check_interval": 4, "max_steps": 40},
        "study": {
            "name": name,
            "batch_sizes": [32],
            "sparsities": [0.0],
            "trials": 2,
            "workers": 1,
            "space": RATES,
        },
    }
    config["study"]["noise_scale"] = False
    (folder / "c.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param("advise", marks=pytest.mark.long),
        pytest.param("fit", marks=pytest.mark.long),
        "study",
    ],
)
def test_code_that_changed_is_named(call, tmp_path, monkeypatch, verb):
    name = f"edited_for_{verb}"
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, name)
    assert call("study", "c.yaml").code == 0
    (tmp_path / f"{name}.py").write_text(MODULE.replace("1.0", "1.25"))
    if verb == "fit":
        done = call("fit", "--of", name, "--cell", "B=32")
        assert done.code == 0
        assert any(line.startswith(f"note: {name}.py ") for line in done.err.splitlines())
        return
    url = f"sqlite:///{tmp_path}/mlruns/study.db"
    AdviceStore(url, name).keep(
        environment=study_attributes(open_storage(url), name)["environments"][0]
    )
    options = ("--budget", "60s") if verb == "advise" else ()
    # The class in this process is not the code of the file: no study may store the file's hash.
    done = call(verb, "c.yaml", "--study.name", "new", *options)
    assert done.code == 2 and f"{name}.py" in error_line(done.err)
    del sys.modules[name]
    done = call(verb, "c.yaml", *options)
    assert done.code == 2 and f"{name}.py" in error_line(done.err)


@pytest.mark.parametrize("verb", ["advise", "study"])
def test_code_that_changes_while_a_command_begins_is_refused(call, tmp_path, monkeypatch, verb):
    """This process has imported the file already: its trials would have the hash of other code."""
    name = f"edited_amid_{verb}"
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, name)
    runner = importlib.import_module(
        {"study": "lit_dps.study.run", "advise": "lit_dps.advice.run"}[verb]
    )
    real = runner.environment_of

    def edited(*args, **options):
        (tmp_path / f"{name}.py").write_text(MODULE.replace("1.0", "1.5"))
        return real(*args, **options)

    monkeypatch.setattr(runner, "environment_of", edited)
    done = call(verb, "c.yaml", *(("--budget", "60s") if verb == "advise" else ()))
    assert done.code == 2 and f"{name}.py" in error_line(done.err)
    assert not (tmp_path / "mlruns").exists()


def test_a_worker_that_imports_other_code_ends_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "METHOD", "fork")  # starts in no time
    given = with_module("Net")
    sources = {"tests/unit/advice/test_step_probe.py": ["a hash", "of other code"]}
    environment = Environment({"sources": sources})
    storage = StorageConfig(str(tmp_path))
    setup = dataclasses.replace(given, storage=storage, environment=environment)
    with refuses(None, ["tests/unit/advice/test_step_probe.py"], error=UserError):
        next(work_in_processes(setup, 1, StopRequest()))


WRITES = """
import time
from pathlib import Path
from lit_dps.module import ImageClassifier

class Mine(ImageClassifier):
    def __init__(self, checkpoint: str = "late.txt", **options):
        super().__init__(**options)
        self.checkpoint = checkpoint

    def on_train_batch_end(self, *args):
        if self.global_step > 30:
            Path(self.checkpoint).write_text(str(time.time()))
"""


@pytest.mark.parametrize("verb", ["study", pytest.param("advise", marks=pytest.mark.long)])
def test_a_file_that_trials_write_late_is_no_change(call, tmp_path, monkeypatch, verb):
    """A file that the first command makes, or that exists before it."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"writes_in_{verb}"
    write(tmp_path, name)
    (tmp_path / f"{name}.py").write_text(WRITES)
    for trials in (1, 2, 3):
        options = ("--study.trials", trials)
        if verb == "advise":
            options = ("--budget", f"{30 * trials}s")
            (tmp_path / "late.txt").touch()
        done = call(verb, "c.yaml", "--goal.error", 0.001, *options)
        assert done.code in (0, ExitCode.NO_RESULT), done.err
        assert (tmp_path / "late.txt").exists()
    if verb == "study":
        url = f"sqlite:///{tmp_path}/mlruns/study.db"
        stored = study_attributes(open_storage(url), name)["environments"]
        assert [each["sources"]["file late.txt"] for each in stored] == [UNKNOWN] * len(stored)


@pytest.mark.slow
def test_a_killed_run_of_a_model_that_writes_a_file_resumes(tmp_path):
    """The first run stores that trials write the file. The hash of the killed run is outdated."""
    name = "writes_and_dies"
    write(tmp_path, name)
    (tmp_path / f"{name}.py").write_text(WRITES)
    command = ["study", "--config", "c.yaml", "--goal.error", 0.001, "--goal.max_steps", 1200]
    command += ["--goal.check_interval", 20, "--study.checkpoint_minutes", 0.002]
    done = run(tmp_path, *command, "--study.trials", 1)
    assert done.returncode == ExitCode.NO_RESULT, done.stderr
    process = start(tmp_path, *command, "--study.trials", 2)
    wait_for_checkpoint(tmp_path, process, name)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(100) == -signal.SIGKILL
    done = run(tmp_path, *command, "--study.trials", 2)
    assert done.returncode == ExitCode.NO_RESULT, done.stderr
    assert "sample 1 resumes from step" in done.stderr and "restarts" not in done.stderr
    stored = study_attributes(open_storage(f"sqlite:///{tmp_path}/mlruns/study.db"), name)
    files = [each["sources"]["file late.txt"] for each in stored["environments"]]
    assert files == [UNKNOWN] * len(files)


EDITS = """
import lit_dps.study.run as run
from lit_dps.cli import main

begin = run.open_run

def edit_and_begin(*args):
    with open("edited_for_ranks.py", "a") as file:
        file.write("SCALE = 1\\n")
    return begin(*args)

if __name__ == "__main__":
    run.open_run = edit_and_begin
    ranks = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    raise SystemExit(main(["study", "--config", "c.yaml", *ranks]))
"""


def test_a_rank_that_imports_other_code_ends_the_study(tmp_path):
    write(tmp_path, "edited_for_ranks")
    (tmp_path / "script.py").write_text(EDITS)
    done = run_forked(tmp_path, ["script.py"])
    assert done.returncode == 2, done.stderr
    assert "rank 1: edited_for_ranks.py" in done.stderr
    assert not results(tmp_path / "mlruns" / "study.db")


def test_ranks_of_two_machines_with_different_code_are_refused(tmp_path, monkeypatch):
    """Each rank of torchrun imports the code of its own machine, here of its own folder."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    processes_of_ranks = []
    for rank, rate in enumerate(("1.0", "1.5")):
        folder = tmp_path / f"machine {rank}"
        folder.mkdir()
        write(folder, "on_two_machines")
        (folder / "on_two_machines.py").write_text(MODULE.replace("1.0", rate))
        of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        of_torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for key, value in of_torchrun.items():
            monkeypatch.setenv(key, str(value))
        options = ("--config", "c.yaml", "--trainer.strategy", "ddp")
        options += ("--storage.optuna", f"sqlite:///{tmp_path}/study.db")
        processes_of_ranks.append(start(folder, "study", *options))
    assert [process.wait(120) for process in processes_of_ranks] == [2, 2]
    said = (tmp_path / "machine 1" / "output.txt").read_text()
    assert "on_two_machines.py" in error_line(said)
