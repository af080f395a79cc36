"""Timing of a module whose steps and checks take a known time, on a clock of these tests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Range
from lit_dps.forecast.step_times import Line, Timing, fit_line, measure
from lit_dps.study.probe_run import CannotTime, RunTimes
from lit_dps.training.workload import Workload
from tests.support.setups import setup_of
from tests.support.tiny import points

STEP, CHECK = 0.010, 0.050
MORE = 1.1  # factor below which measured times lie, which include a few batches more
BATCHES = 30  # of the pruning pass
CLOCK = SimpleNamespace(seconds=0.0)  # a busy machine does not change its times


class Timed(LightningModule):
    """Lets the clock go on in each training step, more with each example and at first, and by 50 ms
    in each check. With soap, each `refresh_steps`-th step takes three times as long."""

    def __init__(
        self,
        rate: float = 0.1,
        step: float = STEP,
        example: float = 0.0,
        first: float = 0.0,
        batch_size: int = 4,
        optimizer: str = "sgd",
        refresh_steps: int = 10,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        first = self.hparams.first if self.trainer.global_step == 0 else 0.0
        CLOCK.seconds += self.hparams.step + self.hparams.example * len(batch[0]) + first
        is_refresh = self.trainer.global_step % self.hparams.refresh_steps == 0
        if self.hparams.optimizer == "soap" and is_refresh:
            CLOCK.seconds += 2 * STEP
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        CLOCK.seconds += CHECK
        self.log("val_error", 0.9)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.rate)


class Plain(LightningDataModule):
    """Training batches without a pruning pass of their own; one validation batch."""

    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(points(320), self.batch_size)

    def val_dataloader(self):
        return DataLoader(points(20), 20)


class WithPass(Plain):
    """The same with a pruning pass."""

    def pruning_dataloader(self, batch_size: int):
        return DataLoader(points(BATCHES * batch_size), batch_size)


class OwnLoader(Plain):
    """The same by a loader that cannot be made anew with another batch size."""

    def train_dataloader(self):
        return _Own(points(320), self.batch_size)


class _Own(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Endless(Plain):
    """The same with training data without a length."""

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator:
            while True:
                yield from points(320)

    def train_dataloader(self):
        return DataLoader(self.Stream(), self.batch_size)


def study(
    data: type = Plain,
    batch_sizes=(4, 16),
    sparsities=(0.0,),
    method="snip",
    key="data.batch_size",
    **model,
):
    """A study of `Timed`."""
    workload = Workload(
        {"class_path": f"{__name__}.Timed", "init_args": model},
        {"class_path": f"{__name__}.{data.__name__}"},
        {"accelerator": "cpu"},
        key,
    )
    return setup_of(
        StudyConfig(
            batch_sizes=list(batch_sizes),
            sparsities=list(sparsities),
            space={"model.rate": Range(0.01, 1, "log")},
        ),
        StorageConfig(),
        workload,
        {"error": 0.5, "check_interval": 16, "max_steps": 160},
        {"method": method, "biases": "paper", "batch_size": 10},
        {"interval": None},
    )


def set_seconds(patch: pytest.MonkeyPatch, seconds: float) -> None:
    patch.setattr("lit_dps.forecast.step_times.SECONDS", seconds)


@pytest.fixture(autouse=True, scope="module")
def short():
    """A fifth of the time, by the clock of these tests, and the threads as they were."""
    threads = torch.get_num_threads()
    clock = SimpleNamespace(perf_counter=lambda: CLOCK.seconds)
    with pytest.MonkeyPatch.context() as patch:
        set_seconds(patch, 0.2)
        for module in ("training.stopwatch", "study.probe_run"):
            patch.setattr(f"lit_dps.{module}.time", clock)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def timing() -> Timing:
    return measure(study())


def test_a_step_and_a_check_last_as_long_as_those_of_the_module(timing):
    assert list(timing.measured) == [4, 16]
    for times in timing.measured.values():
        assert (times.step, times.check) == pytest.approx((STEP, CHECK))
    for batch_size in (4, 8, 16, 64):
        assert timing.step.at(batch_size) == pytest.approx(STEP)
        assert timing.check.at(1 / batch_size) == pytest.approx(CHECK)
    assert timing.pruning == 0


@pytest.mark.parametrize(
    ("checks", "sparsity", "expected"),
    [((5.0, 0.1), 0.0, 0.1), ((0.1, 5.0), 0.0, 0.1), ((5.0, 0.2, 0.1), 0.5, 0.2)],
)
def test_a_slow_validation_of_several_does_not_count(monkeypatch, checks, sparsity, expected):
    seconds = iter(checks)

    def timed(*_) -> RunTimes:
        return RunTimes(0.0, 1.0, next(seconds))

    monkeypatch.setattr("lit_dps.forecast.step_times.timed_run", timed)
    found = measure(study(batch_sizes=(4,), sparsities=(sparsity,)))
    assert found.check == Line(expected, 0.0) and next(seconds, None) is None


def test_lines_are_carried_beyond_the_measured_batch_sizes():
    """Batches of 4 and 16 give the seconds of 64, where times have no noise."""
    step = fit_line([4, 16], [0.004 + 0.001 * b for b in (4, 16)])
    assert step.at(64) == pytest.approx(0.004 + 0.001 * 64)
    check = fit_line([1 / 4, 1 / 16], [0.05 + 0.08 / b for b in (4, 16)])
    assert check.at(1 / 64) == pytest.approx(0.05 + 0.08 / 64)


def test_neither_the_goal_nor_the_first_step_counts():
    """The goal is met at the first check, which ends a run; the first step waits for what it
    needs."""
    setup = study(first=1.0)
    setup = dataclasses.replace(setup, goal=dataclasses.replace(setup.goal, error=0.95))
    for m in measure(setup).measured.values():
        assert m.step == pytest.approx(STEP), "1 s in about 20 steps would add 50 ms to each"
        assert m.check == pytest.approx(CHECK)


@pytest.mark.parametrize(("arguments", "period"), [({}, 10), ({"refresh_steps": 4}, 4)])
def test_the_refreshes_of_soap_have_their_share_of_a_step(monkeypatch, arguments, period):
    """Two to three steps are asked for, and no refresh is among them."""
    set_seconds(monkeypatch, 0.025)
    for times in measure(study(optimizer="soap", **arguments)).measured.values():
        assert times.step == pytest.approx(STEP * (1 + 2 / period))


def test_the_cost_of_an_example_is_found_and_carried_to_other_batch_sizes(monkeypatch):
    set_seconds(monkeypatch, 0.5)
    found = measure(study(batch_sizes=(1, 8, 4096), step=0.004, example=0.004))
    assert list(found.measured) == [1, 8], "a step of 4096 x 4 ms is too long to be timed"
    assert (found.step.a, found.step.b) == pytest.approx((0.004, 0.004))
    assert found.step.at(4096) == pytest.approx(4097 * 0.004)


def test_steps_of_larger_batches_that_are_too_long_grow_in_proportion():
    found = measure(study(batch_sizes=(64, 128), step=0.15))
    assert list(found.measured) == [64]
    assert found.step.at(128) == pytest.approx(2 * found.step.at(64)) == pytest.approx(0.3)
    assert found.least_step(128) == pytest.approx(0.15)
    # A validation of larger batches takes at most as long.
    assert found.check == Line(pytest.approx(CHECK), 0.0)


@pytest.mark.parametrize(
    ("data", "batches"), [(WithPass, BATCHES), (Plain, 320 // 10), (OwnLoader, 320 // 16)]
)
def test_pruning_takes_the_steps_of_its_batches(data, batches):
    found = measure(study(data, batch_sizes=(16,), sparsities=(0.0, 0.5)))
    assert batches * STEP * 0.999 <= found.pruning < MORE * batches * STEP


def test_scores_that_take_no_data_take_no_time():
    assert measure(study(WithPass, sparsities=(0.5,), method="magnitude")).pruning == 0


def test_data_without_an_end_cannot_be_pruned_over():
    with pytest.raises(CannotTime):
        measure(study(Endless, sparsities=(0.5,)))


def test_lines_have_least_relative_errors_and_no_negative_part():
    exact = fit_line([2, 64, 1024], [0.003, 0.034, 0.514])
    assert (exact.a, exact.b) == pytest.approx((0.002, 0.0005))
    assert fit_line([1, 2], [1.0, 4.0]).a == 0  # by itself the line would begin at -2
    assert fit_line([1, 2], [4.0, 1.0]).b == 0
    flat = fit_line([1, 2], [1.0, 3.0])  # a = 0: the b that is least in (b - 1)^2 + (2 b / 3 - 1)^2
    assert flat.b == pytest.approx((1 + 2 / 3) / (1 + 4 / 9))


def test_misfit_is_the_largest_relative_error():
    measured = {2: RunTimes(0.0, 1.0, 0.0), 4: RunTimes(0.0, 2.5, 0.0)}
    found = Timing(measured, 0.0, Line(0.0, 0.5), Line(0, 0))
    assert math.isclose(found.misfit, 0.2)
