"""Find learning-rate schedules that count steps, although the grid has several batch sizes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.trial import SCHEDULE, WARM_UP, Trial
from lit_dps.engines.engine import TrialSettings
from lit_dps.study.probe_run import EndProbe, probe_fit
from lit_dps.study.setup import StudySetup
from lit_dps.training.rate_curve import rate_curve, schedule_shape


class _RateShape(Callback):
    """Keeps the steps of warm-up and schedule, and ends a fit before its first step."""

    def __init__(self) -> None:
        self.shape: dict[str, float] = {}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        # A schedule by epochs has no rates here, since the length of an epoch is not given.
        rates = rate_curve(trainer, pl_module, trainer.max_steps, None)
        self.shape = schedule_shape(rates, trainer.max_steps)
        raise EndProbe


def schedule_notes(setup: StudySetup, training: TrialSettings, trial: Trial) -> list[str]:
    """Return a note if warm-up or schedule take the same steps at all batch sizes.

    Such a part takes more examples at larger batch sizes. A schedule over all of `goal.max_steps`
    has no note: it ends where a trial ends.

    Args:
        setup: The study.
        training: Its settings, without side effects.
        trial: A trial at the smallest batch size.
    """
    smallest = trial.cell.batch_size
    largest = max(setup.study.batch_sizes)
    if smallest == largest:
        return []
    shapes = []
    for batch_size in (smallest, largest):
        cell = replace(trial.cell, batch_size=batch_size, sparsity=0.0)
        kept = _RateShape()
        with suppress(Exception):  # the short trials report errors of the user's code
            probe_fit(training, replace(trial, cell=cell), kept)
        shapes.append(kept.shape)
    parts = []
    for name, key in (("warm-up", WARM_UP), ("schedule", SCHEDULE)):
        steps = shapes[0].get(key)
        if steps is None or steps != shapes[1].get(key):
            continue
        if key == SCHEDULE:
            steps -= 1  # the last of them already has the final rate
            if steps <= shapes[0].get(WARM_UP, 0):
                continue  # a warm-up without decay
        if 1 < steps < setup.goal_of_trials.max_steps - 1:
            parts.append(
                f"the {name} of the learning rate takes {steps:,.0f} steps at every batch size, "
                f"which are {steps * smallest:,.0f} examples at B = {smallest} and "
                f"{steps * largest:,.0f} at B = {largest}"
            )
    if not parts:
        return []
    return [f"{'; '.join(parts)}. Search its length, or give it in examples, to compare them"]
