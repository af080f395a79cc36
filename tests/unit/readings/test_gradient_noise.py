"""The gradient noise scale: its estimate from readings, and the callback that takes them along any
run."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.noise_scale import NoiseScale, noise_scale, reading_batch_size, unbiased_moments
from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.parallel.ddp import trainer_arguments
from lit_dps.readings import NoiseScaleCallback
from lit_dps.readings.callback import ReadingsCallback
from lit_dps.readings.gradient_noise import GradientNorms
from lit_dps.readings.registry import ReadingSpec
from tests.support.ranks import on_ranks
from tests.support.scaled_loss import ScaledLoss
from tests.support.tiny import QUIET, Plain, assert_equal, fit, loader, weights
from tests.unit.readings.test_gradient_norms import NormOfSteps

DIMENSIONS, SPREAD = 10, 3.0


class Drift(LightningModule):
    """The loss w . x: the gradient of an example is x itself, whatever the weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIMENSIONS))

    def training_step(self, batch, batch_idx):
        return (batch[0] @ self.weight).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def drifting(n: int, batch_size: int) -> DataLoader:
    x = torch.randn(n, DIMENSIONS, generator=torch.Generator().manual_seed(1)) * SPREAD + 0.5
    return DataLoader(TensorDataset(x), batch_size)


TRUE_SQUARE, TRUE_VARIANCE = DIMENSIONS * 0.25, DIMENSIONS * SPREAD**2


def test_two_sizes_solve_the_two_equations():
    squared, variance = 2.5, 90.0
    assert unbiased_moments(
        8, 32, squared + variance / 8, squared + variance / 32
    ) == pytest.approx((squared, variance))


def test_a_study_reads_at_the_smallest_batch_size_that_is_not_small():
    assert (
        reading_batch_size([4, 16, 64, 256]) == 64
        and reading_batch_size([32, 64]) == 32
        and reading_batch_size([8, 4]) == 8
    )
    assert reading_batch_size([reading_batch_size([4, 256]), reading_batch_size([16, 64])]) == 64


