"""SGD, momentum and Nesterov's momentum as in the paper: dampening 0, no weight decay.

`WITH_DECAY` has the same rules with weight decay, as torch's SGD adds it to the gradient. They have
no name in a configuration; modules make such an optimizer themselves.

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
    group = optimizer.param_groups[0]
    return not group.get("weight_decay") and _is_of_any_decay(optimizer, momentum, nesterov)


def _is_of_any_decay(optimizer: torch.optim.Optimizer, momentum: bool, nesterov: bool) -> bool:
    if type(optimizer) is not torch.optim.SGD:
        return False
    group = optimizer.param_groups[0]
    if group["maximize"] or (group["momentum"] and group["dampening"]):
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


def _with_decay(rule: Rule, momentum: bool, nesterov: bool) -> Rule:
    """Return a rule with weight decay, which may be 0 in some parameter groups."""

    def make(
        parameters, rate: float, hyperparameters: Mapping[str, float]
    ) -> torch.optim.Optimizer:
        optimizer = rule.make(parameters, rate, hyperparameters)
        for group in optimizer.param_groups:
            group["weight_decay"] = hyperparameters["weight_decay"]
        return optimizer

    def update_(
        weights: Tensor,
        gradients: Tensor,
        state: State,
        rate: Tensor,
        hyperparameters: Mapping,
        step: Tensor,
    ) -> None:
        gradients.addcmul_(weights, hyperparameters["weight_decay"])
        rule.update_(weights, gradients, state, rate, hyperparameters, step)

    return Rule(
        name=f"{rule.name} with weight decay",
        hyperparameters=(*rule.hyperparameters, "weight_decay"),
        state=rule.state,
        make=make,
        is_of=lambda optimizer: _is_of_any_decay(optimizer, momentum, nesterov),
        hyperparameters_of=lambda group: (*rule.hyperparameters_of(group), group["weight_decay"]),
        update_=update_,
        elementwise=True,
    )


WITH_DECAY = (
    _with_decay(SGD, momentum=False, nesterov=False),
    _with_decay(MOMENTUM, momentum=True, nesterov=False),
    _with_decay(NESTEROV, momentum=True, nesterov=True),
)
