"""Weights that another tensor replaces for a check alone keep their mask in training."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lit_dps.core.trial import COPIES
from lit_dps.training import PruningCallback
from tests.support.tiny import Plain, fit, loader, weights

CHECKS = {"max_steps": 9, "val_check_interval": 2, "check_val_every_n_epoch": None}


class SwapsNetwork(Callback):
    """Validates another network with an average of the weights."""

    def on_fit_start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module.network)

    def on_train_batch_end(self, trainer, pl_module, *args):
        with torch.no_grad():
            for slow, fast in zip(
                self.average.parameters(), pl_module.network.parameters(), strict=True
            ):
                slow.lerp_(fast, 0.1)

    def swap(self, module):
        module.network, self.average = self.average, module.network

    def on_validation_epoch_start(self, trainer, pl_module):
        self.swap(pl_module)

    def on_validation_epoch_end(self, trainer, pl_module):
        self.swap(pl_module)


class SwapsLayer(SwapsNetwork):
    """Swaps its first layer alone."""

    def swap(self, module):
        module.network[0], self.average[0] = self.average[0], module.network[0]


class SwapsParameters(SwapsNetwork):
    """Swaps the parameters of the layers."""

    def swap(self, module):
        for layer, other in ((module.network[i], self.average[i]) for i in (0, 2)):
            layer.weight, other.weight = other.weight, layer.weight


class SwapsAtTheStart(SwapsNetwork):
    """Swaps the networks back when the next training batch begins."""

    is_swapped = False

    def on_validation_epoch_start(self, trainer, pl_module):
        self.swap(pl_module)
        self.is_swapped = True

    def on_validation_epoch_end(self, trainer, pl_module):
        pass

    def on_train_batch_start(self, trainer, pl_module, *args):
        if self.is_swapped:
            self.swap(pl_module)
            self.is_swapped = False


class Watched(Plain):
    """Keeps the weights of each training batch and of each check."""

    def __init__(self):
        super().__init__()
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(weights(self))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.seen.append(weights(self))
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("swaps", [SwapsNetwork, SwapsLayer, SwapsParameters, SwapsAtTheStart])
def test_weights_that_were_swapped_for_a_check_stay_pruned(swaps):
    module, pruning = Watched(), PruningCallback(0.7, "magnitude")
    fit(module, val=loader(), callbacks=[swaps(), pruning], num_sanity_val_steps=0, **CHECKS)
    assert len(module.seen) > 9
    for seen in module.seen:
        for name, keep in pruning.mask.items():
            assert not seen[name][~keep].any()
    assert pruning.flags.keys() == {COPIES}


class Averages(SwapsNetwork):
    """Keeps its average to itself."""

    def swap(self, module):
        pass


class AveragesTensors(Averages):
    """Keeps the average of each weight by name."""

    def on_fit_start(self, trainer, pl_module):
        self.average = {
            name: weight.detach().clone() for name, weight in pl_module.named_parameters()
        }

    def on_train_batch_end(self, trainer, pl_module, *args):
        for name, weight in pl_module.named_parameters():
            self.average[name].lerp_(weight.detach(), 0.1)


def tensors_of(average):
    return (
        average
        if isinstance(average, dict)
        else {f"network.{name}": p for name, p in average.named_parameters()}
    )


@pytest.mark.parametrize("averages", [Averages, AveragesTensors])
def test_a_copy_that_a_callback_keeps_is_pruned(averages):
    callback, pruning = averages(), PruningCallback(0.7, "magnitude")
    fit(Plain(), val=loader(), callbacks=[callback, pruning], **CHECKS)
    for name, average in tensors_of(callback.average).items():
        assert not average[~pruning.mask[name]].any()
    assert pruning.flags == {COPIES: sum(keep.numel() for keep in pruning.mask.values())}


def test_a_copy_that_a_callback_keeps_can_stay_dense():
    callback, pruning = (
        Averages(),
        PruningCallback(0.7, "magnitude", exclude=["callbacks.Averages.*"]),
    )
    fit(Plain(), callbacks=[callback, pruning], max_steps=4)
    assert callback.average[0].weight.all()
    assert pruning.flags == {}
