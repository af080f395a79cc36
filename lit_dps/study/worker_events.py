"""What workers tell of the trials that they train, now and then, for whoever watches a study at a
terminal."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Trial

EVERY = 0.5  # seconds between two sightings of a trial: a check may take a millisecond


@dataclass(frozen=True)
class ProgressEvent:
    """How far a trial has come.

    Attributes:
        worker: Process that trains it.
        trial: The trial; None where that process was lost, with whatever it trained.
        step: Optimizer steps so far.
        best: The best value of the goal's metric so far; None before the first check.
        exact: Whether that is no bound: a check that stops early knows the least mistakes that
            there are.
    """

    worker: int
    trial: Trial | None = None
    step: int = 0
    best: float | None = None
    exact: bool = True


class ProgressReporter:
    """Tells how the runs of this process do: when they are handed out, and at their checks, each
    now and then.

    Args:
        tell: Takes what is seen.
        every: Seconds between two sightings of a run.
    """

    def __init__(self, tell: Callable[[ProgressEvent], None], every: float = EVERY):
        self._tell, self._every, self._told = tell, every, dict[tuple, float]()

    def begins(self, run: Attempt) -> None:
        """Takes a run that was handed out."""
        run.watch = self.checked
        self._tell(ProgressEvent(os.getpid(), run.trial))

    def checked(self, run: Attempt) -> None:
        """Takes a run that was checked."""
        where = run.trial.cell, run.trial.point, run.trial.repeat
        if time.monotonic() - self._told.get(where, -math.inf) < self._every:
            return
        self._told[where] = time.monotonic()
        values = run.curve[run.goal.metric]
        exact = run.curve.get("exact", [1] * len(values))
        found = [
            (value, bool(known))
            for value, known in zip(values, exact, strict=True)
            if math.isfinite(value)
        ]
        best = (max if run.goal.at_least else min)(
            found, key=lambda pair: pair[0], default=(None, True)
        )
        self._tell(ProgressEvent(os.getpid(), run.trial, int(run.curve["step"][-1]), *best))
