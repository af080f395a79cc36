"""Reentrant checkpointing hides weights from the pruning pass, which is refused."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lit_dps.training import PruningCallback
from tests.support.errors import refuses
from tests.support.tiny import Plain, fit


class Checkpointed(Plain):
    """Computes its first layer again in the backward pass."""

    is_reentrant = True

    def first(self, x):
        return checkpoint(self.network[0], x.requires_grad_(), use_reentrant=self.is_reentrant)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.network[2](self.first(x).tanh()), y)


class Deep(Checkpointed):
    """Computes all but the bias of its loss again."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(
            checkpoint(self.network, x.requires_grad_(), use_reentrant=True) + 1, y
        )


class ReturnsDict(Checkpointed):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx)}


class NotReentrant(Checkpointed):
    is_reentrant = False


@pytest.mark.parametrize("kind", [Checkpointed, Deep, ReturnsDict])
def test_reentrant_checkpointing_is_refused(kind):
    with refuses("pruning.method", "snip") as caught:
        fit(kind(), callbacks=[PruningCallback(0.7, "snip")], max_steps=2)
    assert "use_reentrant=False" in caught.value.allowed


def test_other_checkpointing_is_pruned_as_without():
    masks = []
    for module in (NotReentrant(), Plain()):
        pruning = PruningCallback(0.7, "snip")
        fit(module, callbacks=[pruning], max_steps=2)
        masks.append(pruning.mask)
    assert all((masks[0][name] == keep).all() for name, keep in masks[1].items())
