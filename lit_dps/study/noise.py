"""The noise scale of a study before it starts: a short run of its dense network, as a first guess
of B_crit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import UserError
from lit_dps.core.noise_scale import NoiseScale, read_at
from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.readings import NoiseScaleCallback
from lit_dps.study.setup import StudySetup

STEPS = 64  # of the short run, every one of them read
PATIENCE = 20.0  # seconds after which a slow run is left with what it has read


def first_guess(setup: StudySetup, go_on: Callable[[], None] = lambda: None) -> NoiseScale | str:
    """The noise scale along the first steps of a study's dense network; why there is none, if so,
    in one line.

    Metaparameters are those at the middle of their ranges, seeds those of point 0. It is run in
    this process, by one device, and stores nothing; what the module writes into its trial's folder
    is removed.

    Args:
        setup: A study that was checked.
        go_on: Called at every step; may raise to leave.
    """
    return short_run(setup, read_at(setup.study.batch_sizes), setup.middle, STEPS, PATIENCE, go_on)


def short_run(
    setup: StudySetup,
    batch_size: int,
    params: dict[str, float],
    steps: int,
    seconds: float,
    go_on: Callable[[], None] = lambda: None,
) -> NoiseScale | str:
    """As `first_guess`, of a run of so many steps at a batch size, or of as many as fit into so
    many seconds."""
    torch.set_num_threads(setup.study.threads)
    # of one network: workers of local SGD have its gradients on parts of the batch
    others = tuple(
        pair for pair in setup.study.cells[0].axes if not pair[0].startswith(("pruning.", "local."))
    )
    params = {key: value for key, value in params.items() if not key.startswith("local.")}
    trial = Trial(Cell(batch_size, 0.0, others), 0, params, setup.study.seed)
    run = Attempt(trial, setup.unreached(steps))
    reads, watch = NoiseScaleCallback(), _Watch(steps, seconds, go_on)
    try:
        with setup.workload.without_side_effects() as workload:
            training = dataclasses.replace(setup.training(), workload=workload, local={})
            TrainerEngine(training, (reads, watch)).train_one(run)
    except _Read:
        pass
    except UserError as error:
        return str(error)
    # of a module that cannot take a part of its batch, say; its trials tell what else fails
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return reads.scale() or f"{len(reads.readings['step'])} readings in {seconds:g} s are too few"


class _Read(Exception):
    """All steps were read."""


class _Watch(Callback):
    """Ends a run after so many steps or seconds."""

    def __init__(self, steps: int, seconds: float, go_on: Callable[[], None]):
        self.steps, self.end, self.go_on = steps, time.monotonic() + seconds, go_on

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: object
    ) -> None:
        self.go_on()
        if trainer.global_step >= self.steps or time.monotonic() > self.end:
            raise _Read
