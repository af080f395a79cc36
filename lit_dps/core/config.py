"""Configuration of a study: the grid and the search, and where results are kept."""

from __future__ import annotations

import hashlib
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from lit_dps.core.aliases import present_engine, warn_of_former_name, warn_of_idle_key
from lit_dps.core.errors import ConfigError, is_number
from lit_dps.core.record import grid
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.search_space import Choices, parse_box
from lit_dps.core.statistic import Statistic, statistic_named
from lit_dps.core.trial import Cell, Value, check_names, check_printable, check_sparsity

EngineName = Literal["auto", "single", "stacked", "lightning", "fused"]
SPARSITY_KEY = "pruning.sparsity"
SAMPLERS = ("sobol", "tpe", "gp")
# Threads of a worker, and workers: more than any CPU has, and fewer than the system allows.
MAX_THREADS = 1024
# Trials of all cells, and repeats of all cells. A million trials of a second take 12 days, and each
# process holds their points in memory.
MAX_TRIALS = 1_000_000
# Largest step budget: 30 years at a thousand steps a second.
MAX_STEPS = 10**12
# The default.
RACE_FACTOR = 2.0
NO_RACE = "null or omitted, because study.train_past_goal continues trials to their budget"


@dataclass
class StudyConfig:
    """The grid and the search.

    Attributes:
        name: Name in Optuna and MLflow. The default is the name of the last configuration file
            without its suffix. Studies of the first version were named "study".
        batch_sizes: Global batch sizes of the grid.
        sparsities: Sparsities of the grid. Each is a share of pruned parameters, in [0, 1).
        grid: Further axes: {KEY: [values]}. For example {pruning.method: [snip, random],
            model.network: [lit_dps.models.MLP, lit_dps.models.SimpleCNN]}. A key belongs to model,
            data, pruning (also pruning.options.batches), optim, local or batch (also
            batch.options.steps). It may also be the trainer's clipping, precision or accumulation,
            or replace batch_sizes or sparsities. Values are numbers, names, class paths, or true
            and false.
        trials: Trials of each cell, one for each sample.
        space: Ranges: {KEY: {low, high, scale}} or {choices}. For example {model.learning_rate:
            {low: 1e-4, high: 1, scale: log}}, or {choices: [0.0, 0.01, 0.1]} of numbers, names or
            class paths.
        sampler: sobol, tpe, gp or a class path. "sobol" draws the samples of the paper's protocol,
            which are the same in every cell. "tpe" and "gp" of Optuna, and the class path of
            another Optuna sampler, use the results of the cell so far.
        best_of: A study whose best samples all trials take. The study is in the same storage. All
            trials of a cell use the sample of K* there and differ only in their seeds. The other
            study used none of these seeds. Use it for measurements that are too expensive for every
            trial of a search, such as smoothness. It also shows how well tuned metaparameters
            transfer.
        seed: Seed of the search and of all trials. The seed and the sample determine the initial
            weights of a trial.
        scramble: Owen's scrambling of the Sobol samples. The plain sequence starts at the low end
            of every range.
        goals: Further goals of the same trials. Each is a value of the goal's metric, with its own
            table and figures. They are easier than the goal, such as larger errors. With
            train_past_goal they may be harder.
        race_factor: Trials stop at this multiple of K*. This does not change K* and saves time. A
            trial stops after this many times the steps of the best complete trial of its cell. It
            is 1 or more. null trains every trial to its budget, as the paper does, and shows which
            part of the search space is successful.
        statistic: What K* of a cell's trials is. "minimum" is the fewest steps of any trial, as in
            the paper. "median_of_best_3", or of another number, is the median of the steps of the
            best three trials. It depends less on the luck of one seed. The class path of a
            statistic is also allowed. Racing and repeats use the same statistic.
        train_past_goal: Train to the budget after the goal. K* stays the same. Complete curves give
            the best metric under every smaller budget of steps or examples. Trials are then not
            raced, and validations do not stop early. The defaults of race_factor and
            goal.early_reject do not apply, and other values of these keys are refused.
        metrics: Further metrics to store at each validation. The module logs them in validation,
            such as val_loss. Validations then do not stop early.
        readings: Quantities to measure along the trials. Each is gradient_norm, gradient_noise,
            curvature, step_seconds, peak_memory, examples, lipschitz, the class path of a
            `lit_dps.readings.Reading`, or {class_path, init_args}. Readings do not change training.
            Their columns are in the tables, in MLflow and in the curves of a `Study`.
        figures: Modules with further figures of the report. Each is a file of the user.
        noise_scale: Measure the gradient noise scale first. A run of 64 steps, which takes at most
            a minute, gives a first guess of the critical batch size before the trials.
        repeats: Repeats of each best sample, on new seeds. They run after the search, with other
            initial weights, masks and orders of examples. The median K over seeds shows how much of
            K* is luck.
        repeat_points: Best samples of a cell to repeat.
        repeat_slack: A repeat stops at this multiple of K*. It then counts as missed. It is 1 or
            more. null trains a repeat to its budget.
        engine: single, stacked, lightning or auto. It is the loop that trains the trials. "single"
            trains one network at a time, from validation to validation. "stacked" trains several
            networks at once, if they can be stacked. Its gradients differ by rounding, which
            training amplifies. So K of a stacked trial has the same distribution, but is not equal
            to the bit. "lightning" is Lightning's own loop, which is equal to "single" to the bit
            and slower. "auto" is "stacked" on a GPU and "single" elsewhere. If a trial does not
            support a loop, it uses the next slower loop, and stores why. "fused" is the former name
            of "stacked".
        workers: Processes that train at the same time. The default is the number of CPU cores
            divided by `threads` and the ranks of a trial, or one on a GPU and for classes of a
            script or notebook.
        threads: CPU threads of each worker. Results may differ in the last digit with another
            number.
        slots: Networks in a stack. The default is the number that fits into memory, or 16 on a CPU.
        checkpoint_minutes: Minutes between saves of a long trial. A longer trial is saved at its
            next validation and when it is interrupted. It resumes from there to the bit. Stacked
            trials are saved too. null never saves.
        batch_size_key: Key of the batch size.
        workload: Name of the MLflow experiment. The default is the data set, network, update rule
            and schedule, without parts that the study varies. A stored study keeps its name.
        lean: Former key, removed in the next release. false is engine "lightning"; true has no
            effect.
    """

    name: str = "study"
    batch_sizes: list[int] = field(default_factory=lambda: [2**i for i in range(1, 15)])
    sparsities: list[float] = field(default_factory=lambda: [0.0, 0.5, 0.7, 0.9])
    trials: int = 100
    seed: int = 0
    scramble: bool = True
    sampler: str = "sobol"
    best_of: str | None = None
    space: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[int | float | str | bool | Any]] = field(default_factory=dict)
    goals: list[float] = field(default_factory=list)
    race_factor: float | None = RACE_FACTOR
    statistic: str = "minimum"
    train_past_goal: bool = False
    metrics: list[str] = field(default_factory=list)
    readings: list[Any] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    noise_scale: bool = True
    repeats: int = 0
    repeat_points: int = 1
    repeat_slack: float | None = 8.0
    engine: EngineName = "single"
    checkpoint_minutes: float | None = 10.0
    slots: int | None = None
    batch_size_key: str = "data.batch_size"
    workload: str | None = None
    workers: int | None = None
    threads: int = 1
    lean: bool | None = None

    def __post_init__(self):
        self._adopt_former_engine()
        for name in ("space", "grid"):
            for key in getattr(self, name):
                if not isinstance(key, str):
                    allowed = "a key of the configuration, such as model.learning_rate"
                    raise ConfigError(f"study.{name}", key, allowed)
        self._take_from_grid(self.batch_size_key, "batch_sizes", int)
        self._take_from_grid(SPARSITY_KEY, "sparsities", float)
        space = {}
        for key, box in self.space.items():
            space[key] = parse_box(f"study.space.{key}", box)
        self.space = space
        if self.train_past_goal and self.race_factor == RACE_FACTOR:
            self.race_factor = None

    def _adopt_former_engine(self) -> None:
        """Replace the former engine "fused", and the former key `lean`, and warn of them."""
        if self.lean is False and self.engine in ("stacked", "fused"):
            raise ConfigError(
                "study.lean",
                False,
                f"omitted, because study.engine is {self.engine}",
                hint="Use study.engine lightning instead of study.lean.",
            )
        engine = cast(EngineName, present_engine(self.engine, self.lean))
        if self.engine == "fused":
            warn_of_former_name("study.engine fused", "study.engine stacked")
        if self.lean is False or (self.lean and self.engine == "lightning"):
            warn_of_former_name(f"study.lean {str(self.lean).lower()}", f"study.engine {engine}")
        elif self.lean:
            warn_of_idle_key("study.lean true")
        self.engine, self.lean = engine, None

    def _take_from_grid(self, key: str, name: str, kind: type[int] | type[float]) -> None:
        """Set the field `name` to the values of a key of the grid, if the grid has the key."""
        if key not in self.grid:
            return
        values = self.grid[key]
        default = getattr(type(self)(), name)
        if getattr(self, name) not in (default, values):
            raise ConfigError("study.grid", key, f"omitted, because study.{name} is set")
        numbers = []
        for value in values:
            if not is_number(value):
                raise ConfigError(f"study.grid.{key}", value, "a number")
            # 2.0 becomes 2; `check` refuses 2.5.
            if kind(value) == value:
                value = kind(value)
            numbers.append(value)
        setattr(self, name, numbers)

    @property
    def whole_curves(self) -> bool:
        """Whether every check of a trial is a full one."""
        return self.train_past_goal or bool(self.metrics)

    @property
    def axes(self) -> dict[str, list[Value]]:
        """The axes of the grid beside batch size and sparsity: values by configuration key."""
        axes = dict(self.grid)
        axes.pop(self.batch_size_key, None)
        axes.pop(SPARSITY_KEY, None)
        return axes

    @property
    def repeat_plan(self) -> RepeatPlan:
        """Which points of a cell are repeated, how often, and for how long."""
        return RepeatPlan(self.repeats, self.repeat_points, self.repeat_slack)

    @property
    def k_star_statistic(self) -> Statistic:
        """The statistic that `statistic` names."""
        return statistic_named(self.statistic)

    @property
    def cells(self) -> list[Cell]:
        """The grid, by sparsity, values of further axes, then batch size."""
        return grid(self.batch_sizes, self.sparsities, self.axes)

    @property
    def cell_count(self) -> int:
        """The number of `cells`, which are not created."""
        axes = (self.batch_sizes, self.sparsities, *self.axes.values())
        return math.prod(map(len, axes))

    def check(self) -> None:
        """Raise ConfigError for a value that is not allowed, whatever the workload."""
        check_name("study.name", self.name)
        if self.workload is not None:
            check_name("study.workload", self.workload)
        self._check_counts()  # before the cells are created
        self._check_grid()
        self._check_sampler()
        self._check_racing()
        self._check_statistic()
        if self.checkpoint_minutes is not None and not 0 < self.checkpoint_minutes < math.inf:
            raise ConfigError(
                "study.checkpoint_minutes", self.checkpoint_minutes, "above 0, or null for none"
            )
        if len(set(self.metrics)) < len(self.metrics):
            raise ConfigError("study.metrics", self.metrics, "a list that has each metric once")
        if not self.space:
            allowed = "at least one range, such as model.learning_rate: {low: 1e-4, high: 1}"
            raise ConfigError("study.space", {}, allowed)
        for key, box in self.space.items():
            box.check(f"study.space.{key}")
            if isinstance(box, Choices):
                check_printable(f"study.space.{key}.choices", box.choices)

    def _check_grid(self) -> None:
        _nonempty_unique("study.batch_sizes", self.batch_sizes)
        for batch_size in self.batch_sizes:
            if batch_size < 1:
                raise ConfigError("study.batch_sizes", batch_size, "at least 1 example")
        _nonempty_unique("study.sparsities", self.sparsities)
        for sparsity in self.sparsities:
            check_sparsity("study.sparsities", sparsity)
        check_names("study.sparsities", self.sparsities)
        for key, values in self.axes.items():
            sections = ("model.", "data.", "pruning.", "optim.", "local.", "batch.", "trainer.")
            if not key.startswith(sections):
                allowed = "keys of model, data, pruning, optim, local, batch or the trainer"
                raise ConfigError("study.grid", key, allowed)
            check_kind(f"study.grid.{key}", values)
            _nonempty_unique(f"study.grid.{key}", values)
            check_names(f"study.grid.{key}", values)
            check_printable(f"study.grid.{key}", values)
        for cell in self.cells:
            if max(len(part.encode()) for part in cell.stored_name.split("/")) > CELL_BYTES:
                allowed = f"keys and values that take at most {CELL_BYTES} bytes"
                raise ConfigError("study.grid", str(cell), allowed)
        _nonempty_unique("study.grid", [key.rpartition(".")[2] for key in self.axes] or ["none"])

    def _check_counts(self) -> None:
        for key in ("trials", "threads", "workers", "slots", "repeat_points"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"study.{key}", value, "at least 1")
        if not 0 <= self.seed < 2**32:
            raise ConfigError("study.seed", self.seed, "0 or more, and below 2^32 = 4294967296")
        for key in ("threads", "workers"):
            value = getattr(self, key)
            if value is not None and value > MAX_THREADS:
                raise ConfigError(f"study.{key}", value, f"at most {MAX_THREADS}")
        if self.repeats < 0:
            raise ConfigError("study.repeats", self.repeats, "0 or more")
        if self.slots is not None and self.slots > MAX_TRIALS:
            raise ConfigError("study.slots", self.slots, f"at most {MAX_TRIALS}")
        cells = self.cell_count
        if cells > MAX_TRIALS:
            allowed = f"at most {MAX_TRIALS} cells: batch sizes x sparsities x values of axes"
            raise ConfigError("study.grid", cells, allowed)
        for key in ("trials", "repeats", "repeat_points"):
            value = getattr(self, key)
            if value * cells > MAX_TRIALS:
                allowed = f"at most {MAX_TRIALS // cells}: {MAX_TRIALS} in a grid of {cells} cells"
                raise ConfigError(f"study.{key}", value, allowed)

    def _check_sampler(self) -> None:
        if self.sampler not in SAMPLERS and "." not in self.sampler:
            allowed = f"one of {', '.join(SAMPLERS)}, or a class path"
            raise ConfigError("study.sampler", self.sampler, allowed)
        if self.best_of is not None and self.sampler != "sobol":
            allowed = "sobol, because study.best_of sets the samples"
            raise ConfigError("study.sampler", self.sampler, allowed)
        if self.best_of == self.name:
            raise ConfigError("study.best_of", self.best_of, "the name of another study")

    def _check_statistic(self) -> None:
        needed = self.k_star_statistic.needed_trials
        if self.trials < needed:
            allowed = f"at least {needed}, because study.statistic is {self.statistic}"
            raise ConfigError("study.trials", self.trials, allowed)

    def _check_racing(self) -> None:
        if self.race_factor is not None and not 1 <= self.race_factor < math.inf:
            raise ConfigError(
                "study.race_factor", self.race_factor, "1 or more, or null for no racing"
            )
        if self.train_past_goal and self.race_factor is not None:
            raise ConfigError("study.race_factor", self.race_factor, NO_RACE)
        if self.repeat_slack is not None and not 1 <= self.repeat_slack < math.inf:
            allowed = "1 or more, or null for goal.max_steps"
            raise ConfigError("study.repeat_slack", self.repeat_slack, allowed)


