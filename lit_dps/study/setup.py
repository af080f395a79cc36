"""StudySetup: the whole configuration of a study as plain data, checked before anything is created."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_dps.config import StorageConfig, StudyConfig, cores
from lit_dps.engines.engine import Engine, Training
from lit_dps.engines.loop import IntervalLoop
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.errors import ConfigError
from lit_dps.goal import Goal
from lit_dps.parallel import settings
from lit_dps.parallel.ranks import started_by_torchrun
from lit_dps.study.checks import check_keys, rehearse_ends
from lit_dps.study.identity import identity
from lit_dps.training import GoalErrorCallback, PruningCallback
from lit_dps.training.checkpoints import Checkpoints
from lit_dps.training.protocol import check_trainer, overruled
from lit_dps.training.workload import Workload
from lit_dps.trial import Cell, Status, Trial, TrialResult

# Trials in lockstep where study.slots does not say: beyond 16 a core's cache holds nothing of the next network; nothing
# was measured on a GPU
CPU_SLOTS, GPU_SLOTS = 16, 64


@dataclass(frozen=True)
class StudySetup:
    """Everything that a process needs to run trials of a study; can be pickled.

    Attributes:
        study: Grid and search.
        storage: Where it is kept.
        workload: What a trial trains.
        goal: Arguments of `GoalErrorCallback`.
        pruning: Arguments of `PruningCallback`.
        smoothness: Arguments of `SmoothnessCallback`.
        uid: Of the study as declared; see `lit_dps.store.header.declare`.
        began: When this run of the study began, in seconds since the epoch.
    """

    study: StudyConfig
    storage: StorageConfig
    workload: Workload
    goal: Mapping[str, Any]
    pruning: Mapping[str, Any]
    smoothness: Mapping[str, Any]
    uid: str | None = None
    began: float = 0.0

    @property
    def cells(self) -> list[Cell]:
        """The cells to run, in order: those of one batch size together, since they may be trained in lockstep."""
        return sorted(self.study.cells, key=lambda cell: (cell.batch_size, cell.others, cell.sparsity))

    def left(self, results: Mapping[Cell, Sequence[TrialResult]]) -> dict[Cell, set[int]]:
        """The points of each cell that have no result yet, or failed."""
        told = {cell: [r for r in results.get(cell, ()) if r.status is not Status.FAILED] for cell in self.cells}
        done = {cell: {result.trial.point for result in told[cell]} for cell in self.cells}
        return {cell: set(range(self.study.trials)) - points for cell, points in done.items()}

    @property
    def goal_of_trials(self) -> Goal:
        return GoalErrorCallback(**self.goal).goal

    @property
    def ranks(self) -> int:
        """Processes that train each trial together."""
        return settings.ranks_asked(self.workload.trainer)

    @property
    def on_gpu(self) -> bool:
        return settings.on_gpu(self.workload.trainer)

    @property
    def workers(self) -> int:
        """Trials that run at the same time: as configured, else one on GPUs, or as many as CPU cores have room for.

        A trial takes `threads` cores for each of its ranks. torchrun starts the ranks of one.
        """
        if self.study.workers is not None:
            return self.study.workers
        if self.on_gpu or started_by_torchrun():
            return 1
        return max(1, cores() // (self.study.threads * self.ranks))

    def checkpoints(self) -> Checkpoints | None:
        """Where the trials are saved. Of several ranks the first one reads, writes and tells."""
        if self.study.checkpoint_minutes is None:
            return None
        return Checkpoints(self.storage.checkpoints(self.study.name), self.uid, self.study.checkpoint_minutes)

    def training(self, checkpoints: Checkpoints | None = None) -> Training:
        """What the trials have in common."""
        return Training(self.workload, self.goal, self.pruning, self.smoothness, checkpoints)

    def engine(self, checkpoints: Checkpoints | None = None) -> Engine:
        """Who trains the trials."""
        training = self.training(checkpoints)
        if self.ranks > 1 or not self.study.lean:
            return TrainerEngine(training)
        return IntervalLoop(training, self.side_by_side)

    @property
    def side_by_side(self) -> int:
        """Trials that each worker trains in lockstep, at most."""
        wanted = self.study.engine == "fused" or (self.study.engine == "auto" and self.on_gpu)
        if not wanted:
            return 1
        cells = len(self.study.cells) // len(self.study.batch_sizes)
        share = math.ceil(self.study.trials * cells / self.workers)
        return self.study.slots or min(GPU_SLOTS if self.on_gpu else CPU_SLOTS, share)

    def check(self, settled: Callable[[LightningDataModule], bool] = lambda data: False) -> LightningDataModule:
        """Checks all that can be checked before a trial runs, and creates nothing.

        Args:
            settled: Whether a study with this data has no trial left to run. Then all that a rehearsal finds out is
                known: its trials ran, under an equal configuration.

        Returns:
            The data module, set up for training.

        Raises:
            ConfigError: naming the key, the value and what is allowed.
            DataError: if the data cannot be read.
        """
        self.study.check()
        PruningCallback(**self.pruning)
        own = self.goal_of_trials
        for value in self.study.goals:
            if not own.easier(value):
                key = next(k for k in ("error", "at_most", "at_least") if self.goal.get(k) is not None)
                side = "below" if own.at_least else "above"
                raise ConfigError("study.goals", value, f"{side} goal.{key} = {own.value:g}, which stops the runs")
            try:
                own.at(value)
            except ConfigError as error:
                raise ConfigError("study.goals", value, error.allowed) from None
        check_trainer(self.workload.trainer)
        check_keys(self.study, self.workload)
        if self.ranks > 1 and self.study.engine == "fused":
            raise ConfigError("study.engine", "fused", f"lightning or auto where {self.ranks} ranks train each trial")
        if self.study.engine == "fused" and not self.study.lean:
            raise ConfigError("study.lean", False, "true where study.engine is fused")
        if started_by_torchrun() and self.workers > 1:
            raise ConfigError("study.workers", self.workers, "1 under torchrun: start it once for each worker")
        smallest = dict.fromkeys(replace(cell, batch_size=min(self.study.batch_sizes)) for cell in self.study.cells)
        for cell in smallest:
            self.training().pruning_of(Trial(cell, 0))
            for end in (0.0, 1.0):  # classes refuse what they do not allow at the ends of the ranges
                data = self.workload.build(self._trial_at(cell, end)).data
        if settled(data):
            return data
        data = rehearse_ends(self.training(), self.study)
        for line in overruled(self.workload.trainer):
            print(f"note: {line}", file=sys.stderr)
        return data

    def _trial_at(self, cell: Cell, end: float) -> Trial:
        """A trial at the low or the high end of all ranges, 0 or 1."""
        return Trial(cell, 0, {key: box.at(end) for key, box in self.study.space.items()})

    def identity(self, data: LightningDataModule) -> dict[str, Any]:
        """What decides the results: equal identities give equal tables."""
        return identity(self.study, self.workload, self.goal, self.pruning, self.smoothness, data)

    def config(self) -> dict[str, Any]:
        """The configuration as plain JSON, as `--config` takes it."""
        return {
            "model": dict(self.workload.model),
            "data": dict(self.workload.data),
            "trainer": dict(self.workload.trainer),
            "goal": dict(self.goal),
            "pruning": dict(self.pruning),
            "smoothness": dict(self.smoothness),
            "study": dataclasses.asdict(self.study),
        }

    def workload_name(self) -> str:
        """The MLflow experiment: as configured, else data set, network or module, and update rule."""
        if self.study.workload:
            return self.study.workload
        args = self.workload.model.get("init_args", {})
        network = args.get("network", self.workload.model)
        parts = [self.workload.data["class_path"], network["class_path"] if isinstance(network, dict) else "network"]
        names = [part.rsplit(".", 1)[-1] for part in parts]
        rule = args.get("optimizer")
        if isinstance(rule, str):
            names.append(rule if args.get("schedule", "constant") == "constant" else f"{rule}-{args['schedule']}-decay")
        return "-".join(names)
