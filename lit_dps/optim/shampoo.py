"""Shampoo (Gupta, Koren, Singer 2018, Algorithms 1 and 2): AdaGrad with a matrix for each side.

L <- L + G G', R <- R + G' G, W <- W - lr (L + eps I)^(-1/4) G (R + eps I)^(-1/4). A vector, such as
a bias, has one matrix, to the power -1/2. A filter of a convolution is a row. The first step is
nearly Muon's without momentum: G with all singular values 1.

Each step takes an eigendecomposition of every L and R, with as many rows as the layer has outputs
and inputs. That suits layers of up to some hundred units.

The step of a pruned weight is not zero, because L and R mix the entries of a matrix. The engines
set pruned weights to zero after each update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.optim.rule import Rule

LEFT, RIGHT = "left", "right"


def _make_state(parameter: Tensor) -> dict[str, Tensor]:
    rows = len(parameter)
    state = {LEFT: parameter.new_zeros(rows, rows)}
    if parameter.ndim > 1:
        columns = parameter[0].numel()
        state[RIGHT] = parameter.new_zeros(columns, columns)
    return state


def _power(matrices: Tensor, exponent: float, epsilon: Tensor) -> Tensor:
    """Return (A + epsilon I)^exponent for symmetric matrices A without negative eigenvalues.

    It is nan where A is not finite.

    Args:
        matrices: Shape (networks, rows, rows).
        exponent: The exponent.
        epsilon: Of each network, shape (networks, 1).
    """
    # The decomposition fails for all networks if one has diverged.
    is_finite = matrices.isfinite().all(dim=-1).all(dim=-1)[:, None, None]
    values, vectors = torch.linalg.eigh(torch.where(is_finite, matrices, 0.0))
    # Rounding makes eigenvalues of zero slightly negative.
    powers = (values.clamp(min=0) + epsilon).pow(exponent)
    product = vectors * powers[:, None] @ vectors.mT
    return torch.where(is_finite, product, torch.nan)


def _shampoo(weights, gradients, state, rate, hyperparameters, step) -> None:
    networks = len(weights)
    epsilon = hyperparameters["epsilon"].view(networks, 1)
    matrices = gradients.reshape(networks, weights.shape[1], -1)
    left = state[LEFT].add_(matrices @ matrices.mT)
    if RIGHT in state:
        right = state[RIGHT].add_(matrices.mT @ matrices)
        direction = _power(left, -0.25, epsilon) @ matrices @ _power(right, -0.25, epsilon)
    else:
        direction = _power(left, -0.5, epsilon) @ matrices
    weights.mul_(1 - rate * hyperparameters["weight_decay"])
    weights.sub_(rate * direction.reshape(weights.shape))


SHAMPOO = Rule(
    name="shampoo",
    hyperparameters=("epsilon", "weight_decay"),
    state=(LEFT, RIGHT),
    update_=_shampoo,
    make_state=_make_state,
)
