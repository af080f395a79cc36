"""Steps are timed up to the memory that there is, found safely, and on the ranks that the trainer
asks for."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lit_dps.advice.step_memory import Memory, is_full
from lit_dps.advice.step_probe import FULL, SPENT, fit_check_seconds, time_steps
from lit_dps.advice.step_time import fit_step_time
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.search_space import Range
from lit_dps.study.probe_run import RunTimes
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.setups import setup_of
from tests.support.texts import numbers_in
from tests.support.tiny import Plain, points

GIB = 2.0**30


class Net(Plain):
    """Has no room for more than `room` examples at once."""

    def __init__(self, lr: float = 0.1, room: int = 10**9):
        super().__init__()
        self.room = room

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > self.room:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB.\nMore of it."
            )
        return super().training_step(batch, batch_idx)


class NeedsTwo(Net):
    """Fails at a single example, as batch norm does."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) < 2:
            raise ValueError("Expected more than 1 value per channel")
        return super().training_step(batch, batch_idx)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4, examples: int = 64):
        super().__init__()
        self.batch_size, self.examples = batch_size, examples

    def train_dataloader(self):
        return DataLoader(points(self.examples), self.batch_size, drop_last=True)

    def val_dataloader(self):
        return DataLoader(points(4), 4)


def setup(devices: int = 1, room: int = 10**9, examples: int = 64) -> StudySetup:
    study = StudyConfig(
        name="steps",
        batch_sizes=[4],
        sparsities=[0.0],
        trials=1,
        space={"model.lr": Range(0.01, 0.1, "log")},
    )
    workload = Workload(
        {"class_path": f"{__name__}.Net", "init_args": {"room": room}},
        {"class_path": f"{__name__}.Data", "init_args": {"examples": examples}},
        {"accelerator": "cpu", "devices": devices},
        "data.batch_size",
    )
    goal = {"error": 0.01, "check_interval": 1, "max_steps": 4}
    return setup_of(study, StorageConfig(), workload, goal, {}, {"interval": None})


class Estimated(Memory):
    """A stand-in: each example takes a GiB, beside 3 for the network; so much is free."""

    def __init__(self, free: float):
        super().__init__()
        self._free = free * GIB

    def end(self, size):
        self.sizes.append((size, (3 + size) * GIB))

    def free(self):
        return self._free


def test_a_device_without_room_ends_the_ladder_and_nothing_is_lost():
    found = time_steps(setup(room=11), 60, lambda line: None)
    assert found.largest == 8 and found.is_memory_full and found.reason == FULL
    assert [row.local_batch for row in found.timed][0] == 1 and 8 in [
        row.local_batch for row in found.timed
    ]
    model = fit_step_time(found.timed, largest=found.largest)
    assert model.at(32).value > model.at(8).value * 3  # accumulated


def test_a_smallest_size_that_fails_does_not_end_the_training_split():
    given = setup(examples=10**6)
    model = {"class_path": f"{__name__}.NeedsTwo"}
    workload = dataclasses.replace(given.workload, model=model)
    found = time_steps(dataclasses.replace(given, workload=workload), 0.3, lambda line: None)
    assert found.timed[0].local_batch == 2
    assert found.reason == SPENT and not found.split_is_used_up


def test_no_room_for_the_smallest_batch_is_one_line():
    with pytest.raises(UserError) as refused:
        time_steps(setup(room=0), 60, lambda line: None)
    assert FULL in str(refused.value) and "\n" not in str(refused.value)


def test_on_a_cpu_no_step_is_tried_that_is_estimated_to_take_more_than_is_free():
    found = time_steps(setup(), 60, lambda line: None, Estimated(free=9))
    assert found.largest == 8 and found.is_memory_full  # 16 would take 8 GiB more, above 80 % of 9
    assert found.reason.startswith(FULL) and numbers_in(found.reason)[:1] == [16]
    assert "0.80 GiB" in found.reason
    roomy = time_steps(setup(), 60, lambda line: None, Estimated(free=100))
    assert roomy.largest == 64 and roomy.split_is_used_up


def test_other_programs_favour_no_batch_size(monkeypatch):
    """A step takes 1 ms an example; the process also waits for a CPU, at some sizes longer."""
    slowdowns = {1: 2.0, 2: 9.0, 4: 2.0, 8: 3.0, 16: 1.0, 32: 2.0, 64: 2.0}
    asked = []

    def run(setup, trial, steps, on_all_ranks=False, most_seconds=None):
        size = trial.cell.batch_size
        asked.append(most_seconds)
        if size > 64:
            raise MemoryError
        quiet = 1e-3 * size
        step = slowdowns[size] * quiet
        if most_seconds is not None:
            return RunTimes(0.0, step, math.nan, step - quiet)
        return RunTimes(0.0, step, 0.3, step - quiet, 0.2)

    monkeypatch.setattr("lit_dps.advice.step_probe.timed_run", run)
    found = time_steps(setup(), 60, lambda line: None, Estimated(free=1e6), warm=True)
    # All sizes get the slowdown of the median size, so their ratios are those of a quiet machine.
    assert [row.seconds for row in found.timed] == pytest.approx([2e-3 * 2**i for i in range(7)])
    assert found.check == pytest.approx(2 * 0.1) and found.check_by_batch == 0
    assert asked == [None] * 2 + [1.0] * 6, "the second validation takes as long as the first"


