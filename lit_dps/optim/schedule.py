"""Learning-rate schedules: step -> factor of the initial rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lit_dps.core.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True)
class RateSchedule:
    """A schedule with its length, warm-up and end.

    The rate rises linearly in the first `warmup_steps` steps: step t, from 0, has the factor
    (t + 1) / warmup_steps, so that no step is wasted at a rate of 0. Then the schedule begins. It
    ends at step `decay_steps`, and the rate stays at the end factor.

    Attributes:
        name: "constant". "linear": falls linearly to the end factor (Shallue et al. 2019, Section
            2; Lee et al. 2021, Section 2; the authors' code computes (lr - end) (1 - min(t, T) / T)
            + end with end = end_factor x lr). "cosine": half a cosine (Loshchilov and Hutter 2017).
            "wsd": constant, then linear in the last share (Hägele et al. 2024).
        decay_steps: Step at which the end factor is reached.
        end_factor: The last factor.
        warmup_steps: Steps of the warm-up; 0 without one.
        decay_share: Share of the steps after the warm-up in which "wsd" decays.
    """

    name: Schedule = "constant"
    decay_steps: int = 1
    end_factor: float = 1.0
    warmup_steps: int = 0
    decay_share: float = 0.2

    def check(self) -> None:
        """Raise ConfigError for a value out of its range."""
        if self.name not in get_args(Schedule):
            allowed = f"one of {', '.join(get_args(Schedule))}"
            raise ConfigError("model.schedule", self.name, allowed)
        if self.decay_steps < 1:
            raise ConfigError("model.decay_steps", self.decay_steps, "at least 1 step")
        if not 0 <= self.end_factor <= 1:
            raise ConfigError("model.end_factor", self.end_factor, "a number in [0, 1]")
        if self.warmup_steps < 0:
            raise ConfigError("model.warmup_steps", self.warmup_steps, "0 steps or more")
        if self.name != "constant" and self.warmup_steps >= self.decay_steps:
            allowed = f"below model.decay_steps = {self.decay_steps}"
            raise ConfigError("model.warmup_steps", self.warmup_steps, allowed)
        if not 0 < self.decay_share <= 1:
            raise ConfigError("model.decay_share", self.decay_share, "a number in (0, 1]")

    @property
    def is_constant(self) -> bool:
        """Whether the rate never changes."""
        return self.name == "constant" and self.warmup_steps == 0

    def factor(self, step: int) -> float:
        """Return the factor of the initial rate for update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        length = self.decay_steps - self.warmup_steps
        progress = min(step - self.warmup_steps, length) / length
        if self.name == "cosine":
            remaining = (1.0 + math.cos(math.pi * progress)) / 2
        elif self.name == "wsd":
            remaining = min(1.0, (1.0 - progress) / self.decay_share)
        else:
            remaining = 1.0 - progress
        return (1.0 - self.end_factor) * remaining + self.end_factor

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Return the schedule as a torch scheduler, which is stepped after each optimizer step."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
