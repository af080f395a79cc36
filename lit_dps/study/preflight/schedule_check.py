"""Find learning-rate schedules that count steps, although the grid has several batch sizes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.trial import SCHEDULE, WARM_UP, Trial
from lit_dps.engines.engine import TrialSettings
from lit_dps.storage.samplers import sobol_point
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

    Such a part takes more examples at larger batch sizes. A part whose length is searched has no
    note. Nor has a schedule over all of `goal.max_steps`, because it ends where a trial ends.

    Args:
        setup: The study.
        training: Its settings, without side effects.
        trial: A trial at the smallest batch size, with the first point of the search.
    """
    study = setup.study
    smallest, largest = trial.cell.batch_size, max(study.batch_sizes)
    if smallest == largest:
        return []
    lengths = _lengths(training, trial, setup.goal_of_trials.max_steps)
    if not lengths:
        return []
    cell = replace(trial.cell, batch_size=largest)
    other_point = sobol_point(study.space, study.seed, 1, study.scramble)
    for other in (replace(trial, cell=cell), replace(trial, params=other_point)):
        others = _lengths(training, other, setup.goal_of_trials.max_steps)
        lengths = {name: steps for name, steps in lengths.items() if others.get(name) == steps}
    parts = []
    for name, steps in lengths.items():
        parts.append(
            f"the {name} of the learning rate takes {steps:,.0f} steps at every batch size, which "
            f"are {steps * smallest:,.0f} examples at B = {smallest} and "
            f"{steps * largest:,.0f} at B = {largest}"
        )
    if not parts:
        return []
    return [f"{'; '.join(parts)}. Search its length, or give it in examples, to compare them"]


def _lengths(training: TrialSettings, trial: Trial, max_steps: int) -> dict[str, float]:
    """Return the steps of the warm-up and of the schedule of a trial, if they end before it."""
    kept = _RateShape()
    with suppress(Exception):  # the short trials report errors of the user's code
        probe_fit(training, replace(trial, cell=replace(trial.cell, sparsity=0.0)), kept)
    warm_up = kept.shape.get(WARM_UP, 0)
    # The last step of a schedule already has the final rate.
    schedule = kept.shape.get(SCHEDULE, 1) - 1
    lengths = {}
    if 1 < warm_up < max_steps - 1:
        lengths["warm-up"] = warm_up
    # A schedule that ends with the warm-up has no decay.
    if max(warm_up, 1) < schedule < max_steps - 1:
        lengths["schedule"] = schedule
    return lengths
