"""A batch in parts is compared with the batch, where a study accumulates gradients."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_dps.advice.batch_dependence import batch_dependence
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Trial
from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.study.preflight.check import check_configuration
from lit_dps.study.preflight.dry_run import dry_run
from lit_dps.study.preflight.parts_check import PartsProbe, check_parts
from lit_dps.study.probe_run import EndProbe
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload
from tests.support import tiny
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


class RandomSum(Random):
    """A sum over examples."""

    def loss(self, batch):
        return len(batch[0]) * super().loss(batch)


class Normalized(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


class Dropped(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 8), nn.Dropout(0.5), nn.Linear(8, 10))


def study_of(model: dict, accumulated: int, **arguments) -> StudySetup:
    space = {"model.learning_rate": Range(1e-3, 1.0, "log")}
    config = StudyConfig(batch_sizes=[16, 64], sparsities=[0.0], space=space, trials=1)
    trainer = {"accelerator": "cpu", "accumulate_grad_batches": accumulated, **arguments}
    goal = {"error": 0.05, "check_interval": 4, "max_steps": 8}
    return setup_of(config, StorageConfig(), Workload(model, DATA, trainer), goal)


def notes(kind=ImageClassifier, network=NETWORK, accumulated=4) -> list[str]:
    """Return the notes of a dry run about parts of a batch."""
    model = {
        "class_path": f"{kind.__module__}.{kind.__name__}",
        "init_args": {"network": network, "optimizer": "sgd"},
    }
    study = study_of(model, accumulated)
    check_configuration(study)
    found = dry_run(study)[1]
    return [note for note in found if "accumulated batches" in note]


def test_a_mean_over_examples_is_silent_also_with_dropout():
    assert notes() == []
    assert notes(network={"class_path": f"{HERE}.Dropped"}) == []


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (SumOfTokens, "as a mean over tokens does"),
        (Contrastive, "its loss is no mean over examples"),
    ],
)
def test_another_gradient_is_reported_with_its_size(kind, cause):
    (note,) = notes(kind)
    assert cause in note and "\n" not in note
    percent = float(re.search(r"of 16 examples by ([\d.e+]+) %", note).group(1))
    assert 1 < percent < 1000
    assert notes(kind, accumulated=1) == []


def test_batch_norm_is_reported_by_its_name():
    network = {"class_path": f"{HERE}.Normalized"}
    (note,) = notes(network=network)
    assert "batch norm (network.2)" in note
    assert notes(network=network, accumulated=1) == []


def notes_on_ranks(kind=ImageClassifier, network=NETWORK, **arguments) -> list[str]:
    """Return the notes about the parts of a batch that two ranks train."""
    model = {
        "class_path": f"{kind.__module__}.{kind.__name__}",
        "init_args": {"network": network, "optimizer": "sgd", "learning_rate": 0.01},
    }
    study = study_of(model, 1, devices=2, **arguments)
    return check_parts(study.trial_settings(), Trial(Cell(16), 0, {}, 0), study)


def test_ranks_that_divide_a_batch_are_checked_like_accumulation():
    assert notes_on_ranks() == []
    (note,) = notes_on_ranks(SumOfTokens)
    assert "2 ranks" in note and "as a mean over tokens does" in note
    network = {"class_path": f"{HERE}.Normalized"}
    (note,) = notes_on_ranks(network=network)
    assert "2 ranks" in note and "batch norm (network.2)" in note
    assert notes_on_ranks(network=network, sync_batchnorm=True) == []


def test_the_numbers_are_the_differences_of_the_gradients():
    """The token mean of halves by hand, on the batches of a fit without a learning rate."""
    torch.manual_seed(0)
    module = SumOfTokens(MLP(hidden=[8]), optimizer="sgd", learning_rate=1e-30)
    seen = []

    class Watches(PartsProbe):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(batch)
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    probe = Watches()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    tiny.fit(module, datamodule=Digits(batch_size=16), callbacks=[probe], max_steps=2)
    for name, tensor in module.state_dict().items():
        assert torch.allclose(tensor, before[name], atol=1e-20)
    weights = list(module.parameters())

    def gradient(x, y):
        gradients = torch.autograd.grad(module.loss((x, y)), weights)
        return torch.cat([each.flatten().double() for each in gradients])

    by_hand = []
    for x, y in seen:
        whole = gradient(x, y)
        halves = (gradient(x[:8], y[:8]) + gradient(x[8:], y[8:])) / 2
        by_hand.append(float((halves - whole).norm() / whole.norm()))
    assert len(seen) == 2 and probe.differences == pytest.approx(by_hand, 1e-4)


def test_a_random_loss_differs_only_on_average():
    assert notes(Random) == []
    (note,) = notes(RandomSum)
    assert "its loss is no mean over examples" in note
    percent = float(re.search(r"of 16 examples by ([\d.e+]+) %", note).group(1))
    assert percent == pytest.approx(50, abs=10)


@pytest.mark.parametrize("kind", [ImageClassifier, SumOfTokens, Contrastive, Random, RandomSum])
def test_study_and_advice_agree(kind):
    model = {
        "class_path": f"{kind.__module__}.{kind.__name__}",
        "init_args": {"network": NETWORK, "optimizer": "sgd", "learning_rate": 0.01},
    }
    study = study_of(model, accumulated=1)
    assert bool(batch_dependence(study, Trial(Cell(16), 0, {}, 0))) == bool(notes(kind))


@pytest.mark.parametrize(("kind", "compared"), [(ImageClassifier, 2), (SumOfTokens, 8)])
def test_equal_batches_end_the_comparison_early(kind, compared):
    module = kind(MLP(hidden=[8]), optimizer="sgd", learning_rate=0.01)
    probe = PartsProbe()
    with pytest.raises(EndProbe):
        tiny.fit(module, datamodule=Digits(batch_size=16), callbacks=[probe], max_steps=9)
    assert len(probe.differences) == compared
