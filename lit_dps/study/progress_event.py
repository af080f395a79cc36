"""The progress of running trials, which workers send to the display."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Trial, TrialKey

# A validation may take a millisecond, and a terminal shows few changes a second.
SECONDS_BETWEEN_EVENTS = 0.5
MAX_EVENTS_PER_SECOND = 20  # of all attempts of a worker: a stack has hundreds


@dataclass(frozen=True)
class ProgressEvent:
    """The progress of one trial.

    Attributes:
        worker: Number of the process that trains it.
        trial: The trial; None if this process was killed, with its trial.
        step: Optimizer steps so far.
        best: The best value of the goal's metric so far; None before the first validation.
        exact: False if `best` is a bound, because a validation stopped early.
        first_step: The step at which this attempt began: more than 0 if it resumed.
    """

    worker: int | None
    trial: Trial | None = None
    step: int = 0
    best: float | None = None
    exact: bool = True
    first_step: int = 0


class ProgressReporter:
    """Reports the progress of the attempts of this process.

    Args:
        on_event: Called when an attempt begins, and after its validations.
        seconds: Least time between two reports of one attempt after validations.
    """

    def __init__(
        self, on_event: Callable[[ProgressEvent], None], seconds: float = SECONDS_BETWEEN_EVENTS
    ):
        self._on_event = on_event
        self._seconds = seconds
        self._last_report: dict[TrialKey, float] = {}  # time by running trial; -inf before it
        self._first_steps: dict[TrialKey, int] = {}

    def watch(self, attempt: Attempt) -> None:
        """Report that an attempt begins, and its progress from now on."""
        assert attempt.trial is not None
        attempt.on_validation = self.on_validation
        key = attempt.trial.key
        self._last_report[key] = -math.inf
        self._first_steps.pop(key, None)
        self._on_event(ProgressEvent(os.getpid(), attempt.trial))

    def on_validation(self, attempt: Attempt) -> None:
        """Report the progress of an attempt, unless its last report is recent."""
        assert attempt.trial is not None
        key = attempt.trial.key
        steps = attempt.curve["step"]
        if key not in self._first_steps:
            # The curve of a resumed attempt has the checks before it was saved.
            self._first_steps[key] = int(steps[-2]) if len(steps) > 1 else 0
        seconds = max(self._seconds, (len(self._last_report) - 1) / MAX_EVENTS_PER_SECOND)
        now = time.monotonic()
        last_report = self._last_report.get(key, -math.inf)
        if attempt.status is not None:
            self._last_report.pop(key, None)
        if now - last_report < seconds:
            return
        if attempt.status is None:
            self._last_report[key] = now
        best, exact = _best_value(attempt)
        first_step = self._first_steps[key]
        event = ProgressEvent(os.getpid(), attempt.trial, int(steps[-1]), best, exact, first_step)
        self._on_event(event)


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
