"""Stale gradients: the update of step t takes the gradient of step t - tau, as a server with tau +
1 workers does.

x_{t+1} = x_t - rate g(x_{t-tau}); nothing moves before step tau, while the queue fills (Koloskova,
Stich, Jaggi 2022, Algorithm 1). Momentum and the moments of Adam are the server's: they take in the
gradients as they come. The first tau steps count as steps. A delay of 0 is no call at all, and so
the usual update to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEY = (
    "stale_gradients"  # in the state of a torch optimizer, which saves and restores it with its own
)


def delay_gradients(optimizer: torch.optim.Optimizer, delay: int) -> None:
    """Puts the gradients of `delay` steps ago in place of today's; none while there are none, so
    that nothing moves.

    To be called between the backward pass and the step of the optimizer.
    """
    if delay == 0:
        return
    waiting: list[list[Tensor | None]] = optimizer.state.setdefault(KEY, [])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    waiting.append([None if p.grad is None else p.grad.clone() for p in parameters])
    stale = waiting.pop(0) if len(waiting) > delay else [None] * len(parameters)
    for parameter, gradient in zip(parameters, stale, strict=True):
        parameter.grad = gradient
