"""Runs a trial that is interrupted and taken up again, each time by an engine of its own, as another process would."""

from __future__ import annotations

import dataclasses

import torch
from lightning.pytorch import Callback

from lit_dps.engines.trainer import LightningEngine
from lit_dps.training.checkpoints import Checkpoints
from lit_dps.training.workload import Workload
from lit_dps.trial import Trial
from tests.unit.test_engine import DATA, MODEL

GOAL = {"error": 0.02, "check_interval": 4, "max_steps": 60}
USER = {"class_path": "tests.unit.saved_user.Dropping"}
USER_DATA = "tests.unit.saved_user.NoisyData"


class Interrupted(BaseException):
    """As the study's own: no Exception."""


class Steps(Callback):
    """Counts the steps that are really taken, and keeps the last weights."""

    def __init__(self):
        self.taken = 0

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.taken += 1

    def on_train_end(self, trainer, pl_module):
        self.weights = torch.cat([t.detach().flatten().float() for t in pl_module.state_dict().values()])


def workload(model=MODEL, data=DATA, **trainer) -> tuple[Workload, Steps]:
    """A workload that counts steps."""
    steps = Steps()
    found = Workload(model, data, {"accelerator": "cpu", **trainer})
    build = found.build

    def counted(trial):
        built = build(trial)
        built.trainer["callbacks"] = [steps]
        return built

    object.__setattr__(found, "build", counted)
    return found, steps


class Study:
    """One kind of trial in a folder; every `run` is by an engine of its own, as in another process."""

    def __init__(self, folder, *, model=MODEL, data=DATA, goal=GOAL, study="a", minutes=1e-9, trainer=None, **options):
        self.folder, self.goal, self.study, self.minutes, self.said = folder, goal, study, minutes, []
        self.model, self.data, self.trainer, self.options = model, data, trainer or {}, options

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder, self.study, self.minutes, self.said.append)

    def run(self, trial: Trial, interrupt: int | None = None, saved: bool = True, **more):
        """The result without its time, and what was counted; interrupted after so many checks if that is given."""
        found, steps = workload(self.model, self.data, **self.trainer)
        checks = iter(range(1, 1000))

        def after_check():
            if next(checks) == interrupt:
                raise Interrupted

        asked = {"after_check": after_check, "checkpoints": self.checkpoints() if saved else None}
        engine = LightningEngine(found, self.goal, **{**self.options, **asked, **more})
        try:
            result = dataclasses.replace(engine.train(trial), seconds=0.0)
        except Interrupted:
            result = None
        return result, steps
