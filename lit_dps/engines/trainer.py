"""The Lightning engine: one trial at a time, each by `Trainer.fit`."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.engines.lean import LeanLoop, standard_data
from lit_dps.engines.scores import ScoreCache
from lit_dps.errors import StorageError, UserError
from lit_dps.parallel import ranks
from lit_dps.training import GoalErrorCallback, PruningCallback, SmoothnessCallback
from lit_dps.training.checkpoint import CheckpointCallback, Paused
from lit_dps.training.checkpoints import Checkpoints
from lit_dps.training.examples import ExamplesCallback
from lit_dps.training.generators import isolated
from lit_dps.training.protocol import screen_callbacks_of
from lit_dps.training.workload import Workload
from lit_dps.trial import RANKS, Cell, Status, Trial, TrialResult


@dataclass(frozen=True)
class LightningEngine:
    """Runs trials of any LightningModule and LightningDataModule, one after another.

    What a module, its data or a callback raises ends their trial alone, as failed; of several ranks it ends them all.

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
            yield self.attempt(trial)

    def attempt(self, trial: Trial) -> TrialResult:
        """`train`, but what a module, its data or a callback raises is a failed trial."""
        begin = time.perf_counter()
        try:
            return self.train(trial)
        except Exception as error:
            # what is not the trial's own ends the command; of several ranks the others may be elsewhere
            if isinstance(error, StorageError) or ranks.is_rank_loss(error) or ranks.world() > 1:
                raise
            if self.checkpoints is not None:
                self.checkpoints.remove(trial)
            line = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
            seconds = time.perf_counter() - begin
            line = line.strip().splitlines()[0].removesuffix(":")
            return TrialResult(trial, Status.FAILED, None, seconds=seconds, failure=line, traceback=text)

    def train(self, trial: Trial) -> TrialResult:
        """Trains one trial to its goal, budget or divergence, from its checkpoint if there is one.

        Raises:
            Exception: what the module, its data or a callback raises.
        """
        if self.checkpoints is None:
            return self._train(trial)
        about = self.checkpoints.about(trial, self._settings())
        saved = ranks.on_rank_zero(lambda: self.checkpoints.find(trial, about))
        if saved is not None:
            try:
                return self._train(trial, about, saved)
            except UserError:
                raise
            except Exception as error:  # of a module that keeps more than it saves, say; a new run tells whose it is
                if ranks.is_rank_loss(error):
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
            saved = checkpoint is not None and checkpoint.supports  # then it pauses by itself
            return self.limit(trial.cell) if saved else min(self.limit(trial.cell), self.pause(trial.cell))

        goal.further, goal.limit = self.goals, limit
        goal.after_check = self.after_check if checkpoint is None else lambda: checkpoint.checked(goal.steps)
        seed = trial.seed_for("prune")
        pruning = PruningCallback(**{**self.pruning, "sparsity": trial.cell.sparsity, "seed": seed})
        if (known := self.scores.of(trial)) is not None:
            pruning.reuse(*known)
        smoothness = SmoothnessCallback(**self.smoothness)
        examples = ExamplesCallback(trial.cell.batch_size, self.workload.batch_size_key)
        ours = [_OwnSignals(), pruning, *([smoothness] if smoothness.interval else []), goal]
        ours += [] if standard_data(built.data) else [examples]  # those make every batch whole
        ours += [LeanLoop(goal.goal.check_interval)] if self.lean else []
        ours += [] if checkpoint is None else [checkpoint]
        screen_callbacks_of(built.module)
        with isolated(seed=trial.seed_for("order")):  # what a loader, an augmentation or dropout draws is the point's
            trainer = Trainer(**{**built.trainer, "callbacks": [*built.trainer["callbacks"], *ours]})
            try:
                trainer.fit(built.module, datamodule=built.data, ckpt_path=saved, weights_only=True)
            except Paused:
                goal.run.status = Status.OUTRACED
        failure = ""
        if goal.status is None:
            failure = f"the module or a callback stopped it after {goal.steps} steps"
        self.scores.keep(trial, pruning.key, pruning.scores)
        together = {RANKS: ranks.world()} if ranks.world() > 1 else {}
        return TrialResult(
            trial=trial,
            status=goal.status or Status.STOPPED,
            steps=goal.steps_to_result,
            curve=goal.curve,
            kept=pruning.mask.kept() if pruning.mask is not None else {},
            seconds=time.perf_counter() - start + (checkpoint.seconds if checkpoint is not None else 0.0),
            smoothness=smoothness.curve if smoothness.interval else {},
            theory=smoothness.terms,
            observed={**pruning.observed, **examples.observed, **together},
            failure=failure,
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

    Lightning's handler of SIGTERM ends the process at the next batch, with exit code 0, whatever ours would do. Of
    several ranks the one that gets it would wait in a broadcast that no other takes part in, for ever.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer._signal_connector.register_signal_handlers = lambda: None  # which comes next, before loaders are made
