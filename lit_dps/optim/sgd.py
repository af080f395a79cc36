"""SGD, momentum and Nesterov's momentum as in the paper: dampening 0, no weight decay.

momentum: a <- m a + g, w <- w - lr a; nesterov: w <- w - lr (g + m a). A rate that changes
multiplies the accumulator at the time of the update, in both, as in TensorFlow's MomentumOptimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_dps.optim.rule import Rule, State

BUFFER = "momentum_buffer"


def _make(
    parameters, rate: float, hyperparameters: Mapping[str, float], nesterov: bool = False
) -> torch.optim.SGD:
    return torch.optim.SGD(
        parameters, lr=rate, momentum=hyperparameters.get("momentum", 0.0), nesterov=nesterov
    )


def _is_of(optimizer: torch.optim.Optimizer, momentum: bool, nesterov: bool) -> bool:
    if type(optimizer) is not torch.optim.SGD:
        return False
    group = optimizer.param_groups[0]
    if group["weight_decay"] or group["maximize"] or (group["momentum"] and group["dampening"]):
        return False
    return bool(group["momentum"]) == momentum and (not momentum or group["nesterov"] == nesterov)


def _sgd(
    weights: Tensor,
    gradients: Tensor,
    state: State,
    rate: Tensor,
    hyperparameters: Mapping,
    step: Tensor,
) -> None:
    weights.addcmul_(gradients, rate, value=-1)


def _momentum(
    weights: Tensor,
    gradients: Tensor,
    state: State,
    rate: Tensor,
    hyperparameters: Mapping,
    step: Tensor,
) -> None:
    accumulators = state[BUFFER].mul_(hyperparameters["momentum"]).add_(gradients)
    weights.addcmul_(accumulators, rate, value=-1)


def _nesterov(
    weights: Tensor,
    gradients: Tensor,
    state: State,
    rate: Tensor,
    hyperparameters: Mapping,
    step: Tensor,
) -> None:
    accumulators = state[BUFFER].mul_(hyperparameters["momentum"]).add_(gradients)
    weights.addcmul_(gradients.addcmul_(accumulators, hyperparameters["momentum"]), rate, value=-1)


SGD = Rule(
    name="sgd",
    hyperparameters=(),
    state=(),
    make=lambda parameters, rate, hyperparameters: _make(parameters, rate, {}),
    is_of=lambda optimizer: _is_of(optimizer, momentum=False, nesterov=False),
    hyperparameters_of=lambda group: (),
    update_=_sgd,
    elementwise=True,
)
MOMENTUM = Rule(
    name="momentum",
    hyperparameters=("momentum",),
    state=(BUFFER,),
    make=_make,
    is_of=lambda optimizer: _is_of(optimizer, momentum=True, nesterov=False),
    hyperparameters_of=lambda group: (group["momentum"],),
    update_=_momentum,
    elementwise=True,
)
NESTEROV = Rule(
    name="nesterov",
    hyperparameters=("momentum",),
    state=(BUFFER,),
    make=lambda parameters, rate, hyperparameters: _make(
        parameters, rate, hyperparameters, nesterov=hyperparameters["momentum"] > 0
    ),
    is_of=lambda optimizer: _is_of(optimizer, momentum=True, nesterov=True),
    hyperparameters_of=lambda group: (group["momentum"],),
    update_=_nesterov,
    elementwise=True,
)
