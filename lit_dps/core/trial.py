"""What a study consists of: cells, trials and their results, and one seed for each purpose.

A *cell* is one point of the grid: a batch size, a sparsity and values of further axes. A *trial* is
a cell plus one point of the metaparameter search. A "step" is always an optimizer step, and
`batch_size` is always the global batch size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lit_dps.core.errors import ConfigError
from lit_dps.core.text import escape
from lit_dps.core.unit import STEPS, Cost, Unit

# Columns of tables that no axis may share its short name with.
_COLUMNS = {
    "batch_size",
    "sparsity",
    "point",
    "status",
    "steps",
    "steps_run",
    "k_star",
    "floor",
    "boundary",
    "examples",
    "seconds",
    "unit",
    "step",
}


class Status(StrEnum):
    """How a trial ended (Lee et al. 2021, Section 2 and Figure 3)."""

    COMPLETE = "complete"  # it met the goal
    INCOMPLETE = "incomplete"  # it spent a budget first
    INFEASIBLE = "infeasible"  # its loss or its weights stopped being finite
    OUTRACED = "outraced"  # the race stopped it: another trial of its cell needed far fewer steps
    PAUSED = "paused"  # not ended: it continues if its cell still needs it
    STOPPED = "stopped"  # the module or a callback ended it before its goal and its budget
    FAILED = "failed"  # an error ended it; it runs again when the study is resumed


Value = int | float | str | bool  # of an axis of the grid
RepeatId = tuple[int, int]  # a point and the number of its repeat; 0 in the search
TrialKey = tuple["Cell", int, int]  # a cell, a point and a repeat: what identifies a trial
FINAL_STATUSES = tuple(status for status in Status if status is not Status.PAUSED)


@dataclass(frozen=True, order=True)
class Series:
    """A cell without its batch size. Each series has one curve of K* and one fitted law.

    Attributes:
        sparsity: Share of pruned parameters.
        axes: Values of further axes of the grid by configuration key, sorted by key.
    """

    sparsity: float = 0.0
    axes: tuple[tuple[str, Value], ...] = ()

    def without(self, *keys: str) -> Series:
        """Return the series without some of its further axes."""
        return Series(self.sparsity, tuple(axis for axis in self.axes if axis[0] not in keys))

    @property
    def names(self) -> list[str]:
        """The values as text, such as ["S=0.9", "delay=4"]."""
        return self._names(text_of)

    @property
    def stored_name(self) -> str:
        """The series in names of stored studies, files, tags and seeds. It never changes."""
        return " ".join(self._names(last_name))

    def _names(self, as_text: Callable[[Value], str]) -> list[str]:
        names = [f"S={self.sparsity:g}"]
        for key, value in self.axes:
            names.append(f"{short_name(key)}={as_text(value)}")
        return names

    def __str__(self) -> str:
        return " ".join(self.names)


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the grid: a batch size, a sparsity and values of further axes.

    Attributes:
        batch_size: Global batch size, in examples.
        sparsity, axes: As in `Series`.
    """

    batch_size: int
    sparsity: float = 0.0
    axes: tuple[tuple[str, Value], ...] = ()

    @property
    def series(self) -> Series:
        return Series(self.sparsity, self.axes)

    @property
    def stack_axes(self) -> tuple[tuple[str, Value], ...]:
        """The axes that the trials of a stack share: all axes except the axes of pruning."""
        return tuple(pair for pair in self.axes if not pair[0].startswith("pruning."))

    @property
    def stored_name(self) -> str:
        """The cell in names of stored studies, files, tags and seeds. It never changes."""
        return f"B={self.batch_size} {self.series.stored_name}"

    def __str__(self) -> str:
        return f"B={self.batch_size} {self.series}"


def short_name(key: str) -> str:
    """Return the last name of a dotted key; the entire key if a table has a column of that name."""
    last = key.rpartition(".")[2]
    return key if last in _COLUMNS else last