@dataclass
class StorageConfig:
    """Where a study is kept.

    Attributes:
        folder: Folder of databases, figures, checkpoints. MLflow's artifacts and the tracebacks of
            failed trials are also there.
        optuna: Optuna storage URL. The default is a SQLite file, FOLDER/study.db. It holds all
            results of a study.
        mlflow: MLflow tracking URI. The default is a SQLite file, FOLDER/mlflow.db. It displays the
            results.
    """

    folder: str = "mlruns"
    optuna: str | None = None
    mlflow: str | None = None

    def __post_init__(self) -> None:
        optuna, mlflow = map(_sqlite_path, (self.optuna_url, self.mlflow_uri))
        if mlflow and mlflow == optuna:
            allowed = f"another file than {self.optuna_url}, the storage of the results"
            raise ConfigError("storage.mlflow", self.mlflow_uri, allowed)

    @property
    def optuna_url(self) -> str:
        return self.optuna or f"sqlite:///{self.folder}/study.db"

    @property
    def mlflow_uri(self) -> str:
        return self.mlflow or f"sqlite:///{self.folder}/mlflow.db"

    def checkpoints(self, study: str) -> Path:
        """The folder of a study's checkpoints."""
        return Path(self.folder) / "checkpoints" / study

    def failures(self, study: str) -> Path:
        """The folder of the tracebacks of a study's failed trials."""
        return Path(self.folder) / "failures" / study


