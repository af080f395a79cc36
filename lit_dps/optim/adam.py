"""Adam (Kingma and Ba 2015, Algorithm 1) and AdamW (Loshchilov and Hutter 2019, Algorithm 2).

The updates are the same as in torch:
m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, w <- w - lr mhat / (sqrt(vhat) + eps). Adam adds
wd w to the gradient, AdamW subtracts lr wd w from the weights. A pruned weight stays zero, because
its gradient, m and v are zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_dps.optim.rule import Rule, State

NAMES = ("beta1", "beta2", "epsilon", "weight_decay")
FIRST, SECOND = "exp_avg", "exp_avg_sq"


def _make(kind: type):
    def make(
        parameters, rate: float, hyperparameters: Mapping[str, float]
    ) -> torch.optim.Optimizer:
        betas = (hyperparameters["beta1"], hyperparameters["beta2"])
        return kind(
            parameters,
            lr=rate,
            betas=betas,
            eps=hyperparameters["epsilon"],
            weight_decay=hyperparameters["weight_decay"],
        )

    return make


def _is_of(optimizer: torch.optim.Optimizer, decoupled: bool) -> bool:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    group = optimizer.param_groups[0]
    if group["amsgrad"] or group["maximize"]:
        return False
    is_adamw = type(optimizer) is torch.optim.AdamW
    return (is_adamw or group.get("decoupled_weight_decay", False)) == decoupled


def _hyperparameters_of(group: Mapping) -> tuple[float, ...]:
    return (*group["betas"], group["eps"], group["weight_decay"])


def _adam(
    weights: Tensor,
    gradients: Tensor,
    state: State,
    rate: Tensor,
    hyperparameters: Mapping,
    step: Tensor,
) -> None:
    _update_(
        weights,
        gradients.addcmul_(weights, hyperparameters["weight_decay"]),
        state,
        rate,
        hyperparameters,
        step,
    )


def _adamw(
    weights: Tensor,
    gradients: Tensor,
    state: State,
    rate: Tensor,
    hyperparameters: Mapping,
    step: Tensor,
) -> None:
    weights.mul_(1 - rate * hyperparameters["weight_decay"])
    _update_(weights, gradients, state, rate, hyperparameters, step)


def _update_(
    weights: Tensor,
    gradients: Tensor,
    state: State,
    rate: Tensor,
    hyperparameters: Mapping,
    step: Tensor,
) -> None:
    beta1, beta2 = hyperparameters["beta1"], hyperparameters["beta2"]
    first = state[FIRST].mul_(beta1).addcmul_(gradients, 1 - beta1)
    second = state[SECOND].mul_(beta2).addcmul_(gradients.square(), 1 - beta2)
    # Corrections are computed in float64, as in torch: 1 - 0.999^t loses digits in float32.
    steps = step.double()
    first_correction = 1 - beta1.double() ** steps
    second_correction = 1 - beta2.double() ** steps
    size = (rate / first_correction).to(weights)
    root = second.sqrt().div_(second_correction.sqrt().to(weights))
    root.add_(hyperparameters["epsilon"])
    weights.addcmul_(first / root, size, value=-1)


ADAM = Rule(
    name="adam",
    hyperparameters=NAMES,
    state=(FIRST, SECOND),
    make=_make(torch.optim.Adam),
    is_of=lambda optimizer: _is_of(optimizer, decoupled=False),
    hyperparameters_of=_hyperparameters_of,
    has_step_counter=True,
    update_=_adam,
    elementwise=True,
)
ADAMW = Rule(
    name="adamw",
    hyperparameters=NAMES,
    state=(FIRST, SECOND),
    make=_make(torch.optim.AdamW),
    is_of=lambda optimizer: _is_of(optimizer, decoupled=True),
    hyperparameters_of=_hyperparameters_of,
    has_step_counter=True,
    update_=_adamw,
    elementwise=True,
)