def text_of(value: Value) -> str:
    """Return a value of an axis as text, such as 0.1, true, or the last name of a class path."""
    if isinstance(value, str):
        is_class_path = all(part.isidentifier() for part in value.split("."))
        return last_name(value) if is_class_path else value
    return last_name(value)


def last_name(value: Value) -> str:
    """Return a value of an axis as text; of a string, what follows its last "."."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value.rpartition(".")[2]
    return f"{value:g}"


def check_names(key: str, values: Iterable[Value]) -> None:
    """Raise ConfigError about `key` if two different values of an axis have the same name."""
    by_name: dict[str, Value] = {}
    for value in values:
        other = by_name.setdefault(last_name(value), value)
        if other != value:
            allowed = "values that differ in 6 digits"
            if isinstance(value, str):
                allowed = 'values that differ after their last "."'
            raise ConfigError(key, value, f"{allowed}, but {other!r} is also in the list")


def check_printable(key: str, values: Iterable[Value]) -> None:
    """Raise ConfigError about `key` if a value has characters that no terminal shows.

    Messages and reports show an escape such as \\u200c in their place, which is another value.
    """
    for value in values:
        if isinstance(value, str) and escape(value) != value:
            raise ConfigError(key, value, "a text without invisible characters")


def check_sparsity(key: str, sparsity: float) -> None:
    """Raise ConfigError about `key` unless 0 <= sparsity < 1."""
    if not 0 <= sparsity < 1:
        allowed = "a share of pruned parameters, from 0 up to but not including 1"
        raise ConfigError(key, sparsity, allowed)


def derive_seed(seed: int, purpose: str, point: int | None = None) -> int:
    """Return a 32-bit seed that depends on a seed, the purpose and the point alone.

    The cell does not enter: at every batch size and sparsity, point i starts from the same initial
    weights.

    Args:
        seed: `Trial.seed`, or the study's seed.
        purpose: "init", "order" or "prune".
        point: Index of the point; None for a seed that all points share.
    """
    text = f"{seed}/{purpose}"
    if point is not None:
        text += f"/{point}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Trial:
    """A cell plus one point of the search.

    Attributes:
        cell: Batch size, sparsity and further axes.
        point: Number of the point among the points of the sampler, from 0.
        params: Metaparameters by configuration key, e.g. {"model.learning_rate": 0.1}.
        seed: Seed from which the seeds of the trial are derived.
        repeat: 0 for the trial of the search. Its repeats with other seeds count from 1.
    """

    cell: Cell
    point: int
    params: Mapping[str, Value] = field(default_factory=dict)
    seed: int = 0
    repeat: int = 0

    @property
    def key(self) -> TrialKey:
        """The cell, the point and the number of the repeat: what identifies a trial."""
        return self.cell, self.point, self.repeat

    @property
    def repeat_id(self) -> RepeatId:
        """The point and the number of the repeat: what identifies a trial in its cell."""
        return self.point, self.repeat

    def seed_for(self, purpose: str) -> int:
        """Return the seed of this trial for a purpose, from `derive_seed`.

        The seed of a repeat also depends on its cell. So repeats in two cells are independent, even
        if the same point is the best of both. The bootstrap of the law assumes this.
        """
        if self.repeat:
            purpose = f"{purpose}/{self.cell.stored_name}/repeat {self.repeat}"
        return derive_seed(self.seed, purpose, self.point)

    @property
    def stored_name(self) -> str:
        """The trial in its checkpoint. It never changes."""
        return f"{self.cell.stored_name} point {self.point}{self._repeat_text}"

    def __str__(self) -> str:
        return f"{self.cell} sample {self.point}{self._repeat_text}"

    @property
    def _repeat_text(self) -> str:
        if self.repeat:
            return f" repeat {self.repeat}"
        return ""

    @property
    def file_name(self) -> str:
        """Name of this trial's files in the folder of its cell, without extension."""
        if self.repeat:
            return f"repeat-{self.repeat}-of-point-{self.point}"
        return f"point-{self.point}"


