"""Masks that change during training are the same in each loop, and after a resume."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.single_network import SingleNetwork
from lit_dps.pruning import Mask
from lit_dps.pruning.moving import RigL
from lit_dps.training import DelayCallback, PruningCallback
from tests.support import saved_study, tiny
from tests.support.errors import refuses
from tests.support.runs import train, train_one
from tests.support.scaled_loss import ScaledLoss
from tests.support.user_readings import Redraws  # noqa: F401  a method by class path
from tests.unit.pruning.test_pruners_engines import GOAL, WORKLOAD

EVERY = 3
METHOD = {"method": "rigl", "options": {"every": EVERY}}
METHODS = {
    "rigl": METHOD,
    "set": {"method": "set", "options": {"every": EVERY, "start": "uniform"}},
    "gradual": {"method": "gradual", "options": {"every": EVERY, "end": 0.75}},
    "snip_it_during": {"method": "snip_it_during", "options": {"every": EVERY, "rounds": 3}},
    "redraws": {"method": f"{__name__}.Redraws"},
}
MOVING = [name for name in METHODS if name != "redraws"]
LONG_GOAL = {**GOAL, "max_steps": 16}
MOMENTUM = "momentum_buffer"


class Loses(RigL):
    """Breaks its promise to keep the count."""

    def next_mask(self, update):
        mask = dict(update.mask)
        name = next(iter(mask))
        mask[name] = torch.zeros_like(mask[name])
        return Mask(mask)


def trials(count: int = 1) -> list[Trial]:
    params = {"model.learning_rate": 0.1, "model.momentum": 0.9}
    return [Trial(Cell(16, 0.8), point, params) for point in range(count)]


@pytest.mark.parametrize("method", METHODS)
def test_single_and_lightning_are_equal_to_the_bit(method):
    pruning = METHODS[method]
    results = []
    for lean in (True, False):
        result = train_one(trials()[0], WORKLOAD, LONG_GOAL, lean=lean, pruning=pruning)
        results.append(dataclasses.replace(result, seconds=0.0))
    assert not results[0].failure and results[0] == results[1]
    fixed = train_one(trials()[0], WORKLOAD, LONG_GOAL, pruning={"method": "random"})
    assert results[0].curve["train_loss"] != fixed.curve["train_loss"]
    # The density after the last change is the cell's.
    assert sum(kept for kept, _ in results[0].kept.values()) == sum(
        kept for kept, _ in fixed.kept.values()
    )


@pytest.mark.parametrize("method", METHODS)
def test_stacked_networks_change_their_masks_as_single_ones(method):
    pruning = METHODS[method]
    stacked = train(trials(3), WORKLOAD, LONG_GOAL, size=3, pruning=pruning)
    alone = train(trials(3), WORKLOAD, LONG_GOAL, pruning=pruning)
    assert all(result.is_stacked for result in stacked)
    for ours, theirs in zip(sorted(stacked, key=lambda r: r.trial.point), alone, strict=True):
        assert ours.kept == theirs.kept
        assert ours.curve["train_loss"] == pytest.approx(theirs.curve["train_loss"], rel=1e-3)


class DeadUnits(tiny.Plain):
    """12 of its 16 hidden units have no gradient, and the others have one of each example."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)))
        with torch.no_grad():
            self.network[0].bias[:4] = 5.0
            self.network[0].bias[4:] = -50.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"method": "snip"},
        {"method": "shuffle", "options": {"of": "snip"}},
        {"method": "snip_it_during", "options": {"every": 2, "rounds": 1}},
    ],
)
def test_weights_that_are_kept_by_their_position_are_counted(arguments):
    """28 scores are above 0: of 4 units with 4 inputs and 3 outputs. Half of 112 are kept."""
    callback = PruningCallback(0.5, biases="keep", **arguments)
    tiny.fit(DeadUnits(), callbacks=[callback], max_steps=3)
    scored = 4 * 4 + 4 * 3
    assert callback.flags["kept"] == 56
    assert callback.flags["kept_with_score_0"] == 56 - scored


