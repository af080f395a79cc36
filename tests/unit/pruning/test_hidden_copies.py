"""Copies of pruned parameters that a module keeps outside of its tree: lists, dicts and objects of
its own."""

from __future__ import annotations

import copy

import pytest
import torch

from lit_dps.core.trial import COPIES
from lit_dps.pruning.mask import hidden_tensors
from tests.support.tiny import Plain, loader, two_layers, weights
from tests.unit.training.test_pruning_callback import pruned


class Averaged(Plain):
    """Keeps an average of its network."""

    def __init__(self):
        super().__init__(two_layers())
        self.found = []

    def average(self) -> list[torch.Tensor]:
        return [
            tensor for path, tensor in hidden_tensors(self).items() if not path.startswith("found")
        ]

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for slow, fast in zip(self.average(), self.network.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.found.append([tensor.clone() for tensor in self.average()])


class InList(Averaged):
    def __init__(self):
        super().__init__()
        self.teacher = [copy.deepcopy(self.network)]


class InDict(Averaged):
    def __init__(self):
        super().__init__()
        self.shadow = {name: p.detach().clone() for name, p in self.network.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for name, p in self.network.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p


class Shadow:
    def __init__(self, parameters):
        self.tensors = [p.detach().clone() for p in parameters]


class InObject(Averaged):
    def __init__(self):
        super().__init__()
        self.shadow = Shadow(self.network.parameters())


@pytest.mark.parametrize("kind", [InList, InDict, InObject])
def test_they_are_zero_where_the_parameters_are(kind):
    module, callback = pruned(
        0.7, module=kind(), steps=7, val_check_interval=5, num_sanity_val_steps=0, val=loader()
    )
    checks = module.found
    assert checks and callback.flags[COPIES] == sum(p.numel() for p in module.network.parameters())
    for average in checks:
        for tensor, name in zip(average, weights(module), strict=True):
            keep = callback.mask[name]
            assert not tensor[~keep].any() and tensor[keep].all()


def test_one_that_is_excluded_stays_dense():
    _, callback = pruned(0.7, module=InList(), more={"exclude": ["teacher.*"]})
    assert COPIES not in callback.flags


def test_what_training_holds_elsewhere_is_none():
    assert not hidden_tensors(Plain()) and pruned(0.7)[1].flags.get(COPIES) is None
