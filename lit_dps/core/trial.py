"""What a study is made of: cells, trials and their results, and one seed for each purpose.

A *cell* is a (batch size, sparsity) of the grid, a *trial* a cell plus one point of the
metaparameter search. The word "step" always means an optimizer step and `batch_size` the global
one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lit_dps.core.errors import ConfigError

# What tables call columns of their own
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
}


class Status(StrEnum):
    """How a trial ended (Lee et al. 2021, Section 2 and Figure 3)."""

    COMPLETE = "complete"  # the goal error was reached
    INCOMPLETE = "incomplete"  # the step budget was spent first
    INFEASIBLE = "infeasible"  # loss or weights stopped being finite
    # stopped, because another trial of its cell had needed so few steps that it could not matter
    OUTRACED = "outraced"
    PAUSED = "paused"  # no end: it goes on from there if it turns out to matter
    STOPPED = "stopped"  # the module or a callback ended it, before its goal and its budget
    FAILED = "failed"  # an error ended it; it is run again when the study is taken up again


Value = int | float | str | bool


ENDS = tuple(status for status in Status if status is not Status.PAUSED)


@dataclass(frozen=True, order=True)
class Series:
    """All of a cell but its batch size: what one curve of K* against batch size is drawn, and one
    law fitted, for.

    Attributes:
        sparsity: Share of pruned parameters.
        axes: Values of further axes of the grid by configuration key, sorted by key.
    """

    sparsity: float = 0.0
    axes: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        return " ".join(
            [
                f"S={self.sparsity:g}",
                *(f"{short_name(key)}={text_of(value)}" for key, value in self.axes),
            ]
        )


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the grid of scientific hyperparameters: a batch size, a sparsity, and values of
    further axes.

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

    def __str__(self) -> str:
        return f"B={self.batch_size} {self.series}"


def short_name(key: str) -> str:
    """The last name of a dotted key; all of it where tables call a column of their own so:
    local.steps."""
    last = key.rpartition(".")[2]
    return key if last in _COLUMNS else last


def text_of(value: Value) -> str:
    """Return a value of an axis as text: the last name of a class path; true and false as in
    YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return value.rpartition(".")[2] if isinstance(value, str) else f"{value:g}"


def check_names(key: str, values: Iterable[Value]) -> None:
    """Raises ConfigError, naming `key`, where cells at two values of an axis have the same name."""
    known: dict[str, Value] = {}
    for value in values:
        if (other := known.setdefault(text_of(value), value)) != value:
            what = (
                "values whose last names differ"
                if isinstance(value, str)
                else "values that differ in 6 digits"
            )
            raise ConfigError(key, value, f"{what}; {other!r} is there too")


def check_sparsity(key: str, sparsity: float) -> None:
    """Raises ConfigError, naming `key`, unless 0 <= sparsity < 1."""
    if not 0 <= sparsity < 1:
        raise ConfigError(
            key, sparsity, "a share of pruned parameters, from 0 up to but not including 1"
        )


def derive_seed(seed: int, purpose: str, point: int | None = None) -> int:
    """A 32-bit seed from the study's seed, the purpose ("init", "order", "prune") and the point
    index alone.

    The cell does not enter: at every batch size and sparsity, point i starts from the same initial
    weights.
    """
    text = f"{seed}/{purpose}" if point is None else f"{seed}/{purpose}/{point}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Trial:
    """A cell plus one Sobol point.

    Attributes:
        cell: Batch size and sparsity.
        point: Index into the Sobol sequence, from 0.
        params: Metaparameters by configuration key, e.g. {"model.learning_rate": 0.1}.
        seed: The study's seed.
        repeat: 0 for the trial of the search; its repeats on fresh seeds count from 1.
    """

    cell: Cell
    point: int
    params: Mapping[str, float | int] = field(default_factory=dict)
    seed: int = 0
    repeat: int = 0

    def seed_for(self, purpose: str) -> int:
        """The seed of this trial for a purpose; see `derive_seed`.

        Of a repeat the cell decides too: those of two cells are independent, also where one point
        is the best of both, as the resampling of the law takes them to be.
        """
        if self.repeat:
            return derive_seed(self.seed, f"{purpose}/{self.cell}/repeat {self.repeat}", self.point)
        return derive_seed(self.seed, purpose, self.point)

    def __str__(self) -> str:
        return f"{self.cell} point {self.point}" + (f" repeat {self.repeat}" if self.repeat else "")

    @property
    def file_name(self) -> str:
        """What files of this trial are called in the folder of its cell."""
        return (
            f"repeat-{self.repeat}-of-point-{self.point}" if self.repeat else f"point-{self.point}"
        )


