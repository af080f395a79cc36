"""The studies that are measured: the paper's MNIST x Simple-CNN x SGD, or the same on digits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lit_dps.core.attempt import Attempt
from lit_dps.core.config import StorageConfig
from lit_dps.core.trial import LIGHTNING, Cell, Status, Trial, TrialResult
from lit_dps.core.trial_config import GoalConfig
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.parallel.process import prepare_process
from lit_dps.study.setup import StudySetup

CONFIG = Path(__file__).parents[1] / "configs" / "mnist-simple-cnn-sgd.yaml"
MOMENTUM_CONFIG = CONFIG.with_name("mnist-simple-cnn-momentum.yaml")
UNREACHABLE = 1e-6  # a goal error below one mistake of any validation split here


def paper_setup(quick: bool, config: Path = CONFIG) -> StudySetup:
    """The paper's workload as the study command reads it; on digits if quick, which need no
    files."""
    from lit_dps.cli.study import read_setup

    prepare_process()
    options = ["--data=lit_dps.data.Digits"] if quick else []
    return read_setup([f"--config={config}", *options])


def varied(
    setup: StudySetup, folder: str | None = None, goal: dict[str, Any] | None = None, **study
) -> StudySetup:
    """The setup with other keys of its goal and its study, stored in a folder."""
    return dataclasses.replace(
        setup,
        study=dataclasses.replace(setup.study, **study),
        goal=dataclasses.replace(setup.goal, **(goal or {})),
        storage=setup.storage if folder is None else StorageConfig(folder=folder),
    )


def on_cpu(setup: StudySetup) -> StudySetup:
    """The setup with its trials on the CPU."""
    return on_device(setup, "cpu")


def on_device(setup: StudySetup, device: str) -> StudySetup:
    """The setup with its trials on one device, "cpu" or "cuda"."""
    workload = dataclasses.replace(
        setup.workload,
        trainer={**setup.workload.trainer, "accelerator": "gpu" if device == "cuda" else device},
    )
    return dataclasses.replace(setup, workload=workload)


def devices() -> list[str]:
    """The kinds of device that this machine has."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def middle_trial(setup: StudySetup, cell: Cell, point: int = 0) -> Trial:
    """A trial in the middle of the search box, which neither diverges nor depends on luck."""
    return Trial(
        cell, point, {key: box.at(0.5) for key, box in setup.study.space.items()}, setup.study.seed
    )


def run_trial(
    setup: StudySetup,
    trial: Trial,
    goal: GoalConfig,
    lean: bool = True,
    callbacks: tuple[Callback, ...] = (),
) -> TrialResult:
    """The result of a trial, by the interval loop if `lean`, else, and with callbacks, by
    Lightning's."""
    training = TrialSettings(setup.workload, goal, setup.pruning)
    name = "auto" if lean and not callbacks else LIGHTNING
    engine = TrialEngine(training, engine=name, callbacks=callbacks)
    run = Attempt(trial, goal.build())
    (result,) = engine.train(iter([run, None]).__next__)
    if result.status is Status.FAILED:
        raise RuntimeError(result.traceback)
    return result
