"""TrialSettings: the settings that the trials of a study share, and results that they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from lit_dps.core.attempt import Attempt
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.registry import argument_names, named_class
from lit_dps.core.search_space import RATE_NAMES
from lit_dps.core.trial import Trial
from lit_dps.core.trial_config import BatchConfig, GoalConfig, OptimConfig, PruningConfig, plain
from lit_dps.pruning import PRUNERS, Pruner
from lit_dps.pruning.pruner import Scores
from lit_dps.readings.registry import ReadingSpec
from lit_dps.training import PruningCallback
from lit_dps.training.checkpoint_files import CheckpointFile, Checkpoints
from lit_dps.training.workload import Workload

# Prefix of keys that name an argument of the pruning method, such as an axis of the grid.
METHOD_OPTIONS = "pruning.options."
# In elements: 256 MiB in float32, which is several times all 100 points of the paper's networks.
MAX_STORED_SCORES = 2**26
NextAttempt = Callable[[], Attempt | None]  # returns the next attempt; None if none remains
# Called after a validation; it may raise to stop training.
RaiseIfStopped = Callable[[], None]
PassKey = tuple[int, ...]  # `TrainingPass.key` of the pass that took the scores


def takes_option(method: str, name: str) -> bool:
    """Return True if a pruning method has an argument of this name, or takes any arguments."""
    kind = named_class("pruning.method", method, PRUNERS, Pruner)
    parameters = inspect.signature(kind).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return True
    return name in argument_names(kind)


@dataclass(frozen=True)
class TrialConfig:
    """The configuration of a trial: the values of the study, of the cell and of the point."""

    pruning: PruningConfig
    optim: OptimConfig
    local: LocalSGDSchedule
    batch: BatchConfig


@dataclass(frozen=True)
class TrialSettings:
    """The settings that the trials of a study share.

    Attributes:
        workload: What a trial trains.
        goal: When a trial stops.
        pruning: How a trial is pruned. The sparsity is the cell's, and the seed the point's.
        optim: The delay of the gradients, and the average of the weights.
        local: The workers of local SGD.
        batch: The batch size as a function of the step.
        checkpoints: The checkpoint files of long runs; None saves nothing.
        metrics: Further validation metrics to keep in the curve.
        shown_steps: The number of steps that the module and its schedules see, if runs end earlier;
            None shows `goal.max_steps`.
        readings: What is measured along a trial and at its end.
    """

    workload: Workload
    goal: GoalConfig
    pruning: PruningConfig = PruningConfig()
    optim: OptimConfig = OptimConfig()
    local: LocalSGDSchedule = LocalSGDSchedule()
    checkpoints: Checkpoints | None = None
    metrics: tuple[str, ...] = ()
    shown_steps: int | None = None
    readings: tuple[ReadingSpec, ...] = ()
    batch: BatchConfig = BatchConfig()
    # Results that trials share: shapes of schedules, and pruning scores with the key of their pass.
    _schedules: dict[tuple, dict[str, float]] = field(default_factory=dict, init=False, repr=False)
    _scores: dict[tuple, tuple[PassKey, Scores]] = field(
        default_factory=dict, init=False, repr=False
    )

    def resolve(self, trial: Trial) -> TrialConfig:
        """Return the configuration of a trial.

        Raises:
            ConfigError: If a value of the cell or the point is refused.
        """
        axes = trial.cell.axes
        return TrialConfig(
            self._pruning_of(trial),
            replace(self.optim, **_values_below("optim.", axes)),
            replace(self.local, **_values_below("local.", [*axes, *trial.params.items()])),
            self.batch.with_axes(axes),
        )

    def _pruning_of(self, trial: Trial) -> PruningConfig:
        """Return how a trial is pruned.

        If the method is an axis, each method receives those of `pruning.options` that it takes.
        """
        arguments: dict[str, Any] = {}
        options = {}
        for key, value in trial.cell.axes:
            if key.startswith(METHOD_OPTIONS):
                options[key.removeprefix(METHOD_OPTIONS)] = value
            elif key.startswith("pruning."):
                arguments[key.removeprefix("pruning.")] = value
        shared = self.pruning.options or {}
        # A dense trial of an axis of methods has the default method, which makes no mask.
        if "method" in arguments or trial.cell.sparsity == 0:
            method = arguments.get("method", self.pruning.method)
            shared = {name: v for name, v in shared.items() if takes_option(method, name)}
        arguments["options"] = {**shared, **options} or None
        arguments["sparsity"] = trial.cell.sparsity
        arguments["seed"] = trial.seed_for("prune")
        return replace(self.pruning, **arguments)

    def pruning_callback(self, trial: Trial) -> PruningCallback:
        """Return the callback that prunes a trial."""
        callback = PruningCallback.of(self.resolve(trial).pruning)
        callback.redraw = partial(self.workload.module, trial)
        return callback

    @property
    def visible_steps(self) -> int:
        """The number of steps that the module and its schedules see."""
        return self.shown_steps or self.goal.max_steps

    def stored_scores(self, trial: Trial) -> tuple[PassKey, Scores] | None:
        """Return the key of the scoring pass and the pruning scores of a point; None if missing."""
        key = self.scores_key(trial)
        if key is None:
            return None
        return self._scores.get(key)

    def scores_key(self, trial: Trial) -> tuple | None:
        """Return what the pruning scores of a trial depend on; None if no other trial has them.

        This includes the searched values, which may be of the network or the loss: samplers other
        than Sobol draw different values in each cell. The scores do not depend on `pruning.init`. A
        repeat has a different network in each cell.
        """
        if trial.repeat or not network_is_shared(self.workload):
            return None
        axes = tuple((key, value) for key, value in trial.cell.axes if key != "pruning.init")
        return trial.seed, trial.point, repr(sorted(trial.params.items())), axes

    def store_scores(self, trial: Trial, key: PassKey | None, scores: Scores | None) -> None:
        """Store pruning scores for the other cells of a point, if there is room for them.

        A scoring pass costs as much as an epoch.

        Args:
            trial: The trial whose network was scored.
            key: Key of the scoring pass; None if the pass depends on the training batch size.
            scores: The scores; None if the scores of the method depend on the sparsity.
        """
        scores_key = self.scores_key(trial)
        if scores is None or key is None or scores_key is None:
            return
        size = sum(score.numel() for score in scores.values())
        for _, stored in self._scores.values():
            size += sum(score.numel() for score in stored.values())
        if size <= MAX_STORED_SCORES:
            self._scores[scores_key] = key, scores

    def schedule_shape(
        self, trial: Trial, measure: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Return the shape of a trial's schedule; trials that differ only in their rate share it.

        Args:
            trial: The trial.
            measure: Measures the shape. It is called once for all trials that share the shape.
        """
        other_params = []
        for key, value in trial.params.items():
            if key.rpartition(".")[2] not in RATE_NAMES:
                other_params.append((key, value))
        shared_key = trial.cell.batch_size, trial.cell.axes, repr(sorted(other_params))
        if shared_key not in self._schedules:
            self._schedules[shared_key] = measure()
        return self._schedules[shared_key]

    def checkpoint_file(self, attempt: Attempt, engine: str) -> CheckpointFile | None:
        """Return the file in which an engine saves an attempt; None without checkpoints."""
        trial = attempt.trial
        if self.checkpoints is None or trial is None:
            return None
        settings: dict[str, Any] = {
            "goal": plain(self.goal),
            "pruning": plain(self.pruning),
            "optim": plain(self.optim),
            "local": plain(self.resolve(trial).local),
            "metrics": list(self.metrics),
            "readings": [spec.identity for spec in self.readings],
            "goals": attempt.other_goals,
            "engine": engine,
            "workload": asdict(self.workload),
        }
        batch = plain(self.batch)
        if batch:
            settings["batch"] = batch
        return self.checkpoints.file(trial, settings)


def network_is_shared(workload: Workload) -> bool:
    """Return True if the network of a point is the same at every batch size."""
    return workload.batch_size_key.startswith("data.")


def _values_below(prefix: str, items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values of keys with a prefix, by the rest of the key."""
    return {key.removeprefix(prefix): value for key, value in items if key.startswith(prefix)}