def test_only_the_last_mask_counts_weights_that_are_kept_by_their_position():
    """It keeps 56, 39 and 22 of 112 weights, and 28 scores are above 0."""
    options = {"every": 2, "rounds": 2}
    callback = PruningCallback(0.8, "snip_it_during", biases="keep", options=options)
    found = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *_):
            found.append(callback.flags.get("kept_with_score_0"))

    tiny.fit(DeadUnits(), callbacks=[callback, Watch()], max_steps=7)
    assert found == [None, 28, 28, 11, 11, None, None]


def test_a_changed_mask_has_the_largest_gradients_and_no_old_momentum(monkeypatch):
    """Each change is checked by hand: weights, gradients and momenta before and after it."""
    changes = []
    moving = []
    change = SingleNetwork._update_and_change_mask

    def recorded(self, batch, step):
        before = {name: mask.clone() for name, mask in self.run.mask.items()}
        loss = change(self, batch, step)
        changes.append(step)
        state = self.run.optimizer.state
        for name, parameter in self.run.module.named_parameters():
            if name not in before:
                continue
            after = self.run.mask[name]
            assert int(after.sum()) == int(before[name].sum())
            grown = after & ~before[name]
            assert (parameter[~after] == 0).all() and (parameter[grown] == 0).all()
            assert (state[parameter][MOMENTUM][~(after & before[name])] == 0).all()
            moving.append(int((state[parameter][MOMENTUM] != 0).sum()))
        return loss

    monkeypatch.setattr(SingleNetwork, "_update_and_change_mask", recorded)
    result = train_one(trials()[0], WORKLOAD, LONG_GOAL, pruning=METHOD)
    assert not result.failure
    assert sum(moving) > 0
    assert changes == [3, 6, 9, 12, 15]


RESUMED = [("rigl", checks, lean) for checks in (1, 2, 3) for lean in (True, False)]
RESUMED += [("set", 2, True), ("gradual", 2, True), ("snip_it_during", 2, True)]


@pytest.mark.parametrize(("method", "checks", "lean"), RESUMED)
def test_a_resumed_run_equals_an_unbroken_one(tmp_path, method, checks, lean):
    study = saved_study.Study(
        tmp_path, goal={**LONG_GOAL, "error": 0.001}, pruning=METHODS[method], lean=lean
    )
    trial = trials()[0]
    trial = dataclasses.replace(trial, params={"model.learning_rate": 0.1})
    unbroken, steps = study.run(trial, saved=False)
    assert study.run(trial, interrupt=checks)[0] is None
    resumed, resumed_steps = study.run(trial)
    assert resumed == unbroken
    assert torch.equal(resumed_steps.weights, steps.weights)
    assert resumed_steps.taken < steps.taken
    kept = sum(each for each, _ in unbroken.kept.values())
    total = sum(each for _, each in unbroken.kept.values())
    assert kept == round(total * 0.2)  # the cell's sparsity is 0.8


def test_a_method_that_loses_elements_is_refused():
    result = train_one(trials()[0], WORKLOAD, LONG_GOAL, pruning={"method": f"{__name__}.Loses"})
    assert "Loses at step 100" not in result.failure  # max_steps is 16
    result = train_one(
        trials()[0],
        WORKLOAD,
        LONG_GOAL,
        pruning={"method": f"{__name__}.Loses", "options": {"every": 4}},
    )
    assert "Loses at step 4" in result.failure


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_every_is_a_positive_number(every):
    pruning = PruningCallback(0.5, "rigl", options={"every": every})
    with refuses("pruning.method"):
        tiny.fit(tiny.Plain(), callbacks=[pruning], max_steps=2)