@dataclass(frozen=True)
class TrialResult:
    """What is kept of a finished trial.

    Attributes:
        trial: The trial.
        status: How it ended.
        steps: Steps to result, a multiple of the check interval; None unless complete.
        curve: Equally long lists "step", that of the goal's metric by its name ("val_error":
            fraction of the validation split), "train_loss" (mean loss of that step's batch, before
            its update) and those of study.metrics, one entry a check; where checks stop early also
            "exact", 0 where the metric is a bound, too bad for every goal still to be met.
        kept: Kept and all elements of each prunable tensor, by parameter name.
        seconds: Wall time of the trial.
        timed: Where it was told, of the attempt's last process: "steps" and their seconds with
            their data, "training", and "checks" and their seconds, "checking". Building, pruning
            and measuring count as neither. Like `attempt`, it says nothing of how the trial ended.
        smoothness: Where it was measured, equally long lists "step", "lipschitz" (local Lipschitz
            constant of the gradient between the weights before and after that step) and
            "squared_gradient" (squared norm of the training gradient before that step), one entry a
            measurement; where asked for also "noise" (trace of the covariance of the per-example
            gradient before that step).
        theory: Where it was measured, "loss" (training loss after pruning, before the first step),
            "gradient_variance" (trace of the covariance of the per-example gradient there),
            "squared_gradient" (squared norm of the training gradient there), "floor" (lower bound
            of the loss), and of all steps run "steps", "rate_sum" and "rate_square_sum" (sums of
            the learning rate and of its square).
        observed: Counts that a reader of the table should know of, by name (`lit_dps.core.trial`).
        failure: Of a failed trial, or one that was stopped, why: one line; else empty.
        traceback: Of a failed trial.
        attempt: Which of the attempts at its point this is: the number of the Optuna trial that it
            is stored in; None where it was not stored. It says nothing of how the trial ended, so
            that results are compared without it.
        engine: The loop that trained it: "interval loop", "sparse", "stack" or "Lightning"; empty
            for failed trials and those of earlier versions. Comparisons ignore it.
        environment: Key of its environment (`lit_dps.core.environment`); None for trials of earlier
            versions. Comparisons ignore it.
    """

    trial: Trial
    status: Status
    steps: int | None
    curve: Mapping[str, list[float]] = field(default_factory=dict)
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    smoothness: Mapping[str, list[float]] = field(default_factory=dict)
    theory: Mapping[str, float] = field(default_factory=dict)
    observed: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    traceback: str = ""
    attempt: int | None = field(default=None, compare=False)
    timed: Mapping[str, float] = field(default_factory=dict, compare=False)
    engine: str = field(default="", compare=False)
    environment: str | None = field(default=None, compare=False)

    @property
    def steps_run(self) -> int:
        """The last checked step: up to there it is known how the trial went."""
        return int(self.curve["step"][-1]) if self.curve.get("step") else self.steps or 0

    def __post_init__(self):
        if (self.steps is not None) != (self.status is Status.COMPLETE):
            raise ValueError(f"steps {self.steps} do not go with status {self.status}")


# Of a schedule with a changing rate: the first step at the largest rate, and the step after which
# it is constant.
WARM_UP = "warm_up_steps"
SCHEDULE = "schedule_steps"
# Values of `TrialResult.engine`. Trials of earlier versions may also have "sparse", an engine that
# was removed.
INTERVAL_LOOP = "interval loop"
STACK = "stack"
LIGHTNING = "Lightning"
SHORT_STEPS = "short_steps"  # optimizer steps on fewer examples than the batch size
UNCOUNTED_STEPS = "uncounted_steps"  # optimizer steps with an unknown number of examples
# kept elements whose pruning score is 0: kept by their place, not by the pruner
UNSCORED = "kept_with_score_0"
KEPT = "kept"  # kept elements, where there are unscored ones
# elements that the pruner chose among, where they are fewer than half of those trained
PRUNABLE = "prunable"
# before what sparsity is a share of, such as nodes: 1 where a mask need not keep that share of the
# weights
BY = "by_"
BY_NODES = f"{BY}nodes"
BY_WEIGHTS = f"{BY}weights"  # a share of weights, which the pruner keeps roughly
TRAINED = "trained"  # elements of the parameters that an optimizer trains, where PRUNABLE is told
# If weights joined the training after pruning: the number of prunable elements without a mask, the
# number of all trained elements, and the step at which the last elements without a mask joined.
IN_NO_MASK, TRAINED_THEN, JOINED_AT = "in_no_mask", "trained_then", "joined_at"
COPIES = "copies"  # elements of tensors that were masked as copies of pruned parameters
STACKED = "stacked"  # 1 where the trial was trained stacked with others
# 1 if an engine of an earlier version skipped the pruned weights of convolutions
SPARSE_KERNELS = "sparse_kernels"
# Of a trial whose weights were moved towards isometry, "before" and "after" it: sum over the layers
# of ||W'W - I||_F; "mean", "spread" (standard deviation) and "condition" of the singular values of
# the Jacobian d logits / d image
RESIDUAL = "isometry_distance_{}"
JACOBIAN = "jacobian_{}_{}"
RANKS = "ranks"  # processes that trained it together, where more than one
