"""Retrains a trial of a stored study, outside of the study: what `fit --of` does."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lit_dps.core.attempt import Attempt, AttemptRules
from lit_dps.core.environment import KEY, changes_since
from lit_dps.core.errors import ConfigError
from lit_dps.core.progress_line import print_wrapped, replace_line
from lit_dps.core.racing import best_trial
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import escape
from lit_dps.core.trial import LIGHTNING, RANKS, SPARSE_KERNELS, STACKED, Cell, Status, TrialResult
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.parallel import ranks
from lit_dps.parallel.process import Interrupted, StopRequest, interruptible, prepare_process
from lit_dps.storage.header import check_unchanged
from lit_dps.study.display import LEAVING
from lit_dps.study.environment import environment_of
from lit_dps.study.preflight.check import check_configuration, explained_by, set_up_data
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import make_stop_check, train_on_ranks
from lit_dps.training.average_callback import showing_average

# Loops that are equal but for the order of their sums differ by less.
ROUNDING_OF_METRIC = 1e-5
STOPPING = f"\n{LEAVING}\n"


class KeepWeights(Callback):
    """Saves a Lightning checkpoint when training ends, for example at the goal.

    If an average of the weights was checked (`optim.average_half_life`), the file has the average.

    Args:
        path: The file. Its folder is made.
        model: Class path and arguments of the module. `validate`, `test` and
            `load_from_checkpoint` build the module from them. None if LightningCLI made the
            module, and so stored them.
    """

    def __init__(self, path: Path, model: Mapping[str, Any] | None = None):
        self.path = path
        self.model = model

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # LightningCLI saves hyperparameters in this form. A module without any chose to save none.
        if self.model is not None and pl_module.hparams:
            pl_module.hparams.clear()
            pl_module.hparams.update(self.model.get("init_args", {}))
            pl_module.hparams["_class_path"] = self.model["class_path"]
            pl_module.hparams["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
        with showing_average(trainer):
            trainer.save_checkpoint(self.path)


def check_is_new(path: Path) -> None:
    """Raise ConfigError if the file of `--checkpoint` exists."""
    if path.exists():
        raise ConfigError("--checkpoint", str(path), "a file that does not exist yet")


def stored_trial(record: StudyRecord, cell: Cell, point: int | None) -> TrialResult:
    """Return the stored trial of a point of a cell; without a point, the trial of K*.

    Raises:
        ConfigError: if the cell has no such trial.
    """
    results = record.results[cell]
    if point is None:
        best = best_trial(results, record.statistic)
        if best is None:
            raise ConfigError("--cell", str(cell), "a cell that has a K*, or any with --point")
        return best
    for result in results:
        if result.trial.point == point:
            return result
    finished = ", ".join(str(result.trial.point) for result in results) or "none yet"
    raise ConfigError("--point", point, f"a finished trial of {cell}: {finished}")


def retrain(
    setup: StudySetup, record: StudyRecord, stored: TrialResult, keep: Path | None = None
) -> Attempt:
    """Train a stored trial to its goal, its budget or divergence. Nothing is stored.

    Seeds, data order, mask, schedule and threads are the same as in the trial, so K is equal. A
    trial that a race stopped early runs to its goal or budget.

    Args:
        setup: The study, with the configuration that is stored with it.
        record: The stored study.
        stored: The trial.
        keep: The file for a checkpoint of the final weights.

    Returns:
        The attempt. Its status is None if it was interrupted, and failed if the module or its data
        raised an error.

    Raises:
        UserError: if data or classes differ from the study's, before anything is trained.
    """
    if keep is not None and setup.ranks > 1:
        allowed = f"omitted, because {setup.ranks} ranks train each trial"
        raise ConfigError("--checkpoint", str(keep), allowed)
    # Checkpoints of trials belong to the study.
    setup = setup.with_study(checkpoint_minutes=None)
    prepare_process()
    check_configuration(setup)
    data, error = set_up_data(setup)  # without a dry run, because the trials have run
    with explained_by(error):
        check_unchanged(setup.storage.optuna_url, setup.study.name, setup.identity(data))
    note = _changes_since(setup, data, record, stored)
    if note:
        print_wrapped(f"note: {escape(note)}")
    torch.set_num_threads(setup.study.threads)
    rules = AttemptRules(record.goal, record.goals, record.train_past_goal, setup.study.metrics)
    attempt = rules.attempt(stored.trial)
    callbacks: list[Callback] = []
    if keep is not None:
        model = setup.workload.specs(stored.trial)["model"]
        callbacks.append(KeepWeights(keep, model))
    engine = TrialEngine(setup.trial_settings(), engine=LIGHTNING, callbacks=tuple(callbacks))
    _train(setup, engine, attempt)
    return attempt


def _train(setup: StudySetup, engine: TrialEngine, attempt: Attempt) -> None:
    """Train one attempt on all ranks, and show its last validation at a terminal."""
    shows = sys.stderr.isatty()
    stop = StopRequest()
    queue = iter([attempt])

    with interruptible(stop, STOPPING):
        raise_if_interrupted = make_stop_check(stop)

        def raise_if_stopped() -> None:
            raise_if_interrupted()
            if shows:
                replace_line(attempt.last_validation)

        try:
            for _ in train_on_ranks(setup, engine, lambda: next(queue, None), raise_if_stopped):
                pass
        except Interrupted:
            attempt.status = None
    if shows:
        replace_line("")


def _changes_since(
    setup: StudySetup, data: LightningDataModule, record: StudyRecord, stored: TrialResult
) -> str | None:
    """Return a sentence on code and data that differ from the stored trial; None if none differ."""
    environments = [each for each in record.environments if each.get(KEY) == stored.environment]
    if not environments or ranks.rank():
        return None
    changes = changes_since(environments, environment_of(setup, data, stored=environments).content)
    if not changes:
        return None
    verb = "is" if len(changes) == 1 else "are"
    return (
        f"{', '.join(changes)} {verb} not as the study's trial was trained with; its K may differ"
    )


def compare_with_stored(attempt: Attempt, stored: TrialResult) -> str:
    """Return a line on whether an attempt ended like the stored trial, with the reason if not."""
    if attempt.status is None:
        return f"the study stored: {_end_of(stored, attempt.goal.metric)}"
    if stored.status in (Status.OUTRACED, Status.STOPPED):
        return f"the study stopped it before: {_end_of(stored, attempt.goal.metric)}"
    has_equal_end = (attempt.status, attempt.steps_to_result) == (stored.status, stored.steps)
    if has_equal_end and _has_equal_last_check(attempt, stored):
        return "as the study stored it"
    end = _end_of(stored, attempt.goal.metric)
    return f"warning: the study stored: {end}; {_reason_of_difference(stored)}"


def _has_equal_last_check(attempt: Attempt, stored: TrialResult) -> bool:
    """Return True if an attempt without K has the last check of the stored trial.

    Steps within a budget of seconds differ in each run. Bounds of a metric are not compared.
    """
    curve = attempt.curve
    if stored.steps is not None or attempt.goal.counts_seconds or not stored.curve.get("step"):
        return True
    if curve["step"][-1:] != stored.curve["step"][-1:]:
        return False
    is_exact = all(each.get("exact", [1])[-1] for each in (curve, stored.curve))
    if stored.status is not Status.INCOMPLETE or not is_exact:
        return True
    metric = attempt.goal.metric
    return math.isclose(curve[metric][-1], stored.curve[metric][-1], rel_tol=ROUNDING_OF_METRIC)


def _reason_of_difference(stored: TrialResult) -> str:
    ranks_of_study = stored.flags.get(RANKS, 1)
    if stored.flags.get(STACKED):
        return "it was trained stacked with others, which is equal in distribution, not to the bit"
    if stored.flags.get(SPARSE_KERNELS):
        return (
            "its convolutions skipped pruned weights, which is equal in distribution, not to the "
            "bit"
        )
    if ranks_of_study != ranks.world():
        return f"{ranks_of_study:.0f} ranks trained it, equal in distribution, not to the bit"
    return "the machine, a version or code that the study does not see differs"


def _end_of(stored: TrialResult, metric: str) -> str:
    if stored.steps is not None:
        return f"{stored.status} after {stored.steps} steps"
    text = f"{stored.status} after {stored.steps_run} steps"
    # The last value may be the bound at which a validation stopped.
    if stored.curve.get(metric) and stored.curve.get("exact", [1])[-1]:
        text += f", {metric} {stored.curve[metric][-1]:.6g}"
    return text
