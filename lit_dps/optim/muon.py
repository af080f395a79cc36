"""Muon (Jordan et al. 2024): the momentum of a matrix, orthogonalized. Other parameters: AdamW.

M <- m M + (1 - m) G, W <- (1 - lr wd) W - lr sqrt(max(1, rows / columns)) O(m M + (1 - m) G), where
O makes all singular values nearly 1. This is `torch.optim.Muon` without its rounding to bfloat16.

A matrix is a parameter of two or more dimensions; a filter of a convolution is a row. Embeddings
and the output layer are matrices too. AdamW trains the other parameters, such as biases, with
the rate lr x adamw_ratio and the same weight decay.

O mixes the entries of a matrix, so the step of a pruned weight is not zero although its gradient
and momentum are. The engines set pruned weights to zero after each update. So the step of a masked
matrix is the masked orthogonalization, whose singular values are no longer nearly 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.optim.adam import ADAMW, FIRST, SECOND
from lit_dps.optim.rule import Rule

BUFFER = "momentum_buffer"
# Jordan's five steps of Newton and Schulz: p(s) = a s + b s^3 + c s^5 moves singular values to 1.
COEFFICIENTS = (3.4445, -4.775, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices with nearly the same singular vectors and with singular values near 1.

    Args:
        matrices: Shape (..., rows, columns).
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices
    if is_tall:
        wide = matrices.mT
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    if is_tall:
        return wide.mT
    return wide


def _make_state(parameter: Tensor) -> dict[str, Tensor]:
    if parameter.ndim >= 2:
        return {BUFFER: torch.zeros_like(parameter)}
    return {FIRST: torch.zeros_like(parameter), SECOND: torch.zeros_like(parameter)}


def _muon(weights, gradients, state, rate, hyperparameters, step) -> None:
    if BUFFER not in state:
        adamw_rate = rate * hyperparameters["adamw_ratio"]
        ADAMW.update_(weights, gradients, state, adamw_rate, hyperparameters, step)
        return
    momentum = hyperparameters["momentum"]
    average = state[BUFFER].lerp_(gradients, 1 - momentum)
    matrices = gradients.lerp(average, momentum).flatten(2)
    scale = max(1, matrices.shape[1] / matrices.shape[2]) ** 0.5
    weights.mul_(1 - rate * hyperparameters["weight_decay"])
    weights.sub_(rate * scale * orthogonalize(matrices).reshape(weights.shape))


MUON = Rule(
    name="muon",
    hyperparameters=("momentum", "adamw_ratio", "beta1", "beta2", "epsilon", "weight_decay"),
    state=(BUFFER, FIRST, SECOND),
    update_=_muon,
    make_state=_make_state,
)
