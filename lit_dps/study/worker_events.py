"""The progress of running trials, which workers report to the display of a study."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Trial

# A validation may take a millisecond, and a terminal shows few changes a second.
SECONDS_BETWEEN_EVENTS = 0.5


@dataclass(frozen=True)
class ProgressEvent:
    """The progress of one trial.

    Attributes:
        worker: Number of the process that trains it.
        trial: The trial; None if this process was killed, with its trial.
        step: Optimizer steps so far.
        best: The best value of the goal's metric so far; None before the first validation.
        exact: False if `best` is a bound, because a validation stopped early.
    """

    worker: int | None
    trial: Trial | None = None
    step: int = 0
    best: float | None = None
    exact: bool = True


class ProgressReporter:
    """Reports the progress of the attempts of this process.

    Args:
        on_event: Called when an attempt begins, and after its validations.
        seconds: Least time between two reports of one attempt after validations.
    """

    def __init__(
        self,
        on_event: Callable[[ProgressEvent], None],
        seconds: float = SECONDS_BETWEEN_EVENTS,
    ):
        self._on_event = on_event
        self._seconds = seconds
        self._last_report: dict[tuple, float] = {}  # time by trial

    def watch(self, attempt: Attempt) -> None:
        """Report that an attempt begins, and its progress from now on."""
        attempt.on_check = self.on_validation
        self._on_event(ProgressEvent(os.getpid(), attempt.trial))

    def on_validation(self, attempt: Attempt) -> None:
        """Report the progress of an attempt, unless its last report is recent."""
        assert attempt.trial is not None
        key = (attempt.trial.cell, attempt.trial.point, attempt.trial.repeat)
        now = time.monotonic()
        if now - self._last_report.get(key, -math.inf) < self._seconds:
            return
        self._last_report[key] = now
        best, exact = _best_value(attempt)
        step = int(attempt.curve["step"][-1])
        self._on_event(ProgressEvent(os.getpid(), attempt.trial, step, best, exact))


def _best_value(attempt: Attempt) -> tuple[float | None, bool]:
    """Return the best finite value of the goal's metric, and whether it is exact."""
    values = attempt.curve[attempt.goal.metric]
    exact = attempt.curve.get("exact", [1] * len(values))
    best = None
    is_exact = True
    for value, value_is_exact in zip(values, exact, strict=True):
        if not math.isfinite(value):
            continue
        if best is None or (value > best if attempt.goal.at_least else value < best):
            best = value
            is_exact = bool(value_is_exact)
    return best, is_exact
