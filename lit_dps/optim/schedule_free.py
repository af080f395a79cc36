"""Schedule-Free SGD and AdamW (Defazio et al. 2024): no schedule, but an average of the weights.

y <- (1 - b) z + b x, z <- z - lr (d(g(y)) + wd y), x <- (1 - c) x + c z, c = lr^2 / sum of lr^2.

The gradient g is taken at y. d(g) is g, or g / (sqrt(vhat) + eps) of Adam without its first moment.
b is the momentum or beta1. At a constant rate, c is 1 / step, and x is the mean of all z. The
authors combine it with a warm-up, and with rates above those of a schedule: 10 to 50 times for SGD,
1 to 10 times for AdamW.

The weights of the module are x, so that validations, checkpoints, readings and the trained network
have x. They are y within a training step, between its loss and its update (`Rule.gradient_point`).
Running statistics of batch normalization are those of y. The authors compute them again at x. The
noise scale is read at x on one device, and at y on several ranks, whose gradients it takes.

As in the authors' code (facebookresearch/schedule_free 70785b5), Adam's bias correction divides v,
and is no part of c. Their code takes the largest rate so far in c, and the paper the present one.
Both are equal while the rate does not fall. Weights of 16 bits are refused: squares of small rates
are 0 in them, and x would keep the initial weights.

A pruned weight stays zero, because it is zero in x and z, and its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_dps.optim.adam import SECOND
from lit_dps.optim.rule import Rule, State

Z = "z"
RATES = "sum_of_squared_rates"


def _sgd_state(parameter: Tensor) -> dict[str, Tensor]:
    return {Z: parameter.clone(), RATES: parameter.new_zeros(1)}


def _adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    return {**_sgd_state(parameter), SECOND: torch.zeros_like(parameter)}


def _sgd_point(weights: Tensor, state: State, hyperparameters: Mapping) -> Tensor:
    return weights.lerp(state[Z], 1 - hyperparameters["momentum"])


def _adamw_point(weights: Tensor, state: State, hyperparameters: Mapping) -> Tensor:
    return weights.lerp(state[Z], 1 - hyperparameters["beta1"])


def _average_(weights: Tensor, state: State, rate: Tensor) -> None:
    """Move the average of z by a step in place."""
    total = state[RATES].add_(rate.view(len(rate), 1).square()).view(rate.shape)
    share = torch.where(total > 0, rate.square() / total, 0.0)
    weights.lerp_(state[Z], share)


def _sgd(weights, gradients, state, rate, hyperparameters, step) -> None:
    point = _sgd_point(weights, state, hyperparameters)
    gradients.addcmul_(point, hyperparameters["weight_decay"])
    state[Z].addcmul_(gradients, rate, value=-1)
    _average_(weights, state, rate)


def _adamw(weights, gradients, state, rate, hyperparameters, step) -> None:
    point = _adamw_point(weights, state, hyperparameters)
    beta2 = hyperparameters["beta2"]
    second = state[SECOND].mul_(beta2).addcmul_(gradients.square(), 1 - beta2)
    # The correction is computed in float64, as in Adam.
    correction = (1 - beta2.double() ** step.double()).sqrt().to(weights)
    root = second.sqrt().div_(correction).add_(hyperparameters["epsilon"])
    state[Z].addcmul_(point, rate * hyperparameters["weight_decay"], value=-1)
    state[Z].addcmul_(gradients / root, rate, value=-1)
    _average_(weights, state, rate)


SCHEDULE_FREE_SGD = Rule(
    name="schedule_free_sgd",
    hyperparameters=("momentum", "weight_decay"),
    state=(Z, RATES),
    update_=_sgd,
    make_state=_sgd_state,
    gradient_point=_sgd_point,
)
SCHEDULE_FREE_ADAMW = Rule(
    name="schedule_free_adamw",
    hyperparameters=("beta1", "beta2", "epsilon", "weight_decay"),
    state=(Z, RATES, SECOND),
    update_=_adamw,
    make_state=_adamw_state,
    gradient_point=_adamw_point,
)
