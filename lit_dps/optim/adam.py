"""Adam (Kingma and Ba 2015, Algorithm 1) and AdamW (Loshchilov and Hutter 2019, Algorithm 2).

The updates are the same as in torch:
m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, w <- w - lr mhat / (sqrt(vhat) + eps). Adam adds
wd w to the gradient, AdamW subtracts lr wd w from the weights. A pruned weight stays zero, because
its gradient, m and v are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lit_dps.optim.rule import Rule

FIRST, SECOND = "exp_avg", "exp_avg_sq"


def _rule(name: str, kind: Any, is_decoupled: bool) -> Rule:
    """Return the rule of a torch optimizer, with decoupled weight decay or without."""

    def make(
        parameters, rate: float, hyperparameters: Mapping[str, float]
    ) -> torch.optim.Optimizer:
        return kind(
            parameters,
            lr=rate,
            betas=(hyperparameters["beta1"], hyperparameters["beta2"]),
            eps=hyperparameters["epsilon"],
            weight_decay=hyperparameters["weight_decay"],
        )

    def is_of(optimizer: torch.optim.Optimizer) -> bool:
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        group = optimizer.param_groups[0]
        if group["amsgrad"] or group["maximize"]:
            return False
        is_adamw = type(optimizer) is torch.optim.AdamW
        return (is_adamw or group.get("decoupled_weight_decay", False)) == is_decoupled

    def update_(weights, gradients, state, rate, hyperparameters, step) -> None:
        if is_decoupled:
            weights.mul_(1 - rate * hyperparameters["weight_decay"])
        else:
            gradients = gradients.addcmul_(weights, hyperparameters["weight_decay"])
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

    return Rule(
        name=name,
        hyperparameters=("beta1", "beta2", "epsilon", "weight_decay"),
        state=(FIRST, SECOND),
        make=make,
        is_of=is_of,
        hyperparameters_of=_hyperparameters_of,
        has_step_counter=True,
        update_=update_,
        elementwise=True,
    )


def _hyperparameters_of(group: Mapping) -> tuple[float, ...]:
    return (*group["betas"], group["eps"], group["weight_decay"])


ADAM = _rule("adam", torch.optim.Adam, is_decoupled=False)
ADAMW = _rule("adamw", torch.optim.AdamW, is_decoupled=True)