def _sqlite_path(url: str) -> str:
    """Return the absolute path of a SQLite URL; "" for other URLs."""
    if not isinstance(url, str) or not url.startswith("sqlite:///"):
        return ""
    return os.path.realpath(url.removeprefix("sqlite:///").partition("?")[0])


# A file name may have 255 bytes. The longest suffix of a study's name has 40 bytes:
# ".NAME-heat-of-the-search.png.1234567.tmp".
NAME_BYTES = 200
CELL_BYTES = 200  # the same for a cell: "CELL repeat-12-of-point-123.txt"


def check_name(key: str, name: str) -> None:
    """Raise ConfigError, naming `key`, if a name cannot be part of file names."""
    if not re.fullmatch(r"[\w.+-][\w .:+-]*", name):
        raise ConfigError(key, name, "a name of letters, digits, blanks and . _ + - :")
    if name.startswith("-"):
        raise ConfigError(
            key, name, "a name that does not begin with -, because options begin with it"
        )
    if name.endswith((".", " ")):
        raise ConfigError(key, name, "a name that ends with neither a dot nor a blank")
    if len(name.encode()) > NAME_BYTES:
        raise ConfigError(key, name, f"at most {NAME_BYTES} bytes; it has {len(name.encode())}")


def folder_name(study: str) -> str:
    """Return the name of the folder of a study's figures and tables, even for an invalid name.

    `lit_dps.storage` ensures that the studies of a storage have different folders.
    """
    name = study.replace(" ", "_").replace(":", "_")
    try:
        check_name("study.name", study)
    except ConfigError:
        # A study of an earlier version or of a foreign database. Its files must stay in the storage
        # folder.
        plain = re.sub(r"[^\w.+-]", "_", name).strip(".-") or "study"
        safe = plain.encode()[: NAME_BYTES - 9].decode(errors="ignore")
        if safe != name:
            name = f"{safe}-{hashlib.sha256(study.encode(errors='surrogatepass')).hexdigest()[:8]}"
    return name


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_kind(key: str, values: list) -> None:
    """Raise ConfigError, naming `key`, unless all values are numbers, names, or true and false."""
    for value in values:
        if not isinstance(value, (bool, int, float, str)):
            raise ConfigError(key, value, "a number, a name, a class path, true or false")
    kinds = set()
    for value in values:
        # In Python, true and false are integers too.
        if isinstance(value, (bool, str)):
            kinds.add(type(value))
        else:
            kinds.add(float)
    if len(kinds) > 1:
        raise ConfigError(
            key, values, "numbers alone, or names and class paths alone, or true and false alone"
        )


def _nonempty_unique(key: str, values: list) -> None:
    if not values:
        raise ConfigError(key, values, "a list of at least one value")
    if len(set(values)) != len(values):
        raise ConfigError(key, values, "a list that has each value once")
