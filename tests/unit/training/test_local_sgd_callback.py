"""LocalSGDCallback on any module: masks, parts of the batch, going on, and what workers cannot
share."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import callbacks as stock
from torch import Tensor, nn

from lit_dps.readings import GradientNorms, ReadingsCallback
from lit_dps.training import DelayCallback, LocalSGDCallback, PruningCallback
from tests.support.errors import refuses
from tests.support.tiny import Plain, assert_equal, fit, loader, points, weights
from tests.unit.training.test_delay_callback import Linear


@pytest.mark.parametrize("by", ["optimizer", "momentum"])
def test_masks_hold_in_every_worker(by):
    seen = []

    def look(trainer, module):
        seen.append(max(float(p[~keep].abs().max()) for name, p, keep in kept(module)))

    class Look(stock.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            look(trainer, pl_module)

        def on_train_end(self, trainer, pl_module):
            look(trainer, pl_module)

    def kept(module):
        mask = pruning.mask
        return [
            (n, p.detach(), mask[n])
            for n, p in module.named_parameters()
            if n in mask and not mask[n].all()
        ]

    pruning = PruningCallback(0.6)
    noisy = (lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.1)) if by == "optimizer" else None
    module = Plain(make_optimizer=noisy or (lambda p: torch.optim.SGD(p, 0.05, 0.9)))
    local = LocalSGDCallback(2, 3, outer_learning_rate=0.7, outer_momentum=0.9)
    fit(module, loader(), callbacks=[pruning, local, Look()], max_steps=11)
    assert len(seen) == 2 * 11 + 1 and max(seen) == 0


def of(module: Plain, steps: int, *callbacks, **arguments) -> dict[str, Tensor]:
    fit(module, loader(), callbacks=callbacks, max_steps=steps, **arguments)
    return weights(module)


def test_any_module_takes_its_parts_of_the_batch_and_ends_as_the_mean():
    module, x = Plain(), points().tensors[0]
    of(module, 5, LocalSGDCallback(2, 3))
    assert module.batches == [x[i : i + 2, 0].tolist() for i in range(0, 20, 2)]
    assert module.taken == 10
    sgd = of(Plain(), 8)
    for name, local in of(Plain(), 8, LocalSGDCallback(2, 1)).items():
        torch.testing.assert_close(local, sgd[name], rtol=1e-5, atol=1e-6)


def test_a_fit_that_is_taken_up_again_is_the_same(tmp_path):
    def adam():
        return Plain(make_optimizer=lambda parameters: torch.optim.Adam(parameters, 0.05))

    local = {
        "workers": 2,
        "steps": 4,
        "start": 4,
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
    }
    data, file = loader(4), tmp_path / "half.ckpt"  # one batch: Lightning begins an epoch anew
    whole = adam()
    fit(whole, data, callbacks=[LocalSGDCallback(**local)], max_steps=15)
    for half in (2, 5, 7, 8):  # before the start, in a round, at its end
        module = adam()
        fit(module, data, callbacks=[LocalSGDCallback(**local)], max_steps=half).save_checkpoint(
            file
        )
        for name, mean in weights(module).items():
            assert torch.equal(torch.load(file)["state_dict"][name], mean)
        second = adam()
        fit(second, data, callbacks=[LocalSGDCallback(**local)], max_steps=15, ckpt_path=file)
        assert_equal(weights(second), weights(whole))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 0),
        ("workers", 1.5),
        ("steps", 0),
        ("steps", True),
        ("start", -1),
        ("outer_learning_rate", 0),
        ("outer_learning_rate", float("nan")),
        ("outer_momentum", 1.0),
        ("outer_momentum", "big"),
        ("outer_nesterov", 2),
    ],
)
def test_bad_numbers_are_refused(name, value):
    with refuses(f"local.{name}", value):
        LocalSGDCallback(**{name: value})


class Noisy(Plain):
    def on_train_batch_end(self, *args):
        with torch.no_grad():
            next(self.parameters()).add_(0.1)


class Averaging(Plain):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))


class Skips(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx != 2 else None


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("module", "callbacks", "options", "culprit"),
    [
        (Linear(torch.optim.LBFGS), [], {}, "LBFGS"),
        (Linear(manual=True), [], {}, "Linear"),
        (Plain(), [DelayCallback(2)], {}, "optim.delay = 2"),
        (Plain(), [GradientNorms()], {}, "GradientNorms"),
        (Plain(), [ReadingsCallback(["lipschitz"])], {}, "ReadingsCallback"),
        (Plain(), [stock.WeightAveraging()], {}, "WeightAveraging"),
        (Plain(), [], {"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches = 2"),
        (Averaging(), [], {}, "network.1.running_mean"),
        (Noisy(), [], {}, "Noisy"),
        (Skips(), [], {}, "Skips"),
        (Plain(make_optimizer=lambda p: Counting(p, 0.1)), [], {}, "Counting"),
    ],
)
def test_what_workers_cannot_share_is_refused(module, callbacks, options, culprit):
    local = LocalSGDCallback(2, 3)
    with refuses("local.workers", 2) as caught:
        fit(module, loader(), callbacks=[local, *callbacks], max_steps=6, **options)
    assert culprit in caught.value.allowed


@pytest.mark.parametrize(("n", "size", "examples"), [(20, 4, 4), (20, 9, 2)])
def test_a_batch_that_the_workers_cannot_share_is_refused(n, size, examples):
    with refuses("local.workers", 3) as caught:
        fit(Plain(), loader(n, size), callbacks=[LocalSGDCallback(3)], max_steps=6)
    assert f"{examples} examples" in caught.value.allowed
    fit(Plain(), loader(20, 9, drop_last=True), callbacks=[LocalSGDCallback(3)], max_steps=6)


def test_a_frozen_batch_norm_serves():
    module = Averaging()
    module.network[1].eval()
    of(module, 4, LocalSGDCallback(2, 3))
