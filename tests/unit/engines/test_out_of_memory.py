"""Memory that becomes insufficient at any time changes no result: a stack is halved."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_dps.core.trial import SINGLE, STACKED, Cell, Status, TrialResult
from lit_dps.engines import stack_filler
from lit_dps.engines.memory import StackLimit, is_out_of_memory
from lit_dps.engines.network_run import NetworkRun
from lit_dps.engines.row_tensors import RowConverter
from lit_dps.engines.snapshots import Snapshots
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.optim.stacked_update import StackedUpdate
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.early_validation import HardestFirst
from tests.support.conformance import by_trial
from tests.support.runs import engine, runs, train
from tests.unit.engines.test_eligible import network
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import trials, workload

GOAL = {"error": 0.3, "check_interval": 4, "max_steps": 40, "early_reject": True}
RATES = [0.0005, 0.06, 0.01, 0.03, 0.02]
ASKED = trials(Cell(16, 0.0), Cell(16, 0.9), rates=RATES)
SIZE = 8  # networks of a stack, of 10 trials


class Fault:
    """Makes one method raise OutOfMemoryError at its n-th call.

    Args:
        owner, name: The method.
        at: Numbers of the calls that fail, from 1.
        is_late: Whether the method does its work before it fails.
    """

    def __init__(self, owner: Any, name: str, at: set[int], is_late: bool = False):
        self.owner = owner
        self.name = name
        self.at = at
        self.is_late = is_late
        self.calls = 0

    def install(self, monkeypatch) -> None:
        method = getattr(self.owner, self.name)

        def fails(*args, **kwargs):
            self.calls += 1
            fails_now = self.calls in self.at
            if fails_now and not self.is_late:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            value = method(*args, **kwargs)
            if fails_now:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return value

        monkeypatch.setattr(self.owner, self.name, fails)


def facts(results: list[TrialResult]) -> dict[tuple, tuple]:
    """What results say of each trial: status, steps and curve."""
    found = {}
    for key, result in by_trial(results).items():
        found[key] = result.status, result.steps, result.curve
    return found


def assert_equal(results: list[TrialResult], expected: list[TrialResult]) -> None:
    """Assert that results are equal up to rounding: stacks of other sizes may round differently."""
    ours, theirs = facts(results), facts(expected)
    assert len(results) == len(expected) and ours.keys() == theirs.keys()
    for key, (status, steps, curve) in theirs.items():
        assert ours[key][:2] == (status, steps), key
        for name, values in curve.items():
            assert ours[key][2][name] == pytest.approx(values, rel=1e-4, nan_ok=True), (key, name)


@pytest.fixture(scope="module")
def undisturbed() -> list[TrialResult]:
    return train(ASKED, workload(), GOAL, size=SIZE)


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """The numbers of networks of all stacks that are made."""
    made: list[int] = []
    init = StackedNetworks.__init__

    def noted(self, runs, *args):
        made.append(len(runs))
        init(self, runs, *args)

    monkeypatch.setattr(StackedNetworks, "__init__", noted)
    return made


FAULTS = {
    "gradients": Fault(StackedNetworks, "gradients", {1}),
    "gradients later": Fault(StackedNetworks, "gradients", {14}),
    "half a step": Fault(StackedUpdate, "__call__", {14}, is_late=True),
    "check": Fault(Snapshots, "per_example_error", {1}),
    "losses of a check": Fault(HardestFirst, "__call__", {3}, is_late=True),
    "snapshot": Fault(StackedNetworks, "snapshot", {2}),
}


REPEATED = {"gradients", "check"}  # other tests and faults fail at the same place


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name, marks=[pytest.mark.long] if name in REPEATED else [])
        for name, fault in FAULTS.items()
    ],
)
def test_the_stack_is_halved_and_results_are_equal(monkeypatch, capsys, sizes, undisturbed, fault):
    sizes.clear()
    fault.install(monkeypatch)
    results = train(ASKED, workload(), GOAL, size=SIZE)
    assert fault.calls > max(fault.at)
    assert {result.engine for result in results} == {STACKED}
    assert_equal(results, undisturbed)
    assert sizes[0] == SIZE and max(sizes[1:]) == SIZE // 2
    assert re.findall("out of memory: .*", capsys.readouterr().err) == [
        "out of memory: the size of stacks is now 4 instead of 8"
    ]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(StackedNetworks, "put", {1}),
        pytest.param(Fault(StackedNetworks, "put", {2}, is_late=True), marks=pytest.mark.long),
        pytest.param(Fault(RowConverter, "rows_of", {9}), marks=pytest.mark.long),
        Fault(NetworkRun, "prune_unless_resumed", {9}),  # the first run of an empty row
        Fault(NetworkRun, "prune_unless_resumed", {5}, is_late=True),  # the stack begins with seven
        Fault(stack_filler, "build_trial", {5}),  # the stack begins with four
    ],
    ids=lambda fault: f"{fault.name} {fault.at}",
)
def test_a_run_that_does_not_fit_begins_later(monkeypatch, capsys, undisturbed, fault):
    fault.install(monkeypatch)
    results = train(ASKED, workload(), GOAL, size=SIZE)
    assert fault.calls > max(fault.at)
    assert {result.engine for result in results} == {STACKED}
    assert_equal(results, undisturbed)
    assert capsys.readouterr().err.count("out of memory: ") == 1


def test_a_stack_that_cannot_be_made_smaller_stays_as_it_is(monkeypatch, undisturbed):
    fault = Fault(StackedNetworks, "take", {1})
    fault.install(monkeypatch)
    results = train(ASKED, workload(), GOAL, size=SIZE)
    assert fault.calls
    assert_equal(results, undisturbed)


@pytest.mark.long
def test_later_stacks_of_the_process_are_small(monkeypatch, capsys, sizes, undisturbed):
    made = engine(workload(), GOAL, size=SIZE)
    Fault(StackedNetworks, "gradients", {1, 2}).install(monkeypatch)
    assert_equal(list(made.train(runs(ASKED, GOAL))), undisturbed)
    assert sizes[:3] == [8, 4, 2]
    sizes.clear()
    assert_equal(list(made.train(runs(ASKED, GOAL))), undisturbed)
    assert max(sizes) == 2
    assert capsys.readouterr().err.count("out of memory: ") == 2


@pytest.mark.long
def test_what_does_not_fit_into_the_smallest_stack_trains_alone(monkeypatch, capsys):
    reference = train(ASKED[:4], workload(), GOAL)

    def gradients(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StackedNetworks, "gradients", gradients)
    results = train(ASKED[:4], workload(), GOAL, size=4)
    assert facts(results) == facts(reference)
    assert {result.engine for result in results} == {SINGLE}
    assert "out of memory" in results[0].engine_reason.lower()
    assert len(re.findall("now 1 instead of 2", capsys.readouterr().err)) == 1


@pytest.mark.parametrize("step", [3, 30])
def test_restarted_runs_resume_from_their_checkpoints(monkeypatch, tmp_path, undisturbed, step):
    monkeypatch.setattr("lit_dps.training.checkpoint_files.MIN_SECONDS_WORTH_SAVING", 0.0)
    begun: list[int] = []
    start = NetworkRun.prune_unless_resumed

    def noted(run, *args, **kwargs):
        start(run, *args, **kwargs)
        begun.append(run.steps)

    monkeypatch.setattr(NetworkRun, "prune_unless_resumed", noted)
    Fault(StackedNetworks, "gradients", {step}).install(monkeypatch)
    checkpoints = Checkpoints(tmp_path, "study", minutes=0)  # after each check
    results = train(ASKED, workload(), GOAL, size=SIZE, checkpoints=checkpoints)
    assert_equal(results, undisturbed)
    restarted = begun[SIZE:]
    assert any(restarted) == (step > GOAL["check_interval"])


@pytest.mark.parametrize("at", [{3}, {9}])
def test_a_checkpoint_that_does_not_fit_is_left_out(monkeypatch, tmp_path, undisturbed, at):
    fault = Fault(StackedNetworks, "write_back", at)
    fault.install(monkeypatch)
    checkpoints = Checkpoints(tmp_path, "study", minutes=0)
    results = train(ASKED, workload(), GOAL, size=SIZE, checkpoints=checkpoints)
    assert fault.calls > max(at)
    assert_equal(results, undisturbed)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 6])
def test_running_statistics_are_not_updated_twice(monkeypatch, sizes, step):
    """Batch normalization updates them before the gradients, which may not fit."""
    used = workload(**network("Normalized"))
    asked = trials(Cell(16, 0.0), rates=[0.002, 0.01, 0.02, 0.03])
    expected = train(asked, used, GOAL, size=4)
    sizes.clear()
    fault = Fault(StackedNetworks, "_losses_of_rows", {step}, is_late=True)
    fault.install(monkeypatch)
    results = train(asked, used, GOAL, size=4)
    assert sizes[:2] == [4, 2]
    assert_equal(results, expected)


class FailingOperations(TorchDispatchMode):
    """Raises OutOfMemoryError in some of torch's operations, by their number within stacks."""

    def __init__(self, at: set[int]):
        super().__init__()
        self.at = at
        self.count = 0
        self.is_in_stack = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.is_in_stack:
            self.count += 1
            if self.count in self.at:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))

    def watch(self, monkeypatch) -> None:
        """Count the operations while a stack trains."""
        train_stack = TrialEngine._train_stack

        def watched(loop, *args):
            results = train_stack(loop, *args)
            while True:
                self.is_in_stack = True
                try:
                    result = next(results, None)
                finally:
                    self.is_in_stack = False
                if result is None:
                    return
                yield result

        monkeypatch.setattr(TrialEngine, "_train_stack", watched)


