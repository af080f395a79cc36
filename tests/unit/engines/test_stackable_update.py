"""A rule whose update is not that of its optimizer, or a schedule that a stack cannot follow, is
not stacked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell
from lit_dps.engines.stackable_update import reason_against_schedule
from lit_dps.module import ImageClassifier
from lit_dps.optim import ADAM, MOMENTUM, NESTEROV, RULES
from lit_dps.optim.rule import Rule
from tests.support.conformance import assert_conform
from tests.support.runs import train
from tests.support.tensor_rules import LARS, SHAMPOO
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import EXAMPLES, GOAL, trials, workload

HERE = "tests.unit.engines.test_stackable_update."


class OwnSGD(torch.optim.SGD):
    """Torch's update, under another name."""


class OwnAdam(torch.optim.Adam):
    """Torch's update, under another name."""


class Slow(torch.optim.SGD):
    """Takes back half of every fifth step, as optimizers with slow weights do."""

    count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        before = [p.clone() for p in self.param_groups[0]["params"]]
        super().step(closure)
        if self.count % 5 == 0:
            for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                p.lerp_(old, 0.5)


def rule(of: Rule, kind: type, update_=None, **options) -> Rule:
    """A rule of somebody else: with the optimizer `kind`, made with these options, and this
    update."""

    def make(parameters, rate, given):
        if issubclass(kind, torch.optim.Adam):
            betas = given["beta1"], given["beta2"]
            decay = given["weight_decay"]
            return kind(
                parameters,
                lr=rate,
                betas=betas,
                eps=given["epsilon"],
                weight_decay=decay,
                **options,
            )
        return kind(parameters, lr=rate, momentum=given.get("momentum", 0.0), **options)

    return replace(
        of,
        name=f"{kind.__name__} {update_.__name__ if update_ else ''}",
        make=make,
        is_of=lambda optimizer: type(optimizer) is kind,
        update_=update_ or of.update_,
    )


def _without_correction(weights, gradients, state, rate, given, step):
    first = state["exp_avg"].lerp_(gradients, 1 - float(given["beta1"][0]))
    second = (
        state["exp_avg_sq"].mul_(given["beta2"]).addcmul_(gradients.square(), 1 - given["beta2"])
    )
    weights.addcmul_(first / (second.sqrt() + given["epsilon"]), rate, value=-1)


def _wrong_from_the_second_step(weights, gradients, state, rate, given, step):
    ADAM.update_(weights, gradients, state, rate, given, torch.ones_like(step))


def _without_decay(weights, gradients, state, rate, given, step):
    ADAM.update_(
        weights, gradients, state, rate, {**given, "weight_decay": torch.zeros_like(rate)}, step
    )


def _damped_buffer(weights, gradients, state, rate, given, step):
    buffer = (
        state["momentum_buffer"].mul_(given["momentum"]).addcmul_(gradients, 1 - given["momentum"])
    )
    weights.addcmul_(buffer, rate, value=-1)


def _nesterov_from_the_second_step(weights, gradients, state, rate, given, step):
    buffer = state["momentum_buffer"].mul_(given["momentum"]).add_(gradients)
    ahead = gradients + given["momentum"] * buffer
    weights.sub_(rate * torch.where(step > 1, ahead, buffer))


def _mixing(weights, gradients, state, rate, given, step):
    gradients.sub_(1e-3 * (gradients.mean(0) - gradients[:1]))
    MOMENTUM.update_(weights, gradients, state, rate, given, step)


def _momentum_of_the_first(weights, gradients, state, rate, given, step):
    first = {"momentum": given["momentum"][:1]}
    MOMENTUM.update_(weights, gradients, state, rate, first, step)


def _rate_of_the_first(weights, gradients, state, rate, given, step):
    MOMENTUM.update_(weights, gradients, state, rate[:1], given, step)


RIGHT = {
    "momentum": rule(MOMENTUM, OwnSGD),
    "nesterov": rule(NESTEROV, OwnSGD, nesterov=True),
    "adam": rule(ADAM, OwnAdam),
}
WRONG = {
    "nesterov is momentum": rule(MOMENTUM, OwnSGD, nesterov=True),
    "decay of the optimizer": rule(MOMENTUM, OwnSGD, weight_decay=1e-6),
    "dampening of the buffer": rule(MOMENTUM, OwnSGD, _damped_buffer),
    "nesterov at step 1": rule(NESTEROV, OwnSGD, _nesterov_from_the_second_step, nesterov=True),
    "mixes networks": rule(MOMENTUM, OwnSGD, _mixing),
    "momentum of another network": rule(MOMENTUM, OwnSGD, _momentum_of_the_first),
    "rate of another network": rule(MOMENTUM, OwnSGD, _rate_of_the_first),
    "slow weights": rule(MOMENTUM, Slow),
    "bias correction": rule(ADAM, OwnAdam, _without_correction),
    "bias correction after step 1": rule(ADAM, OwnAdam, _wrong_from_the_second_step),
    "decay of the rule, which is 0 here": rule(ADAM, OwnAdam, _without_decay),
    "amsgrad": rule(ADAM, OwnAdam, amsgrad=True),
    "another state": replace(rule(MOMENTUM, OwnSGD), state=("momentum_buffer", "other")),
}