# A test below compares accumulated batches with halves.
@pytest.mark.parametrize("accumulated", [1, pytest.param(4, marks=pytest.mark.long)])
def test_the_callback_finds_the_moments_of_a_known_gradient(accumulated):
    callback = NoiseScaleCallback()
    fit(
        Drift(),
        drifting(40_000, 32 // accumulated),
        callbacks=[callback],
        accumulate_grad_batches=accumulated,
        max_steps=1000,
    )
    found = callback.scale()
    assert (found.batch_size, found.readings) == (32, 1000)
    assert abs(found.variance - TRUE_VARIANCE) < 3 * found.variance_error < 0.1 * TRUE_VARIANCE
    assert (
        abs(found.squared_gradient - TRUE_SQUARE)
        < 3 * found.squared_gradient_error
        < 0.5 * TRUE_SQUARE
    )
    assert found.low < TRUE_VARIANCE / TRUE_SQUARE < found.high and found.resolved


def test_halves_and_accumulated_batches_read_the_same():
    """Two accumulated batches are the halves of the batch of both."""
    halves, accumulated = NoiseScaleCallback(), NoiseScaleCallback()
    one, two = Plain(), Plain()
    fit(one, loader(batch_size=4), callbacks=[halves], max_steps=5)
    fit(two, loader(batch_size=2), callbacks=[accumulated], accumulate_grad_batches=2, max_steps=5)
    assert halves.readings["step"] == accumulated.readings["step"] == [0, 1, 2, 3, 4]
    for key in ("squared_gradient", "variance"):
        assert halves.readings[key] == pytest.approx(accumulated.readings[key], rel=1e-4)


def test_it_leaves_training_as_it_is():
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    state = {key: value.clone() for key, value in network.state_dict().items()}
    ends = []
    for callbacks in ([], [NoiseScaleCallback(interval=2, start=1)]):
        network.load_state_dict(state)
        torch.manual_seed(5)
        fit(Plain(network), loader(shuffle=True), callbacks=callbacks, max_steps=6)
        ends.append(
            {**weights(network), **{name: b.clone() for name, b in network.named_buffers()}}
        )
    assert_equal(*ends)
    assert callbacks[0].readings["step"] == [1, 3, 5]


def read_by_ranks(batch_size: int, scales: bool = False) -> tuple[dict, float]:
    torch.manual_seed(3)
    callback, module = NoiseScaleCallback(), ImageClassifier(MLP(hidden=[16]), learning_rate=0.05)
    fit(
        module,
        datamodule=Digits(batch_size=batch_size),
        callbacks=[callback],
        max_steps=4,
        **trainer_arguments({**QUIET, "plugins": [ScaledLoss()] if scales else []}),
    )
    return callback.readings, callback.batch_size


def test_ranks_read_before_and_after_they_add_up():
    alone, size = read_by_ranks(8)
    for readings, batch_size in on_ranks(
        2, read_by_ranks, 8
    ):  # two parts of four: the halves of the batch
        assert batch_size == size == 8
        for key, values in readings.items():
            assert values == pytest.approx(alone[key], rel=1e-3)


def test_a_scaled_loss_does_not_change_what_ranks_read():
    alone, _ = read_by_ranks(8)
    for readings, _ in on_ranks(2, read_by_ranks, 8, True):
        for key, values in readings.items():
            assert values == pytest.approx(alone[key], rel=1e-3)


def norms_of_fused(is_fused: bool) -> tuple[list[float], list[float]]:
    """The squared norms, and the norms, of gradients under a scaled loss."""
    torch.manual_seed(3)
    norms = GradientNorms()
    readings = ReadingsCallback([ReadingSpec(NormOfSteps, "NormOfSteps")])

    class Fused(ImageClassifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, fused=is_fused)

    module = Fused(MLP(hidden=[16]), learning_rate=0.05)
    arguments = {"callbacks": [norms, readings], "max_steps": 4, "plugins": [ScaledLoss()]}
    fit(module, datamodule=Digits(batch_size=8), **arguments)
    return norms.readings["whole"], readings.columns["gradient_norm"]["gradient_norm"]


def test_an_optimizer_that_unscales_in_its_step_has_the_same_norms():
    for fused, plain in zip(norms_of_fused(True), norms_of_fused(False), strict=True):
        assert len(plain) == 4
        assert fused == pytest.approx(plain, rel=1e-4)


def test_parts_are_averaged_before_they_are_divided():
    rng = np.random.default_rng(0)
    readings = {"variance": rng.normal(10, 5, 400), "squared_gradient": rng.normal(0.5, 1, 400)}
    found = noise_scale(readings, 16)
    mean = readings["variance"].mean() / readings["squared_gradient"].mean()
    assert found.value == pytest.approx(mean) and found.low < mean < found.high


def test_limits_cover_the_truth_as_often_as_they_say():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(400):
        readings = {"variance": rng.normal(10, 4, 64), "squared_gradient": rng.normal(0.5, 0.8, 64)}
        found = noise_scale(readings, 16)
        hits += found.low <= 20 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def test_it_is_stored_whole():
    rng = np.random.default_rng(2)
    for gradient in (0.0, 1.0):
        found = noise_scale(
            {"variance": rng.normal(10, 1, 64), "squared_gradient": rng.normal(gradient, 0.1, 64)},
            16,
        )
        stored = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert NoiseScale.from_dict(stored) == found and (stored["high"] is None) == (gradient == 0)


def test_without_a_gradient_it_is_not_resolved_but_bounded():
    rng = np.random.default_rng(2)
    found = noise_scale(
        {"variance": rng.normal(10, 1, 64), "squared_gradient": rng.normal(0, 0.1, 64)}, 16
    )
    assert not found.resolved and math.isnan(found.value) and found.low > 50
    assert str(found).startswith("not resolved (above ") and str(found).endswith("] includes 0")
    assert noise_scale({"variance": [1.0], "squared_gradient": [1.0]}, 16) is None
    assert noise_scale({"variance": [1.0, math.nan], "squared_gradient": [1.0, 1.0]}, 16) is None


def test_what_it_cannot_read_is_refused():
    for values, key, value in (((0,), "interval", 0), ((1, -1), "start", -1)):
        with pytest.raises(ConfigError) as caught:
            NoiseScaleCallback(*values)
        assert (caught.value.key, caught.value.value) == (f"NoiseScaleCallback.{key}", value)
    with pytest.raises(UserError) as refused:
        fit(Plain(), loader(batch_size=1), callbacks=[NoiseScaleCallback()], max_steps=1)
    assert (refused.value.key, refused.value.value) == ("NoiseScaleCallback", 1)
    manual = Plain()
    manual.automatic_optimization = False
    with pytest.raises(ConfigError) as caught:
        fit(manual, callbacks=[NoiseScaleCallback()], max_steps=1)
    assert (caught.value.key, caught.value.value) == ("NoiseScaleCallback", "Plain")
