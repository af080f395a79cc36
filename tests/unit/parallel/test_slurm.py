"""In a Slurm job a trial is what it is elsewhere: Lightning's own files and handlers for it stay
out."""

from __future__ import annotations

import signal

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from lit_dps.core.trial import Cell, Trial
from lit_dps.training.workload import Workload
from tests.unit.engines.test_engine import DATA, MODEL, PARAMS, WORKLOAD, quiet, train  # noqa: F401

TRIAL = Trial(Cell(16, 0.5), 0, PARAMS)


@pytest.fixture
def job(monkeypatch, tmp_path):
    """What Slurm sets for the second of four tasks, in a folder with what another job of
    Lightning's left there."""
    for name, value in {
        "JOB_ID": 7,
        "NTASKS": 4,
        "PROCID": 1,
        "LOCALID": 1,
        "NODEID": 0,
        "JOB_NAME": "dps",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(b"another job's")


def test_the_result_is_the_same_and_nothing_is_written(monkeypatch, job, tmp_path):
    handlers = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    inside = train(TRIAL)
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)) == handlers
    assert [path.name for path in tmp_path.iterdir()] == ["hpc_ckpt_1.ckpt"]
    for name in ("JOB_ID", "NTASKS", "PROCID", "LOCALID", "NODEID", "JOB_NAME"):
        monkeypatch.delenv(f"SLURM_{name}")
    assert inside == train(TRIAL)


def environment(**trainer):
    built = Workload(MODEL, DATA, {"accelerator": "cpu", **trainer}).build(TRIAL)
    return built.trainer, Trainer(**built.trainer)._accelerator_connector.cluster_environment


def test_which_environment_it_takes(job, monkeypatch):
    assert type(environment()[1]) is LightningEnvironment
    own = {
        "class_path": "lightning.pytorch.plugins.environments.SLURMEnvironment",
        "init_args": {"auto_requeue": False},
    }
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert type(environment(plugins=[own])[1]) is SLURMEnvironment, "the user's own"


def test_every_trial_has_a_folder_of_its_own(tmp_path):
    roots = [
        WORKLOAD.build(Trial(cell, point, PARAMS)).trainer["default_root_dir"]
        for cell in (Cell(16, 0.0), Cell(16, 0.5))
        for point in (0, 1)
    ]
    assert len(set(roots)) == 4
    trainer, _ = environment(default_root_dir=str(tmp_path))
    assert trainer["default_root_dir"] == f"{tmp_path}/trials/B=16 S=0.5/point-0"
    assert list(tmp_path.iterdir()) == []
