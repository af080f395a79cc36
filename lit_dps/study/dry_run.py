"""The dry run of a study: short trials at both ends of its grid, before anything is created."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning.pytorch import LightningDataModule

from lit_dps.engines.eligible import standard_data
from lit_dps.engines.engine import Training
from lit_dps.errors import ConfigError
from lit_dps.store import sobol_point
from lit_dps.study.idle_keys import idle_keys
from lit_dps.study.resuming import check_resume
from lit_dps.study.setup import StudySetup
from lit_dps.study.short_trial import Short, run_short
from lit_dps.study.value_by_batch_size import compare_metrics
from lit_dps.trial import Cell, Trial


def dry_run(setup: StudySetup) -> tuple[LightningDataModule, list[str]]:
    """Runs short trials of a study, and returns its data module and what the user should know.

    Short trials run at the smallest batch size and, with data of other people, at the largest one, each at the largest
    sparsity. Nothing is left in the global generators, in the storage or in the user's folder.

    Returns:
        The data module of the smallest batch size, set up for training, and notes, a line each.

    Raises:
        UserError: for a trial that would fail, a metric that depends on the batch size of the grid, and a trial that
            resumes from a checkpoint with other values.
    """
    with setup.workload.traceless() as workload:
        return _dry_run(setup, replace(setup.training(), workload=workload))


def _dry_run(setup: StudySetup, training: Training) -> tuple[LightningDataModule, list[str]]:
    study, notes = setup.study, []
    smallest, largest, sparsity = min(study.batch_sizes), max(study.batch_sizes), max(study.sparsities)
    point = sobol_point(study.space, study.seed, 0, study.scramble)
    others = list(dict.fromkeys(cell.others for cell in study.cells))
    for other in others:
        trial = Trial(Cell(smallest, sparsity, other), 0, point, study.seed)
        refusal = None
        try:
            short = run_short(training, trial)
        except ConfigError as error:
            refusal = error
        if refusal is not None:
            # What fails without the pruning pass too is an error of the module, and is reported as
            # such. Outside of the except block, where the refusal would be that error's context.
            if refusal.key == "pruning.method":
                run_short(training, replace(trial, cell=Cell(smallest, 0.0, other)))
            raise refusal
        notes += short.notes
        _refuse_met(short)
        if setup.ranks > 1 and short.counted.can_be_cut is False:
            what = "for batches of tensors that all have the examples as first dimension"
            raise ConfigError("trainer.strategy", "ddp", what)
        if hasattr(short.data, "check_batch_size"):  # the data may be another's at each value of an axis
            short.data.check_batch_size(largest // training.workload.accumulated)
    if largest > smallest and not standard_data(short.data):  # whose batches and checks are as they have to be
        last = run_short(training, Trial(Cell(largest, sparsity, other), 0, point, study.seed))
        notes += last.notes
        if last.examples != short.examples:
            counts = [" + ".join(map(str, found.values())) for found in (short.examples, last.examples)]
            shown = f"{counts[0]} at B = {smallest} and {counts[1]} at B = {largest}"
            name = type(short.data).__name__
            raise ConfigError("data", name, f"the same validation examples at every batch size, not {shown}")
        _refuse_deaf(training, short, last)
        if last.batches != short.batches or not training.workload.batch_size_key.startswith("data."):
            for other in others:
                notes += compare_metrics(training, Trial(Cell(smallest, 0.0, other), 0, point, study.seed), setup)
    notes += check_resume(training, trial, setup)
    notes += idle_keys(training, setup)
    return short.data, notes


def _refuse_deaf(training: Training, short: Short, last: Short) -> None:
    """Refuse a batch size key whose batches do not grow with it, where nothing tells their number of examples."""
    one, other = short.counted, last.counted
    growth = other.batch_size / one.batch_size
    if one.volume and other.volume and other.volume < math.sqrt(growth) * one.volume:
        found = f"at {one.batch_size} a batch has {one.volume} numbers, and at {other.batch_size} {other.volume}"
        what = f"the key that the train dataloader takes its batch size from: {found}"
        raise ConfigError("study.batch_size_key", training.workload.batch_size_key, what)


def _refuse_met(short: Short) -> None:
    goal, untrained = short.goal.goal, short.untrained
    if untrained is None or not goal.reached(untrained[short.goal.monitor]):
        return
    side, other = "below", ""
    if goal.at_least:
        side = "above"
    else:
        other = "; of a metric that is to be maximised set goal.at_least"
    key = "goal.error" if str(goal).startswith("goal error") else "goal.metric"
    value = untrained[short.goal.monitor]
    raise ConfigError(key, goal.value, f"{side} {value:.4g}, the {short.goal.monitor} of the untrained network{other}")
