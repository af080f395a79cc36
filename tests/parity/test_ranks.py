"""On real MNIST, dense and 90 % sparse: one, two and four ranks train the same trial of
Simple-CNN."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from lit_dps.core.trial import Cell, Trial
from lit_dps.training.workload import Built, Workload
from tests.parity.authors import DATA
from tests.support.ranks import on_ranks
from tests.support.runs import train_one

ROOT_OF_DATA = Path(os.environ.get("LIT_DPS_DATA", DATA))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ROOT_OF_DATA.is_dir(),
        reason="the real data sets are not on this machine (LIT_DPS_DATA)",
    ),
]
MODEL = {
    "class_path": "lit_dps.module.ImageClassifier",
    "init_args": {"network": {"class_path": "lit_dps.models.SimpleCNN"}, "optimizer": "momentum"},
}
MNIST = {"class_path": "lit_dps.data.MNIST", "init_args": {"root": str(ROOT_OF_DATA)}}
# a rate at which rounding is not amplified: at 0.05 a dense K of one rank, 88, was 184 of four on
# another kind of CPU
PARAMS = {"model.learning_rate": 0.01, "model.momentum": 0.9}
DENSE, SPARSE = Cell(32, 0.0), Cell(32, 0.9)
OTHERS = pytest.mark.long
# each cell and each number of ranks once, one pair to the bit; others are a long form
# Most steps: many reach the goal, few show the mask alone.
TO_GOAL, FEW = 400, 8
# No check of either cell comes near the strict goal: one of 0.14417 on one kind of CPU, which rounds
# to 0.14400, met 0.144. The dense checks have the errors 0.48, 0.25, 0.24, 0.19 and 0.13: the
# second one meets the easy goal.
EASY, STRICT = 0.35, 0.153
GOAL_PAIRS = [
    (DENSE, 4, EASY, TO_GOAL),
    pytest.param(SPARSE, 2, STRICT, FEW, marks=OTHERS),  # the pruning pass takes most of its time
    pytest.param(SPARSE, 2, STRICT, TO_GOAL, marks=OTHERS),
    pytest.param(SPARSE, 4, STRICT, TO_GOAL, marks=OTHERS),
    pytest.param(DENSE, 2, STRICT, TO_GOAL, marks=OTHERS),
    pytest.param(DENSE, 4, STRICT, TO_GOAL, marks=OTHERS),
]
MORE_STEPS = [(SPARSE, 4), (SPARSE, 2), (DENSE, 4)]
STEP_PAIRS = [(DENSE, 2), *(pytest.param(*pair, marks=OTHERS) for pair in MORE_STEPS)]


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


def train(cell: Cell, goal: dict, trainer: dict, pruning: dict) -> tuple:
    """Status, steps to result, curve and final weights."""
    torch.set_num_threads(1)
    workload = Watched(MODEL, MNIST, {"accelerator": "cpu", **trainer})
    result = train_one(Trial(cell, 0, PARAMS), workload, goal, pruning=pruning, lean=False)
    return result.status, result.steps, dict(result.curve), workload.end.weights.numpy()


@pytest.mark.parametrize(("cell", "world", "error", "max_steps"), GOAL_PAIRS, ids=str)
def test_several_ranks_find_the_mask_and_k_of_one(cell, world, error, max_steps):
    goal = {"error": error, "check_interval": 8, "max_steps": max_steps, "early_reject": True}
    status, steps, _, weights = on_ranks(1, train, cell, goal, {}, {})[0]
    if max_steps == TO_GOAL:
        assert steps is not None, "a trial that misses its goal tells less"
    for other in on_ranks(world, train, cell, goal, {}, {}):
        assert other[:2] == (status, steps)
        if cell.sparsity:
            assert ((other[-1] == 0) == (weights == 0)).all(), "another mask"


@pytest.mark.long  # the next test finds the mask and K* of one
@pytest.mark.parametrize(("cell", "world"), STEP_PAIRS, ids=str)
def test_several_ranks_take_the_steps_of_one(cell, world):
    """In float64: in float32 an activation that rounding moves across a kink sets two runs apart by
    1e-6 and more."""
    goal = {"error": 0.001, "check_interval": 8, "max_steps": 8, "early_reject": False}
    precise, no_pass = {"precision": "64-true"}, {"method": "magnitude"}
    *_, curve, weights = on_ranks(1, train, cell, goal, precise, no_pass)[0]
    for _, _, others, theirs in on_ranks(world, train, cell, goal, precise, no_pass):
        assert others["val_error"] == curve["val_error"]
        assert others["train_loss"] == pytest.approx(curve["train_loss"], rel=1e-10)
        np.testing.assert_allclose(theirs, weights, rtol=0, atol=1e-12)
