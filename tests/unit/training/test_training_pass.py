"""The pass outside of training: hooks of the copy, state behind the trainer, sizes of batches."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.core.errors import ConfigError
from lit_dps.readings import NoiseScaleCallback
from lit_dps.readings.lipschitz import mean_gradient
from lit_dps.training import PruningCallback
from lit_dps.training.training_pass import TrainingPass, even_batches
from tests.support.measured import lipschitz, terms_of
from tests.support.tiny import Plain, fit, loader


class Seen(Callback):
    """Keeps the state behind the trainer as the first batch begins; `count` is moved by modules."""

    def __init__(self):
        self.count, self.state = 0, None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.state is None:
            rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
            epochs = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
            own = getattr(trainer, "own_count", 0)
            self.state = (rates, epochs, self.count, own, "own" in trainer.callback_metrics)


class MovesTrainer(Plain):
    """Moves in its training step what it reaches through its trainer."""

    def training_step(self, batch, batch_idx):
        self.lr_schedulers().step()
        self.optimizers().param_groups[0]["lr"] *= 0.99
        seen = next(c for c in self.trainer.callbacks if isinstance(c, Seen))
        seen.count += 1
        self.trainer.own_count = getattr(self.trainer, "own_count", 0) + 1
        self.trainer.callback_metrics["own"] = torch.tensor(1.0)
        if len(self.optimizers().param_groups) == 1:
            self.optimizers().add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "frequency": 10**9}}


class Around(torch.optim.Optimizer):
    """An optimizer around another one, whose groups and state are those of the inner one."""

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class UsesAround(Plain):
    def configure_optimizers(self):
        return Around(super().configure_optimizers())


def test_groups_may_be_a_property_of_an_optimizer():
    masks = []
    for module in (Plain, UsesAround):
        torch.manual_seed(0)
        pruning = PruningCallback(sparsity=0.5)
        fit(module(), loader(), callbacks=[pruning], max_steps=2)
        masks.append(pruning.mask.kept())
    assert masks[0] == masks[1]


def test_small_gradients_of_a_scaled_precision_are_not_zero():
    """In float16 gradients below 6e-8 are 0, so that 16-mixed scales the loss of a step."""
    squares = []

    class Small(Plain):
        def training_step(self, batch, batch_idx):
            return 1e-7 * super().training_step(batch, batch_idx)

    class Square(Callback):
        def on_train_start(self, trainer, module):
            data_pass = TrainingPass(trainer, module, 4)
            with data_pass.without_side_effects() as twin:
                total = mean_gradient(list(twin.parameters()), data_pass.losses(twin))
            squares.append(float(total.square().sum()))

    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    for plugins in ([], [half]):
        fit(Small(), callbacks=[Square()], max_steps=1, plugins=plugins)
    assert squares[1] == squares[0] > 0


def test_what_the_pass_moves_through_the_trainer_is_put_back():
    states = []
    for sparsity in (0.0, 0.5):
        torch.manual_seed(0)
        seen = Seen()
        fit(
            MovesTrainer(),
            loader(),
            callbacks=[PruningCallback(sparsity, batch_size=4), seen],
            max_steps=1,
        )
        states.append(seen.state)
    assert states[1] == states[0] == ([0.1], [0], 0, 0, False)


class MovesCallback(Plain):
    """Moves in its training step a callback that keeps an iterator, which cannot be put back."""

    def training_step(self, batch, batch_idx):
        seen = next(c for c in self.trainer.callbacks if isinstance(c, Seen))
        seen.count += 1
        seen.numbers = iter([1, 2])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("callback", [PruningCallback(0.5, batch_size=4), NoiseScaleCallback()])
def test_what_cannot_be_put_back_is_refused_as_the_module_whatever_is_measured(callback):
    seen = Seen()
    seen.numbers = iter([1, 2])
    with pytest.raises(ConfigError) as caught:
        fit(MovesCallback(), loader(), callbacks=[callback, seen], max_steps=1)
    assert (caught.value.key, caught.value.value) == ("model", "MovesCallback")
    assert "Seen.numbers" in caught.value.allowed and "pruning" not in caught.value.allowed


class MadeInHooks(Plain):
    """Uses in its training step what its hooks have made."""

    def on_train_start(self):
        self.weights = torch.ones(3)

    def on_train_epoch_start(self):
        self.outputs = [float(self.weights.sum())]

    def on_train_batch_start(self, batch, batch_idx):
        self.scale = len(self.outputs) + 1.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.scale / self.scale
        self.outputs.append(float(loss))
        return loss


class Freezes(Plain):
    """Freezes its first layer as training starts."""

    def on_train_start(self):
        next(self.parameters()).requires_grad_(False)


@pytest.mark.parametrize("kind", [MadeInHooks, Freezes])
def test_hooks_of_the_copy_run_before_its_training_steps(kind):
    masks = []
    for module in (kind, Plain):
        torch.manual_seed(0)
        pruning = PruningCallback(0.5, batch_size=4)
        fit(module(), loader(), callbacks=[pruning], max_steps=1)
        masks.append(pruning.mask)
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[1])


class WithHooks(LightningModule):
    """A linear regression that takes its scale, 1, from its hooks, or has it from the beginning."""

    def __init__(self, hooks: bool):
        super().__init__()
        self.network, self.hooks = nn.Linear(4, 1), hooks
        if not hooks:
            self.weight = self.offset = self.scale = 1.0

    def on_train_start(self):
        if self.hooks:
            self.weight = 1.0

    def on_train_epoch_start(self):
        if self.hooks:
            self.offset = self.weight

    def on_train_batch_start(self, batch, batch_idx):
        if self.hooks:
            self.scale = self.offset

    def training_step(self, batch, batch_idx):
        return (self.network(batch[0]) * self.scale - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_noise_scale_and_smoothness_are_measured_after_the_hooks_of_the_copy():
    values = []
    for hooks in (True, False):
        torch.manual_seed(0)
        noise, smoothness = NoiseScaleCallback(), lipschitz(interval=1, batch_size=4)
        fit(WithHooks(hooks), loader(), callbacks=[noise, smoothness], max_steps=2)
        constants = smoothness.columns["lipschitz"]["lipschitz"]
        variance = terms_of(smoothness)["gradient_variance"]
        values.append([*noise.readings["variance"], *constants, variance])
    assert len(values[0]) == 5 and values[0] == values[1]


class Late(Plain):
    """Lacks in the pass what a callback makes later."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.made_by_a_callback


