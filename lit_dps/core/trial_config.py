"""Configuration that all trials of a study have in common: goal, pruning, optim, smoothness, batch.

Each class is one section of a configuration. Its fields are the keys: their types, defaults, help
and allowed values are here. `LocalSGDSchedule` (`lit_dps.core.local_sgd`) is the section `local`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lit_dps.core.batch_schedule import (
    CONSTANT,
    NAME_KEY,
    NO_RATE_RULE,
    OPTIONS_KEY,
    RATE_KEY,
    RATE_RULES,
    BatchSchedule,
    RateFactors,
    schedule_named,
)
from lit_dps.core.errors import ConfigError, check_whole, is_number
from lit_dps.core.goal import (
    SINGLE_CHECK,
    TOLERANCE,
    VALIDATION_ERROR,
    Goal,
    resolve_value,
)
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.metric_names import is_rising, is_share
from lit_dps.core.trial import check_sparsity
from lit_dps.core.unit import STEPS

Biases = Literal["paper", "keep"]
Init = Literal["original", "reinit", "isometry", "scaled_by_density"]

AVERAGE_KEY = "optim.average_half_life"
MAX_EXAMPLES = 2**31 - 1  # of a batch; no data set is larger
# Metadata of a field, for `identity_of`. Other fields decide results and are always recorded.
FREE = {"identity": False}  # does not decide results, or each trial sets it
UNLESS_DEFAULT = {"identity": "unless default"}  # studies without the key keep their identity
# As `UNLESS_DEFAULT`; stored configurations and checkpoints also have the key only if it is set.
LATER = {"identity": "unless default", "plain": "unless default"}
# Defaults of keys in a study, where they differ from those of `fit`. A study stores K, and no
# complete curves.
STUDY_DEFAULTS = {"goal.early_reject": True}


@dataclass(frozen=True)
class GoalConfig:
    """When a trial stops.

    It stops at the first check that meets the goal, or at the step budget. One of `error`,
    `at_most` and `at_least` is the value of the goal.

    Attributes:
        error: Validation error to reach, a share. It is between 0 and 1. It is the same as
            `at_most` with the metric `monitor`, and cannot be combined with `metric`.
        check_interval: Optimizer steps between validations.
        max_steps: Maximum steps of a trial. It is a multiple of `check_interval`.
        monitor: Name that the error is logged under. The module logs the validation error as a
            fraction.
        early_reject: Stop a validation once it misses the goal. This needs support by module and
            data (`EarlyValidation`). The number of steps to the goal stays the same. Errors in the
            curve become lower bounds, and the module logs nothing at such a validation.
        metric: Another metric, logged in validation. For example "val/accuracy".
        at_most: Goal value of a metric that falls.
        at_least: Goal value of a metric that rises.
        rule: When validations meet the goal. "single": at the first validation that
            reaches the value. "mean_of_checks": at the first validation where the mean of the last
            validations reaches it. "stays_below": at the first validation where each of the last
            validations reaches it. Or the class path of a `lit_dps.core.goal.GoalRule`. The steps
            to the goal are the step of that validation. Except for "single" and "stays_below",
            validations do not stop early.
        options: Arguments of the rule. Both rules over several validations need their number,
            `checks`.
        max_examples: Maximum training examples of a trial. Examples are counted, so a step on a
            short batch counts less. The trial ends at the first validation at or beyond this
            number. A validation beyond it does not meet the goal. Schedules still see `max_steps`.
        max_seconds: Maximum seconds of training of a trial. It ends a trial as `max_examples` does.
            The clock runs during training steps and while their data load, in all processes of the
            trial together. It stops during validation, building, pruning, measuring and saving.
            Such trials are not reproducible. They are not stacked, because the networks of a stack
            share a clock.
        unit: Unit of K*: steps, examples, seconds. They are counted as for `max_examples` and
            `max_seconds`. K* is then the fewest examples or seconds of any trial, and racing uses
            this unit too. The law of K* is fitted to steps, which are K* / B for examples. There is
            no law for seconds.

    Raises:
        ConfigError: for a value out of its range.
    """

    error: float | None = field(default=None, metadata=UNLESS_DEFAULT)
    check_interval: int = 16
    max_steps: int = 40_000
    monitor: str = VALIDATION_ERROR
    early_reject: bool = field(default=False, metadata=FREE)
    metric: str | None = field(default=None, metadata=UNLESS_DEFAULT)
    at_most: float | None = field(default=None, metadata=UNLESS_DEFAULT)
    at_least: float | None = field(default=None, metadata=UNLESS_DEFAULT)
    rule: str = field(default=SINGLE_CHECK, metadata=LATER)
    options: dict[str, Any] | None = field(default=None, metadata=LATER)
    max_examples: int | None = field(default=None, metadata=LATER)
    max_seconds: float | None = field(default=None, metadata=LATER)
    unit: str = field(default=STEPS.name, metadata=LATER)

    def __post_init__(self):
        resolve_value(self.error, self.at_most, self.at_least, self.metric)
        if is_rising(self.monitored) and self.at_least is None:
            allowed = "a metric that falls. For a metric that rises set goal.at_least"
            raise ConfigError(self.metric_key, self.monitored, allowed)
        self.build()

    def build(self) -> Goal:
        """Return the goal that judges the checks of a trial."""
        value = resolve_value(self.error, self.at_most, self.at_least, self.metric)
        metric = self.monitored
        if self.error is not None:
            metric = VALIDATION_ERROR
        return Goal(
            value,
            self.check_interval,
            self.max_steps,
            metric,
            at_least=self.at_least is not None,
            rule=self.rule,
            options=self.options or {},
            max_examples=self.max_examples,
            max_seconds=self.max_seconds,
            unit=self.unit,
        )

    @property
    def monitored(self) -> str:
        """The name of the metric, as the module logs it."""
        return self.metric or self.monitor

    @property
    def metric_key(self) -> str:
        """The configuration key that names the metric."""
        if self.metric is None:
            return "goal.monitor"
        return "goal.metric"

    def check_scale(self, value: float) -> None:
        """Raise ConfigError if a value of the metric is no share, but the goal is one."""
        name = self.monitored
        if not math.isfinite(value):
            return
        is_error = self.error is not None or (name == VALIDATION_ERROR and self.at_least is None)
        if is_error and "loss" not in name and not 0 <= value <= 1 + TOLERANCE:
            allowed = f"a share between 0 and 1; the module logs {value:g}"
            hint = "Log the error divided by 100 if it is in percent, or set goal.metric, at_most"
            raise ConfigError(self.metric_key, name, allowed, hint)
        if self.at_least is not None and is_share(name) and self.at_least <= 1 < value:
            allowed = f"in the unit of {name}; the module logs {value:g}"
            hint = f"Write {100 * self.at_least:g} if the metric is in percent"
            raise ConfigError("goal.at_least", self.at_least, allowed, hint)

    @property
    def value_key(self) -> str:
        """The configuration key of the goal's value."""
        for name in ("error", "at_most", "at_least"):
            if getattr(self, name) is not None:
                return f"goal.{name}"
        raise AssertionError("a goal has a value")

    @property
    def stops_validations_early(self) -> bool:
        """Whether a check may stop before it has seen the entire validation split."""
        # A metric that rises has no lower bound of mistakes, and a mean needs each value.
        return self.early_reject and self.at_least is None and self.build().is_pointwise


