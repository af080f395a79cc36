"""Readings count the parameters that an optimizer trains, also where the others are not frozen."""

from __future__ import annotations

import math

import pytest
import torch

from lit_dps.core.trial import Cell, Trial
from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.readings import NoiseScaleCallback
from lit_dps.readings.gradient_noise import GradientNorms
from lit_dps.training.workload import Workload
from tests.support.runs import train_one
from tests.support.tiny import fit
from tests.unit.engines.test_engine import quiet  # noqa: F401

READINGS = [
    {"class_path": "curvature", "init_args": {"batches": 2}},
    {"class_path": "gradient_noise", "init_args": {"examples": 64, "part": 16}},
    "gradient_norm",
    {"class_path": "lipschitz", "init_args": {"interval": 4, "examples": 100, "noise": True}},
]
GOAL = {"error": 0.001, "check_interval": 4, "max_steps": 8}


class LastLayer(ImageClassifier):
    """Trains its last layer only.

    Args:
        freezes: Whether the other layers are frozen, and not only left out.
    """

    def __init__(self, freezes: bool = False, **arguments):
        super().__init__(MLP(hidden=[8]), **arguments)
        if freezes:
            self.network.requires_grad_(False)
            for parameter in self.last_parameters():
                parameter.requires_grad_(True)

    def last_parameters(self):
        return list(self.network.parameters())[-2:]

    def configure_optimizers(self):
        return torch.optim.SGD(self.last_parameters(), self.hparams["learning_rate"])


def used(freezes: bool) -> Workload:
    arguments = {"freezes": freezes, "learning_rate": 0.1}
    return Workload(
        {"class_path": f"{__name__}.LastLayer", "init_args": arguments},
        {"class_path": "lit_dps.data.Digits", "init_args": {}},
        {"accelerator": "cpu"},
    )


@pytest.mark.parametrize("how", [{}, {"lean": False}])
def test_parameters_that_no_optimizer_trains_do_not_count(how):
    results = []
    for freezes in (False, True):
        trial = Trial(Cell(16, 0.0), 0, {})
        results.append(train_one(trial, used(freezes), GOAL, readings=READINGS, **how))
    left_out, frozen = results
    assert not left_out.failure and not frozen.failure
    assert left_out.readings.keys() == frozen.readings.keys()
    for name, columns in left_out.readings.items():
        for column, values in columns.items():
            assert values == pytest.approx(frozen.readings[name][column], rel=1e-4), column
    for name, value in left_out.flags.items():
        assert value == pytest.approx(frozen.flags[name], rel=1e-4), name


def test_a_reading_of_a_user_runs_where_the_others_are_not_frozen():
    trial = Trial(Cell(16, 0.0), 0, {})
    sharpness = {"class_path": "tests.support.user_readings.Sharpness"}
    values = []
    for freezes in (False, True):
        result = train_one(trial, used(freezes), GOAL, readings=[sharpness])
        assert not result.failure
        values.append(result.readings["sharpness"]["sharpness"])
    assert values[0] == pytest.approx(values[1], rel=1e-3)


def noise(freezes: bool, batches: int) -> dict:
    torch.manual_seed(1)
    callback = NoiseScaleCallback()
    data = Digits(batch_size=16 // batches)
    fit(
        LastLayer(freezes, learning_rate=0.1),
        datamodule=data,
        callbacks=[callback],
        accumulate_grad_batches=batches,
        max_steps=4,
    )
    return callback.readings


@pytest.mark.parametrize("batches", [1, 2])
def test_the_noise_scale_is_of_the_trained_parameters(batches):
    left_out, frozen = noise(False, batches), noise(True, batches)
    for key, values in frozen.items():
        assert left_out[key] == pytest.approx(values, rel=1e-4)


def test_norms_are_of_the_trained_parameters():
    norms = []
    for freezes in (False, True):
        torch.manual_seed(1)
        callback = GradientNorms()
        module = LastLayer(freezes, learning_rate=0.1)
        fit(module, datamodule=Digits(batch_size=16), callbacks=[callback], max_steps=4)
        norms.append(callback.readings["whole"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert all(map(math.isfinite, norms[0]))
