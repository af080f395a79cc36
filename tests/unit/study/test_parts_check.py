"""A batch in parts is compared with the batch, where a study accumulates gradients."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Range
from lit_dps.module import ImageClassifier
from lit_dps.study.preflight.check import check_configuration
from lit_dps.study.preflight.dry_run import dry_run
from lit_dps.training.workload import Workload
from tests.support.setups import setup_of

HERE = __name__
DATA = {"class_path": "lit_dps.data.Digits", "init_args": {}}
NETWORK = {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [8]}}


class SumOfTokens(ImageClassifier):
    """A mean over the pixels above 0.5, of which each image has another number."""

    def loss(self, batch):
        x, y = batch
        tokens = (x > 0.5).flatten(1).sum(1)
        return (F.cross_entropy(self(x), y, reduction="none") * tokens).sum() / tokens.sum()


class Contrastive(ImageClassifier):
    """Each image is compared with all others of the batch."""

    def loss(self, batch):
        x, y = batch
        logits = F.normalize(self(x))
        return F.cross_entropy(10 * logits @ logits.T, torch.arange(len(x)))


class Random(ImageClassifier):
    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self(x + torch.rand_like(x)), y)


class Normalized(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


class Dropped(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 8), nn.Dropout(0.5), nn.Linear(8, 10))


def notes(kind=ImageClassifier, network=NETWORK, accumulated=4) -> list[str]:
    """Return the notes of a dry run about parts of a batch."""
    model = {
        "class_path": f"{kind.__module__}.{kind.__name__}",
        "init_args": {"network": network, "optimizer": "sgd"},
    }
    space = {"model.learning_rate": Range(1e-3, 1.0, "log")}
    config = StudyConfig(batch_sizes=[16, 64], sparsities=[0.0], space=space, trials=1)
    trainer = {"accelerator": "cpu", "accumulate_grad_batches": accumulated}
    goal = {"error": 0.05, "check_interval": 4, "max_steps": 8}
    study = setup_of(config, StorageConfig(), Workload(model, DATA, trainer), goal)
    check_configuration(study)
    _, found = dry_run(study)
    return [note for note in found if "batch in parts" in note]


def test_a_mean_over_examples_is_silent_also_with_dropout():
    assert notes() == []
    assert notes(network={"class_path": f"{HERE}.Dropped"}) == []


@pytest.mark.parametrize(
    ("kind", "network", "cause"),
    [
        (SumOfTokens, NETWORK, "its loss is no mean over examples"),
        (Contrastive, NETWORK, "its loss is no mean over examples"),
        (ImageClassifier, {"class_path": f"{HERE}.Normalized"}, "batch norm (network.2)"),
    ],
)
def test_another_gradient_is_reported_with_its_size(kind, network, cause):
    (note,) = notes(kind, network)
    assert cause in note and "\n" not in note
    percent = float(re.search(r"of 16 examples by ([\d.e+]+) %", note).group(1))
    assert 1 < percent < 1000
    assert notes(kind, network, accumulated=1) == []


def test_the_number_is_the_difference_of_the_gradients():
    """The token mean of halves by hand, on the first batch of the largest cell."""
    from lit_dps.data import Digits
    from lit_dps.models import MLP
    from lit_dps.study.preflight.parts_check import PartsProbe
    from lit_dps.study.preflight.short_trial import perturb
    from tests.support import tiny

    torch.manual_seed(0)
    module = SumOfTokens(MLP(hidden=[8]), optimizer="sgd", learning_rate=0.1)
    seen = []

    class Watches(PartsProbe):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(batch)
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    probe = Watches()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(Exception):  # noqa: B017  the probe ends the run
        tiny.fit(module, datamodule=Digits(batch_size=16), callbacks=[probe], max_steps=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    perturb(module)
    (x, y), *_ = seen
    weights = list(module.parameters())

    def gradient(part):
        gradients = torch.autograd.grad(module.loss((x[part], y[part])), weights)
        return torch.cat([each.flatten().double() for each in gradients])

    whole = gradient(slice(0, 16))
    halves = (gradient(slice(0, 8)) + gradient(slice(8, 16))) / 2
    assert probe.difference == pytest.approx(float((halves - whole).norm() / whole.norm()), 1e-4)


def test_a_random_loss_is_unknown():
    (note,) = notes(Random)
    assert "is not known: its loss is random" in note