@dataclass(frozen=True)
class PruningConfig:
    """Pruning before the first step.

    Attributes:
        sparsity: Share of pruned parameters, in [0, 1). 0 prunes nothing. A study sets it.
        method: Such as snip, grasp; or a class path. The methods are "snip" (as in the paper),
            "magnitude", "random", "snip_it", "iterative_snip", "force", "grasp", "synflow", "snap",
            "snap_it", "random_layerwise", "smart_ratio", "shuffle", "two_four", "from_file", and
            the class path of a `lit_dps.pruning.Pruner`. "rigl", "set", "gradual", "snip_it_during"
            change the mask during training.
        biases: paper: prune biases too; keep: do not. "paper" is the behavior of the authors' code.
        batch_size: Examples of a batch of the pruning pass. Each batch is weighted by its size, so
            that the scores are sums over the examples.
        seed: Seed of the "random" scores. A study sets it.
        exclude: Patterns of parameters that stay dense. For example "head.*", "*.cls_token", or
            "teacher.*" for a copy of the pruned network.
        options: Arguments of the method's constructor. If the method is an axis of the grid, each
            method receives the options that it accepts.
        init: Weights: original, reinit, isometry or scaled_by_density. These are the weights at the
            start of training (`lit_dps.pruning.start`). "original": the weights that were scored.
            "reinit": new weights of the network's own initialization, only in a study. "isometry":
            the original weights, moved towards orthogonal layers (Lee et al. 2020).
            "scaled_by_density": the original weights, divided by the root of the density of their
            tensor (Dey et al. 2024). Sparsity 0 always uses the original weights.

    Raises:
        ConfigError: for a value out of its range.
    """

    sparsity: float = field(default=0.0, metadata=FREE)
    method: str = "snip"
    biases: Biases = "paper"
    batch_size: int = 100
    seed: int = field(default=0, metadata=FREE)
    exclude: Sequence[str] = field(default=(), metadata=UNLESS_DEFAULT)
    options: dict[str, Any] | None = field(default=None, metadata=UNLESS_DEFAULT)
    init: Init = field(default="original", metadata=UNLESS_DEFAULT)

    def __post_init__(self):
        # The callback checks the method.
        check_sparsity("pruning.sparsity", self.sparsity)
        _check_choice("pruning.biases", self.biases, get_args(Biases))
        _check_examples("pruning.batch_size", self.batch_size)
        _check_choice("pruning.init", self.init, get_args(Init))


