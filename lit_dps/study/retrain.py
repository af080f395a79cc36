"""A trial of a stored study once more, by itself: what `fit --of` does."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.environment import KEY, changes_since
from lit_dps.core.errors import ConfigError
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import RANKS, SPARSE_KERNELS, STACKED, Cell, Status, TrialResult
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.parallel import ranks
from lit_dps.parallel.process import Interrupted, StopRequest, interruptible, prepare_process
from lit_dps.storage.header import check_unchanged
from lit_dps.study.environment import environment_of
from lit_dps.study.preflight.check import check_configuration, set_up_data
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import first_of_ranks, raise_if_any_rank_interrupted

LEAVING = "\n{}: leaving at the next check; once more to leave now\n"


class KeepWeights(Callback):
    """Saves a Lightning checkpoint when training ends of itself: of a trial that stops at its goal,
    the weights there.

    Args:
        path: The file, in a folder that is made.
        model: Class path and arguments that the module is made of, which `validate`, `test` and
            `load_from_checkpoint` make it of again.
    """

    def __init__(self, path: Path, model: Mapping[str, Any]):
        self.path, self.model = path, model

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.hparams:  # as LightningCLI writes them; else the module chose to save none
            pl_module.hparams.clear()
            pl_module.hparams.update(self.model.get("init_args", {}))
            pl_module.hparams["_class_path"] = self.model["class_path"]
            pl_module.hparams["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
        trainer.save_checkpoint(self.path)


def chosen(record: StudyRecord, cell: Cell, point: int | None) -> TrialResult:
    """The stored trial of a point of a cell; without a point that of K*.

    Raises:
        ConfigError: where there is none.
    """
    results = record.results[cell]
    if point is None:
        complete = [result for result in results if result.steps is not None]
        if not complete:
            raise ConfigError("--cell", str(cell), "a cell that has a K*, or any with --point")
        return min(complete, key=lambda result: (result.steps, result.trial.point))
    found = next((result for result in results if result.trial.point == point), None)
    if found is None:
        known = ", ".join(str(result.trial.point) for result in results) or "none yet"
        raise ConfigError("--point", point, f"a finished one of {cell}: {known}")
    return found


def train_again(
    setup: StudySetup, record: StudyRecord, stored: TrialResult, keep: Path | None = None
) -> Attempt:
    """Trains a stored trial to its goal, budget or divergence, as `TrainerEngine` does. Stores
    nothing.

    Seeds, data order, mask, schedule and threads are the trial's own, so that K is its K. A trial
    that a race stopped goes on to its goal or budget: nothing races it here.

    Args:
        setup: The study, of the configuration that is stored with it.
        record: The study as it is stored.
        stored: The trial.
        keep: Where to save a checkpoint of the weights at the end.

    Returns:
        The run; its status is None where it was interrupted, and failed where the module or its
        data raised.

    Raises:
        UserError: for data or classes that are not the study's, before anything is trained.
    """
    if keep is not None and setup.ranks > 1:
        raise ConfigError(
            "--checkpoint", str(keep), f"left out where {setup.ranks} ranks train each trial"
        )
    # a run of minutes to hours that is told nothing of the study's storage; and its checkpoints are
    # the study's
    setup = dataclasses.replace(
        setup, study=dataclasses.replace(setup.study, checkpoint_minutes=None)
    )
    prepare_process()
    data = check_configuration(setup)  # without a dry run, because the trials have run
    set_up_data(data)
    check_unchanged(setup.storage.optuna_url, setup.study.name, setup.identity(data))
    if note := _changed_since(setup, data, record, stored):
        print(f"note: {note}", file=sys.stderr, flush=True)
    torch.set_num_threads(setup.study.threads)
    train_past_goal = record.run_on and not stored.trial.repeat
    run = Attempt(
        stored.trial,
        record.goal,
        record.goals,
        train_past_goal=train_past_goal,
        metrics=setup.study.metrics,
    )
    model = setup.workload.specs(stored.trial)["model"]
    engine = TrainerEngine(setup.training(), () if keep is None else (KeepWeights(keep, model),))
    left, stop = [run], StopRequest()
    with interruptible(stop, LEAVING):
        leave = raise_if_any_rank_interrupted(stop)

        def at_check() -> None:
            leave()
            if sys.stderr.isatty():
                print(f"\r{run.last_check}\033[K", end="", file=sys.stderr, flush=True)

        try:
            with first_of_ranks(setup) as train:
                for _ in train(engine, lambda: left.pop() if left else None, at_check):
                    pass
        except Interrupted:
            run.status = None
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return run


def _changed_since(setup: StudySetup, data, record: StudyRecord, stored: TrialResult) -> str | None:
    """Return a sentence on code and data that differ from the stored trial; None if none differ."""
    known = [each for each in record.environments if each.get(KEY) == stored.environment]
    if not known or ranks.rank():
        return None
    changes = changes_since(known, environment_of(setup, data))
    if not changes:
        return None
    verb = "is" if len(changes) == 1 else "are"
    return (
        f"{', '.join(changes)} {verb} not as the study's trial was trained with; its K may differ"
    )


def compared(run: Attempt, stored: TrialResult) -> str:
    """Whether a run ended as the stored trial did, in a line: the same K, or which, and why that
    may be."""
    if run.status is None:
        return f"the study stored: {_ended(stored)}"
    if stored.status in (Status.OUTRACED, Status.STOPPED):
        return f"the study stopped it before: {_ended(stored)}"
    if (run.status, run.steps_to_result) == (stored.status, stored.steps):
        return "as the study stored it"
    why = "the machine, a version or code that the study does not see is another one"
    if stored.flags.get(STACKED):
        why = "it was trained stacked with others, which is equal in distribution, not to the bit"
    elif stored.flags.get(SPARSE_KERNELS):
        why = (
            "its convolutions skipped pruned weights, which is equal in distribution, not to "
            "the "
            "bit"
        )
    elif stored.flags.get(RANKS, 1) != ranks.world():
        why = (
            f"{stored.flags.get(RANKS, 1):.0f} ranks trained it, equal in distribution, not "
            "to "
            "the bit"
        )
    return f"warning: the study stored: {_ended(stored)}; {why}"


def _ended(stored: TrialResult) -> str:
    return (
        f"{stored.status} after "
        f"{stored.steps if stored.steps is not None else stored.steps_run} "
        "steps"
    )
