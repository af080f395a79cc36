"""Approximate isometry after pruning (Lee et al. 2020).

"A Signal Propagation Perspective for Pruning Neural Networks". Pruning weakens signals: the
singular values of the network's Jacobian fall. Moving the weights under their mask towards
orthogonal columns in each layer restores the signals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

STEPS, RATE = 10_000, 0.1  # of the authors' code (spp-public 32bde49)
CHECK_STEPS = 50  # steps between two checks whether the distance still falls
MIN_FALL = 1e-3  # relative fall of the distance between two checks, if it still falls
MAX_HALVINGS = 10  # of the rate


def restore_isometry(
    parameters: Mapping[str, nn.Parameter],
    mask: Mapping[str, Tensor],
    steps: int = STEPS,
    rate: float = RATE,
) -> dict[str, float]:
    """Move the weights of masked layers in place towards ||(C W)'(C W) - I||_F = 0.

    This is Eq. 7 of Lee et al. (2020). C is the mask. W has a column for each output, with the
    weights of all its inputs. Each tensor is moved by gradient descent. At the authors' constant
    rate, the distance in the end oscillates by the size of a step. Here the rate is halved when the
    distance stops falling, up to `MAX_HALVINGS` times. This comes closer to the minimum, and ends
    long before their 10,000 steps.

    Args:
        parameters: Parameters by name. Those with fewer than two dimensions, and those without a
            mask, do not change.
        mask: The kept elements of each parameter.
        steps: The most steps of gradient descent.
        rate: Its learning rate.

    Returns:
        The final distance of each moved tensor.
    """
    final = {}
    for name, keep in mask.items():
        parameter = parameters[name]
        if parameter.ndim >= 2:
            final[name] = _descend(parameter, keep.to(parameter.device), steps, rate)
    return final


def distances(
    parameters: Mapping[str, nn.Parameter], mask: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return ||(C W)'(C W) - I||_F of each masked tensor of two or more dimensions."""
    result = {}
    for name, keep in mask.items():
        weight = parameters[name].detach()
        if weight.ndim >= 2:
            distance, _ = _residual(_rows(weight * keep.to(weight.device)))
            result[name] = float(distance)
    return result


@torch.no_grad()
def _descend(weight: nn.Parameter, keep: Tensor, steps: int, rate: float) -> float:
    """Move a weight by gradient descent; return its final distance."""
    kept = _rows(keep)
    rows = _rows(weight * keep)
    last = float("inf")
    halvings = 0
    for step in range(steps):
        distance, gradient = _residual(rows)
        if step % CHECK_STEPS == 0:
            current = float(distance)
            if current == 0 or halvings == MAX_HALVINGS:
                break
            if current > (1 - MIN_FALL) * last:
                rate = rate / 2
                halvings += 1
            last = current
        rows = rows - rate * gradient * kept
    weight.copy_(rows.view(weight.shape))
    return float(_residual(rows)[0])


def _rows(weight: Tensor) -> Tensor:
    """Return a row for each output, the transpose of the paper's W, in float32 or float64."""
    kind = weight.dtype if weight.dtype == torch.float64 else torch.float32
    return weight.detach().reshape(len(weight), -1).to(kind)


def _residual(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return ||W'W - I||_F and its gradient, by the smaller one of the two products of rows."""
    if len(rows) <= rows.shape[1]:
        gram = rows @ rows.T
        gram.diagonal().sub_(1)
        distance = gram.norm()
        return distance, 2 * (gram @ rows) / distance.clamp_min(1e-30)
    # An embedding has a row for each word.
    gram = rows.T @ rows
    distance = (gram.square().sum() - 2 * rows.square().sum() + len(rows)).clamp_min(0).sqrt()
    return distance, 2 * (rows @ gram - rows) / distance.clamp_min(1e-30)


def jacobian_singular_values(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the singular values of d output / d input at each example: (examples, outputs).

    They are float64 if x is.

    Args:
        forward: Maps a batch of inputs to outputs, shape (batch, outputs), example by example.
        x: Inputs, shape (examples, ...).
    """
    x = x.detach().requires_grad_()
    outputs = forward(x)
    rows = []
    for i in range(outputs.shape[1]):
        (gradient,) = torch.autograd.grad(outputs[:, i].sum(), x, retain_graph=True)
        rows.append(gradient)
    matrix = torch.stack(rows, dim=1).flatten(2)
    if matrix.dtype != torch.float64:
        matrix = matrix.float()
    return torch.linalg.svdvals(matrix)
