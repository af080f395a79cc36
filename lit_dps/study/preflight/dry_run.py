"""The dry run of a study: short trials at both ends of its grid, before anything is created."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from dataclasses import replace

from lightning.pytorch import Callback, LightningDataModule

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.eligible import standard_data
from lit_dps.engines.engine import Training
from lit_dps.storage.samplers import sobol_point
from lit_dps.study.data_hashes import check_validation_data, fingerprint
from lit_dps.study.preflight.batch_size_check import compare_metrics, repeated_metrics
from lit_dps.study.preflight.idle_keys import idle_keys
from lit_dps.study.preflight.resume_check import check_resume
from lit_dps.study.preflight.short_trial import Short, run_short
from lit_dps.study.probe_run import EndProbe, probe_fit
from lit_dps.study.setup import StudySetup
from lit_dps.training.deterministic import deterministic_kernels


def dry_run(setup: StudySetup) -> tuple[LightningDataModule, list[str]]:
    """Run short trials of a study, and return its data module and notes for the user.

    Short trials run at the smallest batch size and, unless the data are ours, at the largest one,
    each at the largest sparsity. The dry run does not change global generators, the storage or the
    user's folder.

    Returns:
        The data module of the smallest batch size, set up for training, and notes of one line each.

    Raises:
        UserError: if a trial would fail, if a metric depends on the batch size of the grid, or if a
            trial resumes from a checkpoint with other values.
    """
    with setup.workload.without_side_effects() as workload:
        return _dry_run(setup, replace(setup.training(), workload=workload))


def _dry_run(setup: StudySetup, training: Training) -> tuple[LightningDataModule, list[str]]:
    study = setup.study
    notes: list[str] = []
    smallest, largest = min(study.batch_sizes), max(study.batch_sizes)
    sparsity = max(study.sparsities)
    point = sobol_point(study.space, study.seed, 0, study.scramble)
    others = list(dict.fromkeys(cell.axes for cell in study.cells))
    for other in others:
        trial = Trial(Cell(smallest, sparsity, other), 0, point, study.seed)
        refusal = None
        try:
            short = run_short(training, trial)
        except ConfigError as error:
            refusal = error
        if refusal is not None:
            # If the trial also fails without the pruning pass, the module's error is raised here.
            # This is outside of the except block, so that the refusal is not shown as its context.
            if refusal.key == "pruning.method":
                run_short(training, replace(trial, cell=Cell(smallest, 0.0, other)))
            raise refusal
        notes += [*short.notes, *repeated_metrics(short, setup)]
        _refuse_goal_met_untrained(short)
        if setup.ranks > 1 and short.counted.can_be_cut is False:
            what = "for batches of tensors that all have the examples as first dimension"
            raise ConfigError("trainer.strategy", "ddp", what)
        # Each value of an axis may have another data module.
        if hasattr(short.data, "check_batch_size"):
            short.data.check_batch_size(largest // training.workload.accumulated)
    # The batches and validation of our own data are known to be right.
    if largest > smallest and not standard_data(short.data):
        last = run_short(training, Trial(Cell(largest, sparsity, other), 0, point, study.seed))
        notes += last.notes
        if last.examples != short.examples:
            counts = (
                f"{_sum_text(short.examples)} at B = {smallest} and "
                f"{_sum_text(last.examples)} at "
                f"B = {largest}"
            )
            name = type(short.data).__name__
            raise ConfigError(
                "data", name, f"the same validation examples at every batch size, not {counts}"
            )
        _refuse_ignored_batch_size(training, short, last)
        if last.batches != short.batches or not training.workload.batch_size_key.startswith(
            "data."
        ):
            for other in others:
                dense = Trial(Cell(smallest, 0.0, other), 0, point, study.seed)
                notes += compare_metrics(training, dense, setup)
    if not standard_data(short.data):
        notes += check_validation_data(setup)
    notes += _equal_weights_note(training, trial)
    with deterministic_kernels() if setup.on_gpu else nullcontext():
        notes += check_resume(training, trial, setup)
        notes += idle_keys(training, setup)
    return short.data, notes


class _InitialWeights(Callback):
    """Ends a fit before its first step, with a hash of the weights; "" without weights."""

    def __init__(self):
        self.hash = ""
        self.module = ""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.module = type(pl_module).__name__
        weights = dict(pl_module.named_parameters())
        if weights:
            self.hash = fingerprint(weights)
        raise EndProbe


def _equal_weights_note(training: Training, trial: Trial) -> list[str]:
    """Return a note if two points of the search begin with equal weights."""
    dense = replace(trial, cell=replace(trial.cell, sparsity=0.0))
    hashes = []
    for point in range(2):
        weights = _InitialWeights()
        with suppress(Exception):  # lazy weights have no values yet
            probe_fit(training, replace(dense, point=point), weights)
        hashes.append(weights.hash)
    if not hashes[0] or hashes[0] != hashes[1]:
        return []
    return [
        f"all points of the search begin with equal weights: {weights.module} loads them, or sets "
        "a seed of its own. So luck of the initial weights is no part of K*, nor of study.repeats"
    ]


def _sum_text(examples: dict[int, int] | None) -> str:
    """Return the examples of each data loader as a sum, such as "100 + 20"."""
    return " + ".join(map(str, (examples or {}).values()))


def _refuse_ignored_batch_size(training: Training, short: Short, last: Short) -> None:
    """Raise ConfigError if batches do not grow with the batch size key.

    This check is for batches whose number of examples is unknown.
    """
    one, other = short.counted, last.counted
    growth = other.batch_size / one.batch_size
    if one.volume and other.volume and other.volume < math.sqrt(growth) * one.volume:
        sizes = (
            f"at {one.batch_size} a batch has {one.volume} numbers, and at {other.batch_size} "
            f"{other.volume}"
        )
        what = f"the key that the train dataloader takes its batch size from: {sizes}"
        raise ConfigError("study.batch_size_key", training.workload.batch_size_key, what)


def _refuse_goal_met_untrained(short: Short) -> None:
    """Raise ConfigError if the untrained network meets the goal."""
    goal, untrained = short.goal.goal, short.untrained
    if untrained is None or not goal.is_reached(untrained[short.goal.monitor]):
        return
    side, hint = "below", "; of a metric that is to be maximised set goal.at_least"
    if goal.at_least:
        side, hint = "above", ""
    key = "goal.error" if str(goal).startswith("goal error") else "goal.metric"
    value = untrained[short.goal.monitor]
    raise ConfigError(
        key,
        goal.value,
        f"{side} {value:.4g}, the {short.goal.monitor} of the untrained network{hint}",
    )
