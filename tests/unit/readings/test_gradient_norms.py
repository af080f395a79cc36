"""GradientNorms: the gradient's squared norm on a rank's part of the batch and on the whole."""

from __future__ import annotations

import math

import pytest
import torch

from lit_dps.core.errors import ConfigError
from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.parallel.ddp import trainer_arguments
from lit_dps.readings import GradientNorms, ReadingsCallback
from lit_dps.readings.gradient import GradientNorm
from lit_dps.readings.registry import ReadingSpec
from lit_dps.training import PruningCallback
from tests.support.ranks import on_ranks
from tests.support.tiny import QUIET, Plain, fit


class NormOfSteps(GradientNorm):
    when = "step"


def norms(batch_size: int, sparsity: float = 0.5) -> dict[str, list[float]]:
    """The readings, and what they should be: `wanted` from the whole batch's own gradients."""
    torch.manual_seed(3)
    callback, module = (
        GradientNorms(interval=2),
        ImageClassifier(MLP(hidden=[16]), learning_rate=0.05),
    )
    pruning, data, wanted = PruningCallback(sparsity), Digits(batch_size=batch_size), []

    def note(batch, i):
        if pruning.mask is not None:  # the pruning pass calls this hook before
            wanted.append(_square(module, pruning, batch))

    module.on_train_batch_start = note
    reading = ReadingsCallback([ReadingSpec(NormOfSteps, "NormOfSteps")])
    fit(
        module,
        datamodule=data,
        callbacks=[callback, pruning, reading],
        max_steps=4,
        **trainer_arguments(QUIET),
    )
    norms_read = reading.columns["gradient_norm"]["gradient_norm"][::2]
    return {**callback.readings, "wanted": wanted[::2], "read": [norm**2 for norm in norms_read]}


def _square(module, pruning, batch) -> float:
    gradients = torch.autograd.grad(module.loss(batch), list(module.parameters()))
    named = zip(dict(module.named_parameters()), gradients, strict=True)
    return sum(float((g * pruning.mask[name]).double().square().sum()) for name, g in named)


def test_gradient_norms_before_and_after_the_ranks_add_up():
    alone = norms(5)
    assert alone["part"] == alone["whole"] == pytest.approx(alone["wanted"])
    assert alone["read"] == pytest.approx(alone["wanted"])
    assert (alone["step"], alone["share"]) == ([0, 2], [1.0, 1.0])
    parts = on_ranks(2, norms, 5)
    assert [part["share"] for part in parts] == [[0.4, 0.4], [0.6, 0.6]]
    for part in parts:
        assert part["whole"] == pytest.approx(alone["whole"], rel=1e-4)
        assert part["read"] == pytest.approx(alone["read"], rel=1e-4)
        assert part["part"] == pytest.approx(part["wanted"], rel=1e-4)  # of this rank's examples
        assert part["part"] != pytest.approx(alone["whole"], rel=1e-2)


def test_a_rank_without_a_part_has_no_norm():
    none = on_ranks(2, norms, 1)[0]
    assert (
        none["share"] == [0.0, 0.0] and all(map(math.isnan, none["part"])) and none["whole"][0] > 0
    )


def test_what_it_cannot_read_is_refused():
    with pytest.raises(ConfigError) as caught:
        GradientNorms(0)
    assert (caught.value.key, caught.value.value) == ("GradientNorms.interval", 0)
    with pytest.raises(ConfigError) as caught:
        fit(Plain(), callbacks=[GradientNorms()], accumulate_grad_batches=2, max_steps=2)
    assert (caught.value.key, caught.value.value) == ("trainer.accumulate_grad_batches", 2)
