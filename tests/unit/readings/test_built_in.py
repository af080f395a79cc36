"""The readings of the package by name: their values in each loop, resumed, and refused."""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from lit_dps.core.process_memory import reset_peak
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.data import Digits
from lit_dps.readings import Moment, Reading, ReadingsCallback
from lit_dps.readings.lipschitz import gradient_moments
from lit_dps.readings.registry import ReadingSpec, resolve_readings
from lit_dps.testing.toy import ToyRun
from lit_dps.training import GoalErrorCallback
from tests.support.errors import refuses
from tests.support.runs import train, train_one
from tests.support.saved_study import Study as SavedStudy
from tests.support.tiny import Plain, fit
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.readings.test_readings import GOAL, TINY, TRIAL, WORKLOAD

RATE = 0.1
NOISE = {"class_path": "gradient_noise", "init_args": {"examples": 64, "part": 16}}
NAMES = ["gradient_norm", NOISE, "step_seconds", "peak_memory", "examples"]
PLAIN_SGD = {"model.learning_rate": RATE, "model.momentum": 0.0}


class Moved(Reading):
    """The distance that the last step before a check moves the weights."""

    name = "moved"

    def before(self, moment):
        self.weights = _flat(moment.module)

    def read(self, moment):
        return {"moved": float((_flat(moment.module) - self.weights).norm())}


def _flat(module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).double()


def workload(**trainer):
    return dataclasses.replace(WORKLOAD, trainer={**WORKLOAD.trainer, **trainer})


def norms_of(result) -> list[float]:
    return result.readings["gradient_norm"]["gradient_norm"]


@pytest.mark.parametrize("how", [{}, {"lean": False}, {"size": 2}])
def test_each_loop_reads_them(how):
    names = ["gradient_norm", NOISE, "examples"] if "size" in how else NAMES
    trials = [Trial(Cell(16, 0.5), point, PLAIN_SGD) for point in range(2)]
    readings = [*resolve_readings(names), ReadingSpec(Moved, "Moved")]
    for result in train(trials, WORKLOAD, GOAL, readings=readings, **how):
        assert result.status is Status.INCOMPLETE
        assert result.readings["gradient_norm"]["step"] == [4, 8, 12, 16]
        # A plain step moves the weights by the rate times the gradient.
        moved = [distance / RATE for distance in result.readings["moved"]["moved"]]
        assert norms_of(result) == pytest.approx(moved, rel=1e-4)
        assert min(moved) > 0.01
        assert result.readings["examples"]["examples_seen"] == [64, 128, 192, 256]
        if "size" in how:
            assert result.engine == "stacked"
            continue
        # A process with torch needs more than 100 MiB.
        assert 100 < result.end_readings["peak_memory"] < 10_000
        seconds = result.readings["step_seconds"]["step_seconds"]
        assert seconds[0] == pytest.approx(result.curve["seconds"][0] / 4)
        assert result.curve["seconds"][-1] == pytest.approx(result.timed["training"])


def noise(part: int) -> tuple[ToyRun, dict[str, float]]:
    """The noise of a pruned network on 16 examples, in parts."""
    entry = {"class_path": "gradient_noise", "init_args": {"examples": 16, "part": part}}
    run = ToyRun(0.5)
    (spec,) = resolve_readings([entry])
    with ExitStack() as stack:
        return run, dict(spec.build().read(Moment("gradient_noise", 1, run, stack)))


@pytest.mark.parametrize("part", [1, 4, 7])
def test_the_noise_scale_is_of_the_gradients_of_the_parts(part):
    run, values = noise(part)
    gradients, sizes = [], []
    for batch, size in run.training_pass(part, 16).batches():
        named = dict(run.module.named_parameters())
        found = torch.autograd.grad(run.module.loss(batch), list(named.values()))
        masked = zip(named, found, strict=True)
        gradients.append(torch.cat([(g * run.masks.get(n, 1)).flatten() for n, g in masked]))
        sizes.append(size)
    rows = torch.stack(gradients).double()
    b = torch.tensor(sizes).double()
    whole = (b @ rows / 16).square().sum()
    squared, variance = values["noise_squared_gradient"], values["noise_variance"]
    # E |g_b|^2 = |G|^2 + tr(Sigma) / b
    assert squared + variance / 16 == pytest.approx(float(whole), rel=1e-4)
    parts = rows.square().sum(1).mean()
    assert squared + variance * float((1 / b).mean()) == pytest.approx(float(parts), rel=1e-4)
    expected = variance / squared if squared > 0 else math.nan
    assert values["noise_scale"] == pytest.approx(expected, nan_ok=True)


def test_the_noise_of_single_examples_is_the_moment_of_the_theory():
    run, values = noise(1)
    ((batch, size),) = run.training_pass(16, 16).batches()

    def loss(parameters, example):
        x, y = example
        return F.cross_entropy(functional_call(run.module.network, parameters, x[None]), y[None])

    network = run.module.network
    parameters = {name: weight.detach() for name, weight in network.named_parameters()}
    masks = {name.removeprefix("network."): mask for name, mask in run.masks.items()}
    moments = gradient_moments(loss, parameters, [batch], masks)
    assert values["noise_variance"] == pytest.approx(moments.variance * size / (size - 1), rel=1e-4)


