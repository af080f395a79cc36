"""Update rules by the paper's names, and their schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from lit_dps import schedules

Rule = Literal["sgd", "momentum", "nesterov"]


def make_optimizer(
    parameters: Iterable[nn.Parameter], rule: Rule, learning_rate: float, momentum: float
) -> torch.optim.SGD:
    """torch.optim.SGD with dampening 0 and no weight decay, whose update equals TensorFlow's MomentumOptimizer.

    momentum: a <- m a + g, w <- w - lr a; nesterov: w <- w - lr (g + m a). A rate that changes multiplies the
    accumulator at the time of the update, in both.
    """
    if rule == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate)
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, nesterov=rule == "nesterov")


def make_scheduler(
    optimizer: torch.optim.Optimizer, schedule: schedules.Schedule, decay_steps: int, end_factor: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule as a torch scheduler that is stepped once an optimizer step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedules.factor(schedule, step, decay_steps, end_factor)
    )
