"""Learning-rate schedules: step -> factor of the initial rate."""

from __future__ import annotations

from typing import Literal

import torch

Schedule = Literal["constant", "linear"]


def factor(schedule: Schedule, step, decay_steps: int = 1, end_factor: float = 1.0):
    """Return the factor of the initial rate for update number `step`, counted from 0.

    Args:
        schedule: "constant", or "linear", which falls linearly over `decay_steps` to `end_factor`
            and stays there (Shallue et al. 2019, Section 2; Lee et al. 2021, Section 2). The
            authors' code computes (lr - end) (1 - min(t, T) / T) + end with end = end_factor x lr.
        step: The number of the update.
        decay_steps: Length T of the decay in steps.
        end_factor: Final factor.
    """
    if schedule == "constant":
        return 1.0
    return (1.0 - end_factor) * (1.0 - min(step, decay_steps) / decay_steps) + end_factor


def make_scheduler(
    optimizer: torch.optim.Optimizer, schedule: Schedule, decay_steps: int, end_factor: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule as a torch scheduler, which is stepped after each optimizer step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factor(schedule, step, decay_steps, end_factor)
    )
