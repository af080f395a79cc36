"""A probe skips a batch size that has no room, and ends with the cause of any other failure."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from lit_dps.advice import probe_study as probes_module
from lit_dps.advice.options import Clock
from lit_dps.advice.probe_study import CannotRun, ChosenPoints, Probes, failed_trials
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import ConfigError, StorageError, UserError
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.study.failures import AllFail
from lit_dps.study.workers import WorkerDied
from lit_dps.tracking.sync import MlflowSync
from tests.support.errors import refuses
from tests.unit.advice.test_step_probe import Net, with_module


class FailsAbove(Net):
    """Fails with batches of more than 4 examples."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 4:
            raise self.error()
        return super().training_step(batch, batch_idx)


class Wrong(FailsAbove):
    def error(self):
        return ValueError("shapes differ")


class Misconfigured(FailsAbove):
    def error(self):
        return ConfigError("model.width", 3, "an even number")


class Full(FailsAbove):
    def error(self):
        return RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class FullInNumpy(FailsAbove):
    def error(self):
        return MemoryError("Unable to allocate 8 GiB")


class FailsAtTheFirstPoint(Net):
    """Fails at a high rate alone."""

    def training_step(self, batch, batch_idx):
        if self.lr > 0.05:
            raise ValueError("the rate is too high")
        return super().training_step(batch, batch_idx)

    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr = lr


RATES = (0.08, 0.02, 0.03, 0.04)  # the first one fails in FailsAtTheFirstPoint


def probes(tmp_path, name: str) -> Probes:
    return probes_of(tmp_path, f"{__name__}.{name}")


def probes_of(tmp_path, class_path: str) -> Probes:
    """Return probes of a module by its class path."""
    given = with_module("Net")
    model = {"class_path": class_path}
    if class_path == f"{__name__}.Net":
        model = given.workload.model
    study = dataclasses.replace(given.study, workers=1)
    setup = dataclasses.replace(
        given,
        study=study,
        storage=StorageConfig(str(tmp_path)),
        workload=dataclasses.replace(given.workload, model=model),
    )
    found = Probes(setup, data=None)
    # A method that MlflowSync does not have fails.
    found.mlflow = create_autospec(MlflowSync, instance=True)
    return found


def run(work: Probes, size: int, trials: int = 2) -> bool:
    clock = Clock(60, SimpleNamespace(keep=lambda **kw: None), 0.0)
    points = tuple({"model.lr": rate} for rate in RATES[:trials])
    return work.run(size, math.inf, StopRequest(), clock, ChosenPoints(points))


@pytest.mark.parametrize("name", ["Full", "FullInNumpy"])
def test_a_batch_without_memory_is_skipped(tmp_path, name):
    work = probes(tmp_path, name)
    assert run(work, 4)
    with pytest.raises(CannotRun):
        run(work, 8)
    assert work.without_room == {8}
    assert list(failed_trials(work.record())) == [8]


def test_a_batch_above_the_training_split_is_skipped(tmp_path):
    work = probes(tmp_path, "Net")
    with pytest.raises(CannotRun):
        run(work, 128)
    assert work.without_room == {128}


@pytest.mark.parametrize(
    ("name", "cause"),
    [("Wrong", "ValueError"), ("Misconfigured", "model.width")],
)
@pytest.mark.parametrize("trials", [2, 4])
def test_a_failure_of_the_users_code_ends_the_probe_with_its_cause(tmp_path, name, cause, trials):
    work = probes(tmp_path, name)
    assert run(work, 4, trials)
    with pytest.raises(AllFail) as failed:
        run(work, 8, trials)
    assert failed.value.value.startswith(cause)
    assert "B = 8" in str(failed.value)
    assert not work.without_room
    assert len(failed_trials(work.record())[8]) == min(trials, 3)


def test_a_probe_whose_only_trials_in_time_failed_ends_too(tmp_path, monkeypatch):
    work = probes(tmp_path, "Wrong")
    real = probes_module.train_remaining

    def ends_after_one(setup, workers, until, on_event):
        results = real(setup, workers, until)
        yield next(results)
        results.close()
        raise Interrupted("the budget")

    monkeypatch.setattr(probes_module, "train_remaining", ends_after_one)
    assert not run(work, 4), "the time is over, and a trial ended well"
    with refuses(None, "ValueError: shapes differ", error=AllFail):
        run(work, 8)


def test_a_trial_that_fails_beside_others_ends_nothing(tmp_path):
    work = probes(tmp_path, "FailsAtTheFirstPoint")
    assert run(work, 4, 4)
    assert 0 < len(failed_trials(work.record())[4]) < 4


def ended_by(tmp_path, monkeypatch, error: Exception, ranks: int = 1) -> Probes:
    """Return a probe whose workers end with an error."""

    def train_remaining(setup, workers, until, on_event):
        raise error
        yield

    found = probes(tmp_path, "Net")
    if ranks > 1:
        trainer = {**found.setup.workload.trainer, "devices": ranks}
        found.setup = dataclasses.replace(
            found.setup, workload=dataclasses.replace(found.setup.workload, trainer=trainer)
        )
    monkeypatch.setattr(probes_module, "train_remaining", train_remaining)
    return found


@pytest.mark.parametrize(
    ("error", "ranks", "raised"),
    [
        (WorkerDied(7, -9), 1, CannotRun),  # as Linux ends a process for want of memory
        (WorkerDied(7, -11), 1, WorkerDied),
        (MemoryError(), 2, CannotRun),  # of several ranks errors come as they are
        (ConfigError("study.batch_sizes", 8, "at most 4"), 2, CannotRun),
        (ConfigError("model.width", 8, "at most 4"), 2, ConfigError),
        (StorageError("out of memory"), 1, StorageError),  # of sqlite
    ],
)
def test_what_ends_the_workers_is_told_from_want_of_room(
    tmp_path, monkeypatch, error, ranks, raised
):
    work = ended_by(tmp_path, monkeypatch, error, ranks)
    with pytest.raises(raised):
        run(work, 4)
    assert work.without_room == ({4} if raised is CannotRun else set())


def test_an_error_of_a_module_on_several_ranks_is_one_line(tmp_path, monkeypatch):
    work = ended_by(tmp_path, monkeypatch, ZeroDivisionError("division by zero"), ranks=2)
    with refuses(None, 4, error=UserError) as failed:
        run(work, 4)
    assert "ZeroDivisionError" in str(failed.value) and "\n" not in str(failed.value)


def test_resumed_probes_stay_in_the_experiment_of_their_study(tmp_path):
    setup = probes(tmp_path, "Net").setup
    former = dataclasses.replace(setup.study, workload="Former")
    assert run(Probes(dataclasses.replace(setup, study=former), data=None), 4)
    resumed = Probes(setup, data=None)
    assert run(resumed, 8)
    assert resumed.record().workload == "Former"
    runs = resumed.mlflow.runs
    assert runs.client.get_experiment(runs.experiment_id).name == "Former"