@dataclass(frozen=True)
class TrialResult:
    """What is stored of a finished trial.

    Attributes:
        trial: The trial.
        status: How it ended.
        steps: Steps to result: the step of the check at which the goal was first met. None unless
            complete.
        curve: One entry a check, in equally long lists: "step"; the goal's metric by its name
            ("val_error": share of the validation split); "train_loss" (mean loss of that step's
            batch before its update); the metrics of study.metrics. If checks stop early, also
            "exact": 0 if the metric is a bound, too bad for every unmet goal.
        kept: Number of kept elements and of all elements of each prunable tensor, by parameter.
        seconds: Wall time of the trial.
        timed: Times of the attempt's last process, if known: "steps" and their seconds with their
            data, "training"; "checks" and their seconds, "checking"; the seconds of both for which
            the process had no CPU, "waited" (unknown in results of earlier versions). They do not
            include building, pruning and measuring. Comparisons ignore it.
        readings: The readings along the run (`study.readings`) by name. Each has equally long lists
            by column, among them "step".
        end_readings: The readings at the end by column; empty unless the trial is complete or its
            budget is spent.
        flags: Counts that a reader of the table should know, by their names below.
        failure: Why the trial failed or was stopped, in one line; else empty.
        traceback: Of a failed trial.
        attempt: Number of the Optuna trial that stores this attempt; None if it is not stored.
            Comparisons ignore it.
        engine: The loop that trained it: "single", "stacked" or "lightning", as in `study.engine`.
            Empty if it is not recorded. Comparisons ignore it.
        engine_reason: Why no faster loop trained it, such as the hook of the user's module that
            needs Lightning's loop; else empty. Comparisons ignore it.
        environment: Key of its environment (`lit_dps.core.environment`); None if it is not
            recorded. Comparisons ignore it.
        unit: The unit of its cost.
    """

    trial: Trial
    status: Status
    steps: int | None
    curve: Mapping[str, list[float]] = field(default_factory=dict)
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    readings: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)
    end_readings: Mapping[str, float] = field(default_factory=dict)
    flags: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    traceback: str = ""
    attempt: int | None = field(default=None, compare=False)
    timed: Mapping[str, float] = field(default_factory=dict, compare=False)
    engine: str = field(default="", compare=False)
    engine_reason: str = field(default="", compare=False)
    environment: str | None = field(default=None, compare=False)
    unit: Unit = STEPS

    def __post_init__(self):
        if (self.steps is not None) != (self.status is Status.COMPLETE):
            raise ValueError(f"steps {self.steps} do not go with status {self.status}")

    @property
    def steps_run(self) -> int:
        """The step of the last check. The course of the trial is known up to there."""
        if self.curve.get("step"):
            return int(self.curve["step"][-1])
        return self.steps or 0

    @property
    def cost(self) -> Cost | None:
        """What the trial spent until it met its goal, in `unit`. None unless complete."""
        if self.steps is None:
            return None
        return self.unit.cost_at(self.curve, self.steps)

    @property
    def cost_run(self) -> Cost:
        """What the trial spent until its last check, in `unit`."""
        if not self.steps_run:
            return 0
        return self.unit.cost_at(self.curve, self.steps_run)

    @property
    def least_cost(self) -> float:
        """The least cost at which the trial may meet the goal, in `unit`.

        It is the cost of a complete trial, and infinite for one that diverged. Any other trial may
        meet the goal at the check after its last one.
        """
        if self.cost is not None:
            return float(self.cost)
        if self.status is Status.INFEASIBLE:
            return math.inf
        return float(self.cost_run)

    @property
    def is_stacked(self) -> bool:
        """True if it was trained stacked with others, so that they all have the same seconds."""
        return bool(self.flags.get(STACKED))


