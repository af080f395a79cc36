"""The batch size and the learning rate of each optimizer step, and the examples of several steps.

A cell's batch size B is the largest one of its trials. A schedule may begin with smaller batches
(batch warm-up: Smith et al. 2018, "Don't Decay the Learning Rate, Increase the Batch Size"). K* is
in steps at any schedule. Every count of examples in the package is the sum of the sizes of the
steps: `BatchSchedule.examples_of`, or what a trial has counted (`StudyRecord.examples_of`).

`RateFactors` has the factors by which the learning rate follows the batch size.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

from lit_dps.core.errors import ConfigError
from lit_dps.core.registry import (
    argument_names,
    instance_of,
    named_class,
    refuse_unknown_option,
)

CONSTANT = "constant"
# Why nothing is fitted against B.
GROWING = "batch.schedule changes the batch size along a trial"
NAME_KEY = "batch.schedule"
OPTIONS_KEY = "batch.options"
RATE_KEY = "batch.rate"
# How the learning rate follows the batch size: the power of the batch size.
NO_RATE_RULE = "none"
INVERSE_SQRT = "inverse_sqrt"
RATE_RULES = {NO_RATE_RULE: 0.0, "sqrt": 0.5, "linear": 1.0, INVERSE_SQRT: -0.5}
# The share of the run after which the schedule "late" has large batches.
LATE = 0.8


class BatchSchedule(ABC):
    """The batch size as a function of the step. The arguments of the constructor are its options.

    Sizes must depend on the arguments of `size` alone, because a resumed run asks for them again.
    """

    @abstractmethod
    def size(self, step: int, examples: int, batch_size: int) -> int:
        """Return the number of examples of a step, from 1 to `batch_size`.

        Args:
            step: Number of optimizer steps before this step.
            examples: Examples of these steps.
            batch_size: The cell's batch size, which is the largest one.
        """

    def decay(self, step: int, examples: int, batch_size: int) -> float:
        """Return the factor of the learning rate beside the rule of `batch.rate`, usually 1.

        Args:
            step, examples, batch_size: As in `size`.
        """
        return 1.0

    @property
    def is_constant(self) -> bool:
        """Whether every step has the cell's batch size."""
        return False

    def sizes(self, batch_size: int) -> Iterator[int]:
        """Yield the batch size of each step, without an end.

        Raises:
            ConfigError: if `size` returns something else than an integer from 1 to `batch_size`.
        """
        step = 0
        examples = 0
        while True:
            size = self._checked_size(step, examples, batch_size)
            yield size
            step += 1
            examples += size

    def _checked_size(self, step: int, examples: int, batch_size: int) -> int:
        """Return `size`; raises as `sizes`."""
        size = self.size(step, examples, batch_size)
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= batch_size:
            allowed = f"an integer from 1 to {batch_size} as the size of step {step}"
            raise ConfigError(NAME_KEY, f"{type(self).__name__}.size = {size}", allowed)
        return size

    def sizes_of_parts(self, batch_size: int, parts: int) -> Iterator[int]:
        """Yield the size of each batch of a loader, if a step accumulates several equal batches.

        Args:
            batch_size: Examples of a step: the cell's batch size.
            parts: Batches of a step.

        Raises:
            ConfigError: if a step cannot be divided into equal batches, and as `sizes`.
        """
        for step, size in enumerate(self.sizes(batch_size)):
            if size % parts:
                allowed = f"multiples of trainer.accumulate_grad_batches = {parts}"
                raise ConfigError(NAME_KEY, f"{size} examples in step {step}", allowed)
            for _ in range(parts):
                yield size // parts

    def examples_of(self, steps: float, batch_size: int) -> float:
        """Return the examples of the first steps of a run.

        Args:
            steps: Number of steps; between two integers the examples are interpolated.
            batch_size: The cell's batch size.
        """
        whole = math.floor(steps)
        totals = self._totals_to(whole + 1, batch_size)
        if steps == whole:
            return totals[whole]
        return totals[whole] + (steps - whole) * (totals[whole + 1] - totals[whole])

    def steps_within(self, examples: int, batch_size: int) -> int:
        """Return the most steps that need at most a number of examples."""
        totals = self._totals_to(examples // batch_size + 1, batch_size)
        while totals[-1] <= examples:
            totals = self._totals_to(2 * len(totals), batch_size)
        return bisect_right(totals, examples) - 1

    @cached_property
    def _totals(self) -> dict[int, array[int]]:
        """The examples of 0, 1, ... steps, by batch size."""
        return {}

    def _totals_to(self, steps: int, batch_size: int) -> array[int]:
        """Return the examples of 0, 1, ..., at least `steps` steps."""
        totals = self._totals.setdefault(batch_size, array("q", [0]))
        while len(totals) <= steps:
            size = self._checked_size(len(totals) - 1, totals[-1], batch_size)
            totals.append(totals[-1] + size)
        return totals


class Constant(BatchSchedule):
    """Every step has the cell's batch size.

    Args:
        options: Of other schedules, which an axis `batch.schedule` may compare with this one.
            They have no effect.
    """

    def __init__(self, **options: Any):
        pass

    def size(self, step: int, examples: int, batch_size: int) -> int:
        return batch_size

    @property
    def is_constant(self) -> bool:
        return True

    def examples_of(self, steps: float, batch_size: int) -> float:
        return steps * batch_size

    def steps_within(self, examples: int, batch_size: int) -> int:
        return examples // batch_size


CONSTANT_BATCH = Constant()


class _Scheduled(BatchSchedule):
    """A batch that grows to the cell's batch size, in steps or in examples.

    Args:
        steps: Length in optimizer steps. Set either `steps` or `examples`.
        examples: Length in training examples.

    Raises:
        ConfigError: for a value out of its range.
    """

    def __init__(self, steps: int | None = None, examples: int | None = None):
        if (steps is None) == (examples is None):
            value = {"steps": steps, "examples": examples}
            raise ConfigError(OPTIONS_KEY, value, "either steps or examples, not both")
        for unit, length in (("steps", steps), ("examples", examples)):
            if length is not None and (length < 1 or length != int(length)):
                raise ConfigError(f"{OPTIONS_KEY}.{unit}", length, "a whole number, 1 or more")
        self._by_examples = examples is not None
        self._length = int(steps or examples or 0)

    def size(self, step: int, examples: int, batch_size: int) -> int:
        share = self._share(*divmod(self._done(step, examples), self._length))
        return max(1, math.floor(min(share, 1) * batch_size))

    def _done(self, step: int, examples: int) -> int:
        """Return the steps or examples so far."""
        return examples if self._by_examples else step

    @abstractmethod
    def _share(self, lengths: int, rest: int) -> Fraction | int:
        """Return the share of the batch size, which may be above 1, after some training.

        Args:
            lengths: Whole lengths that were trained.
            rest: Steps or examples of the length that has begun.
        """


class _Growing(_Scheduled):
    """A batch that grows from a share of the cell's batch size, in steps or in examples.

    Args:
        start: Size of the first batch, as a share of the cell's batch size, in (0, 1]. Sizes are
            rounded down, and at least 1.
        steps, examples: The length, in optimizer steps or in training examples.

    Raises:
        ConfigError: for a value out of its range.
    """

    def __init__(self, start: float, steps: int | None = None, examples: int | None = None):
        if isinstance(start, bool) or not 0 < start <= 1:
            allowed = "a share of the batch size, above 0 and at most 1"
            raise ConfigError(f"{OPTIONS_KEY}.start", start, allowed)
        super().__init__(steps, examples)
        self._start = Fraction(str(start))  # exact, so that no size is rounded down by chance

    @cached_property
    def _doublings(self) -> int:
        """The number of doublings after which the batch has the cell's size."""
        return math.ceil(1 / self._start - 1).bit_length()


class LinearWarmUp(_Growing):
    """The batch grows linearly to the cell's batch size, within `steps` or `examples`."""

    def _share(self, lengths: int, rest: int) -> Fraction | int:
        if lengths:
            return 1
        return self._start + (1 - self._start) * Fraction(rest, self._length)


class Doubling(_Growing):
    """The batch doubles after every `steps` or `examples`, up to the cell's batch size."""

    def _share(self, lengths: int, rest: int) -> Fraction | int:
        if lengths >= self._doublings:
            return 1
        return self._start * 2**lengths


class LateSwitch(_Growing):
    """The batch has a share of the cell's size, then the cell's size late in the run.

    Wang et al. 2026, "Fast Catch-up, Late Switching" (arXiv 2602.14208): on hard tasks the best
    schedule under a budget of examples keeps small batches for most of the training.

    Args:
        start: As in `linear`.
        steps, examples: The length of the run, in optimizer steps or in training examples.
        share: The share of the run before the switch, in (0, 1).
    """

    def __init__(
        self,
        start: float,
        steps: int | None = None,
        examples: int | None = None,
        share: float = LATE,
    ):
        super().__init__(start, steps, examples)
        if isinstance(share, bool) or not 0 < share < 1:
            raise ConfigError(f"{OPTIONS_KEY}.share", share, "a share of the run in (0, 1)")
        self._switch = Fraction(str(share)) * self._length

    def _share(self, lengths: int, rest: int) -> Fraction | int:
        if lengths or rest >= self._switch:
            return 1
        return self._start


class Seesaw(_Growing):
    """The batch doubles wherever a cosine schedule would have halved the learning rate.

    Meterez et al. 2025, "Seesaw" (arXiv 2510.14717). Where a schedule would halve the rate, Seesaw
    doubles the batch size and divides the rate by sqrt(2) for Adam, `batch.rate: inverse_sqrt`. For
    SGD it doubles the batch size alone, `batch.rate: none`. Once the batch has the cell's size, the
    rate is halved instead, as the schedule would have done.

    Args:
        start: As in `linear`. The batch doubles until it has the cell's size; B must be at least
            1 / start.
        steps, examples: The length of the cosine schedule, in optimizer steps or in training
            examples.
        end: The last rate of the cosine schedule, as a share of its first one, in (0, 1). The rate
            stays there after the end.
    """

    def __init__(
        self,
        start: float,
        steps: int | None = None,
        examples: int | None = None,
        end: float = 0.1,
    ):
        super().__init__(start, steps, examples)
        if isinstance(end, bool) or not 0 < end < 1:
            allowed = "the last learning rate as a share of the first, in (0, 1)"
            raise ConfigError(f"{OPTIONS_KEY}.end", end, allowed)
        self._end = end

    def size(self, step: int, examples: int, batch_size: int) -> int:
        if batch_size * self._start < 1:
            # A batch of one example would stay, while the rate counts the doublings.
            smallest = math.ceil(1 / self._start)
            allowed = f"at least 1 / B with seesaw; B = {batch_size} must be at least {smallest}"
            raise ConfigError(f"{OPTIONS_KEY}.start", float(self._start), allowed)
        return super().size(step, examples, batch_size)

    def _share(self, lengths: int, rest: int) -> Fraction | int:
        return self._start * 2 ** self._halvings(lengths, rest)

    def decay(self, step: int, examples: int, batch_size: int) -> float:
        halvings = self._halvings(*divmod(self._done(step, examples), self._length))
        # The doubling that reaches the cell's size may be a smaller growth, which counts as one.
        return 0.5 ** max(0, halvings - self._doublings)

    def _halvings(self, lengths: int, rest: int) -> int:
        """Return how often the cosine schedule has halved the rate."""
        progress = 1.0
        if not lengths:
            progress = rest / self._length
        cosine = (1 + math.cos(math.pi * progress)) / 2
        rate = self._end + (1 - self._end) * cosine
        # Rounding must not hide a halving: a rate of 1/2 - 1e-17 is a half.
        return math.floor(-math.log2(rate) + 1e-9)


class Stages(_Scheduled):
    """Fixed batch sizes in fixed shares of the run, such as "0:B/4 3%:B/2 10%:B".

    Args:
        stages: For each stage the share of the run at which it begins, and its batch size: B, the
            cell's batch size, or a fraction B/n of it, rounded down. The first stage begins at 0.
            The last one has B.
        steps, examples: The length of the run, in optimizer steps or in training examples.
        others: Options of other schedules of the package, on an axis `batch.schedule`. They have
            no effect.

    Raises:
        ConfigError: for other texts, and for values out of their range.
    """

    def __init__(
        self,
        stages: str,
        steps: int | None = None,
        examples: int | None = None,
        **others: Any,
    ):
        super().__init__(steps, examples)
        _refuse_unknown_options(others)
        allowed = 'stages START:SIZE that begin later and end with B, such as "0:B/4 3%:B/2 10%:B"'
        self._stages: list[tuple[Fraction, Fraction]] = []
        for stage in stages.split():
            parsed = _STAGE.fullmatch(stage)
            if parsed is None:
                raise ConfigError(NAME_KEY, stages, allowed)
            start = Fraction(parsed["start"]) / 100
            if bool(self._stages) != (start > 0) or start >= 1:
                raise ConfigError(NAME_KEY, stages, allowed)
            if self._stages and start <= self._stages[-1][0]:
                raise ConfigError(NAME_KEY, stages, allowed)
            self._stages.append((start, Fraction(1, int(parsed["divisor"] or 1))))
        if not self._stages or self._stages[-1][1] != 1:
            raise ConfigError(NAME_KEY, stages, allowed)

    def _share(self, lengths: int, rest: int) -> Fraction | int:
        if lengths:
            return 1
        share = self._stages[0][1]
        for start, of_stage in self._stages:
            if rest >= start * self._length:
                share = of_stage
        return share


# A stage of `Stages`.
_STAGE = re.compile(r"(?P<start>0|\d+(\.\d+)?(?=%))%?:B(/(?P<divisor>[1-9]\d*))?")

SCHEDULES: dict[str, type[BatchSchedule]] = {
    CONSTANT: Constant,
    "linear": LinearWarmUp,
    "doubling": Doubling,
    "late": LateSwitch,
    "seesaw": Seesaw,
}


def _refuse_unknown_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that no schedule of the package takes."""
    names: dict[str, None] = {}
    for kind in (Stages, *SCHEDULES.values()):
        for name in argument_names(kind):
            names[name] = None
    allowed = f"omitted; the schedules take {', '.join(names)}"
    refuse_unknown_option(OPTIONS_KEY, options, names, allowed)


class RateFactors:
    """The factor of the learning rate at each step of a run whose batch size changes.

    The largest rate of a run is the rate that is configured. With the rules "sqrt" and "linear" it
    is the rate of the cell's batch size B, and a step of b examples has the factor (b / B)^(1/2) or
    b / B. With "inverse_sqrt" it is the rate of the first step, of b0 examples, and the factor is
    (b0 / b)^(1/2).

    Args:
        schedule: The batch size as a function of the step.
        rule: One of `RATE_RULES`.
        batch_size: The cell's batch size.
    """

    def __init__(self, schedule: BatchSchedule, rule: str, batch_size: int):
        self._schedule = schedule
        self._power = RATE_RULES[rule]
        self._rule = rule
        self._batch_size = batch_size

    @cached_property
    def _reference(self) -> int:
        """The batch size at which the rate is the one that is configured."""
        if self._rule == INVERSE_SQRT:
            return next(self._schedule.sizes(self._batch_size))
        return self._batch_size

    @property
    def are_one(self) -> bool:
        """Whether every step has the factor 1, whatever the sizes."""
        if self._schedule.is_constant:
            return True
        decays = type(self._schedule).decay is not BatchSchedule.decay
        return self._power == 0 and not decays

    def at(self, step: int) -> float:
        """Return the factor of step number `step`, from 0."""
        if self.are_one:
            return 1.0
        examples = int(self._schedule.examples_of(step, self._batch_size))
        size = self._schedule.examples_of(step + 1, self._batch_size) - examples
        decay = self._schedule.decay(step, examples, self._batch_size)
        return (size / self._reference) ** self._power * decay


def schedule_named(name: str, options: Mapping[str, Any] | None = None) -> BatchSchedule:
    """Return a schedule of batch sizes.

    Args:
        name: One of `SCHEDULES`, the stages of `Stages`, or the class path of a `BatchSchedule`.
        options: Arguments of its constructor.

    Raises:
        ConfigError: if there is no such schedule, or if it does not take the options.
    """
    if ":B" in name:
        return instance_of(Stages, OPTIONS_KEY, name, {"stages": name, **(options or {})})
    kind = named_class(NAME_KEY, name, SCHEDULES, BatchSchedule)
    return instance_of(kind, OPTIONS_KEY, name, options)
