"""The batch size of each optimizer step, and the examples of a number of steps.

A cell's batch size B is the largest one of its trials. A schedule may begin with smaller batches
(batch warm-up: Smith et al. 2018, "Don't Decay the Learning Rate, Increase the Batch Size"). K* is
in steps at any schedule. Every count of examples in the package is the sum of the sizes of the
steps: `BatchSchedule.examples_of`, or what a trial has counted (`StudyRecord.examples_of`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

from lit_dps.core.errors import ConfigError
from lit_dps.core.registry import instance_of, named_class

CONSTANT = "constant"
# Why nothing is fitted against B.
GROWING = "batch.schedule changes the batch size along a trial"
NAME_KEY = "batch.schedule"
OPTIONS_KEY = "batch.options"


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


class _Growing(BatchSchedule):
    """A batch that grows from a share of the cell's batch size, in steps or in examples.

    Args:
        start: Size of the first batch, as a share of the cell's batch size, in (0, 1]. Sizes are
            rounded down, and at least 1.
        steps: Length in optimizer steps. Set either `steps` or `examples`.
        examples: Length in training examples.

    Raises:
        ConfigError: for a value out of its range.
    """

    def __init__(self, start: float, steps: int | None = None, examples: int | None = None):
        if isinstance(start, bool) or not 0 < start <= 1:
            allowed = "a share of the batch size, above 0 and at most 1"
            raise ConfigError(f"{OPTIONS_KEY}.start", start, allowed)
        if (steps is None) == (examples is None):
            value = {"steps": steps, "examples": examples}
            raise ConfigError(OPTIONS_KEY, value, "either steps or examples, not both")
        for unit, length in (("steps", steps), ("examples", examples)):
            if length is not None and (length < 1 or length != int(length)):
                raise ConfigError(f"{OPTIONS_KEY}.{unit}", length, "a whole number, 1 or more")
        self._start = Fraction(str(start))  # exact, so that no size is rounded down by chance
        self._by_examples = examples is not None
        self._length = int(steps or examples or 0)

    def size(self, step: int, examples: int, batch_size: int) -> int:
        done = examples if self._by_examples else step
        share = self._share(*divmod(done, self._length))
        return max(1, math.floor(min(share, 1) * batch_size))

    @abstractmethod
    def _share(self, lengths: int, rest: int) -> Fraction | int:
        """Return the share of the batch size, which may be above 1, after some training.

        Args:
            lengths: Whole lengths that were trained.
            rest: Steps or examples of the length that has begun.
        """


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

    @cached_property
    def _doublings(self) -> int:
        """The number of doublings after which the batch has the cell's size."""
        return math.ceil(1 / self._start - 1).bit_length()


SCHEDULES: dict[str, type[BatchSchedule]] = {
    CONSTANT: Constant,
    "linear": LinearWarmUp,
    "doubling": Doubling,
}


def schedule_named(name: str, options: Mapping[str, Any] | None = None) -> BatchSchedule:
    """Return a schedule of batch sizes.

    Args:
        name: One of `SCHEDULES`, or the class path of a `BatchSchedule`.
        options: Arguments of its constructor.

    Raises:
        ConfigError: if there is no such schedule, or if it does not take the options.
    """
    kind = named_class(NAME_KEY, name, SCHEDULES, BatchSchedule)
    return instance_of(kind, OPTIONS_KEY, name, options)
