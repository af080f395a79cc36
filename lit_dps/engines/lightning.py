"""The Lightning engine: one trial at a time, each by `Trainer.fit`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_dps.callbacks import GoalErrorCallback, PruningCallback, SmoothnessCallback
from lit_dps.callbacks.checkpoint import CheckpointCallback, Left
from lit_dps.engines.checkpoints import Checkpoints
from lit_dps.engines.lean import LeanLoop
from lit_dps.engines.scores import ScoreCache
from lit_dps.errors import UserError
from lit_dps.parallel import ranks
from lit_dps.trial import Cell, Status, Trial, TrialResult
from lit_dps.workload import Workload


@dataclass(frozen=True)
class LightningEngine:
    """Runs trials of any LightningModule and LightningDataModule, one after another.

    Attributes:
        workload: What a trial trains.
        goal: Arguments of `GoalErrorCallback`.
        pruning: Arguments of `PruningCallback` but the sparsity, which is the cell's.
        smoothness: Arguments of `SmoothnessCallback`.
        goals: Further goal errors that the runs answer.
        lean: Whether a batch of Lightning's loop is all steps between two checks (`LeanLoop`), where that can be.
        limit: The step that the trials of a cell have to reach: beyond it they cannot matter any more.
        pause: The step at which they stop too, to be run again and further if they turn out to matter.
        after_check: Called after each check that a trial goes on from; may raise, on all ranks, to leave.
        checkpoints: Where long trials are saved and go on from; None begins each anew.
    """

    workload: Workload
    goal: Mapping[str, Any]
    pruning: Mapping[str, Any] = field(default_factory=dict)
    smoothness: Mapping[str, Any] = field(default_factory=lambda: {"interval": None})
    goals: Sequence[float] = ()
    lean: bool = True
    limit: Callable[[Cell], float] = lambda cell: math.inf
    pause: Callable[[Cell], float] = lambda cell: math.inf
    after_check: Callable[[], None] = lambda: None
    checkpoints: Checkpoints | None = None
    scores: ScoreCache = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "scores", ScoreCache(self.workload))

    def run(self, trials: Iterable[Trial]) -> Iterator[TrialResult]:
        for trial in trials:
            yield self.train(trial)

    def rehearse(self, trial: Trial) -> None:
        """One training step and one validation batch, to find what does not fit together before a study begins.

        Raises:
            ConfigError: for trainer arguments that do not serve, or a module that logs no validation error.
        """
        built, goal = self.workload.build(trial), GoalErrorCallback(**self.goal)
        try:
            trainer = Trainer(**built.trainer)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise UserError(f"trainer: {error}") from error
        goal.setup(trainer, built.module, "fit")
        with torch.random.fork_rng():
            interval = None if self.smoothness["interval"] is None else 1
            smoothness = SmoothnessCallback(**{**self.smoothness, "interval": interval, "examples": 2})
            rehearsal = Trainer(**{**built.trainer, "fast_dev_run": 1, "callbacks": [smoothness]})
            rehearsal.fit(built.module, datamodule=built.data)
        goal.error_of(rehearsal)

    def train(self, trial: Trial) -> TrialResult:
        """Trains one trial to its goal, budget or divergence, from its checkpoint if there is one.

        Raises:
            RuntimeError: if something else (a callback of the user's, say) stopped the run before.
        """
        if self.checkpoints is None:
            return self._train(trial)
        about = self.checkpoints.about(trial, self._settings())
        saved = ranks.said_by_first(lambda: self.checkpoints.find(trial, about))
        if saved is not None:
            try:
                return self._train(trial, about, saved)
            except UserError:
                raise
            except Exception as error:  # of a module that keeps more than it saves, say; a new run tells whose it is
                if ranks.lost(error):
                    raise
                self.checkpoints.remove(trial)
                if ranks.world() > 1:  # the others may be elsewhere
                    raise
                why = str(error).split("\n")[0]
                self.checkpoints.say(f"{about['name']} begins anew: it cannot go on from its checkpoint ({why})")
        return self._train(trial, about)

    def _settings(self) -> dict[str, Any]:
        given = {key: getattr(self, key) for key in ("goal", "pruning", "smoothness", "goals", "lean")}
        return {**given, "workload": asdict(self.workload)}

    def _train(self, trial: Trial, about: Mapping[str, Any] | None = None, saved: Path | None = None) -> TrialResult:
        """Trains one trial; with what there is to tell `about` it, it is saved on its way."""
        start = time.perf_counter()
        built = self.workload.build(trial)
        goal = GoalErrorCallback(**self.goal)
        checkpoint = None if about is None else self._checkpoint(trial, about)

        def limit() -> float:
            saved = checkpoint is not None and checkpoint.serves  # then it pauses by itself
            return self.limit(trial.cell) if saved else min(self.limit(trial.cell), self.pause(trial.cell))

        goal.further, goal.limit = self.goals, limit
        goal.after_check = self.after_check if checkpoint is None else checkpoint.checked
        seed = trial.seed_for("prune")
        pruning = PruningCallback(**{**self.pruning, "sparsity": trial.cell.sparsity, "seed": seed})
        pruning.reuse(self.scores.of(trial))
        smoothness = SmoothnessCallback(**self.smoothness)
        ours = [_OwnSignals(), pruning, *([smoothness] if smoothness.interval else []), goal]
        ours += [LeanLoop(goal.goal.check_interval)] if self.lean else []
        ours += [] if checkpoint is None else [checkpoint]
        callbacks = [*(built.trainer.pop("callbacks", None) or []), *ours]
        with torch.random.fork_rng():  # what a user's loader or dropout draws depends on the point alone
            torch.manual_seed(trial.seed_for("order"))
            trainer = Trainer(**built.trainer, callbacks=callbacks)
            try:
                trainer.fit(built.module, datamodule=built.data, ckpt_path=saved, weights_only=True)
            except Left:
                goal.run.status = Status.OUTRACED
        if goal.status is None:
            raise RuntimeError(f"the run of {trial.cell} point {trial.point} was stopped before its goal or its budget")
        self.scores.keep(trial, pruning.scores, built.data)
        return TrialResult(
            trial=trial,
            status=goal.status,
            steps=goal.steps_to_result,
            curve=goal.curve,
            kept=pruning.mask.kept() if pruning.mask is not None else {},
            seconds=time.perf_counter() - start + (checkpoint.seconds if checkpoint is not None else 0.0),
            smoothness=smoothness.curve if smoothness.interval else {},
            theory=smoothness.terms,
        )

    def _checkpoint(self, trial: Trial, about: Mapping[str, Any]) -> CheckpointCallback:
        return CheckpointCallback(
            self.checkpoints.path(trial),
            about,
            60 * self.checkpoints.minutes,
            self.after_check,
            lambda: self.pause(trial.cell),
            self.checkpoints.say_once,
        )


class _OwnSignals(Callback):
    """Leaves signals to whoever handles them outside of the run.

    Lightning's handler of SIGTERM ends the process at the next batch, with exit code 0, whatever ours would do.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer._signal_connector.teardown()
        trainer._signal_connector.received_sigterm = False