@dataclass(frozen=True)
class OptimConfig:
    """Stale gradients, and averages of the weights.

    Attributes:
        delay: Delay of the gradients in steps, tau. 0 is the usual update.
        average_half_life: Validate the average of the weights; half-life in examples. 0 validates
            the trained weights. The average is exponential. The running statistics of batch
            normalization are averaged too (`lit_dps.optim.weight_average`). Local SGD does not
            support it.

    Raises:
        ConfigError: for a value out of its range.
    """

    delay: int = field(default=0, metadata=UNLESS_DEFAULT)
    average_half_life: float = field(default=0.0, metadata=LATER)

    def __post_init__(self):
        check_whole("optim.delay", self.delay, 0, "steps")
        half_life = self.average_half_life
        if not is_number(half_life) or not 0 <= half_life < math.inf:
            raise ConfigError(AVERAGE_KEY, half_life, "a number of examples, 0 or more")


@dataclass(frozen=True)
class BatchConfig:
    """The batch size as a function of the step.

    The batch size of a cell is the largest one of its trials. K stays in optimizer steps; examples
    are counted, as the sum of the sizes of the steps. There is no law of K against such a batch
    size, and no critical batch size.

    Attributes:
        schedule: linear, doubling, late, seesaw, stages or a class path. "constant" trains every
            step on the cell's batch size. "linear" grows the batch linearly to that size.
            "doubling" doubles the batch until it has that size. "late" uses a share of that size,
            and the full size in the last part of the run. "seesaw" doubles the batch where a cosine
            schedule would halve the learning rate. Stages such as "0:B/4 3%:B/2 10%:B" have fixed
            sizes in fixed shares of the run. Or the class path of a
            `lit_dps.core.batch_schedule.BatchSchedule`. The data must be an
            `lit_dps.data.ImageData`.
        options: Arguments of the schedule. "linear", "doubling", "late" and "seesaw" need `start`,
            the first batch size as a share of B. All need a length in `steps` or `examples`: of the
            warm-up, between two doublings, or of the run. "late" also has `share`, the share of the
            run before the switch (0.8). "seesaw" also has `end`, the last learning rate of the
            cosine schedule as a share of its first (0.1).
        rate: How the learning rate follows the batch: none, sqrt, linear or inverse_sqrt. With
            "sqrt" and "linear" the configured learning rate belongs to the cell's batch size.
            Smaller batches have it times their share of that size, or times the root of the share.
            With "inverse_sqrt" it belongs to the first step, and larger batches have smaller
            learning rates. A schedule of the module is multiplied with it.

    Raises:
        ConfigError: for a schedule that does not exist, or that does not take the options.
    """

    schedule: str = field(default=CONSTANT, metadata=LATER)
    options: dict[str, Any] | None = field(default=None, metadata=LATER)
    rate: str = field(default=NO_RATE_RULE, metadata=LATER)

    def __post_init__(self):
        _check_choice(RATE_KEY, self.rate, list(RATE_RULES))
        self.build()

    def rate_factors(self, batch_size: int) -> RateFactors:
        """Return the factors of the learning rate at each step of a cell of a batch size."""
        return RateFactors(self.build(), self.rate, batch_size)

    def build(self) -> BatchSchedule:
        """Return the schedule."""
        return schedule_named(self.schedule, self.options)

    def with_axes(self, axes: Iterable[tuple[str, Any]]) -> BatchConfig:
        """Return the configuration of a cell, with the values of its axes by key."""
        values: dict[str, Any] = {}
        options = dict(self.options or {})
        for key, value in axes:
            if key.startswith(f"{OPTIONS_KEY}."):
                options[key.removeprefix(f"{OPTIONS_KEY}.")] = value
            elif key == NAME_KEY:
                values["schedule"] = value
            elif key == RATE_KEY:
                values["rate"] = value
        return dataclasses.replace(self, options=options or None, **values)


