"""Stale gradients: the update by hand, alike in all engines, taken up again, and what is
refused."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_dps.core.trial import Cell, Trial
from lit_dps.optim import RULES
from lit_dps.optim.delay import delay_gradients
from lit_dps.optim.rule import at_gradient_point
from lit_dps.training import DelayCallback
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.runs import train, train_one
from tests.support.scaled_loss import ScaledLoss
from tests.support.tiny import Plain, fit, loader
from tests.unit.pruning.test_pruners_engines import MODEL

DATA = {"class_path": "lit_dps.data.Digits", "init_args": {}}
GOAL = {"error": 0.02, "check_interval": 8, "max_steps": 24}
HYPERPARAMETERS = {
    "momentum": 0.9,
    "beta1": 0.9,
    "beta2": 0.99,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
    "adamw_ratio": 0.5,
    "refresh_steps": 2,
}
CURVATURE = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)


def workload(rule: str, **arguments) -> Workload:
    init = {**MODEL["init_args"], "optimizer": rule, **arguments}
    return Workload({**MODEL, "init_args": init}, DATA, {"accelerator": "cpu"})


def path(rule: str, delay: int, steps: int = 12, rate: float = 0.05) -> list[torch.Tensor]:
    """The weights on a quadratic, x' H x / 2, after each step."""
    x = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer, found = RULES[rule].make([x], rate, HYPERPARAMETERS), []
    for _ in range(steps):
        x.grad = CURVATURE @ x.detach()
        delay_gradients(optimizer, delay)
        optimizer.step()
        found.append(x.detach().clone())
    return found


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_sgd_takes_the_gradient_of_so_many_steps_ago(delay):
    x = [torch.tensor([1.0, -2.0], dtype=torch.float64)]
    for t in range(12):
        x.append(x[t] - 0.05 * CURVATURE @ x[t - delay] if t >= delay else x[t])
    torch.testing.assert_close(path("sgd", delay), x[1:], rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_the_server_keeps_its_own_state_and_the_queue_comes_first(rule):
    """On a constant gradient a delay is nothing but a late start, of momentum and moments too."""
    found = {}
    for delay in (0, 3):
        x = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        optimizer, found[delay] = RULES[rule].make([x], 0.05, HYPERPARAMETERS), [x.detach().clone()]
        for _ in range(12):
            with at_gradient_point(optimizer):
                x.grad = torch.tensor([0.5, -1.0], dtype=torch.float64)
            delay_gradients(optimizer, delay)
            optimizer.step()
            found[delay].append(x.detach().clone())
    assert all(torch.equal(x, found[3][0]) for x in found[3][:4])
    assert all(map(torch.equal, found[3][3:], found[0]))


def test_the_largest_stable_rate_falls_with_the_delay():
    """Below 2 sin(pi / (2 (2 tau + 1))) over the curvature it converges, above it does not."""
    for delay in (0, 1, 2, 4, 8):
        bound = 2 * float(torch.sin(torch.tensor(torch.pi / (2 * (2 * delay + 1)))))
        ends = []
        for share in (0.97, 1.03):
            x = nn.Parameter(torch.ones(1, dtype=torch.float64))
            optimizer = torch.optim.SGD([x], lr=share * bound)
            for _ in range(4000):
                x.grad = x.detach().clone()
                delay_gradients(optimizer, delay)
                optimizer.step()
            ends.append(abs(float(x.detach())))
        assert ends[0] < 1e-3 < 1e3 < ends[1], delay


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_the_fastest_rate_and_its_contraction_are_those_of_the_double_root(delay):
    """Of z^(tau + 1) - z^tau + rate h: at rate h = tau^tau / (tau + 1)^(tau + 1) the roots meet at
    tau / (tau + 1)."""
    best, ends = delay**delay / (delay + 1) ** (delay + 1), {}
    for share in (0.9, 1.0, 1.1):
        x, found = nn.Parameter(torch.ones(1, dtype=torch.float64)), []
        optimizer = torch.optim.SGD([x], lr=share * best)
        for _ in range(900):
            x.grad = x.detach().clone()
            delay_gradients(optimizer, delay)
            optimizer.step()
            found.append(abs(float(x.detach())))
        ends[share] = max(found[-20:])
        if share == 1:
            assert (found[899] / found[839]) ** (1 / 60) == pytest.approx(
                delay / (delay + 1), rel=2e-3
            )
    assert ends[1.0] < 0.1 * min(ends[0.9], ends[1.1])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sparsity", [0.0, 0.8])
def test_both_engines_train_the_same_to_the_bit(rule, sparsity):
    rate = 0.01 if rule.startswith("adam") else 0.1
    trial = Trial(Cell(16, sparsity, (("optim.delay", 3),)), 1, {"model.learning_rate": rate})
    used = workload(rule, **({"weight_decay": 0.1} if rule.startswith("adam") else {}))
    ours, theirs = (train_one(trial, used, GOAL, lean=lean) for lean in (True, False))
    assert dataclasses.replace(ours, seconds=0.0) == dataclasses.replace(theirs, seconds=0.0)
    prompt = train_one(Trial(Cell(16, sparsity), 1, trial.params), used, GOAL)
    assert ours.curve["train_loss"] != prompt.curve["train_loss"]


def test_a_delay_of_nothing_is_the_usual_update_to_the_bit():
    trial = Trial(Cell(16, 0.8), 1, {"model.learning_rate": 0.1})
    delayed = Trial(Cell(16, 0.8, (("optim.delay", 0),)), 1, trial.params)
    for lean in (True, False):
        usual, none = (
            train_one(t, workload("momentum"), GOAL, lean=lean) for t in (trial, delayed)
        )
        assert none.curve == usual.curve


@pytest.mark.parametrize(
    ("rule", "schedule"), [("momentum", "constant"), ("nesterov", "linear"), ("adamw", "linear")]
)
def test_stacked_trials_train_as_single_ones(rule, schedule):
    rates = (0.002, 0.01, 0.03) if rule == "adamw" else (0.02, 0.1, 0.2)
    trials = [
        Trial(Cell(16, s, (("optim.delay", 3),)), 1, {"model.learning_rate": r})
        for r in rates
        for s in (0.0, 0.8)
    ]
    used = workload(rule, schedule=schedule, decay_steps=40, weight_decay=0.1)
    stacked = train(trials, used, GOAL, size=4)  # later ones begin in rows of earlier ones
    assert len(stacked) == len(trials) and all("stacked" in result.flags for result in stacked)
    for ours in stacked:
        alone = train_one(ours.trial, used, GOAL)
        assert ours.curve["train_loss"] == pytest.approx(alone.curve["train_loss"], rel=2e-3), (
            ours.trial
        )


class Linear(LightningModule):
    def __init__(self, optimizer=torch.optim.SGD, manual=False):
        super().__init__()
        self.layer, self.optimizer, self.automatic_optimization = (
            nn.Linear(4, 3),
            optimizer,
            not manual,
        )

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.1)


