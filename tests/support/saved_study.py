"""Runs a trial that is interrupted and taken up again, each time by an engine of its own, as
another process would."""

from __future__ import annotations

import dataclasses

import torch

from lit_dps.core.trial import Trial
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.workload import Workload
from tests.support.runs import train_one
from tests.unit.engines.test_engine import DATA, MODEL

GOAL = {"error": 0.02, "check_interval": 4, "max_steps": 60}
USER = {"class_path": "tests.support.saved_user.Dropping"}
USER_DATA = "tests.support.saved_user.NoisyData"


class Interrupted(BaseException):
    """As the study's own: no Exception."""


class Steps:
    """What was trained: the steps that the optimizers took, and the last weights."""

    def __init__(self):
        self.taken = 0
        self.module = None

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([t.detach().flatten().float() for t in self.module.state_dict().values()])


class Counted(Workload):
    """A workload that counts the steps of its optimizers."""

    def build(self, trial):
        built, steps = super().build(trial), self.steps
        configure, steps.module = built.module.configure_optimizers, built.module

        def counted():
            found = configure()
            optimizer = found["optimizer"] if isinstance(found, dict) else found
            optimizer.register_step_post_hook(lambda *_: setattr(steps, "taken", steps.taken + 1))
            return found

        built.module.configure_optimizers = counted
        return built


def workload(model=MODEL, data=DATA, **trainer) -> tuple[Workload, Steps]:
    """A workload that counts steps."""
    found = Counted(model, data, {"accelerator": "cpu", **trainer})
    object.__setattr__(found, "steps", Steps())
    return found, found.steps


class Study:
    """One kind of trial in a folder; every `run` is by an engine of its own, as in another
    process."""

    def __init__(
        self,
        folder,
        *,
        model=MODEL,
        data=DATA,
        goal=GOAL,
        study="a",
        minutes=1e-9,
        trainer=None,
        environment=None,
        **options,
    ):
        self.environment = environment or {}
        self.folder, self.goal, self.study, self.minutes, self.said = (
            folder,
            goal,
            study,
            minutes,
            [],
        )
        self.model, self.data, self.trainer, self.options = model, data, trainer or {}, options

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self.folder, self.study, self.minutes, self.said.append, self.environment
        )

    def run(self, trial: Trial, interrupt: int | None = None, saved: bool = True, **more):
        """The result without its time, and what was counted; interrupted after so many checks if
        that is given."""
        found, steps = workload(self.model, self.data, **self.trainer)
        checks = iter(range(1, 1000))

        def raise_if_stopped():
            if next(checks) == interrupt:
                raise Interrupted

        asked = {
            "raise_if_stopped": raise_if_stopped,
            "checkpoints": self.checkpoints() if saved else None,
        }
        try:
            result = train_one(trial, found, self.goal, **{**self.options, **asked, **more})
            result = dataclasses.replace(result, seconds=0.0)
        except Interrupted:
            result = None
        return result, steps
