"""Bad input: one line that names the key, the value and what is allowed; exit code 2; nothing
created."""

from __future__ import annotations

import copy
import os
import sqlite3
import subprocess
import sys
import threading

import pytest
import yaml

from lit_dps.cli import main
from lit_dps.storage import database
from tests.e2e.commands import FAST

BASE = yaml.safe_load(FAST.read_text())


@pytest.fixture
def refusal(tmp_path, monkeypatch, capfd):
    """Runs a command that must be refused in an empty folder, and returns what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIT_DPS_DATA", raising=False)

    def run(
        *args: str,
        config: dict | str | None = BASE,
        verb: str = "study",
        leaves: set[str] = frozenset(),
    ) -> str:
        (tmp_path / "config.yaml").write_text(
            config if isinstance(config, str) else yaml.safe_dump(config)
        )
        before = {path.name for path in tmp_path.iterdir()}
        monkeypatch.setattr(sys, "argv", ["lit-dps"])
        assert main([verb, "--config", "config.yaml", *args]) == 2
        said = capfd.readouterr().err
        assert said.startswith("lit-dps: error: ")
        assert said.count("\n") == 1, said
        assert {path.name for path in tmp_path.iterdir()} - before <= leaves
        return said

    return run


def edited(path: str, value) -> dict:
    config = copy.deepcopy(BASE)
    *parents, last = path.split("/")
    node = config
    for name in parents:
        node = node[name]
    node[last] = value
    return config


def box(**space) -> dict:
    return edited("study/space", {"model.learning_rate": space})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (edited("goal/foo", 1), ["goal", "foo"]),
        (
            edited("study/checkpoint_minutes", 0),
            ["study.checkpoint_minutes", "0.0", "null for none"],
        ),
        (
            edited("study/race_factor", "a lot"),
            ["study.race_factor is 'a lot'; it must be a number or null"],
        ),
        (
            edited("study/workers", ""),
            ["study.workers is ''; it must be a whole number or null"],
        ),
        *[(edited(key, None), [f"{key} is null"]) for key in ("study", "pruning", "storage")],
        (
            edited("smoothness", {"interval": "often"}),
            ["smoothness.interval is 'often'; it must be a whole number or null"],
        ),
        (
            edited("trainer/callbacks", [{"class_path": "lightning.pytorch.callbacks.Timer"}]),
            ["callbacks.Timer", "interval", "set interval: 'step'"],
        ),
        (edited("foo", 1), ["'foo' is not accepted"]),
        (edited("model/init_args/foo", 1), ["model", "'foo' is not accepted"]),
        (
            edited("model/init_args/network/init_args/foo", 1),
            ["model.network", "'foo' is not accepted"],
        ),
        (
            edited("model/init_args/network", {}),
            ["model.network is 'Module'", "parameters to train"],
        ),
        (edited("model/class_path", "nope.Nope"), ["model", "nope.Nope"]),
        (
            edited("model/class_path", "lit_dps.models.MLP"),
            ["model", "not correspond to a subclass of LightningModule"],
        ),
        (
            edited("model/init_args/network/class_path", "lit_dps.models.Nope"),
            ["model.network", "lit_dps.models.Nope"],
        ),
        (edited("data/class_path", "lit_dps.data.MNITS"), ["data", "lit_dps.data.MNITS"]),
        (
            edited("model/init_args/optimizer", "adagrad"),
            ["model.optimizer", "'adagrad'", "sgd, momentum"],
        ),
        (edited("study/batch_sizes", ["a"]), ["study.batch_sizes", "'a'", "number"]),
        (edited("study/batch_sizes", "many"), ["study.batch_sizes", "'many'", "list"]),
        (edited("study/batch_sizes", []), ["study.batch_sizes", "at least one"]),
        (edited("study/batch_sizes", [0]), ["study.batch_sizes", "0", "at least 1"]),
        (edited("study/batch_sizes", [16, 16]), ["study.batch_sizes", "each value once"]),
        (edited("study/batch_sizes", [16, 1351]), ["data.batch_size", "1351", "1 to 1350"]),
        (edited("study/sparsities", [1.0]), ["study.sparsities", "1.0", "not including 1"]),
        (edited("study/sparsities", [-0.1]), ["study.sparsities", "-0.1", "from 0"]),
        (edited("study/seed", -1), ["study.seed is -1; it must be 0 or more"]),
        (edited("study/trials", 0), ["study.trials", "0", "at least 1"]),
        (edited("study/goals", [0.2]), ["study.goals", "0.2", "above goal.error = 0.2"]),
        (edited("study/goals", [0.3, 0.1]), ["study.goals", "0.1", "above goal.error = 0.2"]),
        (edited("study/goals", [1.0]), ["study.goals", "1.0", "between 0 and 1"]),
        (edited("study/goals", 0.3), ["study.goals", "0.3", "list"]),
        (edited("study/goals", ["high"]), ["study.goals", "'high'", "number"]),
        (edited("study/name", "a|b"), ["study.name", "'a|b'"]),
        (edited("study/batch_size_key", "data.foo"), ["data", "foo"]),
        (edited("study/space", {}), ["study.space", "at least one range"]),
        (
            edited("study/space", {"foo": {"low": 0.1, "high": 1}}),
            ["study.space", "'foo'", "model.learning_rate"],
        ),
        (
            edited("study/space", {"model.foo": {"low": 0.1, "high": 1}}),
            ["model", "'foo' is not accepted"],
        ),
        (
            edited("study/space", {"model.momentum": {"low": 0.1, "high": 1.5}}),
            ["model.momentum", "1.5", "[0, 1)"],
        ),
        (
            box(low=1, high=0.1),
            ["study.space.model.learning_rate", "[1, 0.1]", "low below high"],
        ),
        (
            box(low=0.1, high=0.1),
            ["study.space.model.learning_rate", "[0.1, 0.1]", "low below high"],
        ),
        (box(low=0, high=1, scale="log"), ["study.space.model.learning_rate", "[0, 1]", "above 0"]),
        (box(low=0, high=1, scale="reverse_log"), ["study.space.model.learning_rate", "below 1"]),
        (
            box(low=0.1, high=1, scale="cubic"),
            ["study.space", "'cubic'", "linear, log, reverse_log"],
        ),
        (box(low="x", high=1), ["study.space.model.learning_rate.low", "'x'", "a number"]),
        (box(low=0.1), ["study.space", "high"]),
        (edited("goal/error", 0), ["goal.error", "0", "between 0 and 1"]),
        (edited("goal/error", 1.0), ["goal.error", "1.0", "between 0 and 1"]),
        (edited("goal/error", "low"), ["goal.error", "'low'", "number"]),
        (edited("goal", {}), ["goal.error"]),
        (edited("goal/check_interval", 0), ["goal.check_interval", "0", "at least 1"]),
        (
            edited("goal/max_steps", 81),
            ["goal.max_steps", "81", "multiple of goal.check_interval = 4"],
        ),
        (edited("goal/monitor", "val_mistakes"), ["goal.monitor", "'val_mistakes'", "val_error"]),
        (edited("goal/monitor", "val_acc"), ["goal.monitor", "'val_acc'", "goal.at_least"]),
        (edited("trainer/max_steps", 50), ["trainer.max_steps", "50", "goal.max_steps"]),
        (edited("trainer/limit_val_batches", 0.5), ["trainer.limit_val_batches", "0.5"]),
        (edited("trainer/accelerator", "qpu"), ["trainer", "qpu", "cpu"]),
        (edited("trainer/foo", 1), ["trainer", "foo"]),
        (
            edited("trainer", {"accelerator": "cpu", "devices": 0}),
            ["trainer.devices", "0", "number of devices"],
        ),
        (
            edited("trainer", {"accelerator": "cpu", "num_nodes": 2}),
            ["trainer.num_nodes", "2", "torchrun"],
        ),
        (
            edited("trainer", {"accelerator": "cpu", "devices": 2, "strategy": "fsdp"}),
            ["trainer.strategy", "'fsdp'"],
        ),
        (
            edited("study/engine", "stacked") | {"trainer": {"devices": 2, "accelerator": "cpu"}},
            ["study.engine", "2 ranks"],
        ),
        (edited("pruning", {"method": "lottery"}), ["pruning.method", "'lottery'", "snip"]),
        (
            edited("pruning", {"init": "anew"}),
            ["pruning.init is 'anew'", "reinit", "isometry"],
        ),
        (
            edited("pruning", {"method": "shuffle", "options": {"of": "lottery"}}),
            ["pruning.options.of", "'lottery'"],
        ),
        (edited("data/init_args", {"order": "missing.npy"}), ["data.order", "missing.npy"]),
        ("a: [1", ["config"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_configuration(refusal, config, said):
    message = refusal(config=config)
    for part in said:
        assert part in message


def test_a_forecast_refuses_what_a_study_refuses(refusal, tmp_path):
    assert "above goal.error" in refusal("--forecast", config=edited("study/goals", [0.1]))
    assert "1 to 1350" in refusal("--forecast", config=edited("study/batch_sizes", [2000]))
    (tmp_path / "file").touch()
    assert "file is no folder" in refusal("--forecast", "--storage.folder", "file/x")


def test_bad_command_line(refusal, capfd):
    assert "--study.foo" in refusal("--study.foo", "1")
    assert "study.trials.foo: there is no such key" in refusal("--study.trials.foo", "1")
    assert "study.race_factor.foo: there is no such key" in refusal("--study.race_factor.foo", "1")
    assert "missing.yaml" in refusal("--config", "missing.yaml")
    assert main(["stduy"]) == 2
    assert "study" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["fit", "validate", "analyze"])
def test_other_verbs_refuse_in_one_line_too(refusal, verb):
    assert "foo" in refusal("--study.foo", "1", verb=verb)


def test_analyze_without_a_study(refusal):
    assert "mlruns/study.db" in refusal(verb="analyze")


def test_missing_data_says_where_it_looked_and_what_to_put_there(refusal):
    offline = {"class_path": "lit_dps.data.MNIST", "init_args": {"root": "here", "download": False}}
    message = refusal(config=edited("data", offline))
    assert "here/MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]" in message
    assert "here/mnist/{train,test}.parquet" in message
    assert "--data.root" in message and "LIT_DPS_DATA" in message


def test_truncated_data(refusal, tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").write_bytes(
        bytes([0, 0, 8, 3, 0, 0, 0, 9, 0, 0, 0, 28, 0, 0, 0, 28]) + b"x" * 99
    )
    (raw / "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 9]) + b"x" * 9)
    message = refusal(
        config=edited("data", {"class_path": "lit_dps.data.MNIST", "init_args": {"root": "."}})
    )
    for fact in ("train-images-idx3-ubyte", "99 data bytes", "7056"):
        assert fact in message


@pytest.mark.parametrize("kind", ["optuna", "mlflow"])
def test_storage_that_is_no_database(refusal, tmp_path, kind):
    (tmp_path / "corrupt.db").write_bytes(b"no database" * 999)
    assert "corrupt.db" in refusal(f"--storage.{kind}", "sqlite:///corrupt.db")


def test_storage_damaged_behind_its_header(refusal, tmp_path):
    with sqlite3.connect(tmp_path / "damaged.db") as connection:
        connection.execute("create table studies (study_id integer)")
    damaged = bytearray((tmp_path / "damaged.db").read_bytes())
    damaged[100:] = os.urandom(len(damaged) - 100)
    (tmp_path / "damaged.db").write_bytes(damaged)
    leaves = {"damaged.db.lock"}
    assert "cannot use sqlite:///damaged.db" in refusal(
        "--storage.optuna", "sqlite:///damaged.db", leaves=leaves
    )


def test_storage_in_an_impossible_place(refusal, tmp_path):
    (tmp_path / "file").touch()
    assert "file is no folder" in refusal("--storage.folder", "file/x")
    assert "'study.db'" in refusal("--storage.optuna", "study.db")


def test_unwritable_storage(refusal, tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir(mode=0o500)
    if os.geteuid() == 0:  # root writes everywhere: ask as another user would be answered
        access = os.access
        monkeypatch.setattr(
            os, "access", lambda path, *args: "closed" not in str(path) and access(path, *args)
        )
    assert "closed is not writable" in refusal("--storage.folder", "closed")


def test_locked_database(refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(database, "LOCKED_TIMEOUT_SECONDS", 0.2)
    connection = sqlite3.connect(tmp_path / "locked.db", check_same_thread=False)
    connection.execute("create table t (x)")
    connection.commit()
    connection.execute("begin exclusive")
    release = threading.Timer(60, connection.rollback)
    release.start()
    message = refusal("--storage.optuna", "sqlite:///locked.db", leaves={"locked.db.lock"})
    release.cancel()
    connection.close()
    assert "database is locked" in message


@pytest.mark.long  # a database that may not grow, in test_nothing_lost.py, is a short form
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_loses_nothing_that_is_stored(tmp_path, monkeypatch, capfd):
    """The disk fills up in the middle of a study; with room again the same command ends it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-dps"])
    args = ["study", "--config", str(FAST), "--storage.optuna", f"sqlite:///{disk}/study.db"]
    try:
        one = ["--study.batch_sizes", "[64]", "--study.sparsities", "[0]", "--study.trials", "1"]
        assert main([*args, *one]) == 3  # its only trial misses the goal: no K*
        with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(b"x" * 4096)
        capfd.readouterr()
        assert main(args) == 2
        error = [
            line
            for line in capfd.readouterr().err.splitlines()
            if line.startswith("lit-dps: error")
        ]
        assert len(error) == 1 and "full" in error[0]
        (disk / "filler").unlink()
        assert main(args) == 0
        assert "trials have not finished" not in capfd.readouterr().out
    finally:
        subprocess.run(["umount", "-l", disk], check=False)