def test_a_fit_that_is_taken_up_again_is_the_same(tmp_path):
    torch.manual_seed(0)
    start = Linear()
    whole, first, second = (copy.deepcopy(start) for _ in range(3))
    fit(
        whole, loader(4), callbacks=[DelayCallback(3)], max_steps=10
    )  # one batch: Lightning begins an epoch anew
    trainer = fit(first, loader(4), callbacks=[DelayCallback(3)], max_steps=5)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(
        second,
        loader(4),
        callbacks=[DelayCallback(3)],
        max_steps=10,
        ckpt_path=tmp_path / "half.ckpt",
    )
    assert torch.equal(second.layer.weight, whole.layer.weight)
    assert not torch.equal(start.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("delay", [-1, 1.5, True, "2"])
def test_what_is_no_delay_is_refused(delay):
    with refuses("optim.delay", delay):
        DelayCallback(delay)


@pytest.mark.parametrize("module", [Linear(torch.optim.LBFGS), Linear(manual=True)])
def test_what_cannot_be_delayed_is_refused(module):
    with refuses("optim.delay", 2):
        fit(module, loader(), callbacks=[DelayCallback(2)], max_steps=2)


def test_a_scaled_loss_is_refused():
    with refuses("optim.delay", 2):
        fit(Plain(), loader(), callbacks=[DelayCallback(2)], plugins=[ScaledLoss()], max_steps=1)
