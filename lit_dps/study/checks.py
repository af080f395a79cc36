"""What is checked of a whole study before anything is created: its keys, and a rehearsal of both ends of its grid.

A rehearsal is a short run of a trial that finds what does not fit together.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_dps.engines.eligible import standard_data
from lit_dps.engines.engine import Training
from lit_dps.engines.sparse import check_sparse
from lit_dps.errors import ConfigError, UserError, place_in_user_code, user_error_in
from lit_dps.parallel.ranks import started_by_torchrun
from lit_dps.runs import Run
from lit_dps.space import extremes
from lit_dps.store import sampler_of, sobol_point
from lit_dps.study.keys import check_goals, check_keys, check_workers
from lit_dps.study.setup import StudySetup
from lit_dps.training import DelayCallback, GoalErrorCallback, PruningCallback, SmoothnessCallback, lightning_private
from lit_dps.training.generators import isolated
from lit_dps.training.protocol import check_trainer, overruled, screen_callbacks_of
from lit_dps.training.rate_curve import rate_curve, rate_remarks
from lit_dps.training.steps import ExamplesCallback, refuse_too_large
from lit_dps.training.unmasked import later_weights_note
from lit_dps.trial import Cell, Trial

STEPS = 2  # an epoch ends before the first check, and one after it
BATCHES = 16  # of an epoch of a module that steps its optimizer itself
PASS = 2  # batches of the pruning pass
PATIENCE = 64  # batches without an optimizer step


def check(
    setup: StudySetup, settled: Callable[[LightningDataModule], bool] = lambda data: False
) -> LightningDataModule:
    """Checks all that can be checked before a trial runs, and creates nothing.

    Args:
        setup: The study.
        settled: Whether a study with this data has no trial left to run. Then all that a rehearsal finds out is known:
            its trials ran, under an equal configuration.

    Returns:
        The data module, set up for training.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
        DataError: if the data cannot be read.
    """
    study, trainer = setup.study, setup.workload.trainer
    study.check()
    PruningCallback(**setup.pruning)
    DelayCallback(**setup.optim)
    check_goals(setup)
    sampler_of(study, setup.goal_of_trials)
    check_trainer(trainer)
    check_keys(setup)
    alone = study.engine in ("fused", "sparse")
    if setup.ranks > 1 and alone:
        raise ConfigError("study.engine", study.engine, f"lightning or auto where {setup.ranks} ranks train each trial")
    if alone and not study.lean:
        raise ConfigError("study.lean", False, f"true where study.engine is {study.engine}")
    if study.engine == "sparse":
        if setup.on_gpu:
            raise ConfigError(
                "study.engine", "sparse", "lightning, fused or auto on a GPU: sparse convolutions are for a CPU"
            )
        if study.threads > 1:
            raise ConfigError(
                "study.threads", study.threads, "1 where study.engine is sparse: its convolutions use one"
            )
        check_sparse()
    if started_by_torchrun() and setup.workers > 1:
        raise ConfigError("study.workers", setup.workers, "1 under torchrun: start it once for each worker")
    for cell in dict.fromkeys(replace(cell, batch_size=min(study.batch_sizes)) for cell in study.cells):
        setup.training().pruning_of(Trial(cell, 0))
        setup.training().delay_of(Trial(cell, 0))
        for params in extremes(setup.space):  # classes refuse what they do not allow
            data = setup.workload.build(Trial(cell, 0, params)).data
            check_workers(setup, cell, params)
    if settled(data):
        return data
    data = rehearse_ends(setup)
    for line in overruled(trainer):
        print(f"note: {line}", file=sys.stderr)
    return data


def rehearse_ends(setup: StudySetup) -> LightningDataModule:
    """Rehearses the smallest batch size of a study, and the largest of other people's data, at its largest sparsity.

    Returns:
        The data module of the smallest, set up for training.

    Raises:
        UserError: for what does not serve.
    """
    with setup.workload.traceless() as workload:
        return _rehearse_ends(setup, replace(setup.training(), workload=workload))


def _rehearse_ends(setup: StudySetup, training: Training) -> LightningDataModule:
    study = setup.study
    smallest, largest, sparsity = min(study.batch_sizes), max(study.batch_sizes), max(study.sparsities)
    point = sobol_point(study.space, study.seed, 0, study.scramble)
    others = dict.fromkeys(cell.others for cell in study.cells)
    for other in others:
        trial = Trial(Cell(smallest, sparsity, other), 0, point, study.seed)
        refusal = None
        try:
            data, checked = _rehearse(training, trial)
        except ConfigError as error:
            refusal = error
        if refusal is not None:
            # What fails without the pruning pass too is an error of the module, and is reported as such. Outside of
            # the except block, where the refusal would be the context of that error.
            if refusal.key == "pruning.method":
                _rehearse(training, replace(trial, cell=Cell(smallest, 0.0, other)))
            raise refusal
        if hasattr(data, "check_batch_size"):  # the data may be another's at each value of an axis
            data.check_batch_size(largest // training.workload.accumulated)
    if largest > smallest and not standard_data(data):  # whose batches and checks are as they have to be
        trial = Trial(Cell(largest, sparsity, other), 0, point, study.seed)
        _, checked_last = _rehearse(training, trial, look_first=False, steps=1)
        if checked_last != checked:
            counts = [" + ".join(map(str, found.values())) for found in (checked, checked_last)]
            shown = f"{counts[0]} at B = {smallest} and {counts[1]} at B = {largest}"
            name = type(data).__name__
            raise ConfigError("data", name, f"the same validation examples at every batch size, not {shown}")
    return data


def _rehearse(
    training: Training, trial: Trial, look_first: bool = True, steps: int = STEPS
) -> tuple[LightningDataModule, dict[int, int] | None]:
    """Runs a trial as `TrainerEngine` does, but each step is an epoch, and after the first check it ends.

    So there are a check of the untrained network if `look_first`, a pruning pass over the first batches, so many
    optimizer steps, ends of epochs and a check. No trace is left in the global generators.

    Returns:
        The data module, set up for training, and the examples of a check by data loader; None where checks may stop
        early.

    Raises:
        UserError: for what does not serve, in one line; what the user's module raised says where.
    """
    built = training.workload.build(trial)
    budget = GoalErrorCallback(**training.goal).goal.max_steps
    lasts = {"check_interval": steps, "max_steps": max(steps, budget - budget % steps)}
    goal = GoalErrorCallback(**{**training.goal, **lasts})
    watch = _Watch(goal, PATIENCE * training.workload.accumulated)
    goal.look_first, goal.budget = look_first, budget
    goal.follow(Run(trial, goal.goal, stop_at=lambda: 0, metrics=training.metrics))
    pruning = training.pruning_of(trial)
    pruning.examples = PASS * pruning.batch_size
    ours = [pruning, training.delay_of(trial), training.local_of(trial), goal, watch]
    if training.smoothness["interval"] is not None:
        ours.insert(1, SmoothnessCallback(**{**training.smoothness, "interval": 1, "examples": 2}))
    screen_callbacks_of(built.module)
    own = not built.module.automatic_optimization or is_overridden("optimizer_step", built.module)
    # a module that says when to step may accumulate over batches
    epoch = {"limit_train_batches": BATCHES if own else training.workload.accumulated}
    with isolated(seed=trial.seed_for("order")):
        try:
            if not standard_data(built.data):
                ours.append(ExamplesCallback(trial.cell.batch_size, training.workload.batch_size_key))
            callbacks = [*built.trainer["callbacks"], *ours]
            try:
                trainer = Trainer(**{**built.trainer, **epoch, "callbacks": callbacks})
            except (ValueError, TypeError, MisconfigurationException) as error:
                raise UserError(f"trainer: {error}") from error
            goal.before_fit(trainer, built.data)
            trainer.fit(built.module, datamodule=built.data)
        except Exception as error:
            raise user_error_in(error) or UserError(_told(error, trial)) from error
    for remark in watch.remarks:
        print(f"note: at B = {trial.cell.batch_size} {remark} steps of the budget", file=sys.stderr)
    if goal.status is None:
        name = type(built.module).__name__
        if lightning_private.batches_of_epoch(trainer) == 0:
            refuse_too_large(trainer, trial.cell.batch_size)
            raise ConfigError("data", type(built.data).__name__, "a train dataloader that gives batches")
        raise ConfigError(
            "model", name, f"a module that trains for {steps} steps: it or a callback stopped the trainer"
        )
    _refuse_met(goal)
    note = later_weights_note(trainer, pruning.observed) if trial.cell.sparsity else ""
    if note:
        print(f"note: {trial.cell}: {note}", file=sys.stderr)
    if trial.cell.sparsity and watch.finite is False:
        what = f"lower sparsities for {type(built.module).__name__}: its loss is not finite once it is pruned"
        raise ConfigError("study.sparsities", trial.cell.sparsity, what)
    return built.data, goal.validated.first


def _refuse_met(goal: GoalErrorCallback) -> None:
    found = goal.untrained
    if found is not None and goal.goal.reached(found):
        side = "above" if goal.goal.at_least else "below"
        other = "" if goal.goal.at_least else "; of a metric that is to be maximised set goal.at_least"
        raise ConfigError(
            "goal.error" if str(goal.goal).startswith("goal error") else "goal.metric",
            goal.goal.value,
            f"{side} {found:.4g}, the {goal.monitor} of the untrained network{other}",
        )


def _told(error: Exception, trial: Trial) -> str:
    """An error of somebody else's code in one line, with the last place in it that is neither ours nor a library's."""
    said = " ".join(str(error).split())[:500]
    return f"a rehearsal of {trial.cell} failed: {type(error).__name__}: {said}{place_in_user_code(error)}"


class _Watch(Callback):
    """Ends a run after so many batches without an optimizer step, and no run by its epochs.

    Attributes:
        finite: Whether the first training loss is finite; None before, or without one.
        remarks: What is to be known of the learning rates over the budget.
    """

    def __init__(self, goal: GoalErrorCallback, batches: int):
        self.goal, self.left = goal, batches
        self.finite: bool | None = None
        self.remarks: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = self.goal.steps_of_epoch
        rates = rate_curve(trainer, pl_module, trainer.max_steps, epoch)
        if rates is not None:
            self.remarks = rate_remarks(rates, trainer.lr_scheduler_configs, epoch)
        lightning_private.set_epochs(trainer, -1)  # they are as short as a step here

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.finite is None and loss is not None:
            self.finite = math.isfinite(float(loss))
        self.left -= 1
        if not self.left and not self.goal.steps:
            raise ConfigError("model", type(pl_module).__name__, "a module that steps an optimizer, or returns a loss")
