"""The schedule of local SGD: when workers train separately, and when they meet.

Steps up to `start` are synchronous: one network on the entire batch. Then each worker trains its
network on its part of the batch, and all meet after every `steps` steps (Stich 2019, "Local SGD
Converges Fast and Communicates Little"; post-local SGD, with a start: Lin et al. 2020, "Don't Use
Large Mini-Batches, Use Local SGD"). Here every round has the same length. The code of Lin et al.
and torch's PeriodicModelAverager also meet right after the first local step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from lit_dps.core.errors import ConfigError, check_whole


@dataclass(frozen=True)
class LocalSGDSchedule:
    """Local SGD: workers train separately, and meet after every `steps` steps.

    Attributes:
        workers: Number of workers n; 1: the usual training.
        steps: Local steps H between two synchronizations.
        start: Synchronous steps t0 before the local steps.
        outer_learning_rate: Learning rate of the outer optimizer. With 1 and without momentum,
            workers continue from their mean.
        outer_momentum: Momentum of the outer optimizer. It is in [0, 1).
        outer_nesterov: Use Nesterov's outer momentum.

    Raises:
        ConfigError: for a value out of its range.
    """

    workers: int = 1
    steps: int = 1
    start: int = 0
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    outer_nesterov: bool = True

    def __post_init__(self):
        check_whole("local.workers", self.workers, 1, "workers")
        check_whole("local.steps", self.steps, 1, "steps")
        check_whole("local.start", self.start, 0, "steps")
        rate = self.outer_learning_rate
        if not _is_real(rate) or not 0 < rate < math.inf:
            raise ConfigError("local.outer_learning_rate", rate, "a number above 0")
        momentum = self.outer_momentum
        if not _is_real(momentum) or not 0 <= momentum < 1:
            raise ConfigError("local.outer_momentum", momentum, "a number in [0, 1)")
        if self.outer_nesterov not in (True, False):
            raise ConfigError("local.outer_nesterov", self.outer_nesterov, "true or false")

    @property
    def on(self) -> bool:
        """Whether training differs from the usual one; a meeting of one worker changes nothing."""
        return self.workers > 1 or self.outer_learning_rate != 1 or self.outer_momentum != 0

    def meet_after(self, step: int) -> bool:
        """Return True if the workers meet after a step, counted from 1."""
        return step > self.start and (step - self.start) % self.steps == 0

    def communications(self, steps: int) -> int:
        """Return how often the workers communicate in some steps of training; 0 for one worker.

        They communicate in each synchronous step and at each meeting. Checks do not count.
        """
        if self.workers == 1:
            return 0
        return min(steps, self.start) + max(0, steps - self.start) // self.steps


def _is_real(value: object) -> bool:
    """Return True for a real number, such as one of NumPy; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)
