"""StudySetup: the whole configuration of a study as plain data, and all of it that decides
results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_dps.core.aliases import as_stored
from lit_dps.core.config import StorageConfig, StudyConfig, cores
from lit_dps.core.goal import Goal
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.record import StudyRecord
from lit_dps.core.repeats import missing_repeats
from lit_dps.core.search_space import Space
from lit_dps.core.space_history import ExpandedSpace
from lit_dps.core.trial import ENGINE_SET, LIGHTNING, STACKED, Cell, Status, TrialResult
from lit_dps.core.trial_config import (
    TRIAL_SECTIONS,
    GoalConfig,
    OptimConfig,
    PruningConfig,
    SmoothnessConfig,
    plain,
)
from lit_dps.engines.engine import Engine, Training
from lit_dps.engines.interval_loop import IntervalLoop
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.parallel import settings
from lit_dps.parallel.ranks import started_by_torchrun
from lit_dps.study.identity import identity_of_study
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.workload import Workload

# Trials in lockstep where study.slots does not say: beyond 16 a core's cache holds nothing of the
# next network. An H200 trains 25 and 100 about as fast a network at B = 256, and the more the
# faster at B = 2 (benchmarks/products.py)
CPU_SLOTS, GPU_SLOTS = 16, 64


@dataclass(frozen=True)
class StudySetup:
    """Everything that a process needs to run trials of a study; can be pickled.

    Attributes:
        study: Grid and search.
        storage: Where it is kept.
        workload: What a trial trains.
        goal: When a trial stops.
        pruning: How the trials are pruned.
        smoothness: What is measured along the trials.
        optim: How stale their gradients are.
        local: Their workers of local SGD.
        uid: Of the study as declared; see `lit_dps.storage.header.declare`.
        boxes: How its box was widened (`lit_dps.study.expand_space`).
        run_number: Of this run of the study; see `lit_dps.storage.header.begin_run`.
        budget: The trainer's steps that module and schedules see, for trials that end earlier; None
            for the goal's.
        environment: Key of the environment of this run (`lit_dps.core.environment`).
        sources: Hashes of the user's code in this environment, to which processes that import it
            later hold it.
    """

    study: StudyConfig
    storage: StorageConfig
    workload: Workload
    goal: GoalConfig
    pruning: PruningConfig = PruningConfig()
    smoothness: SmoothnessConfig = SmoothnessConfig()
    optim: OptimConfig = OptimConfig()
    local: LocalSGDSchedule = LocalSGDSchedule()
    uid: str | None = None
    run_number: int = 0
    boxes: tuple[ExpandedSpace, ...] = ()
    budget: int | None = None
    environment: str | None = None
    sources: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.study.whole_curves and self.goal.early_reject:
            object.__setattr__(self, "goal", dataclasses.replace(self.goal, early_reject=False))

    @property
    def space(self) -> Space:
        """The box of the points, as it was widened."""
        return self.boxes[-1].space if self.boxes else self.study.space

    @property
    def cells(self) -> list[Cell]:
        """The cells to run, in order: those of one batch size together, since they may be trained
        in lockstep."""
        return sorted(
            self.study.cells, key=lambda cell: (cell.batch_size, cell.axes, cell.sparsity)
        )

    def remaining_points(
        self, results: Mapping[Cell, Sequence[TrialResult]]
    ) -> dict[Cell, set[int]]:
        """The points of each cell that have no result yet, or failed."""
        points = set(range(self.study.trials))
        return {
            cell: points
            - {r.trial.point for r in results.get(cell, ()) if r.status is not Status.FAILED}
            for cell in self.cells
        }

    def remaining_repeats(self, record: StudyRecord) -> int:
        """The repeats that are left to run: those of the best points so far, of cells that have
        one."""
        found = (
            (record.results.get(cell, ()), record.repeats.get(cell, ())) for cell in self.cells
        )
        return sum(len(missing_repeats(self.study.repeat_plan, *results)) for results in found)

    @property
    def goal_of_trials(self) -> Goal:
        return self.goal.build()

    @property
    def middle(self) -> dict[str, Any]:
        """The metaparameters at the middle of their ranges."""
        return {key: box.at(0.5) for key, box in self.study.space.items()}

    def unreached(self, steps: int) -> Goal:
        """A goal that no metric meets, checked after more steps than so many: of runs that are
        timed or read."""
        return Goal(1e300, 1 + steps, 1 + steps, self.goal_of_trials.metric, at_least=True)

    @property
    def ranks(self) -> int:
        """Processes that train each trial together."""
        return settings.ranks_asked(self.workload.trainer)

    @property
    def on_gpu(self) -> bool:
        return settings.on_gpu(self.workload.trainer)

    @property
    def workers(self) -> int:
        """Trials that run at the same time: as configured, else one on GPUs, or as many as CPU
        cores have room for.

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
        return Checkpoints(
            self.storage.checkpoints(self.study.name), self.uid, self.study.checkpoint_minutes
        )

    def training(self, checkpoints: Checkpoints | None = None) -> Training:
        """What the trials have in common."""
        of_trials = self.workload, self.goal, self.pruning, self.smoothness, self.optim, self.local
        return Training(*of_trials, checkpoints, tuple(self.study.metrics), self.budget)

    def engine(self, checkpoints: Checkpoints | None = None) -> Engine:
        """Return what trains the trials. It may train some by a slower loop than the study's."""
        training = self.training(checkpoints)
        reason = self.reason_for_lightning
        if reason is not None:
            return TrainerEngine(training, reason=reason)
        return IntervalLoop(training, self.stack_size)

    @property
    def reason_for_lightning(self) -> str | None:
        """Why Lightning's loop trains all trials; None if each trial decides."""
        if self.ranks > 1:
            return f"{self.ranks} ranks train each trial"
        if self.study.engine == LIGHTNING:
            return ENGINE_SET
        return None

    @property
    def stack_size(self) -> int:
        """The largest number of networks that each worker trains at once."""
        stacks = self.study.engine == STACKED or (self.study.engine == "auto" and self.on_gpu)
        if not stacks:
            return 1
        cells = len(self.study.cells) // len(self.study.batch_sizes)
        share = math.ceil(self.study.trials * cells / self.workers)
        return self.study.slots or min(GPU_SLOTS if self.on_gpu else CPU_SLOTS, share)

    def config(self) -> dict[str, Any]:
        """The configuration as plain JSON, with the names of keys in the stored format."""
        config = {
            "model": dict(self.workload.model),
            "data": dict(self.workload.data),
            "trainer": dict(self.workload.trainer),
            "goal": plain(self.goal),
            "pruning": plain(self.pruning),
            "smoothness": plain(self.smoothness),
            "optim": plain(self.optim),
            "local": plain(self.local),
            "study": dataclasses.asdict(self.study),
        }
        return as_stored(config)

    def workload_name(self) -> str:
        """The MLflow experiment: as configured, else data set, network or module, and update
        rule."""
        if self.study.workload:
            return self.study.workload
        args = self.workload.model.get("init_args", {})
        network = args.get("network", self.workload.model)
        parts = [
            self.workload.data["class_path"],
            network["class_path"] if isinstance(network, dict) else "network",
        ]
        names = [part.rsplit(".", 1)[-1] for part in parts]
        rule = args.get("optimizer")
        if isinstance(rule, str):
            names.append(
                rule
                if args.get("schedule", "constant") == "constant"
                else f"{rule}-{args['schedule']}-decay"
            )
        return "-".join(names)

    def identity(self, data: LightningDataModule | None) -> dict[str, Any]:
        """Return the configuration that decides results, as plain JSON; see `study.identity`.

        Args:
            data: The data module, set up.
        """
        sections = {name: getattr(self, name) for name in TRIAL_SECTIONS}
        return identity_of_study(self.study, self.workload, sections, data)
