"""Schedules that take the same steps at all batch sizes are reported before a study."""

from __future__ import annotations

import re

import pytest
from torch.optim import lr_scheduler

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Range
from lit_dps.module import ImageClassifier
from lit_dps.study.preflight.dry_run import dry_run
from lit_dps.training.workload import Workload
from tests.support.setups import setup_of

DATA = {"class_path": "lit_dps.data.Digits", "init_args": {}}
NETWORK = {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [8]}}


class BySteps(ImageClassifier):
    """SGD with a factor of the rate at each step."""

    def factor(self, step):
        raise NotImplementedError

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = lr_scheduler.LambdaLR(optimizer, self.factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Milestone(BySteps):
    def factor(self, step):
        return 1.0 if step < 20 else 0.1


class WarmUp(BySteps):
    def factor(self, step):
        return min(1.0, (step + 1) / 11)


class MilestoneOfExamples(BySteps):
    def factor(self, step):
        return 1.0 if step * self.trainer.datamodule.batch_size < 320 else 0.1


class Searched(BySteps):
    """A milestone that follows a searched number."""

    def factor(self, step):
        return 1.0 if step < 10 + 20 * self.hparams.momentum else 0.1


class Linear(BySteps):
    def factor(self, step):
        return 1 - step / 40


def notes(kind: type, batch_sizes=(16, 64)) -> list[str]:
    """Return the notes of a dry run about schedules."""
    model = {
        "class_path": f"{__name__}.{kind.__name__}",
        "init_args": {"network": NETWORK, "optimizer": "sgd"},
    }
    space = {
        "model.learning_rate": Range(1e-3, 1.0, "log"),
        "model.momentum": Range(0.1, 0.9, "linear"),
    }
    config = StudyConfig(batch_sizes=list(batch_sizes), sparsities=[0.0], space=space, trials=1)
    goal = {"error": 0.05, "check_interval": 4, "max_steps": 40}
    workload = Workload(model, DATA, {"accelerator": "cpu"})
    found = dry_run(setup_of(config, StorageConfig(), workload, goal))[1]
    return [note for note in found if "at every batch size" in note]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "part", "steps"), [(Milestone, "schedule", 20), (WarmUp, "warm-up", 10)]
)
def test_a_part_of_fixed_steps_is_reported_in_steps_and_examples(kind, part, steps):
    (note,) = notes(kind)
    assert part in note and "\n" not in note
    assert list(map(int, re.findall(r"\d+", note.replace(",", "")))) == [
        steps,
        steps * 16,
        16,
        steps * 64,
        64,
    ]
    assert notes(kind, batch_sizes=[16]) == []


@pytest.mark.parametrize("kind", [MilestoneOfExamples, Searched, Linear])
def test_examples_searched_lengths_and_all_steps_of_a_trial_are_silent(kind):
    assert notes(kind) == []