def test_delayed_gradients_are_refused():
    pruning = PruningCallback(0.5, "rigl")
    with refuses("pruning.method"):
        tiny.fit(tiny.Plain(), callbacks=[pruning, DelayCallback(2)], max_steps=2)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"local": {"workers": 4}}, "local.workers = 4"),
        ({"optim": {"delay": 2}}, "optim.delay = 2"),
    ],
)
@pytest.mark.parametrize("lean", [True, False])
def test_each_loop_refuses_workers_and_delayed_gradients(arguments, reason, lean):
    result = train_one(trials()[0], WORKLOAD, LONG_GOAL, lean=lean, pruning=METHOD, **arguments)
    assert f"a method whose mask does not change, with {reason}" in result.failure


def test_several_optimizers_are_refused():
    class Two(tiny.Plain):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    pruning = PruningCallback(0.5, "rigl")
    with pytest.raises(ConfigError):
        tiny.fit(Two(), callbacks=[pruning], max_steps=2)


def test_gradient_clipping_sees_the_pruned_network_and_growth_the_dense_one():
    """With clipping, the method still receives the unclipped gradients of all weights."""
    seen = []

    class Sees(RigL):
        def next_mask(self, update):
            seen.append({name: g.clone() for name, g in update.gradients.items()})
            return update.mask

    def run(**arguments):
        pruning = PruningCallback(0.5, "random")
        pruning.pruner = Sees(every=1)
        tiny.fit(tiny.Plain(), callbacks=[pruning], max_steps=2, **arguments)
        return pruning.mask

    mask = run(gradient_clip_val=1e-6)
    name = next(iter(mask))
    assert (seen[0][name][~mask[name]] != 0).any()
    assert max(float(g.norm()) for g in seen[0].values()) > 1e-3


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_step_that_does_not_happen_changes_no_mask(is_scaled):
    """The third batch has a loss that overflows, or none; the mask changes after every third."""
    changes = []
    dense_steps = []

    class Sees(RigL):
        def next_mask(self, update):
            gradients = torch.cat([g.flatten() for g in update.gradients.values()])
            assert gradients.isfinite().all() and gradients.any()
            changes.append(update.step)
            return super().next_mask(update)

    class Skips(tiny.Plain):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if len(self.losses) != 3:
                return loss
            return loss * math.inf if is_scaled else None

        def on_after_backward(self):
            mask = pruning.mask["network.2.weight"]
            if self.network[2].weight.grad[~mask].any():
                dense_steps.append(len(self.losses))

    pruning = PruningCallback(0.5, "random")
    pruning.pruner = Sees(every=3)
    arguments = {"plugins": [ScaledLoss()]} if is_scaled else {}
    tiny.fit(Skips(), callbacks=[pruning], max_steps=9, **arguments)
    assert changes == [6]
    # The loss that overflows has dense gradients too. In the backward passes of other steps they
    # are masked, so that clipping sees the pruned network.
    assert dense_steps == ([3, 6] if is_scaled else [6])


def test_ranks_change_their_masks_alike():
    from tests.support.ranks import same_on_ranks

    assert same_on_ranks(2, trained_on_ranks) > 0


def trained_on_ranks() -> float:
    """Return a number that depends on all weights and masks after training on ranks."""
    return sum(map(trained_by, MOVING))


def trained_by(method: str) -> float:
    torch.manual_seed(0)
    from lit_dps.data import Digits
    from lit_dps.models import MLP
    from lit_dps.module import ImageClassifier
    from lit_dps.parallel import ranks
    from lit_dps.parallel.ddp import trainer_arguments

    module = ImageClassifier(MLP(hidden=[8]), optimizer="momentum", learning_rate=0.1)
    pruning = PruningCallback(0.5, method, options={"every": 2})
    options = trainer_arguments({**tiny.QUIET, "devices": ranks.world()})
    tiny.fit(module, datamodule=Digits(batch_size=16), callbacks=[pruning], max_steps=6, **options)
    total = sum(float(p.abs().double().sum()) for p in module.parameters())
    return total + sum(float(m.double().cumsum(0).sum()) for m in pruning.mask.values())
