"""The Trainer engine: one run at a time, each by Lightning's `Trainer.fit`, of any module and data module."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.engines.eligible import standard_data
from lit_dps.engines.engine import Training
from lit_dps.errors import UserError
from lit_dps.parallel import ranks
from lit_dps.runs import Run
from lit_dps.training import GoalErrorCallback, SmoothnessCallback, lightning_private
from lit_dps.training.checkpoint import CheckpointCallback, Paused
from lit_dps.training.checkpoints import CheckpointFile
from lit_dps.training.generators import isolated
from lit_dps.training.protocol import screen_callbacks_of
from lit_dps.training.steps import ExamplesCallback
from lit_dps.trial import RANKS, TrialResult


@dataclass(frozen=True)
class TrainerEngine:
    """Runs trials of any LightningModule and LightningDataModule, one after another.

    What a module, its data or a callback raises ends their trial alone, as failed; of several ranks it ends them all.

    Attributes:
        training: What the trials have in common.
        callbacks: Further callbacks of every run, such as a stopwatch.
    """

    training: Training
    callbacks: tuple[Callback, ...] = ()

    def train(
        self, next_run: Callable[[], Run | None], at_check: Callable[[], None] = lambda: None
    ) -> Iterator[TrialResult]:
        while (run := next_run()) is not None:
            yield self.training.attempt(run, lambda run: self.train_one(run, at_check))

    def train_one(self, run: Run, at_check: Callable[[], None] = lambda: None) -> None:
        """Trains one run to its goal, budget or divergence, from its checkpoint if there is one.

        Raises:
            Exception: what the module, its data or a callback raises.
        """
        begin, checkpoints = time.perf_counter(), self.training.checkpoints
        file = self.training.file_of(run, "Trainer")
        saved = None if file is None else ranks.on_rank_zero(lambda: checkpoints.find(run.trial, file.about))
        anew = saved is None
        if not anew:
            try:
                self._train(run, at_check, file, saved)
            except UserError:
                raise
            except Exception as error:  # of a module that keeps more than it saves, say; a new run tells whose it is
                if ranks.is_rank_loss(error):
                    raise
                checkpoints.remove(run.trial)
                if ranks.world() > 1:  # the others may be elsewhere
                    raise
                why = str(error).split("\n")[0]
                checkpoints.say(f"{file.about['name']} begins anew: it cannot go on from its checkpoint ({why})")
                run.restart()
                anew = True
        if anew:
            self._train(run, at_check, file)
        run.seconds += time.perf_counter() - begin

    def _train(
        self, run: Run, at_check: Callable[[], None], file: CheckpointFile | None, saved: Path | None = None
    ) -> None:
        training, trial = self.training, run.trial
        built = training.workload.build(trial)
        goal = GoalErrorCallback(**training.goal)
        goal.follow(run)
        goal.at_check, checkpoint = at_check, None
        if file is not None:
            checkpoint = CheckpointCallback(file, training.checkpoints.seconds, run, at_check)
            goal.at_check, goal.saved = checkpoint.checked, lambda: checkpoint.can_save
        pruning = training.pruning_of(trial)
        if (known := training.known_scores(trial)) is not None:
            pruning.reuse(*known)
        smoothness = SmoothnessCallback(**training.smoothness)
        examples = ExamplesCallback(trial.cell.batch_size, training.workload.batch_size_key)
        delay = training.delay_of(trial)
        local = training.local_of(trial)  # before the goal, which asks for the loss of all workers
        asked = [*([delay] if delay.delay else []), *([smoothness] if smoothness.interval else [])]
        asked += [local] if local.rounds.on else []
        ours = [_OwnSignals(), pruning, *asked, goal]
        ours += [examples] if not standard_data(built.data) else []
        ours += [checkpoint] if checkpoint is not None else []
        screen_callbacks_of(built.module)
        with isolated(seed=trial.seed_for("order")):  # what a loader, an augmentation or dropout draws is the point's
            callbacks = [*built.trainer["callbacks"], *self.callbacks, *ours]
            trainer = Trainer(**{**built.trainer, "callbacks": callbacks})
            with suppress(Paused):
                trainer.fit(built.module, datamodule=built.data, ckpt_path=saved, weights_only=True)
        if run.status is None:
            run.failure = f"the module or a callback stopped it after {goal.steps} steps"
        training.keep_scores(trial, pruning.key, pruning.scores)
        run.kept = pruning.mask.kept() if pruning.mask is not None else {}
        run.seconds = checkpoint.seconds if checkpoint is not None else 0.0
        run.timed = goal.watch.timed
        run.smoothness, run.theory = (smoothness.curve if smoothness.interval else {}), smoothness.terms
        together = {RANKS: ranks.world()} if ranks.world() > 1 else {}
        run.observed = {**pruning.observed, **examples.observed, **together}


class _OwnSignals(Callback):
    """Leaves signals to whoever handles them outside of the run."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        lightning_private.leave_signals_alone(trainer)