# Values of `TrialResult.engine`. Trials of earlier versions may also have "sparse", an engine that
# was removed.
SINGLE = "single"  # the interval loop, one network at a time
STACKED = "stacked"  # the interval loop, several networks at once; also a flag, with the value 1
LIGHTNING = "lightning"  # Lightning's own loop

# Value of `TrialResult.engine_reason` if the user has chosen the loop.
ENGINE_SET = "study.engine is lightning"

# The reading of the local Lipschitz constant, which has a table and figures of its own. Columns:
# "step"; "lipschitz", the constant of the gradient between the weights before and after that step;
# "squared_gradient", the squared norm of the training gradient before that step; if requested,
# "noise", the trace of the covariance of the per-example gradient before that step.
LIPSCHITZ = "lipschitz"

# The readings of a `NoiseScaleCallback` among the trainer's callbacks. Columns: "step";
# "noise_scale_squared_gradient", |G|^2; "noise_scale_variance", tr(Sigma).
NOISE_SCALE = "noise_scale"

# Names of `TrialResult.flags`. Each is present only if there is something to report.

# Prefix of terms of the theory: "loss" (training loss after pruning, before the first step),
# "gradient_variance" (trace of the covariance of the per-example gradient there),
# "squared_gradient" (squared norm of the training gradient there), "floor" (lower bound of the
# loss), and over all steps run "steps", "rate_sum" and "rate_square_sum" (sums of the learning rate
# and of its square).
THEORY = "theory/"

# A schedule with a changing rate: its first step at the largest rate, and the step after which the
# rate is constant.
WARM_UP = "warm_up_steps"
SCHEDULE = "schedule_steps"

# Optimizer steps on fewer examples than the batch size, and on an unknown number of examples.
SHORT_STEPS = "short_steps"
UNCOUNTED_STEPS = "uncounted_steps"

# Kept elements whose pruning score is 0, so that their position decided, not the pruner. With them,
# KEPT is the number of all kept elements.
UNSCORED = "kept_with_score_0"
KEPT = "kept"

# Elements that the pruner chose from, if they are fewer than half of the trained ones. With them,
# TRAINED is the number of elements that an optimizer trains.
PRUNABLE = "prunable"
TRAINED = "trained"

# 1 if sparsity is a share of something other than weights, such as nodes: then a mask need not keep
# that share of the weights. BY_WEIGHTS is a share of weights that the pruner keeps roughly.
BY = "by_"
BY_NODES = f"{BY}nodes"
BY_WEIGHTS = f"{BY}weights"

# If weights joined the training after pruning: the number of prunable elements without a mask, the
# number of all trained elements, and the step at which the last elements without a mask joined.
IN_NO_MASK = "in_no_mask"
TRAINED_THEN = "trained_then"
JOINED_AT = "joined_at"

# If the mask changes during training: the sum over the steps up to the last change of the share of
# masked elements that are kept, and the step of this change.
DENSITY_SUM = "density_sum"
DENSITY_STEP = "density_step"
CHANGE_EVERY = "mask_changes_every"  # optimizer steps between changes of the mask, if it changes

COPIES = "copies"  # elements of tensors that were masked as copies of pruned parameters
RANKS = "ranks"  # processes that trained the trial together, if more than one
# 1 if the reading peak_memory is the peak since the process began, as the system cannot reset it
PEAK_OF_PROCESS = "peak_of_process"
SPARSE_KERNELS = "sparse_kernels"  # 1 if a removed engine skipped pruned weights of convolutions

# Of weights that were moved towards isometry, "before" and "after": the sum over the layers of
# ||W'W - I||_F; and of the singular values of the Jacobian d logits / d image the "mean", "spread"
# (standard deviation) and "condition".
RESIDUAL = "isometry_distance_{}"
JACOBIAN = "jacobian_{}_{}"