def test_a_step_that_fails_in_the_pass_is_refused_by_the_key_of_the_pass():
    with pytest.raises(ConfigError) as caught:
        fit(Late(), loader(), callbacks=[PruningCallback(0.5, batch_size=4)], max_steps=1)
    assert (caught.value.key, caught.value.value) == ("pruning.method", "snip")
    assert "made_by_a_callback" in caught.value.allowed


@pytest.mark.parametrize(
    ("n", "most", "sizes"),
    [
        (301, 100, [100] * 3),
        (303, 100, [74, 76, 76, 76]),
        (170, 50, [42, 42, 42, 44]),
        (201, 100, [100] * 2),
        (7, 3, [2] * 3),
        (5, 1, [2] * 2),
    ],
)
def test_batches_of_a_loader_that_drops_its_last_are_even(n, most, sizes):
    batches = even_batches(list(range(n)), most)
    assert sorted(map(len, batches)) == sorted(sizes)
    assert [i for batch in batches for i in batch] == list(range(n - n % 2))


class Pairs(Plain):
    """Batch normalization, and a step over pairs: both refuse a last batch of one example."""

    def __init__(self):
        super().__init__(
            nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        difference = (self.network(x[::2]) - self.network(x[1::2])).square().mean()
        return super().training_step(batch, batch_idx) + difference


def test_a_loader_that_drops_its_last_batch_gives_the_pass_no_short_one():
    torch.manual_seed(0)
    x, y = torch.randn(25, 4), torch.arange(25) % 3
    train, pruning = (
        DataLoader(TensorDataset(x, y), 4, drop_last=True),
        PruningCallback(0.5, batch_size=8),
    )
    fit(Pairs(), train, callbacks=[pruning], max_steps=1)
    assert sum(int(keep.sum()) for keep in pruning.mask.values()) > 0
