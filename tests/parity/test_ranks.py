"""On real MNIST, dense and 90 % sparse: one, two and four ranks train the same trial of Simple-CNN."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lit_dps.engines.lightning import LightningEngine
from lit_dps.trial import Cell, Trial
from lit_dps.workload import Built, Workload
from tests.parity.authors import DATA
from tests.ranks import on_ranks

ROOT_OF_DATA = Path(os.environ.get("LIT_DPS_DATA", DATA))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ROOT_OF_DATA.is_dir(), reason="the real data sets are not on this machine (LIT_DPS_DATA)"),
]
MODEL = {
    "class_path": "lit_dps.module.ImageClassifier",
    "init_args": {"network": {"class_path": "lit_dps.models.SimpleCNN"}, "optimizer": "momentum"},
}
MNIST = {"class_path": "lit_dps.data.MNIST", "init_args": {"root": str(ROOT_OF_DATA)}}
PARAMS = {"model.learning_rate": 0.01, "model.momentum": 0.9}
GOAL = {"error": 0.06, "check_interval": 8, "max_steps": 200, "early_reject": True}


class Weights(Callback):
    """Keeps the weights that a run ended with."""

    def on_train_end(self, trainer, pl_module):
        self.weights = torch.cat([p.detach().flatten() for p in pl_module.parameters()])


class Watched(Workload):
    """A workload whose runs have one more callback."""

    def build(self, trial: Trial) -> Built:
        built = super().build(trial)
        object.__setattr__(self, "end", Weights())
        return Built(built.module, built.data, {**built.trainer, "callbacks": [self.end]})


def train(sparsity: float) -> tuple:
    torch.set_num_threads(1)
    workload = Watched(MODEL, MNIST, {"accelerator": "cpu"})
    result = LightningEngine(workload, GOAL).train(Trial(Cell(32, sparsity), 0, PARAMS))
    return result.status, result.steps, dict(result.curve), dict(result.kept), workload.end.weights.numpy()


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_one_two_and_four_ranks_train_the_same_trial(sparsity):
    alone = on_ranks(1, train, sparsity)[0]
    assert alone[1] is not None, "a trial that misses its goal tells less"
    weights = torch.from_numpy(alone[-1])
    for world in (2, 4):
        for status, steps, curve, kept, others in on_ranks(world, train, sparsity, timeout=1500):
            assert (status, steps, kept) == (alone[0], alone[1], alone[3])
            assert curve["val_error"] == pytest.approx(alone[2]["val_error"], abs=2 / 6000)
            assert curve["train_loss"] == pytest.approx(alone[2]["train_loss"], rel=1e-3)
            others = torch.from_numpy(others)
            assert torch.equal(others == 0, weights == 0), "another mask"
            torch.testing.assert_close(others, weights, rtol=1e-4, atol=1e-5)
