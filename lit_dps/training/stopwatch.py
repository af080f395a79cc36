"""Where the time of a run goes: into optimizer steps, into checks, or elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from lightning.pytorch import Trainer

Phase = Literal["training", "checking"]


def now(device: torch.device | None = None) -> float:
    """Seconds, when what was called on a device is done."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Seconds of optimizer steps with their data, and of checks, as far as this process made them.

    All else counts as neither: building, pruning, measuring, logging, saving.
    """

    def __init__(self):
        self._spent: dict[Phase, float] = {"training": 0.0, "checking": 0.0}
        self._phase: Phase | None = None
        self._since, self._steps, self._checks = 0.0, 0, 0

    def turn(self, to: Phase | None, device: torch.device | None = None) -> None:
        """Ends what was timed, once what was called on the device is done, and begins something
        else, or nothing."""
        seconds = now(device)
        if self._phase is not None:
            self._spent[self._phase] += seconds - self._since
        self._phase, self._since = to, seconds

    @contextmanager
    def stopped(self, device: torch.device | None = None) -> Iterator[None]:
        """In here nothing is timed."""
        phase = self._phase
        self.turn(None, device)
        yield
        self.turn(phase, device)

    def checked(self, steps: int) -> None:
        """A check is over, so many steps after the last one."""
        self.turn(None)
        self._steps, self._checks = self._steps + steps, self._checks + 1

    @property
    def timed(self) -> dict[str, float]:
        """As `TrialResult.timed`."""
        if not self._checks:
            return {}
        return {"steps": self._steps, **self._spent, "checks": self._checks}


def watch_of(trainer: Trainer) -> Stopwatch:
    """The stopwatch of a run, which its `GoalErrorCallback` holds; one that nobody reads
    without."""
    found = (getattr(callback, "watch", None) for callback in trainer.callbacks)
    return next((watch for watch in found if isinstance(watch, Stopwatch)), Stopwatch())
