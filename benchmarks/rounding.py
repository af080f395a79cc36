"""How far rounding alone moves K: trials run twice, the second time with every initial weight moved
by one last digit.

`python -m benchmarks.rounding --root DATA` prints K of both, and how many moved by more than one
check.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Cell, Trial
from lit_dps.core.trial_config import GoalConfig
from lit_dps.engines.lightning_loop import LightningLoop
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.parallel.process import prepare_process
from lit_dps.study.hardware import cpu_model
from lit_dps.training.workload import Built, Workload

MODEL = {
    "class_path": "lit_dps.module.ImageClassifier",
    "init_args": {"network": {"class_path": "lit_dps.models.SimpleCNN"}, "optimizer": "momentum"},
}
GOAL = GoalConfig(error=0.02, check_interval=16, max_steps=4000, early_reject=True)
PARAMS = {"model.learning_rate": 0.02, "model.momentum": 0.9}


class Nudge(Callback):
    """Moves every weight to the next larger number that float32 has."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.copy_(torch.nextafter(parameter, torch.tensor(torch.inf)))


class Nudged(Workload):
    """A workload whose trials begin one unit in the last place away."""

    def build(self, trial: Trial) -> Built:
        built = super().build(trial)
        return Built(
            built.module,
            built.data,
            {**built.trainer, "callbacks": [*built.trainer["callbacks"], Nudge()]},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", help="Folder of the data sets.")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=128)
    options = parser.parse_args()
    prepare_process()
    torch.set_num_threads(1)
    data = {"class_path": "lit_dps.data.MNIST", "init_args": {"root": options.root}}
    workloads = [kind(MODEL, data, {"accelerator": "cpu"}) for kind in (Workload, Nudged)]
    engines = [LightningLoop(TrialSettings(workload, GOAL)) for workload in workloads]
    goal = GOAL.build()
    cell, found = Cell(options.batch_size, 0.0), []
    for point in range(options.trials):
        runs = [Attempt(Trial(cell, point, PARAMS), goal) for _ in engines]
        for engine, run in zip(engines, runs, strict=True):
            engine.train(run)
        found.append([run.steps_to_result for run in runs])
        print(f"point {point}: K = {found[-1][0]}, nudged {found[-1][1]}", flush=True)
    both = [pair for pair in found if None not in pair]
    moved = sum(abs(a - b) > GOAL.check_interval for a, b in both)
    print(
        f"of {len(both)} trials that reached the goal both times, {moved} moved by more than one "
        f"check ({cpu_model()})"
    )


if __name__ == "__main__":
    main()
