"""What a run costs besides its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Checks:
    """Validation during a run.

    One takes seconds + by_batch / m for a local batch of m examples. If the batch size of the
    validation follows the batch size of the training, `by_batch` is above 0.

    Attributes:
        seconds: Seconds at any batch size.
        interval: Steps between two validations.
        by_batch: Seconds times examples.
        largest: The largest local batch; larger ones are accumulated.
    """

    seconds: float
    interval: float
    by_batch: float = 0.0
    largest: float = math.inf

    def seconds_per_step(self, batch_size: float, devices: int = 1) -> float:
        """Return the share of validation in the seconds of a step."""
        local = min(batch_size / devices, self.largest)
        return (self.seconds + self.by_batch / local) / self.interval


@dataclass(frozen=True)
class Costs:
    """What a run costs besides its steps.

    Attributes:
        price: Price of a device-hour; None leaves out costs.
        checks: Validation during the run; None leaves out its time.
        steps_include_checks: Whether the seconds of a step include validation already.
    """

    price: float | None = None
    checks: Checks | None = None
    steps_include_checks: bool = False

    def check_seconds_per_step(self, batch_size: float, devices: int) -> float:
        """Return the share of validation in the seconds of a step."""
        if self.checks is None:
            return 0.0
        return self.checks.seconds_per_step(batch_size, devices)


NO_COSTS = Costs()
