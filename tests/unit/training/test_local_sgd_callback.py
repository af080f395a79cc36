"""LocalSGDCallback on any module: masks, parts of the batch, going on, and what workers cannot
share."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import callbacks as stock
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.readings import GradientNorms, SmoothnessCallback
from lit_dps.training import DelayCallback, LocalSGDCallback, PruningCallback
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
    ("given", "said"),
    [
        ({"workers": 0}, "local.workers: 0 is not allowed; a whole number of workers, 1 or more"),
        ({"workers": 1.5}, "local.workers: 1.5 is not allowed"),
        ({"steps": 0}, "local.steps: 0 is not allowed; a whole number of steps, 1 or more"),
        ({"steps": True}, "local.steps: True is not allowed"),
        ({"start": -1}, "local.start: -1 is not allowed; a whole number of steps, 0 or more"),
        (
            {"outer_learning_rate": 0},
            "local.outer_learning_rate: 0 is not allowed; a number above 0",
        ),
        ({"outer_learning_rate": float("nan")}, "local.outer_learning_rate: nan is not allowed"),
        (
            {"outer_momentum": 1.0},
            r"local.outer_momentum: 1.0 is not allowed; a number in \[0, 1\)",
        ),
        ({"outer_momentum": "big"}, "local.outer_momentum: 'big' is not allowed"),
        ({"outer_nesterov": 2}, "local.outer_nesterov: 2 is not allowed; true or false"),
    ],
)
def test_bad_numbers_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        LocalSGDCallback(**given)


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
    ("module", "callbacks", "options", "said"),
    [
        (
            Linear(torch.optim.LBFGS),
            [],
            {},
            "1 for LBFGS, which evaluates the loss itself in a step",
        ),
        (Linear(manual=True), [], {}, "1 for Linear, which steps its optimizers itself"),
        (Plain(), [DelayCallback(2)], {}, "1 with optim.delay = 2"),
        (Plain(), [GradientNorms()], {}, "1 with GradientNorms"),
        (Plain(), [SmoothnessCallback(2)], {}, "1 with SmoothnessCallback"),
        (Plain(), [stock.WeightAveraging()], {}, "1 with WeightAveraging"),
        (Plain(), [], {"accumulate_grad_batches": 2}, "1 with trainer.accumulate_grad_batches = 2"),
        (
            Averaging(),
            [],
            {},
            "1 for Averaging, which changes network.1.running_mean in training, as batch norm",
        ),
        (Noisy(), [], {}, "1 for Noisy, whose weights something else than the optimizer moves"),
        (Skips(), [], {}, "1 for Skips, which leaves out batches without a loss"),
        (
            Plain(make_optimizer=lambda p: Counting(p, 0.1)),
            [],
            {},
            "1 for Counting, which keeps state in its groups",
        ),
    ],
)
def test_what_workers_cannot_share_is_refused(module, callbacks, options, said):
    with pytest.raises(ConfigError, match=f"local.workers: 2 is not allowed; {said}"):
        fit(
            module, loader(), callbacks=[LocalSGDCallback(2, 3), *callbacks], max_steps=6, **options
        )


@pytest.mark.parametrize(
    ("n", "size", "said"),
    [
        (20, 4, "a divisor of the 4 examples of a training batch"),
        (20, 9, "a divisor of the 2 examples of the last"),
    ],
)
def test_a_batch_that_the_workers_cannot_share_is_refused(n, size, said):
    with pytest.raises(ConfigError, match=f"local.workers: 3 is not allowed; {said}"):
        fit(Plain(), loader(n, size), callbacks=[LocalSGDCallback(3)], max_steps=6)
    fit(Plain(), loader(20, 9, drop_last=True), callbacks=[LocalSGDCallback(3)], max_steps=6)


def test_a_frozen_batch_norm_serves():
    module = Averaging()
    module.network[1].eval()
    of(module, 4, LocalSGDCallback(2, 3))
