"""The pruning pass leaves no trace: what a module sees, draws, counts and logs is as without it."""

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule
from torch import nn
from torch.utils.data import DataLoader

from lit_dps.training import PruningCallback
from tests.support.errors import raises_about
from tests.support.tiny import Plain, Recorder, fit, loader, points


class Noisy(Plain):
    """Dropout, batch normalization, a buffer, logging and a metric: all that a training step can
    touch."""

    def __init__(self, network=None):
        super().__init__(
            network
            or nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.accuracy = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen += len(batch[0])
        self.log("train_loss", loss)
        self.log_dict({"epoch_loss": loss}, on_epoch=True, on_step=False)
        self.accuracy.update(loss.detach())
        self.log("metric", self.accuracy, on_epoch=True, on_step=False)
        return loss


class Start(Callback):
    """Keeps what surrounds the weights as the first batch begins."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.state = {
            "rng": torch.get_rng_state(),
            "metric": module.accuracy.mean_value.clone(),
            "updates": torch.tensor(module.accuracy.update_count),
            "logged": sorted(trainer.callback_metrics),
            "batch": batch[0].clone(),
            **{name: buffer.clone() for name, buffer in module.named_buffers()},
        }


def noisy() -> Noisy:
    torch.manual_seed(0)
    return Noisy()


@pytest.mark.parametrize("method", ["snip", "random"])
def test_the_first_batch_begins_as_without_pruning(method):
    states = []
    for sparsity in (0.0, 0.5):
        module, start = noisy(), Start()
        torch.manual_seed(4)
        fit(
            module,
            loader(shuffle=True),
            callbacks=[PruningCallback(sparsity, method), start],
            max_steps=1,
        )
        states.append(start.state)
    assert {"seen", "network.1.running_mean", "network.1.num_batches_tracked"} <= states[0].keys()
    for key, value in states[0].items():
        same = (
            torch.equal(value, states[1][key])
            if isinstance(value, torch.Tensor)
            else value == states[1][key]
        )
        assert same, key


class Unused(LightningDataModule):
    """Gives the pruning pass data of its own, to see whether any of it is left in the module."""

    def train_dataloader(self):
        return loader()

    def pruning_dataloader(self, batch_size):
        return DataLoader([(1e3 * x, y) for x, y in points(40)], batch_size)


def test_batch_norm_statistics_hold_the_training_batches_alone():
    module = noisy()
    inner = Recorder(lambda _, module: module.network[0](points().tensors[0][:4]).detach())
    fit(module, datamodule=Unused(), callbacks=[PruningCallback(0.5, "snip"), inner], max_steps=1)
    batch = inner.values[
        0
    ]  # what the norm saw in the one step: the first linear layer, pruned, on the first batch
    norm = module.network[1]
    torch.testing.assert_close(norm.running_mean, 0.1 * batch.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * batch.var(0), rtol=1e-5, atol=1e-6)
    assert int(norm.num_batches_tracked) == 1 and int(module.seen) == 4


def test_logged_metrics_are_of_the_training_steps_alone():
    module = noisy()
    trainer = fit(
        module, datamodule=Unused(), callbacks=[PruningCallback(0.5, "snip")], max_steps=5
    )
    assert len(module.losses) == 5, "the pass, which came first, was a copy's"
    steps = torch.tensor(module.losses)
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(
        float(steps[-1]), rel=1e-6
    )
    assert float(trainer.callback_metrics["epoch_loss"]) == pytest.approx(
        float(steps.mean()), rel=1e-6
    )
    assert float(trainer.callback_metrics["metric"]) == pytest.approx(float(steps.mean()), rel=1e-6)


def order_of(sparsity: float, **arguments) -> list:
    torch.manual_seed(4)
    module = Plain()
    fit(module, loader(**arguments), callbacks=[PruningCallback(sparsity, "snip")], max_steps=10)
    return module.batches[-10:]


@pytest.mark.parametrize("generator", [False, True], ids=["global", "own"])
def test_a_shuffling_loader_gives_the_same_order_whatever_the_sparsity(generator):
    """Also when it shuffles by a generator of its own, which the pruning pass must not advance."""
    orders = [
        order_of(
            sparsity,
            shuffle=True,
            generator=torch.Generator().manual_seed(3) if generator else None,
        )
        for sparsity in (0.0, 0.5)
    ]
    assert orders[0] == orders[1]
    assert orders[0][:5] != orders[0][5:]


def test_persistent_workers_give_the_same_order_whatever_the_sparsity():
    orders = [order_of(s, shuffle=True, num_workers=1, persistent_workers=True) for s in (0.0, 0.5)]
    assert orders[0] == orders[1]


def test_a_pruning_dataloader_is_asked_for_the_callbacks_batch_size():
    asked = []

    class Data(LightningDataModule):
        def train_dataloader(self):
            return loader()

        def pruning_dataloader(self, batch_size):
            asked.append(batch_size)
            return loader(20, batch_size)

    fit(Plain(), datamodule=Data(), callbacks=[PruningCallback(0.5, batch_size=7)], max_steps=1)
    assert asked == [7]


def test_log_works_as_before_after_the_pass_also_when_it_fails():
    class Broken(Noisy):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    module = Broken()
    with raises_about(RuntimeError, "broken"):
        fit(module, callbacks=[PruningCallback(0.5)], max_steps=1)
    assert "log" not in module.__dict__
