"""Optimizers with several parameter groups, and SGD with weight decay, are stacked."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn

from lit_dps.core.goal import Goal
from lit_dps.core.trial import LIGHTNING, Cell
from lit_dps.engines.eligible import ineligibility_reason
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.optim import ADAMW, OURS, RULES, StackedUpdate, rule_of
from lit_dps.optim.parameter_groups import names_of_groups
from lit_dps.parallel.process import Interrupted
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.rate_curve import largest_rates, rates_of_groups
from tests.support.conformance import assert_conform
from tests.support.runs import engine, runs, train
from tests.support.setups import training_of
from tests.support.tensor_rules import LARS
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_logged_modules import KeepsState, both, trials, workload
from tests.zoo.animals.data import VALIDATION
from tests.zoo.animals.optimizers import Groups

GOAL = {"error": 0.02, "check_interval": 4, "max_steps": 24}
GROUPS = "optimizers.Groups"
KINDS = [
    (GROUPS, {}),
    (GROUPS, {"kind": "sgd", "schedule": "cosine"}),
    (GROUPS, {"kind": "nesterov", "schedule": "lambda"}),
    pytest.param(GROUPS, {"schedule": "lambda"}, marks=pytest.mark.long),
    ("optimizers.Decayed", {}),
]


@pytest.mark.parametrize(("model", "arguments"), KINDS)
def test_a_stack_with_groups_ends_as_in_lightning_s_loop(model, arguments):
    asked = trials(Cell(16, 0.0), Cell(16, 0.8))
    used = workload(model, trainer={"gradient_clip_val": 0.5}, **arguments)
    ours, reference = both(used, asked, GOAL, metrics=("val_loss",))
    assert {(result.engine, result.engine_reason) for result in ours} == {("stacked", "")}
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), VALIDATION) == []
    theirs = {(result.trial.cell, result.trial.point): result for result in reference}
    for result in ours:
        expected = theirs[result.trial.cell, result.trial.point]
        assert result.curve["val_loss"] == pytest.approx(expected.curve["val_loss"], rel=1e-3)
        shape = {key: value for key, value in result.flags.items() if key != "stacked"}
        assert shape == expected.flags, "the lengths of warm-up and schedule"


@pytest.mark.parametrize(("model", "arguments"), KINDS)
def test_the_weights_are_those_of_lightning_s_loop(model, arguments, monkeypatch):
    used = workload(model, **arguments)
    goal = {"metric": "val_loss", "at_most": 1e-6, "check_interval": 4, "max_steps": 8}
    asked = trials(Cell(32, 0.5), rates=(0.01, 0.03))
    reference = KeepsState()
    settings = training_of(used, goal)
    lightning = TrialEngine(settings, engine=LIGHTNING, callbacks=(reference,))
    assert len(list(lightning.train(runs(asked, goal)))) == 2
    kept: list[dict[str, Tensor]] = []
    take = StackedNetworks.snapshot

    def keep(self, interval, intervals):
        take(self, interval, intervals)
        kept.clear()
        for row in self.live:
            self.write_back_weights(row)
            state = self.run_at(row).module.state_dict()
            kept.append({name: tensor.clone() for name, tensor in state.items()})

    monkeypatch.setattr(StackedNetworks, "snapshot", keep)
    assert [result.engine for result in train(asked, used, goal, size=4)] == ["stacked"] * 2
    for ours, expected in zip(kept, reference.states, strict=True):
        for name, tensor in expected.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


def test_an_interrupted_stack_with_groups_resumes(tmp_path):
    used = workload(GROUPS, schedule="lambda")
    goal = {"metric": "val_loss", "at_most": 1e-6, "check_interval": 4, "max_steps": 16}
    asked = trials(Cell(16, 0.5))
    checkpoints = Checkpoints(tmp_path, "study", minutes=0)
    checks = []

    def raise_if_stopped() -> None:
        checks.append(1)
        if len(checks) == 2:
            raise Interrupted("test")

    with pytest.raises(Interrupted):
        interrupted = engine(used, goal, size=4, checkpoints=checkpoints)
        list(interrupted.train(runs(asked, goal), raise_if_stopped))
    resumed = train(asked, used, goal, size=4, checkpoints=checkpoints)
    unbroken = train(asked, used, goal, size=4)
    for ours, expected in zip(resumed, unbroken, strict=True):
        assert ours.engine == "stacked"
        assert ours.curve == expected.curve


class ByRate(Groups):
    """Decays its biases in place of its matrices at a large rate."""

    def configure_optimizers(self):
        self.hparams.swapped = self.hparams.lr > 0.005
        return super().configure_optimizers()


def test_networks_with_other_groups_leave_the_stack():
    used = workload()
    used.model["class_path"] = f"{__name__}.ByRate"
    ours, reference = both(used, trials(Cell(16, 0.0)), GOAL)
    assert sorted(result.engine for result in ours) == ["lightning", "lightning", "stacked"]
    assert "its module or data differ" in max(result.engine_reason for result in ours)
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), VALIDATION) == []


def test_groups_of_different_rules_are_not_stacked():
    training = training_of(workload(GROUPS, kind="sgd", head_momentum=0.0), GOAL)
    reason = ineligibility_reason(training, trials(Cell(16, 0.0))[0], stacked=True)
    assert reason is not None and "no stackable update rule" in reason


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]


def test_the_rule_of_several_groups():
    first, second = ({"params": [each]} for each in parameters())
    plain = torch.optim.SGD([first, {**second, "lr": 1.0}], 0.1, 0.9)
    assert rule_of(plain) is RULES["momentum"]
    decayed = torch.optim.SGD([first, {**second, "weight_decay": 0.1}], 0.1, 0.9)
    rule = rule_of(decayed)
    assert rule is not None and rule.name == "momentum with weight decay" and rule in OURS
    assert rule.numbers_of(decayed) == {"momentum": [0.9, 0.9], "weight_decay": [0.0, 0.1]}
    assert decayed.param_groups[0]["params"] is first["params"]
    assert len(decayed.param_groups) == 2, "the optimizer is as before"
    mixed = torch.optim.SGD([first, {**second, "nesterov": True}], 0.1, 0.9)
    assert rule_of(mixed) is None
    assert rule_of(torch.optim.AdamW([first, {**second, "amsgrad": True}])) is None


@pytest.mark.parametrize("rule", [ADAMW, LARS], ids=["elements", "tensors"])
def test_a_group_is_updated_by_its_numbers(rule):
    tensors = {"a": torch.randn(2), "b": torch.randn(3), "c": torch.randn(2)}
    groups = [["b"], [], ["c", "a"]]
    update = StackedUpdate(rule, tensors, groups)
    assert list(update.weights.shapes) == ["b", "c", "a"]
    weights = torch.randn(2, 7)
    gradients = torch.randn(2, 7)
    numbers = {name: torch.rand(2, 3) for name in rule.hyperparameters}
    rates = torch.rand(2, 3)
    step = torch.ones(2, 1)
    state = {}
    for key, layout in update.state.items():
        state[key] = torch.zeros(2, layout.size)
    ours = weights.clone()
    update(ours, gradients.clone(), state, rates, numbers, step)
    for group, names in ((0, ["b"]), (2, ["c", "a"])):
        alone = StackedUpdate(rule, {name: tensors[name] for name in names})
        places = slice(0, 3) if group == 0 else slice(3, 7)
        expected = weights[:, places].clone()
        fresh = {key: torch.zeros(2, layout.size) for key, layout in alone.state.items()}
        of_group = {name: each[:, group : group + 1] for name, each in numbers.items()}
        rate = rates[:, group : group + 1]
        alone(expected, gradients[:, places].clone(), fresh, rate, of_group, step)
        assert torch.equal(ours[:, places], expected)
        assert not torch.equal(expected, weights[:, places])
        for key, tensor in fresh.items():
            assert torch.equal(state[key][:, places], tensor)


def test_names_and_rates_of_groups():
    first, second = parameters()
    groups = [{"params": [second], "lr": 1.0}, {"params": [first]}]
    optimizer = torch.optim.SGD(groups, 0.1)
    assert names_of_groups(optimizer, {"a": first, "b": second}) == [["b"], ["a"]]
    assert names_of_groups(optimizer, {"a": first}) == [[], ["a"]]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    configs = [LRSchedulerConfig(schedule, interval="step")]
    assert rates_of_groups(optimizer, configs, 2) == [(1.0, 0.1), (0.5, 0.05)]
    assert largest_rates(rates_of_groups(optimizer, configs, 2)) == [1.0, 0.5]
