"""SGD, momentum and Nesterov's momentum as in the paper: dampening 0, no weight decay.

`WITH_DECAY` has the same rules with weight decay, as torch's SGD adds it to the gradient. They have
no name in a configuration; modules make such an optimizer themselves.

momentum: a <- m a + g, w <- w - lr a; nesterov: w <- w - lr (g + m a). A rate that changes
multiplies the accumulator at the time of the update, in both, as in TensorFlow's MomentumOptimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lit_dps.optim.rule import Rule

BUFFER = "momentum_buffer"


def _rule(name: str, momentum: bool = False, nesterov: bool = False, decays: bool = False) -> Rule:
    """Return a rule; with decay, the weight decay may be 0 in some parameter groups."""
    names: tuple[str, ...] = ()
    state_names: tuple[str, ...] = ()
    if momentum:
        names = ("momentum",)
        state_names = (BUFFER,)
    if decays:
        name = f"{name} with weight decay"
        names = (*names, "weight_decay")

    def make(parameters, rate: float, hyperparameters: Mapping[str, float]) -> torch.optim.SGD:
        own: dict[str, Any] = {key: hyperparameters[key] for key in names}
        has_nesterov = nesterov and own["momentum"] > 0
        return torch.optim.SGD(parameters, lr=rate, nesterov=has_nesterov, **own)

    def is_of(optimizer: torch.optim.Optimizer) -> bool:
        if type(optimizer) is not torch.optim.SGD:
            return False
        group = optimizer.param_groups[0]
        if group["maximize"] or (group["momentum"] and group["dampening"]):
            return False
        if group["weight_decay"] and not decays:
            return False
        has_momentum = bool(group["momentum"])
        return has_momentum == momentum and (not momentum or group["nesterov"] == nesterov)

    def update_(weights, gradients, state, rate, hyperparameters, step) -> None:
        if decays:
            gradients.addcmul_(weights, hyperparameters["weight_decay"])
        direction = gradients
        if momentum:
            direction = state[BUFFER].mul_(hyperparameters["momentum"]).add_(gradients)
        if nesterov:
            direction = gradients.addcmul_(direction, hyperparameters["momentum"])
        weights.addcmul_(direction, rate, value=-1)

    return Rule(name, names, state_names, update_, make, is_of, elementwise=True)


SGD = _rule("sgd")
MOMENTUM = _rule("momentum", momentum=True)
NESTEROV = _rule("nesterov", momentum=True, nesterov=True)
WITH_DECAY = (
    _rule("sgd", decays=True),
    _rule("momentum", momentum=True, decays=True),
    _rule("nesterov", momentum=True, nesterov=True, decays=True),
)
