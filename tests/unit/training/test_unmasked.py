"""Weights that are trained but in no mask are counted, at the step at which they join the
training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from lit_dps.core.trial import IN_NO_MASK, JOINED_AT, TRAINED_THEN
from lit_dps.training import PruningCallback
from tests.support.tiny import Plain, fit

WEIGHTS = 4 * 5 + 5 * 3
BIASES = 5 + 3


class Later(Plain):
    """Trains 4 -> 5 -> 3; `change` is called once, before the batch of this number, counted from
    0."""

    at = 5

    def __init__(self):
        super().__init__()
        self.begun = 0

    def on_train_batch_start(self, batch, batch_idx):
        if self.begun == self.at:
            self.change()
        self.begun += 1

    def change(self):
        raise NotImplementedError


class Unfrozen(Later):
    """The first layer is frozen until then; the optimizer holds it from the start."""

    def __init__(self):
        super().__init__()
        self.network[0].requires_grad_(False)

    def change(self):
        self.network[0].requires_grad_(True)


class Grouped(Unfrozen):
    """The first layer is frozen until then, and gets a group of its own in the optimizer."""

    def change(self):
        super().change()
        self.optimizers().optimizer.add_param_group(
            {"params": self.network[0].parameters(), "lr": 0.01}
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.network[2].parameters(), lr=0.1)


class Grown(Later):
    """A layer is added behind the network."""

    def change(self):
        self.network.append(nn.Linear(3, 3))
        self.optimizers().optimizer.add_param_group({"params": self.network[3].parameters()})


class Hidden(Later):
    """A layer is added in a list, where the module does not register it."""

    def __init__(self):
        super().__init__()
        self.extra = []

    def change(self):
        self.extra.append(nn.Linear(3, 3, bias=False))
        self.optimizers().optimizer.add_param_group({"params": self.extra[0].parameters()})

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.network(x)
        for layer in self.extra:
            z = layer(z)
        return F.cross_entropy(z, y)


class Unused(Later):
    """A second head, which the loss does not depend on until then."""

    def __init__(self):
        super().__init__()
        self.second, self.weight = nn.Linear(4, 3, bias=False), None

    def change(self):
        self.weight = 0.5

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.network(x)
        if self.weight is not None:
            z = z + self.weight * self.second(x)
        return F.cross_entropy(z, y)


class LowRank(nn.Module):
    """A frozen layer plus a product of two matrices of rank 2."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapted(Later):
    """The first layer is wrapped, so that its weights go by other names."""

    def change(self):
        self.network[0] = LowRank(self.network[0])
        self.optimizers().optimizer.add_param_group(
            {"params": [self.network[0].down, self.network[0].up]}
        )