@pytest.mark.parametrize("name", ["peak_memory", "step_seconds"])
def test_a_trial_whose_process_is_measured_trains_alone(name):
    trials = [dataclasses.replace(TRIAL, point=point) for point in range(2)]
    goal = {**GOAL, "max_steps": 4}
    for result in train(trials, WORKLOAD, goal, size=2, readings=resolve_readings([name])):
        assert result.engine == "single" and name in result.engine_reason


def test_the_gradient_is_of_the_whole_step_before_clipping():
    goal = {**GOAL, "check_interval": 1, "max_steps": 2}
    readings = resolve_readings(["gradient_norm"])
    options = {"readings": readings, "lean": False}
    plain = norms_of(train_one(TRIAL, WORKLOAD, goal, **options))
    clipped = norms_of(train_one(TRIAL, workload(gradient_clip_val=1e-3), goal, **options))
    assert clipped[0] == plain[0] > 1e-2
    assert clipped[1] != plain[1]
    parts = norms_of(train_one(TRIAL, workload(accumulate_grad_batches=2), goal, **options))
    assert parts == pytest.approx(plain, rel=1e-4)


def test_step_seconds_are_the_median_of_the_intervals():
    (spec,) = resolve_readings(["step_seconds"])
    curve = {"step": [2, 4, 6], "seconds": [8.0, 10.0, 14.0]}
    assert spec.build().read_curve(curve) == {"step_seconds": 2.0}


@pytest.mark.parametrize("lean", [True, False])
def test_a_resumed_trial_equals_an_unbroken_one(tmp_path, lean):
    options = {"readings": resolve_readings(NAMES), "lean": lean}
    study = SavedStudy(tmp_path, model=TINY, goal={**GOAL, "max_steps": 24}, **options)
    unbroken, _ = study.run(TRIAL, saved=False)
    assert study.run(TRIAL, interrupt=3)[0] is None
    resumed, steps = study.run(TRIAL)
    assert steps.taken == 24 - 12
    for name in ("examples", "gradient_norm", "gradient_noise"):
        assert resumed.readings[name] == unbroken.readings[name]
    assert resumed.readings["step_seconds"]["step"] == unbroken.curve["step"]
    assert resumed.curve["seconds"] == sorted(resumed.curve["seconds"])
    assert min(resumed.readings["step_seconds"]["step_seconds"]) > 0


def test_the_peak_of_a_resumed_trial_includes_the_time_before(monkeypatch):
    peaks = iter([3 * 2**20, 2 * 2**20])
    monkeypatch.setattr("lit_dps.readings.spent.peak_bytes", lambda: next(peaks))
    (spec,) = resolve_readings(["peak_memory"])
    resumed = spec.build()
    resumed.load_state_dict(spec.build().state_dict())
    assert resumed.read(None) == {"peak_memory": 3.0}


@pytest.mark.parametrize(("can_reset", "flags"), [(True, {}), (False, {"peak_of_process": 1})])
def test_a_peak_that_includes_earlier_trials_is_flagged(tmp_path, monkeypatch, can_reset, flags):
    """A container may have a read-only /proc."""
    folder = tmp_path if can_reset else tmp_path / "missing"
    monkeypatch.setattr("lit_dps.core.process_memory._PROCESS", folder)
    assert reset_peak() is can_reset
    (spec,) = resolve_readings(["peak_memory"])
    reading = spec.build()
    reading.start(SimpleNamespace(device=torch.device("cpu")))
    assert reading.flags == flags


@pytest.mark.parametrize(
    ("name", "arguments"), [("part", {"part": 0}), ("examples", {"examples": 9})]
)
def test_noise_needs_two_parts(name, arguments):
    with refuses(f"study.readings.gradient_noise.{name}", arguments[name]):
        resolve_readings([{"class_path": "gradient_noise", "init_args": arguments}])


def test_on_cuda_the_peak_is_of_the_device_that_the_process_uses(monkeypatch):
    peaks, resets = [0, 5 * 2**20], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(peaks))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    (spec,) = resolve_readings(["peak_memory"])
    reading = spec.build()
    reading.start(SimpleNamespace(device=torch.device("cuda", 1)))
    assert resets == [0, 1]
    assert reading.read(None) == {"peak_memory": 5.0}


def test_a_name_and_a_class_path_are_one_reading():
    by_path = resolve_readings(["lit_dps.readings.spent.Examples"])
    assert by_path[0].identity == resolve_readings(["examples"])[0].identity
    with refuses("study.readings", "examples"):
        resolve_readings(["examples", *by_path])


class TwoSteps(Plain):
    """Steps its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_has_no_gradient_norm():
    goal = GoalErrorCallback(error=0.1, check_interval=2, max_steps=4)
    callbacks = [goal, ReadingsCallback(["gradient_norm"])]
    with refuses("study.readings", "gradient_norm"):
        fit(TwoSteps(), datamodule=Digits(), callbacks=callbacks)