@dataclass(frozen=True)
class SmoothnessConfig:
    """Measurements of the terms of the convergence theory along a trial.

    Attributes:
        interval: Steps between measurements; null: none. The paper uses 100.
        delta: Distance of the gammas, in (0, 1]. The gammas are delta, 2 delta, ...
        last: Largest gamma, at least `delta`. The paper uses 1, its code 0.9.
        examples: Training examples of the gradients. They are the first examples of the pruning
            pass. The default is all.
        batch_size: Examples per batch of the passes. It changes results by rounding only.
        floor: Lower bound f_inf of the training loss. It is 0 for a cross-entropy.
        noise: Measure the gradient noise too. Each measurement then computes the variance of the
            per-example gradient before the step. The extra pass takes 2 to 100 times as long as a
            pass in batches.

    Raises:
        ConfigError: for a value out of its range.
    """

    # A measurement costs more than the training that it watches, so none is the default.
    interval: int | None = None
    delta: float = 0.1
    last: float = 1.0
    examples: int | None = None
    batch_size: int = field(default=1000, metadata=FREE)
    floor: float = 0.0
    noise: bool = field(default=False, metadata=UNLESS_DEFAULT)

    def __post_init__(self):
        if self.interval is not None and self.interval < 1:
            raise ConfigError("smoothness.interval", self.interval, "at least 1 step")
        _check_examples("smoothness.batch_size", self.batch_size)
        if self.examples is not None:
            _check_examples("smoothness.examples", self.examples)
        if not 0 < self.delta <= 1:
            raise ConfigError("smoothness.delta", self.delta, "a number in (0, 1]")
        if not self.delta <= self.last:
            allowed = f"at least smoothness.delta = {self.delta:g}"
            raise ConfigError("smoothness.last", self.last, allowed)
        if not math.isfinite(self.floor):
            raise ConfigError("smoothness.floor", self.floor, "a finite lower bound of the loss")


# The sections of a configuration that all trials have in common, by name.
TRIAL_SECTIONS: dict[str, type] = {
    "local": LocalSGDSchedule,
    "goal": GoalConfig,
    "pruning": PruningConfig,
    "optim": OptimConfig,
    "smoothness": SmoothnessConfig,
    "batch": BatchConfig,
}


def plain(config: Any) -> dict[str, Any]:
    """Return a section as plain JSON, by key; without `LATER` keys that have their default."""
    values = dataclasses.asdict(config)
    for each in dataclasses.fields(config):
        value = values[each.name]
        if each.metadata.get("plain") == "unless default" and value == each.default:
            del values[each.name]
        elif isinstance(value, tuple):
            values[each.name] = list(value)
    return values


def identity_of(config: Any, without: Container[str] = ()) -> dict[str, Any]:
    """Return the keys of a section that decide results, as plain JSON.

    Args:
        config: The section.
        without: Keys that the trials set, so that they decide no result of the study.
    """
    identity = {}
    values = plain(config)
    for each in dataclasses.fields(config):
        rule = each.metadata.get("identity")
        value = values.get(each.name, each.default)
        if rule is False or each.name in without:
            continue
        if rule == "unless default" and (value == each.default or value in ([], {})):
            continue
        identity[each.name] = value
    return identity


def _check_choice(key: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(key, value, f"one of {', '.join(choices)}")


def _check_examples(key: str, examples: int) -> None:
    if examples < 1:
        raise ConfigError(key, examples, "at least 1 example")
    if examples > MAX_EXAMPLES:
        raise ConfigError(key, examples, f"at most {MAX_EXAMPLES} examples")