def train_with_failures(monkeypatch, at: set[int], used, **options) -> tuple[list, int]:
    """Return the results of a few trials, and the number of operations within stacks."""
    asked = trials(Cell(16, 0.0), Cell(16, 0.9), rates=RATES[:3])
    goal = {**GOAL, "max_steps": 16}
    operations = FailingOperations(at)
    with monkeypatch.context() as patched, operations:
        operations.watch(patched)
        return train(asked, used, goal, size=3, **options), operations.count


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("module", ["SimpleCNN", "Normalized"])
def test_any_operation_may_fail(monkeypatch, tmp_path, module, seed):
    """A trial alone may fail then, and runs again when the study is resumed. None is wrong."""
    used = workload() if module == "SimpleCNN" else workload(**network(module))
    expected, count = train_with_failures(monkeypatch, set(), used)
    generator = random.Random(seed)
    at = {generator.randrange(1, count) for _ in range(1 + seed % 3)}
    options = {}
    if seed % 2:
        options["checkpoints"] = Checkpoints(tmp_path, "study", minutes=0)
    results, _ = train_with_failures(monkeypatch, at, used, **options)
    failed = {(r.trial.cell, r.trial.point) for r in results if r.status is Status.FAILED}
    assert len(failed) < len(at)
    of_others = [r for r in results if (r.trial.cell, r.trial.point) not in failed]
    theirs = [r for r in expected if (r.trial.cell, r.trial.point) not in failed]
    assert_equal(of_others, theirs)


def test_errors_of_libraries_are_recognized():
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(cublas))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    ("size", "networks", "fitting", "after"),
    [(10**9, 100, 1, 50), (50, 50, 1, 25), (10**9, 3, 1, 2), (10**9, 64, 60, 60), (1, 1, 1, 1)],
)
def test_the_limit_of_a_stack(capsys, size, networks, fitting, after):
    limit = StackLimit(size)
    limit.halve(networks, fitting)
    assert limit.size == after
    printed = capsys.readouterr().err
    before = min(size, networks)
    if after < before:
        assert printed == f"out of memory: the size of stacks is now {after} instead of {before}\n"
    else:
        assert printed == ""