class TwoOptimizers(Later):
    """Steps two optimizers by hand; the second one gets the first layer's weights later."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.network[0].requires_grad_(False)

    def change(self):
        self.network[0].weight.requires_grad_(True)
        self.optimizers()[1].optimizer.add_param_group({"params": [self.network[0].weight]})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.optimizer.step()  # Lightning does not see this step

    def configure_optimizers(self):
        first = torch.optim.SGD([self.network[2].weight], lr=0.1)
        return first, torch.optim.Adam([self.network[2].bias], lr=0.01)


def observed(module, sparsity=0.7, callbacks=(), steps=12, method="magnitude", **arguments):
    """What the pruning callback observed of a run of so many steps."""
    pruning = PruningCallback(sparsity, method, **arguments)
    fit(module, callbacks=[*callbacks, pruning], max_steps=steps)
    return pruning.flags


@pytest.mark.parametrize(
    ("module", "dense", "trained"),
    [
        (Unfrozen, 4 * 5 + 5, WEIGHTS + BIASES),
        (Grouped, 4 * 5 + 5, WEIGHTS + BIASES),
        (Grown, 3 * 3 + 3, WEIGHTS + BIASES + 12),
        (Hidden, 9, WEIGHTS + BIASES + 9),
        (Adapted, 2 * 4 + 5 * 2, 18 + 5 * 3 + 3),
        (TwoOptimizers, 4 * 5, 4 * 5 + 5 * 3 + 3),
    ],
)
def test_weights_that_join_the_training_later_are_counted(module, dense, trained):
    found = observed(module())
    counts = found[IN_NO_MASK], found[TRAINED_THEN], found[JOINED_AT]
    assert counts == (dense, trained, Later.at + 1)


def test_weights_that_the_loss_begins_to_use_are_counted():
    found = observed(Unused(), method="snip")  # which scores what the loss depends on
    counts = found[IN_NO_MASK], found[TRAINED_THEN], found[JOINED_AT]
    assert counts == (12, WEIGHTS + BIASES + 12, Later.at + 1)


def test_what_a_finetuning_callback_unfreezes_is_counted():
    class Backbone(Plain):
        def __init__(self):
            super().__init__()
            self.backbone = self.network[0]

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    found = observed(Backbone(), callbacks=[BackboneFinetuning(1)])
    counts = found[IN_NO_MASK], found[TRAINED_THEN], found[JOINED_AT]
    assert counts == (25, WEIGHTS + BIASES, 6)  # five batches an epoch


@pytest.mark.parametrize(
    ("arguments", "dense"),
    [
        ({"biases": "keep"}, 20),
        ({"exclude": ["network.0.*"]}, 0),
        ({"exclude": ["*.weight"], "biases": "paper"}, 5),
    ],
)
def test_what_pruning_would_leave_dense_is_not_counted(arguments, dense):
    assert observed(Unfrozen(), **arguments).get(IN_NO_MASK, 0) == dense


def test_a_dense_run_and_a_run_whose_mask_covers_all_have_nothing_to_count():
    assert observed(Unfrozen(), sparsity=0.0) == {}
    assert observed(Plain()) == {}


class Replaced(Later):
    """Its first layer becomes a fresh one of the same shape, which the optimizer trains in its
    place."""

    def change(self):
        self.network[0] = nn.Linear(4, 5)
        self.optimizers().optimizer.add_param_group({"params": self.network[0].parameters()})


class Registered(Later):
    """The weights of its first layer become a parameter of its own."""

    def change(self):
        self.network[0].weight = nn.Parameter(torch.ones(5, 4))
        self.optimizers().optimizer.add_param_group({"params": [self.network[0].weight]})


@pytest.mark.parametrize("module", [Replaced, Registered])
def test_a_tensor_in_the_place_of_a_pruned_one_has_its_mask(module):
    module = module()
    pruning = PruningCallback(0.7, "magnitude")
    fit(module, callbacks=[pruning], max_steps=12)
    weight, keep = module.network[0].weight.detach(), pruning.mask["network.0.weight"]
    assert not weight[~keep].any() and weight[keep].all()
    assert pruning.flags == {}


def test_a_wrapped_layer_keeps_its_mask():
    module, pruning = Adapted(), PruningCallback(0.7, "magnitude")
    fit(module, callbacks=[pruning], max_steps=12)
    keep = pruning.mask["network.0.weight"]
    assert not module.network[0].base.weight[~keep].any()


def test_weights_that_join_in_two_stages_are_counted_together():
    class Gradual(Unfrozen):
        def __init__(self):
            super().__init__()
            self.network[2].weight.requires_grad_(False)

        def on_train_batch_start(self, batch, batch_idx):
            super().on_train_batch_start(batch, batch_idx)
            if self.begun == 9:
                self.network[2].weight.requires_grad_(True)

    found = observed(Gradual(), steps=10)
    assert (found[IN_NO_MASK], found[TRAINED_THEN], found[JOINED_AT]) == (
        4 * 5 + 5 + 15,
        WEIGHTS + BIASES,
        9,
    )
