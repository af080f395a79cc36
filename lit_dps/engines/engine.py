"""The joint between search and training: who trains runs, and what the trials of a study have in
common."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from lit_dps.core.attempt import Attempt
from lit_dps.core.error_origin import error_text
from lit_dps.core.errors import StorageError, UserError
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.search_space import RATE_NAMES
from lit_dps.core.trial import Status, Trial, TrialResult
from lit_dps.core.trial_config import (
    GoalConfig,
    OptimConfig,
    PruningConfig,
    SmoothnessConfig,
    plain,
)
from lit_dps.parallel import ranks
from lit_dps.training import DelayCallback, LocalSGDCallback, PruningCallback
from lit_dps.training.checkpoint_files import CheckpointFile, Checkpoints
from lit_dps.training.lightning_private import error_of_fit
from lit_dps.training.workload import Workload

OPTIONS = "pruning.options."  # an axis may be an argument of the pruning method
SCORES_KEPT = (
    2**26
)  # elements: 256 MiB in float32, all 100 points of the paper's networks many times over
Key = tuple[int, ...]  # of the pass that scores were taken over: `TrainingPass.key`


class Engine(Protocol):
    """Trains runs."""

    def train(
        self, next_run: Callable[[], Attempt | None], at_check: Callable[[], None] = lambda: None
    ) -> Iterator[TrialResult]:
        """Pulls a run whenever there is room for one; yields each result as soon as it is known.

        Args:
            next_run: The next run; None where there is none for now.
            at_check: Called after each check that a run goes on from; may raise, on all ranks, to
                leave.
        """


@dataclass(frozen=True)
class Training:
    """What the trials of a study have in common.

    Attributes:
        workload: What a trial trains.
        goal: When a trial stops.
        pruning: How it is pruned; the sparsity is the cell's, the seed the point's.
        smoothness: What is measured along it.
        optim: How stale its gradients are.
        local: Its workers of local SGD.
        checkpoints: Where long runs are saved and go on from; None begins each anew.
        metrics: Further metrics of validation that their runs keep.
        budget: The trainer's steps that module and schedules see, for runs that end earlier; None
            for the goal's.
    """

    workload: Workload
    goal: GoalConfig
    pruning: PruningConfig = PruningConfig()
    smoothness: SmoothnessConfig = SmoothnessConfig()
    optim: OptimConfig = OptimConfig()
    local: LocalSGDSchedule = LocalSGDSchedule()
    checkpoints: Checkpoints | None = None
    metrics: tuple[str, ...] = ()
    budget: int | None = None
    _schedules: dict[tuple, dict[str, float]] = field(default_factory=dict, init=False, repr=False)
    _scores: dict[tuple, tuple[Key, dict[str, Tensor]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def pruning_of(self, trial: Trial) -> PruningCallback:
        """How a trial is pruned."""
        own = _values_below("pruning.", trial.cell.axes)
        options = dict(self.pruning.options or {})
        for name in [*own]:
            if name.startswith("options."):
                options[name.removeprefix("options.")] = own.pop(name)
        if options:
            own["options"] = options
        own |= {"sparsity": trial.cell.sparsity, "seed": trial.seed_for("prune")}
        callback = PruningCallback.of(replace(self.pruning, **own))
        callback.redraw = partial(self.workload.module, trial)
        return callback

    def delay_of(self, trial: Trial) -> DelayCallback:
        """How stale the gradients of a trial are."""
        own = _values_below("optim.", trial.cell.axes)
        return DelayCallback.of(replace(self.optim, **own))

    def local_of(self, trial: Trial) -> LocalSGDCallback:
        """The workers that a trial is trained by; its cell and its point may say their numbers."""
        own = _values_below("local.", [*trial.cell.axes, *trial.params.items()])
        return LocalSGDCallback.of(replace(self.local, **own))

    def known_scores(self, trial: Trial) -> tuple[Key, dict[str, Tensor]] | None:
        """The pruning scores of the trial's point, if they were kept, and the key of the pass they
        were taken over."""
        return None if trial.repeat else self._scores.get(_scored(trial))

    def keep_scores(self, trial: Trial, key: Key | None, scores: dict[str, Tensor] | None) -> None:
        """Keeps the scores of a pass, which cost as much as an epoch, for the point's other cells,
        while there is room.

        The key is None where the batch size of the training decides on the pass. A repeat has a
        network of its own in each cell.
        """
        if scores is None or key is None or trial.repeat or not network_is_shared(self.workload):
            return
        known = sum(score.numel() for _, kept in self._scores.values() for score in kept.values())
        if known + sum(score.numel() for score in scores.values()) <= SCORES_KEPT:
            self._scores[_scored(trial)] = key, scores

    def schedule_of(
        self, trial: Trial, evaluate: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Return the shape of a trial's schedule. Trials that differ only in their rate share
        it."""
        others = [
            (key, value)
            for key, value in trial.params.items()
            if key.rpartition(".")[2] not in RATE_NAMES
        ]
        cell = trial.cell.batch_size, trial.cell.axes, repr(sorted(others))
        if cell not in self._schedules:
            self._schedules[cell] = evaluate()
        return self._schedules[cell]

    def file_of(self, run: Attempt, engine: str) -> CheckpointFile | None:
        """Where a run is saved by an engine of this name; None without checkpoints."""
        if self.checkpoints is None:
            return None
        given: dict[str, Any] = {
            "goal": plain(self.goal),
            "pruning": plain(self.pruning),
            "smoothness": plain(self.smoothness),
        }
        # Checkpoints without these keys remain valid.
        if self.pruning.init == "original":
            del given["pruning"]["init"]
        if not self.smoothness.noise:
            del given["smoothness"]["noise"]
        if self.optim.delay:
            given["optim"] = plain(self.optim)
        rounds = self.local_of(run.trial).rounds
        if rounds.on:
            given["local"] = plain(rounds)
        given |= {"metrics": list(self.metrics)} if self.metrics else {}
        given |= {"goals": run.other_goals, "engine": engine, "workload": asdict(self.workload)}
        return self.checkpoints.file(run.trial, given)

    def attempt(self, run: Attempt, train: Callable[[Attempt], None]) -> TrialResult:
        """The result of a run; what a module, its data or a callback raises makes it a failed
        trial.

        Raises:
            Exception: what is not the trial's own; of several ranks anything, since the others may
                be elsewhere.
        """
        try:
            train(run)
        except Exception as raised:
            error = error_of_fit(raised)
            if isinstance(error, StorageError) or ranks.is_rank_loss(error) or ranks.world() > 1:
                raise
            if self.checkpoints is not None:
                self.checkpoints.remove(run.trial)
            line = (
                str(error)
                if isinstance(error, UserError)
                else f"{type(error).__name__}: {error_text(error)}"
            )
            run.restart()
            run.status, run.failure = Status.FAILED, line.strip().splitlines()[0].removesuffix(":")
            run.traceback = "".join(traceback.format_exception(error))
        return run.result()


def _values_below(prefix: str, values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values whose keys have a prefix, by the rest of their keys."""
    return {key.removeprefix(prefix): value for key, value in values if key.startswith(prefix)}


def _scored(trial: Trial) -> tuple:
    """What the scores of a trial's network depend on: not on the weights that it is trained from.

    Its metaparameters are among it, which may be of the network or the loss: a point of a search
    that is not Sobol's has others in each cell.
    """
    others = tuple(pair for pair in trial.cell.axes if pair[0] != "pruning.init")
    return trial.seed, trial.point, repr(sorted(trial.params.items())), others


def network_is_shared(workload: Workload) -> bool:
    """Whether the network of a point is the same at every batch size: it is not told of it."""
    return workload.batch_size_key.startswith("data.")
