"""What can be stacked, and what says why it cannot."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.eligible import ineligibility_reason
from lit_dps.engines.stackable_loss import _close, _close_gradients
from lit_dps.module import ImageClassifier
from lit_dps.training.workload import Workload
from tests.support.conformance import assert_conform
from tests.support.runs import train
from tests.support.setups import training_of
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import EXAMPLES, GOAL, both, trials, workload


class OwnLoss(ImageClassifier):
    def loss(self, batch):
        x, y = batch
        return nn.functional.multi_margin_loss(self(x), y)


class OwnOptimizer(ImageClassifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate, momentum=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Decayed(ImageClassifier):
    """Decays its weights alone, and halves the rate of its biases."""

    def configure_optimizers(self):
        weights = [each for each in self.parameters() if each.ndim > 1]
        biases = [each for each in self.parameters() if each.ndim == 1]
        rate = self.hparams.learning_rate
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 2 * rate}]
        optimizer = torch.optim.SGD(groups, rate, momentum=0.5)
        factors = [lambda step: 1.0, lambda step: 0.5 ** (step // 10)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Frozen(ImageClassifier):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        next(iter(self.network.parameters())).requires_grad_(False)
        self.register_buffer("scale", torch.rand(1) + 0.5)

    def forward(self, x):
        return self.network(x) * self.scale


@pytest.mark.parametrize(
    "name",
    [
        "OwnLoss",
        "OwnOptimizer",
        pytest.param("Decayed", marks=pytest.mark.long),
        "Frozen",
        pytest.param("Locked", marks=pytest.mark.long),
    ],
)
def test_a_module_of_the_users_is_stacked(name):
    used = workload(class_path=f"tests.unit.engines.test_eligible.{name}")
    ours, reference = both(used, trials(Cell(16, 0.0), Cell(16, 0.5), rates=[0.02, 0.05, 0.002]))
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []


class Drawing(nn.Module):
    """Draws from NumPy, with little effect."""

    def forward(self, x):
        return x + 1e-9 * np.random.rand()


class Noise(nn.Module):
    def forward(self, x):
        return x + 1e-9 * torch.randn_like(x)


class Counting(ImageClassifier):
    """Its loss counts its calls, without an effect."""

    calls = 0

    def loss(self, batch):
        self.calls += 1
        return super().loss(batch)


class Normalized(nn.Module):
    def __init__(self, layer: str = "BatchNorm1d"):
        super().__init__()
        last = {
            "BatchNorm1d": nn.BatchNorm1d(32),
            "Dropout": nn.Dropout(0.1),
            "numpy": Drawing(),
            "Noise": Noise(),
        }.get(layer)
        last = nn.BatchNorm1d(32, track_running_stats=False) if last is None else last
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), last, nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, x):
        out = self.linear(x.flatten(1))
        return out if out.sum() > 0 else 2 * out


class OwnStep(ImageClassifier):
    def training_step(self, batch, batch_idx):
        return 2 * super().training_step(batch, batch_idx)


class Adam(ImageClassifier):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), amsgrad=True)


class HalfTrained(ImageClassifier):
    def configure_optimizers(self):
        return torch.optim.SGD(list(self.parameters())[:2], lr=0.1)


class OwnParameters(ImageClassifier):
    """Trains its last tensors, as adapters do; the other parameters keep their values."""

    def parameters(self, recurse=True):
        return iter(list(super().parameters(recurse))[-2:])


class Scaled(ImageClassifier):
    def on_train_start(self):
        for parameter in self.parameters():
            parameter.data.mul_(0.5)


class Stepping(ImageClassifier):
    def loss(self, batch):
        return super().loss(batch) / (1 + self.trainer.global_step)


class Epochs(ImageClassifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1),
        }


class Hooked(ImageClassifier):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        next(iter(self.network.parameters())).register_hook(lambda gradient: 0 * gradient)


class Locked(ImageClassifier):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.lock = threading.Lock()


class Fickle(ImageClassifier):
    calls = 0

    def per_example_error(self, batch):
        self.calls += 1
        return super().per_example_error(batch) + (self.calls % 2 == 0)


class Borderline(ImageClassifier):
    """Says of each example at every second call that it is just right, else that it is just
    wrong."""

    calls = 0

    def per_example_error(self, batch):
        self.calls += 1
        return 0 * super().per_example_error(batch) + (1 - 1e-6 * (self.calls % 2 == 0))


class Smoothed(ImageClassifier):
    def __init__(self, smoothing: float = 0.0, **arguments):
        super().__init__(**arguments)
        self.smoothing = smoothing

    def loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y, label_smoothing=self.smoothing)


def test_trials_that_differ_in_more_than_tensors_are_trained_by_themselves():
    used = workload(class_path="tests.unit.engines.test_eligible.Smoothed")
    params = [{"model.learning_rate": 0.05, "model.smoothing": s} for s in (0.0, 0.5, 0.0)]
    asked = [Trial(Cell(16, 0.0), i, p) for i, p in enumerate(params)]
    ours, reference = both(used, asked, {**GOAL, "max_steps": 16})
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []


def network(name: str, **init_args) -> dict:
    return {
        "network": {
            "class_path": f"tests.unit.engines.test_eligible.{name}",
            "init_args": init_args,
        }
    }


def own(name: str) -> dict:
    return {"class_path": f"tests.unit.engines.test_eligible.{name}"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (network("Normalized", layer="alone"), "not the mean over the examples"),
        (network("Normalized", layer="numpy"), "random numbers of NumPy"),
        (network("Normalized", layer="Noise"), "random numbers in a training step other than"),
        (own("Counting"), "changes an attribute"),
        (network("Branching"), "needs the value of a tensor"),
        (own("OwnStep"), "overrides training_step"),
        (own("Adam"), "Adam as configured"),
        (own("HalfTrained"), "differ from the trained parameters"),
        (own("OwnParameters"), "differ from the trained parameters"),
        (
            {
                "trainer": {
                    "callbacks": [{"class_path": "lightning.pytorch.callbacks.DeviceStatsMonitor"}]
                }
            },
            "trainer.callbacks contains DeviceStatsMonitor",
        ),
        (own("Scaled"), "overrides on_train_start"),
        (own("Stepping"), "reads trainer.global_step"),
        (own("Epochs"), "does not step once per optimizer step"),
        (own("Hooked"), "hooks on its parameters"),
        (own("Fickle"), "per_example_error of Fickle differs"),
        (own("Borderline"), "per_example_error of Borderline differs"),
        ({"trainer": {"limit_train_batches": 3}}, "trainer.limit_train_batches"),
    ],
    ids=str,
)
def test_what_cannot_be_stacked_says_why_and_runs_one_at_a_time(arguments, reason):
    asked = trials(Cell(16, 0.0), rates=[0.02, 0.1])
    goal = {**GOAL, "max_steps": 8, "early_reject": "per_example_error" in reason}
    ours = train(asked, workload(**arguments), goal, size=16)
    assert "stacked" not in {result.engine for result in ours}
    for result in ours:
        assert reason in result.engine_reason
    alone = train(asked, workload(**arguments), goal, lean=False)
    assert [replace(r, seconds=0) for r in ours] == [replace(r, seconds=0) for r in alone]


def test_a_per_example_error_of_its_own_is_asked_early_checks_alone():
    """Else Lightning's validation says how many are wrong."""
    trial, used = trials(Cell(16, 0.0), rates=[0.02])[0], workload(**own("Fickle"))
    for early, why in (
        (True, None),
        (False, "Fickle overrides per_example_error, and goal.early_reject is false"),
    ):
        training = training_of(used, {**GOAL, "early_reject": early})
        assert ineligibility_reason(training, trial) == why


