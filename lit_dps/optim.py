"""Update rules by the paper's names, and their learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

Rule = Literal["sgd", "momentum", "nesterov"]
Schedule = Literal["constant", "linear"]


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


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The update rule that an optimizer makes for all its parameters; None if it is none of these."""
    if type(optimizer) is not torch.optim.SGD or len(optimizer.param_groups) != 1:
        return None
    group = optimizer.param_groups[0]
    if group["weight_decay"] or group["maximize"] or (group["momentum"] and group["dampening"]):
        return None
    if group["momentum"] == 0:
        return "sgd"
    return "nesterov" if group["nesterov"] else "momentum"


def update_(
    rule: Rule, weights: Tensor, gradients: Tensor, accumulators: Tensor | None, rate: Tensor, momentum: Tensor
) -> None:
    """One step of a rule in place, as `make_optimizer`'s makes it, for many networks at once.

    Args:
        rule: The rule.
        weights: Shape (networks, parameters).
        gradients: Of the same shape; may be overwritten.
        accumulators: Of the same shape, zero before the first step; not used by sgd.
        rate: Learning rate of each network, shape (networks, 1).
        momentum: Likewise; not used by sgd.
    """
    direction = gradients
    if rule != "sgd":
        accumulators.mul_(momentum).add_(gradients)
        direction = gradients.addcmul_(accumulators, momentum) if rule == "nesterov" else accumulators
    weights.addcmul_(direction, rate, value=-1)


def factor(schedule: Schedule, step, decay_steps: int = 1, end_factor: float = 1.0):
    """The factor of the initial rate that update number `step`, counted from 0, is made with.

    Args:
        schedule: "constant", or "linear": falls linearly over `decay_steps` to `end_factor`, then stays
            (Shallue et al. 2019, Section 2; Lee et al. 2021, Section 2). The authors' code:
            (lr - end) (1 - min(t, T) / T) + end with end = end_factor x lr.
        step: A number.
        decay_steps: Length T of the decay in steps.
        end_factor: Final factor.
    """
    if schedule == "constant":
        return 1.0
    return (1.0 - end_factor) * (1.0 - min(step, decay_steps) / decay_steps) + end_factor


def make_scheduler(
    optimizer: torch.optim.Optimizer, schedule: Schedule, decay_steps: int, end_factor: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule as a torch scheduler that is stepped once an optimizer step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(schedule, step, decay_steps, end_factor))