def results(name: str, used: Rule, monkeypatch) -> tuple[list, set[str]]:
    """The results of three trials, and why they were not stacked."""
    monkeypatch.setitem(RULES, name, used)
    asked = trials(Cell(16, 0.5), rates=[0.002, 0.004, 0.003])
    done = train(asked, workload(optimizer=name), {**GOAL, "max_steps": 8}, size=2)
    return done, {result.engine_reason for result in done}


@pytest.mark.parametrize("name", RIGHT)
def test_a_rule_that_is_its_optimizers_is_stacked(name, monkeypatch):
    done, reasons = results(name + " of mine", RIGHT[name], monkeypatch)
    assert reasons == {""} and all("stacked" in result.flags for result in done)


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_is_not_its_optimizers_is_trained_alone(name, monkeypatch):
    done, reasons = results(name, WRONG[name], monkeypatch)
    assert len(reasons) == 1 and WRONG[name].name in reasons.pop()
    assert not any("stacked" in result.flags for result in done)
    lightning = train(
        [r.trial for r in done], workload(optimizer=name), {**GOAL, "max_steps": 8}, lean=False
    )
    assert [r.curve for r in done] == [r.curve for r in lightning]


@pytest.mark.parametrize(
    ("used", "delay"),
    [
        pytest.param(LARS, 0, id="lars-0"),
        pytest.param(LARS, 3, id="lars-3", marks=pytest.mark.long),
        pytest.param(SHAMPOO, 0, id="shampoo-0", marks=pytest.mark.long),
        pytest.param(SHAMPOO, 3, id="shampoo-3"),
    ],
)
def test_a_rule_by_tensor_is_stacked_with_the_results_of_each_trial_alone(used, delay, monkeypatch):
    monkeypatch.setitem(RULES, used.name, used)
    asked = trials(Cell(16, 0.5), rates=[0.02, 0.04, 0.03])
    found, goal = [], {**GOAL, "max_steps": 8}
    for options in ({"size": 2}, {}, {"lean": False}):
        optim = {"delay": delay}
        found.append(train(asked, workload(optimizer=used.name), goal, optim=optim, **options))
    stacked, alone, lightning = found
    assert {result.engine for result in stacked} == {"stacked"}
    assert [r.curve for r in alone] == [r.curve for r in lightning]
    assert assert_conform(stacked, alone, Goal.from_dict(goal), EXAMPLES) == []


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_our_rules_agree(name):
    asked = trials(Cell(16, 0.0), rates=[0.002, 0.004])
    used = workload(optimizer=name, weight_decay=0.01, schedule="linear", decay_steps=8)
    done = train(asked, used, {**GOAL, "max_steps": 8}, size=2)
    assert {result.engine for result in done} == {"stacked"}


class Counting(ImageClassifier):
    """A schedule that counts how often it is asked."""

    def configure_optimizers(self):
        optimizer, calls = torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate), []

        def factor(step):
            calls.append(step)
            return 0.9 ** len(calls)

        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }


class CountingItself(ImageClassifier):
    """A schedule that counts in an attribute of the module how often it is asked."""

    calls = 0

    def factor(self, step):
        self.calls += 1
        return 0.9**self.calls

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)
        schedule = LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("name", ["Counting", "CountingItself"])
def test_a_schedule_that_counts_its_calls_is_trained_alone(name):
    asked = trials(Cell(16, 0.0), rates=[0.02, 0.04])
    used = workload(class_path=HERE + name)
    done = train(asked, used, {**GOAL, "max_steps": 8}, size=2)
    (reason,) = {result.engine_reason for result in done}
    assert f"schedule of {name} " in reason
    lightning = train(asked, used, {**GOAL, "max_steps": 8}, lean=False)
    assert [r.curve for r in done] == [r.curve for r in lightning]


def test_a_schedule_is_asked_for_the_steps_of_the_budget_alone():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    asked = []
    schedule = LambdaLR(optimizer, lambda step: asked.append(step) or (1 - step / 20) ** 0.9)
    assert reason_against_schedule(schedule, 20) is None and max(asked) == 20