@pytest.mark.parametrize("point", [1, 9])
def test_rounding_at_a_maximum_is_no_reason_against_a_stack(point):
    """With these initial weights two values of a pooling window are equal up to rounding."""
    used = Workload(
        {
            "class_path": "lit_dps.module.ImageClassifier",
            "init_args": {"network": {"class_path": "lit_dps.models.SimpleCNN"}},
        },
        {"class_path": "lit_dps.data.Digits"},
        {"accelerator": "cpu"},
    )
    trial = Trial(Cell(16), point, {"model.learning_rate": 0.01})
    training = training_of(used, {"error": 0.08, "check_interval": 4, "max_steps": 8})
    assert ineligibility_reason(training, trial, stacked=True) is None


def test_gradients_are_close_but_for_kinks():
    gradient = torch.linspace(-1.0, 1.0, 2000).expand(2, -1)
    with_kink = gradient.clone()
    with_kink[0, 3] += 0.05
    assert not _close(with_kink, gradient, 1.0)
    assert _close_gradients(with_kink, gradient, 1.0)
    assert not _close_gradients(gradient * 1.02, gradient, 1.0)
    assert not _close_gradients(gradient.flip(1), gradient, 1.0)
    assert not _close_gradients(gradient * math.nan, gradient, 1.0)
