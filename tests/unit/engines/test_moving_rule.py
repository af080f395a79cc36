"""Somebody else's update rule that moves weights whose gradient is zero: pruned ones stay zero in
every engine."""

from __future__ import annotations

import pytest
import torch

from lit_dps.core.trial import Cell
from lit_dps.engines.single_network import SingleSnapshot
from lit_dps.engines.snapshots import Snapshots
from lit_dps.optim import RULES, Rule
from lit_dps.training import goal_callback as goal_error
from tests.support.runs import train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import GOAL, trials, workload


class Noisy(torch.optim.SGD):
    """Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.add_(0.01 * torch.randn_like(p))


def noisy(weights, gradients, state, rate, given, step):
    weights.sub_(rate * gradients).add_(0.01 * torch.randn_like(weights))


NOISY = Rule(
    name="noisy",
    hyperparameters=(),
    state=(),
    make=lambda parameters, rate, given: Noisy(parameters, lr=rate),
    is_of=lambda optimizer: type(optimizer) is Noisy,
    hyperparameters_of=lambda group: (),
    has_step_counter=False,
    update_=noisy,
)


class Shrinking(torch.optim.SGD):
    """Also moves weights whose gradient is zero."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.mul_(0.999)


def shrinking(weights, gradients, state, rate, given, step):
    weights.sub_(rate * gradients).mul_(0.999)


SHRINKING = Rule(
    name="shrinking",
    hyperparameters=(),
    state=(),
    make=lambda parameters, rate, given: Shrinking(parameters, lr=rate),
    is_of=lambda optimizer: type(optimizer) is Shrinking,
    hyperparameters_of=lambda group: (),
    has_step_counter=False,
    update_=shrinking,
)


@pytest.mark.parametrize(("delay", "stacked"), [(0, True), (2, False)])
def test_with_late_gradients_it_trains_alone(monkeypatch, delay, stacked):
    name = f"{__name__}.SHRINKING"
    monkeypatch.setitem(RULES, name, SHRINKING)
    asked = trials(Cell(32, 0.0, (("optim.delay", delay),)), rates=[0.01, 0.02])
    results = train(asked, workload(optimizer=name), {**GOAL, "max_steps": 8}, size=2)
    assert [result.is_stacked for result in results] == [stacked, stacked]


@pytest.mark.parametrize(
    "name", [f"{__name__}.NOISY", "lion", "muon", "soap", "schedule_free_adamw"]
)
@pytest.mark.parametrize(
    "options", [{}, {"size": 2}, {"lean": False}], ids=["one", "stack", "Lightning"]
)
def test_pruned_weights_stay_zero(monkeypatch, options, name):
    zeros = []
    monkeypatch.setitem(RULES, f"{__name__}.NOISY", NOISY)

    def share(weights) -> None:
        zeros.append((torch.cat([w.flatten() for w in weights]) == 0).float().mean().item())

    def of_module(module):
        share(module.parameters())
        return True

    monkeypatch.setattr(SingleSnapshot, "are_finite", lambda one: [of_module(one._run.module)])
    monkeypatch.setattr(
        Snapshots,
        "are_finite",
        lambda stack: [share([row]) is None for row in stack.tensors.weights],
    )
    monkeypatch.setattr(goal_error, "weights_finite", of_module)
    asked = trials(Cell(32, 0.9), rates=[0.01, 0.02])
    train(asked, workload(optimizer=name), {**GOAL, "max_steps": 8}, **options)
    assert len(zeros) == 4 and zeros == pytest.approx([0.9] * 4, abs=1e-3)
