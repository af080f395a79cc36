"""Each worker sees its part of the visible GPUs, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ddp
from lit_dps.parallel import fork_server as processes
from lit_dps.parallel.gpus import (
    VARIABLE,
    gpus_of_worker,
    gpus_of_workers,
    visible_gpus,
    worker_environment,
)
from lit_dps.study.workers import _WorkerPool
from tests.support.texts import numbers_in

UUIDS = ["GPU-8932f937", "GPU-1f22a253"]
MIG = ["MIG-c6d4f1ef", "MIG-cba663e8", "MIG-0a1b2c3d"]


@pytest.fixture
def machine(monkeypatch):
    """Return a function that makes up a number of GPUs and a value of CUDA_VISIBLE_DEVICES."""

    def make_up(count: int, value: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        if value is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, value)

    return make_up


@pytest.mark.parametrize(
    ("count", "value", "names"),
    [
        (3, None, ["0", "1", "2"]),
        (2, "4,6", ["4", "6"]),  # such as Slurm's part of a node
        (2, " 1 , 0 ", ["1", "0"]),
        (2, ",".join(UUIDS), UUIDS),
        (1, "3,-1,2", ["3"]),  # CUDA stops at the first name that it does not know
        (0, "", []),
        (0, None, []),
        (1, ",".join(MIG), MIG),  # CUDA counts one MIG instance
    ],
)
def test_visible_gpus(machine, count, value, names):
    machine(count, value)
    assert visible_gpus() == names


@pytest.mark.parametrize(
    ("ranks", "gpus", "by_worker"),
    [
        (1, ["0", "1"], [["0"], ["1"], ["0"]]),
        (1, ["5"], [["5"], ["5"]]),
        (2, ["0", "1", "2", "3"], [["0", "1"], ["2", "3"], ["0", "1"]]),
        (2, ["0", "1", "2"], [["0", "1"], ["0", "1"]]),  # no group of two remains
    ],
)
def test_gpus_are_divided_among_workers(ranks, gpus, by_worker):
    assert [gpus_of_worker(n, ranks, gpus) for n in range(len(by_worker))] == by_worker


@pytest.mark.parametrize(
    ("trainer", "count", "value", "seen", "used"),
    [
        ({}, 2, None, ["0", "1", "0"], 2),
        ({"accelerator": "gpu", "devices": 1}, 4, None, ["0", "1", "2"], 3),
        ({}, 2, ",".join(UUIDS), [*UUIDS, UUIDS[0]], 2),
        ({}, 1, ",".join(MIG), MIG, 3),
        ({"devices": 2, "strategy": "ddp"}, 4, None, ["0,1", "2,3", "0,1"], 4),
        ({}, 1, None, [None] * 3, 1),  # there is nothing to divide
        ({"accelerator": "cpu"}, 2, None, [None] * 3, 0),
        ({}, 0, None, [None] * 3, 0),
        ({"devices": [1]}, 2, None, [None] * 3, 1),  # the user has chosen a GPU
    ],
)
def test_variables_of_three_workers(machine, trainer, count, value, seen, used):
    machine(count, value)
    ranks = ddp.ranks_asked(trainer)
    variables = [worker_environment(n, ranks, trainer).get(VARIABLE) for n in range(3)]
    assert variables == seen
    assert gpus_of_workers(3, ranks, trainer) == used


def test_a_study_starts_each_worker_with_its_gpu(machine, monkeypatch):
    machine(2)
    started = []

    def start(target, name, args, environment):
        started.append((name, environment))

    monkeypatch.setattr(processes, "start", start)
    setup = SimpleNamespace(ranks=1, workload=SimpleNamespace(trainer={}), config=lambda: {})
    pool = _WorkerPool(setup, None)
    for number in range(2):
        pool.start_worker(number)
    assert started == [("worker 0", {VARIABLE: "0"}), ("worker 1", {VARIABLE: "1"})]


def test_more_ranks_than_gpus_are_refused(machine):
    machine(2)
    with pytest.raises(ConfigError) as refused:
        ddp.ranks_asked({"devices": 3, "strategy": "ddp"})
    assert refused.value.key == "trainer.devices" and refused.value.value == 3
    assert numbers_in(refused.value.allowed)[:1] == [2]


def send_visible(sent) -> None:
    """Send what a worker sees before it does anything."""
    sent.send((os.environ.get(VARIABLE), torch.cuda.is_initialized()))


@pytest.mark.long
@pytest.mark.parametrize(
    "method", [processes.METHOD, pytest.param("spawn", marks=pytest.mark.long)]
)
def test_a_worker_sees_its_gpu_before_cuda_is_initialized(machine, monkeypatch, method):
    machine(2, "GPU-a,GPU-b")
    monkeypatch.setattr(processes, "METHOD", method)
    for number, name in enumerate(["GPU-a", "GPU-b"]):
        received, sent = processes.context().Pipe(duplex=False)
        environment = worker_environment(number, 1, {})
        process = processes.start(send_visible, f"worker {number}", (sent,), environment)
        sent.close()
        try:
            assert received.poll(100), "the process hangs"
            assert received.recv() == (name, False)
        finally:
            process.join(10)
            process.kill()
    assert os.environ[VARIABLE] == "GPU-a,GPU-b", "the parent sees all of them"


def test_imports_of_a_worker_ask_for_no_gpu():
    """The fork server imports these modules once for all workers."""
    code = """
import torch
asked = []
for name in ("device_count", "is_available", "init", "_lazy_init"):
    setattr(torch.cuda, name, lambda *args, name=name: asked.append(name) or 0)
import lit_dps.study.workers, lit_dps.module, lit_dps.data
assert not asked, asked
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
