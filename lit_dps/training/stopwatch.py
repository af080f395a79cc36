"""Stopwatch: measures the seconds that a run spends in optimizer steps and in validations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from lightning.pytorch import Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.parallel.process import cpu_wait_seconds

Phase = Literal["training", "checking"]


def now(device: torch.device | None = None) -> float:
    """Return a time in seconds, after the device has finished its work."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Measures seconds of optimizer steps with their data, and of validations, in this process.

    All other work counts as neither: building, pruning, measuring, logging and saving.
    """

    def __init__(self):
        self._seconds: dict[Phase, float] = {"training": 0.0, "checking": 0.0}
        self._phase: Phase | None = None
        self._phase_start = 0.0
        self._waited = 0.0
        self._waited_before = 0.0
        self._steps = 0
        self._checks = 0

    def switch_to(self, phase: Phase | None, device: torch.device | None = None) -> None:
        """End the current phase once the device has finished, and begin another, or none.

        A phase that has already begun continues.
        """
        if phase == self._phase:
            return
        time_now = now(device)
        waited = cpu_wait_seconds()
        if self._phase is not None:
            self._seconds[self._phase] += time_now - self._phase_start
            self._waited += waited - self._waited_before
        self._phase = phase
        self._phase_start = now()
        self._waited_before = waited

    @contextmanager
    def paused(self, device: torch.device | None = None) -> Iterator[None]:
        """Measure nothing in this block."""
        phase = self._phase
        self.switch_to(None, device)
        yield
        self.switch_to(phase, device)

    def restart_phase(self) -> None:
        """Drop the time since the current phase began."""
        self._phase_start = now()
        self._waited_before = cpu_wait_seconds()

    def add_validation(self, steps: int) -> None:
        """End a validation, which follows this number of steps."""
        self.switch_to(None)
        self._steps += steps
        self._checks += 1

    @property
    def training_seconds(self) -> float:
        """Seconds of the steps up to the end of the last phase of training."""
        return self._seconds["training"]

    @property
    def timed(self) -> dict[str, float]:
        """Steps, validations, the seconds of each and the wait, as in `TrialResult.timed`.

        Steps after the last validation do not count. Empty before the first validation.
        """
        if not self._checks:
            return {}
        counts = {"steps": self._steps, "checks": self._checks}
        return {**counts, **self._seconds, "waited": self._waited}


def stopwatch_of(trainer: Trainer) -> Stopwatch:
    """Return the stopwatch of the trainer's `GoalErrorCallback`, or a new one without it."""
    for callback in lightning_private.callbacks_of(trainer):
        stopwatch = getattr(callback, "stopwatch", None)
        if isinstance(stopwatch, Stopwatch):
            return stopwatch
    return Stopwatch()
