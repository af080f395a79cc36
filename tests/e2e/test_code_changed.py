"""A module that is edited after a study ran: `study` and `advise` refuse it, and `fit --of` names
it."""

from __future__ import annotations

import dataclasses
import importlib
import socket
from pathlib import Path

import pytest
import yaml

from lit_dps.core.config import StorageConfig
from lit_dps.core.environment import Environment
from lit_dps.core.errors import UserError
from lit_dps.parallel import fork_server as processes
from lit_dps.parallel.process import StopRequest
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.database import open_storage
from lit_dps.storage.stored_format import study_attributes
from lit_dps.study.workers import work_in_processes
from tests.e2e.commands import start
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
    (tmp_path / f"{name}.py").write_text(MODULE.replace("1.0", "1.5"))
    if verb == "fit":
        done = call("fit", "--of", name, "--cell", "B=32")
        assert done.code == 0
        assert any(line.startswith(f"note: {name}.py ") for line in done.err.splitlines())
        return
    url = f"sqlite:///{tmp_path}/mlruns/study.db"
    AdviceStore(url, name).keep(
        environment=study_attributes(open_storage(url), name)["environments"][0]
    )
    done = call(verb, "c.yaml", *(("--budget", "60s") if verb == "advise" else ()))
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
