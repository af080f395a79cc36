"""Update rules that need the shape of a parameter, for tests."""

from __future__ import annotations

import torch

from lit_dps.optim import Rule


def _lars(weights, gradients, state, rate, hyperparameters, step):
    """LARS (You, Gitman, Ginsburg 2017, Algorithm 1), with a trust ratio of 1 for zero norms."""
    axes = tuple(range(1, weights.ndim))
    norms = [tensor.square().sum(axes, keepdim=True).sqrt() for tensor in (weights, gradients)]
    ratio = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
    buffer = state["momentum_buffer"].mul_(hyperparameters["momentum"])
    weights.sub_(buffer.add_(0.1 * rate * ratio * gradients))


def _shampoo_state(parameter):
    matrix = parameter.reshape(parameter.shape[0], -1)
    state = {"left": torch.eye(len(matrix)).to(parameter)}
    if parameter.ndim > 1:
        state["right"] = torch.eye(matrix.shape[1]).to(parameter)
    return state


def _shampoo(weights, gradients, state, rate, hyperparameters, step):
    """Shampoo (Gupta, Koren, Singer 2018, Algorithms 1 and 2, k = 1 and 2)."""
    matrices = gradients.reshape(len(gradients), state["left"].shape[1], -1)
    state["left"].add_(matrices @ matrices.mT)
    if "right" in state:
        state["right"].add_(matrices.mT @ matrices)
        matrices = _power(state["left"], -0.25) @ matrices @ _power(state["right"], -0.25)
    else:
        matrices = _power(state["left"], -0.5) @ matrices
    weights.sub_(rate * matrices.reshape(weights.shape))


def _power(matrices, exponent):
    values, vectors = torch.linalg.eigh(matrices)
    return vectors * values[:, None].pow(exponent) @ vectors.mT


LARS = Rule("lars", ("momentum",), ("momentum_buffer",), _lars)
SHAMPOO = Rule("shampoo", (), ("left", "right"), _shampoo, make_state=_shampoo_state)