@pytest.mark.parametrize(("seconds", "timed"), [(60, 7), (0.1, 1)])
def test_a_validation_whose_batch_size_follows_the_training_is_timed_at_each_size(
    monkeypatch, seconds, timed
):
    """A validation takes 10 ms, and 5 ms for each of 64 / B batches."""
    asked = []

    def run(setup, trial, steps, on_all_ranks=False, most_seconds=None):
        size = trial.cell.batch_size
        asked.append(most_seconds)
        if size > 64:
            raise MemoryError
        check = math.nan
        if most_seconds is None:
            check = 0.01 + 0.005 * 64 / size
        return RunTimes(0.0, 1e-3 * size, check)

    monkeypatch.setattr("lit_dps.advice.step_probe.timed_run", run)
    found = time_steps(setup(), seconds, lambda line: None, Estimated(free=1e6), warm=True)
    assert asked[:7].count(None) == timed
    if timed > 1:
        for size in (1, 8, 64):
            assert found.check_at(size) == pytest.approx(0.01 + 0.005 * 64 / size)
    else:
        assert found.check_at(8) == found.check_at(1) == pytest.approx(0.33)


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([(16, 1.05), (64, 1.0)], (1.0, 0.0)),
        ([(16, 1.0), (64, 1.09)], (1.0, 0.0)),
        ([(16, 1.6), (64, 1.0)], (0.8, 12.8)),
    ],
)
def test_validations_of_nearly_equal_time_do_not_depend_on_the_batch_size(checks, expected):
    assert fit_check_seconds(checks) == pytest.approx(expected)


class Schedule(Net):
    """Its schedule wants more steps than its warm-up of 3; at B = 8 it is broken."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        length = self.trainer.max_steps - 3
        assert self.trainer.estimated_stepping_batches == self.trainer.max_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class LongWarmUp(Net):
    """Refuses a budget that is shorter than its warm-up."""

    def configure_optimizers(self):
        if self.trainer.max_steps < 1000:
            raise ValueError("1000 steps of warm-up")
        return torch.optim.SGD(self.parameters(), 0.1)


class Broken(Net):
    def training_step(self, batch, batch_idx):
        1 / 0  # noqa: B018


class BrokenAtEight(Net):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) == 8:
            1 / 0  # noqa: B018
        return super().training_step(batch, batch_idx)


def with_module(name: str, **goal) -> StudySetup:
    given = setup()
    workload = dataclasses.replace(given.workload, model={"class_path": f"{__name__}.{name}"})
    return dataclasses.replace(
        given, workload=workload, goal=dataclasses.replace(given.goal, **goal)
    )


def test_steps_are_timed_under_the_budget_of_the_study():
    """With budgets of 3 steps, as many as the warm-up, the schedule would divide by 0."""
    seen = []
    found = time_steps(with_module("Schedule", max_steps=1000), 60, seen.append)
    assert found.largest == 64


class CheckedData(Data):
    """Refuses batches above its split, as the data modules of the package do."""

    def __init__(self, batch_size: int = 4):
        if batch_size > 16:
            raise ConfigError(
                "data.batch_size", batch_size, "1 to 16, the size of the training split"
            )
        super().__init__(batch_size)


def test_data_that_refuse_batches_above_their_split_end_the_ladder():
    given = setup()
    data = {"class_path": f"{__name__}.CheckedData"}
    found = time_steps(
        dataclasses.replace(given, workload=dataclasses.replace(given.workload, data=data)),
        60,
        lambda line: None,
    )
    assert found.largest == 16 and found.split_is_used_up
    assert found.reason.startswith("data.batch_size ") and numbers_in(found.reason) == [32, 1, 16]


def test_an_error_that_is_no_lack_of_memory_ends_the_command_with_its_cause():
    with refuses(None, 8, error=UserError) as refused:
        time_steps(with_module("BrokenAtEight"), 60, lambda line: None)
    assert "ZeroDivisionError" in str(refused.value)


PEAKS = """
import json, runpy, sys
memory = runpy.run_path(sys.argv[1])["Memory"]()
for size in (1, 2):
    memory.begin()
    held = b"x" * (size * 64 * 2**20)  # 64 MiB an example
    memory.end(size)
    del held
print(json.dumps([memory.sizes, memory.missing(3), memory.missing(10**9)]))
"""


def test_a_process_tells_what_it_takes():
    """In a process of its own: some systems do not let the peak of one that did more begin anew."""
    file = inspect.getfile(Memory)
    done = subprocess.run(
        [sys.executable, "-c", PEAKS, file], capture_output=True, text=True, check=True
    )
    ((_, low), (_, high)), little, much = json.loads(done.stdout)
    assert 0.7 * 64 < (high - low) / 2**20 < 1.5 * 64
    assert little < 0 < much


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                "4 bytes"
            ),
            True,
        ),
        (UserError("cannot time a trial: MemoryError"), True),
        (UserError("cannot time a trial: _ArrayMemoryError: Unable to allocate 8 GiB"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_want_of_memory_is_told_from_other_errors(error, full):
    assert is_full(error) is full


@pytest.mark.long
@pytest.mark.slow
def test_several_ranks_are_timed_and_the_exchange_is_fitted():
    said = []
    found = time_steps(setup(devices=2), 60, said.append)
    small, *others = [row.local_batch for row in found.timed if row.devices == 2]
    assert small == 1 and len(others) <= 1  # the largest one where there is time
    for local in others:
        # Two share the split, which ends what one can take.
        assert 2 * local <= found.largest or found.reason == SPENT
    assert sum("2 devices" in line for line in said) == 1 + len(others)
    local = max([small, *others])
    model = fit_step_time(found.timed)
    alpha, _ = model.exchange.constants[1]
    assert (
        alpha > 0
        and model.at(2 * local, 2).source == "fitted"
        and model.at(4 * local, 4).source == "extrapolated"
    )
