"""A warm-up keeps its examples when the batch size changes, and a schedule ends where it should."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import lr_scheduler

from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.optim.schedule import RateSchedule
from lit_dps.training import ScheduleScalingCallback
from lit_dps.training.schedule_scaling import scaled_clock
from tests.support.errors import refuses
from tests.support.tiny import Plain, fit, loader

STEPS = 40
WARM_UP = 8


def shape(step: float) -> float:
    """A warm-up over 8 steps, then a cosine that ends at step 40."""
    if step < WARM_UP:
        return step / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


def lambda_lr(optimizer):
    return lr_scheduler.LambdaLR(optimizer, shape)


def sequential(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.125, 1.0, total_iters=7),
        lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 7),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [7])


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=STEPS, pct_start=0.2)


def warm_up_alone(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / WARM_UP))


class Scheduled(Plain):
    """Keeps the rate of each step."""

    def __init__(self, make=lambda_lr, **config):
        super().__init__()
        self.make, self.config, self.rates = make, config, []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = {"scheduler": self.make(optimizer), "interval": "step", **self.config}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_batch_start(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def rates(make=lambda_lr, callbacks=(), batch_size=4, steps=STEPS, config=None, **arguments):
    module = Scheduled(make, **(config or {}))
    data = loader(n=4 * 20, batch_size=batch_size)
    fit(module, data, callbacks=callbacks, max_steps=steps, **arguments)
    return module.rates


def test_the_clock_is_two_lines():
    clock = scaled_clock(8, 40, 2)
    assert [clock.at(t) for t in (0, 1, 2, 21, 40, 50)] == [0, 4, 8, 24, 40, 40]
    # A shorter horizon, and a longer warm-up.
    assert [scaled_clock(8, 40, 16, 32).at(t) for t in (8, 16, 24, 32)] == [4, 8, 24, 40]
    # A warm-up alone ends one step later; of an unknown length the rest keeps its pace.
    assert [scaled_clock(8, 9, 4).at(t) for t in (2, 4, 5, 9)] == [4, 8, 9, 9]
    assert [scaled_clock(8, None, 4).at(t) for t in (2, 4, 5, 9)] == [4, 8, 9, 13]
    # A warm-up beyond the horizon is all that the run sees.
    assert [scaled_clock(8, 40, 80).at(t) for t in (10, 40)] == [1, 4]
    # No warm-up before and after.
    assert [scaled_clock(0, 40, 0, 20).at(t) for t in (0, 5, 20)] == [0, 10, 40]


@pytest.mark.parametrize("make", [lambda_lr, sequential, one_cycle])
@pytest.mark.parametrize(("batch_size", "ratio"), [(4, 1), (8, 2), (2, 0.5), (12, 3)])
def test_the_warm_up_keeps_its_examples(make, batch_size, ratio):
    plain = rates(make)
    warm_up = max(range(STEPS), key=lambda step: (plain[step], -step))
    assert warm_up in (7, 8)
    scaled = rates(make, [ScheduleScalingCallback(4, warm_up)], batch_size)
    new = warm_up / ratio
    expected = []
    for step in range(STEPS):
        if step <= new:
            time = step * ratio
        else:
            time = warm_up + (step - new) * (STEPS - warm_up) / (STEPS - new)
        expected.append(plain[min(STEPS - 1, math.floor(time + 1e-9))])
    assert scaled == pytest.approx(expected)


def test_a_horizon_ends_the_schedule():
    """The warm-up stays, and 32 steps of decay are passed in 16."""
    scaled = rates(callbacks=[ScheduleScalingCallback(4, horizon=24)])
    assert scaled[:9] == pytest.approx([shape(t) for t in range(9)])
    assert scaled[9:24] == pytest.approx([shape(8 + 2 * (t - 8)) for t in range(9, 24)])
    assert scaled[24:] == pytest.approx([0.0] * 16, abs=1e-12)


def test_a_warm_up_alone_is_constant_after_it():
    scaled = rates(warm_up_alone, [ScheduleScalingCallback(4, WARM_UP)], batch_size=8)
    assert scaled == pytest.approx([0, 0.25, 0.5, 0.75] + [1.0] * 36)


def test_a_schedule_that_follows_the_batch_size_already_does_not_change():
    def halved(optimizer):
        return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))

    scaled = rates(halved, [ScheduleScalingCallback(4, WARM_UP)], batch_size=8)
    assert scaled == rates(halved, batch_size=8)
    by_epochs = {"interval": "epoch"}
    callback = ScheduleScalingCallback(4, WARM_UP)
    scaled = rates(callbacks=[callback], batch_size=8, config=by_epochs)
    assert scaled == rates(batch_size=8, config=by_epochs) and callback.clock is None


@pytest.mark.parametrize("given", [WARM_UP - 1, WARM_UP])
def test_the_warm_up_of_the_package_is_the_identity_at_the_reference(given):
    """Step t has the rate (t + 1) / 8: the largest rate is that of step 7, the eighth one."""

    def package(warm_up):
        return RateSchedule("cosine", STEPS, 0.0, warm_up).scheduler

    plain = rates(package(WARM_UP))
    callback = ScheduleScalingCallback(4, given)
    assert rates(package(WARM_UP), [callback]) == plain and plain[7] == 1 > plain[6]
    scaled = rates(package(WARM_UP), [callback], batch_size=2)
    assert [scaled.index(rate) for rate in plain[:8]] == [0, 2, 4, 6, 8, 10, 12, 14]
    # A module that follows the batch size has 4 steps of warm-up at twice the batch size.
    if given == WARM_UP:
        assert rates(package(4), [callback], batch_size=8) == rates(package(4), batch_size=8)


def test_a_constant_rate_has_no_clock():
    callback = ScheduleScalingCallback(4, WARM_UP)
    constant = rates(lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), [callback], 8)
    assert constant == [1.0] * STEPS and callback.clock is None


def test_accumulated_batches_count():
    scaled = rates(
        warm_up_alone, [ScheduleScalingCallback(4, WARM_UP)], steps=10, accumulate_grad_batches=2
    )
    assert scaled[::2] == pytest.approx([0, 0.25, 0.5, 0.75] + [1.0] * 6)


def test_the_data_of_the_package_declare_their_batch_size():
    class WarmClassifier(ImageClassifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            schedule = {"scheduler": warm_up_alone(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    callback = ScheduleScalingCallback(8, WARM_UP)
    fit(WarmClassifier(MLP()), Digits(batch_size=32), callbacks=[callback], max_steps=10)
    assert callback.clock is not None and callback.clock.new_warm_up == WARM_UP * 8 / 32


class StopAt(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= self.step


@pytest.mark.parametrize("stop", [2, 11])
def test_a_resumed_run_continues(tmp_path, stop):
    whole = rates(callbacks=[ScheduleScalingCallback(4, WARM_UP)], batch_size=12)
    first, rest = Scheduled(), Scheduled()
    scaling = [ScheduleScalingCallback(4, WARM_UP), StopAt(stop)]
    trainer = fit(first, loader(80, 12), callbacks=scaling, max_steps=STEPS)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    scaling = [ScheduleScalingCallback(4, WARM_UP)]
    fit(rest, loader(80, 12), callbacks=scaling, max_steps=STEPS, ckpt_path=tmp_path / "run.ckpt")
    assert (len(first.rates), len(rest.rates)) == (stop, STEPS - stop)
    assert first.rates + rest.rates == pytest.approx(whole)


def test_a_schedule_that_cannot_be_scaled_is_named(monkeypatch):
    class Manual(Scheduled):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            self.lr_schedulers().step()

    callback = ScheduleScalingCallback(4, WARM_UP)
    seen = []
    monkeypatch.setattr("lit_dps.training.schedule_scaling.rank_zero_warn", seen.append)
    fit(Manual(), loader(batch_size=8), callbacks=[callback], max_steps=3)
    assert callback.clock is None and "does not change LambdaLR" in seen[0]


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ((0,), "reference", 0),
        ((4, -1), "warm_up", -1),
        ((4, 8, 0), "horizon", 0),
    ],
)
def test_values_out_of_range_are_refused(arguments, key, value):
    with refuses(f"ScheduleScalingCallback.{key}", value):
        ScheduleScalingCallback(*arguments)
