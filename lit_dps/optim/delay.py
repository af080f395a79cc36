"""Delayed gradients: step t applies the gradient of step t - tau, as a server with tau + 1 workers.

x_{t+1} = x_t - rate g(x_{t-tau}). The weights do not change before step tau, while the queue fills
(Koloskova, Stich, Jaggi 2022, Algorithm 1). Momentum and the moments of Adam are the server's, and
are updated when a gradient is applied. The first tau steps count as steps. A delay of 0 changes
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_dps.optim.parameter_groups import parameters_of

# Key in the state of a torch optimizer, which saves and restores it with the rest of its state.
DELAY_STATE_KEY = "stale_gradients"


def delay_gradients(optimizer: torch.optim.Optimizer, delay: int) -> None:
    """Replace the gradients by the gradients of `delay` steps ago; by None before step `delay`.

    Call this between the backward pass and the step of the optimizer.
    """
    if delay == 0:
        return
    state: Any = optimizer.state
    queue: list[list[Tensor | None]] = state.setdefault(DELAY_STATE_KEY, [])
    parameters = parameters_of(optimizer)
    gradients: list[Tensor | None] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            gradient = gradient.clone()
        gradients.append(gradient)
    queue.append(gradients)
    delayed: list[Tensor | None] = [None] * len(parameters)
    if len(queue) > delay:
        delayed = queue.pop(0)
    for parameter, gradient in zip(parameters, delayed, strict=True):
        parameter.grad = gradient
