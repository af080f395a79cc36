"""StudySetup: the configuration of a study as plain data, with what follows from it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from lightning.pytorch import LightningDataModule

from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StorageConfig, StudyConfig, cores
from lit_dps.core.environment import COMPUTED, DATA, SOURCES, Environment
from lit_dps.core.goal import Goal
from lit_dps.core.identity import local_classes
from lit_dps.core.idle_axes import keys_that_vary
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.record import StudyRecord, remaining_points, shared_cells
from lit_dps.core.repeats import missing_repeats
from lit_dps.core.search_space import ExpandedSpace, Space
from lit_dps.core.trial import STACKED, Cell, Trial, TrialResult, Value
from lit_dps.core.trial_config import (
    TRIAL_SECTIONS,
    BatchConfig,
    GoalConfig,
    OptimConfig,
    PruningConfig,
    SmoothnessConfig,
    plain,
)
from lit_dps.engines.trial_engine import LoopChoice, TrialEngine
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.parallel import ddp
from lit_dps.parallel.ranks import started_by_torchrun
from lit_dps.readings.registry import ReadingSpec, resolve_readings, without_lipschitz
from lit_dps.storage.samplers import sobol_point
from lit_dps.study.identity import identity_of_study
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.workload import Workload

# Default of study.slots, the most networks of a stack. More than 16 do not fit into a core's cache.
CPU_STACK_SIZE = 16
# On an H200, a network of a stack of 25 and of 100 takes about the same time at B = 256. At B = 2,
# larger stacks are faster (benchmarks/products.py).
GPU_STACK_SIZE = 64


@dataclass(frozen=True)
class StudySetup:
    """Everything that a process needs to run trials of a study; can be pickled.

    Attributes:
        study: The grid and the search.
        storage: Addresses of the storage and of MLflow.
        workload: What a trial trains.
        goal: When a trial stops.
        pruning: How the trials are pruned.
        smoothness: What is measured along the trials.
        optim: The delay of the gradients of the trials.
        local: The local SGD workers of each trial.
        batch: The batch size as a function of the step.
        uid: The uid of the declared study; see `lit_dps.storage.header.declare`.
        spaces: The expansions of the search space (`lit_dps.study.expand_space`).
        run_number: The number of this run; see `lit_dps.storage.run_records.begin_run`.
        shown_steps: The trainer's steps that module and schedules see, if trials end earlier; None
            for the goal's.
        given_points: The metaparameters of each trial of a cell; empty for the sampler's points.
        cost_limit: The cost after which each trial stops, beside the race, in the unit of K*.
        environment: Code, data, versions and machine of this run. Processes that import the code
            later compare it with these hashes.
        shared: The cells of the stored study that show the trials of an equal cell
            (`StudyRecord.shared`); empty if no study is stored.
        trusts_best_of: Whether workers may import the modules that the study in `study.best_of`
            names, although this user did not run it.
    """

    study: StudyConfig
    storage: StorageConfig
    workload: Workload
    goal: GoalConfig
    pruning: PruningConfig = PruningConfig()
    smoothness: SmoothnessConfig = SmoothnessConfig()
    optim: OptimConfig = OptimConfig()
    local: LocalSGDSchedule = LocalSGDSchedule()
    batch: BatchConfig = BatchConfig()
    uid: str | None = None
    run_number: int = 0
    spaces: tuple[ExpandedSpace, ...] = ()
    shown_steps: int | None = None
    given_points: tuple[Mapping[str, Value], ...] = ()
    cost_limit: float = math.inf
    environment: Environment = Environment()
    shared: Mapping[Cell, Cell] = field(default_factory=dict)
    trusts_best_of: bool = False

    def __post_init__(self):
        if self.study.whole_curves and self.goal.early_reject:
            object.__setattr__(self, "goal", dataclasses.replace(self.goal, early_reject=False))
        readings, smoothness = without_lipschitz(self.study.readings, self.smoothness)
        if len(readings) < len(self.study.readings):
            study = dataclasses.replace(self.study, readings=readings)
            object.__setattr__(self, "study", study)
            object.__setattr__(self, "smoothness", smoothness)

    @property
    def space(self) -> Space:
        """The search space, with its expansions."""
        return self.spaces[-1].space if self.spaces else self.study.space

    @property
    def cells(self) -> list[Cell]:
        """The cells to run, in order. Cells of one batch size follow each other, for stacks.

        Of equal cells only one is run (`shared_cells`).
        """
        grid = self.study.cells
        in_grid = set(grid)
        cells = [cell for cell in grid if self.shared.get(cell) not in in_grid]
        trained = set(cells) - shared_cells(cells).keys()
        return sorted(trained, key=lambda cell: (cell.batch_size, cell.axes, cell.sparsity))

    def import_classes(self) -> None:
        """Import the classes that the goal, the statistic and batch schedules name.

        Reading a study imports no class that another person's configuration names. The classes of
        this configuration are the user's.
        """
        self.goal.build()
        _ = self.study.k_star_statistic
        for cell in self.cells:
            self.batch.with_axes(cell.axes).build()

    def with_study(self, **changes: Any) -> Self:
        """Return the study with other values of its grid and search (`StudyConfig`)."""
        return dataclasses.replace(self, study=dataclasses.replace(self.study, **changes))

    def with_stored_trials(self, record: StudyRecord) -> Self:
        """Return the study with the equal cells that a stored study has trained.

        Trained cells come first, so that a cell that the grid adds never replaces one of them.
        """
        trained = {cell: record.results[cell] for cell in record.trained_cells}
        cells = dict.fromkeys([*trained, *record.cells, *self.study.cells])
        return dataclasses.replace(self, shared=shared_cells(cells, trained))

    def remaining_points(
        self, results: Mapping[Cell, Sequence[TrialResult]]
    ) -> dict[Cell, set[int]]:
        """Return the points of each cell that the next run of the study must train."""
        return remaining_points(self.cells, self.study.trials, results)

    def remaining_trials(self, record: StudyRecord) -> int:
        """Return the number of trials and repeats that have no result yet, or failed."""
        count = self.remaining_repeats(record)
        for points in self.remaining_points(record.results).values():
            count += len(points)
        return count

    def remaining_repeats(self, record: StudyRecord) -> int:
        """Return the number of repeats that remain at the best points so far."""
        count = 0
        plan = self.study.repeat_plan
        statistic = self.study.k_star_statistic
        for cell in self.cells:
            results = record.results.get(cell, ())
            repeats = record.repeats.get(cell, ())
            count += len(missing_repeats(plan, results, repeats, statistic))
        return count

    @property
    def built_goal(self) -> Goal:
        return self.goal.build()

    def most_steps(self, cell: Cell, step_seconds: float = 0.0) -> int:
        """Return the step of the validation at which the budgets of a trial are spent.

        Args:
            cell: The cell of the trial.
            step_seconds: Seconds of a training step; 0 if they are unknown. Then
                `goal.max_seconds` does not count.
        """
        schedule = self.batch.with_axes(cell.axes).build()
        return self.built_goal.most_steps(cell.batch_size, step_seconds, schedule)

    @property
    def attempt_rules(self) -> AttemptRules:
        """The rules that the attempts at all trials share."""
        study = self.study
        return AttemptRules(self.built_goal, study.goals, study.train_past_goal, study.metrics)

    @property
    def middle(self) -> dict[str, Any]:
        """The metaparameters at the middle of their ranges."""
        return {key: box.at(0.5) for key, box in self.study.space.items()}

    def sample(self, number: int) -> dict[str, Value]:
        """Return the metaparameters of a Sobol sample, for runs beside the study."""
        study = self.study
        return sobol_point(study.space, study.seed, number, study.scramble)

    def unreachable_goal(self, steps: int) -> Goal:
        """Return a goal that no metric meets, with one check after more than `steps` steps.

        It is for runs that are timed or measured.
        """
        return Goal(1e300, 1 + steps, 1 + steps, self.built_goal.metric, at_least=True)

    @property
    def ranks(self) -> int:
        """The number of processes that train each trial together."""
        return ddp.ranks_asked(self.workload.trainer)

    @property
    def on_gpu(self) -> bool:
        return ddp.on_gpu(self.workload.trainer)

    @property
    def local_classes(self) -> list[str]:
        """The classes that only the process of the script or notebook can import, by path."""
        return local_classes(self.config())

    @property
    def workers(self) -> int:
        """The number of trials that run at the same time.

        The default is 1 on GPUs, under torchrun, and for classes of a script or notebook. Otherwise
        it is the number of trials that the CPU cores suffice for. Each rank of a trial uses
        `threads` cores.
        """
        if self.study.workers is not None:
            return self.study.workers
        if self.on_gpu or started_by_torchrun() or self.local_classes:
            return 1
        return max(1, cores() // (self.study.threads * self.ranks))

    def checkpoints(self) -> Checkpoints | None:
        """Return the folder of checkpoints; None without checkpoints."""
        minutes = self.study.checkpoint_minutes
        if minutes is None:
            return None
        content = self.environment.content
        environment = {name: content.get(name, {}) for name in (SOURCES, DATA, COMPUTED)}
        folder = self.storage.checkpoints(self.study.name)
        return Checkpoints(folder, self.uid, minutes, environment=environment)

    def trial_settings(self, checkpoints: Checkpoints | None = None) -> TrialSettings:
        """Return the settings that the trials share."""
        return TrialSettings(
            self.workload,
            self.goal,
            self.pruning,
            self.optim,
            self.local,
            checkpoints,
            tuple(self.study.metrics),
            self.shown_steps,
            self.readings,
            self.batch,
        )

    @property
    def readings(self) -> tuple[ReadingSpec, ...]:
        """The readings of `study.readings` and of the section `smoothness`."""
        return resolve_readings(self.study.readings, self.smoothness)

    def without_readings(self) -> StudySetup:
        """Return the study without readings along its trials."""
        smoothness = dataclasses.replace(self.smoothness, interval=None)
        return dataclasses.replace(self.with_study(readings=[]), smoothness=smoothness)

    @property
    def grows_batches(self) -> bool:
        """Whether the batch size of any cell changes along its trials."""
        batches = [self.batch.with_axes(cell.axes) for cell in self.study.cells]
        return not all(batch.build().is_constant for batch in batches)

    def with_constant_batch(self) -> StudySetup:
        """Return the study with the cell's batch size in every step."""
        grid = {key: v for key, v in self.study.grid.items() if not key.startswith("batch.")}
        return dataclasses.replace(self.with_study(grid=grid), batch=BatchConfig())

    def engine(self, checkpoints: Checkpoints | None = None) -> TrialEngine:
        """Return the engine that trains the trials."""
        return TrialEngine(
            self.trial_settings(checkpoints),
            self.stack_size,
            stacks_alone=self.on_gpu,
            engine=self.study.engine,
        )

    @property
    def stack_size(self) -> int:
        """The largest number of networks that each worker trains at once."""
        stacks = self.study.engine == STACKED or (self.study.engine == "auto" and self.on_gpu)
        if not stacks:
            return 1
        cells = len(self.cells) // len(self.study.batch_sizes)
        share = math.ceil(self.study.trials * cells / self.workers)
        limit = GPU_STACK_SIZE if self.on_gpu else CPU_STACK_SIZE
        return self.study.slots or min(limit, share)

    def loop_choices(self) -> list[LoopChoice]:
        """Return the loop of each cell.

        A trial in the middle of the search space decides for the cells that differ in their batch
        size or their pruning alone.
        """
        engine = self.engine()
        by_axes: dict[tuple, LoopChoice] = {}
        choices = []
        for cell in self.cells:
            axes = cell.stack_axes
            if axes not in by_axes:
                by_axes[axes] = engine.choose(Trial(cell, 0, self.middle, self.study.seed))
            choices.append(by_axes[axes])
        return choices

    def trials_at_a_time(
        self, choices: Sequence[LoopChoice], workers: int, record: StudyRecord
    ) -> int:
        """Return how many trials train at the same time, at most.

        Args:
            choices: The loop of each cell.
            workers: The number of processes.
            record: The stored study.
        """
        points = self.remaining_points(record.results)
        stackable: Counter[tuple] = Counter()  # the remaining trials that one stack may train
        for cell, choice in zip(self.cells, choices, strict=True):
            if choice.engine == STACKED:
                stackable[cell.batch_size, cell.stack_axes] += len(points[cell])
        most = max(stackable.values(), default=0)
        if stackable:
            # Repeats of all cells follow the search. Those of one batch size are not counted here.
            most = most or self.remaining_repeats(record)
        return max(workers, min(most, workers * self.stack_size))

    def config(self) -> dict[str, Any]:
        """The configuration as plain JSON."""
        study = dataclasses.asdict(self.study)
        # A former key of configuration files, which `StudyConfig` has replaced.
        del study["lean"]
        # Studies without later keys keep the configuration that they were stored with.
        for key in ("readings", "figures"):
            if not study[key]:
                del study[key]
        sections = {name: plain(getattr(self, name)) for name in TRIAL_SECTIONS}
        if not sections["batch"]:
            del sections["batch"]
        return {
            "model": dict(self.workload.model),
            "data": dict(self.workload.data),
            "trainer": dict(self.workload.trainer),
            **sections,
            "study": study,
        }

    def workload_name(self) -> str:
        """Return the name of the MLflow experiment, such as MNIST-MLP-momentum.

        The default is made of the data set, the network or module, the update rule and the
        schedule. Parts that the study varies are omitted.
        """
        if self.study.workload:
            return self.study.workload
        axes = self.study.axes
        varied = keys_that_vary(axes, self.study.space)
        arguments = self.workload.model.get("init_args", {})
        network = arguments.get("network", self.workload.model)
        network_class = network["class_path"] if isinstance(network, dict) else "network"
        class_paths = [self.workload.data["class_path"]]
        if "model.network" not in varied:
            class_paths.append(network_class)
        parts = [path.rsplit(".", 1)[-1] for path in class_paths]
        rule = arguments.get("optimizer")
        if not isinstance(rule, str):  # not a module of lit_dps
            return "-".join(parts)
        (rule,) = axes.get("model.optimizer", [rule])[:1]
        (schedule,) = axes.get("model.schedule", [arguments.get("schedule", "constant")])[:1]
        if "model.optimizer" not in varied:
            parts.append(str(rule))
        if schedule != "constant" and "model.schedule" not in varied:
            parts.append(f"{schedule}-decay")
        return "-".join(parts)

    def identity(self, data: LightningDataModule | None) -> dict[str, Any]:
        """Return the configuration that decides results, as plain JSON; see `study.identity`.

        Args:
            data: The data module, set up.
        """
        sections = {name: getattr(self, name) for name in TRIAL_SECTIONS}
        return identity_of_study(self.study, self.workload, sections, data)
