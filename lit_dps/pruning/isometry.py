"""Approximate isometry after pruning (Lee et al. 2020, "A Signal Propagation Perspective for
Pruning Neural Networks").

Pruning takes signal away: the singular values of the network's Jacobian fall. Weights that are
moved, under their mask, towards orthogonal columns in each layer let it through again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

STEPS, RATE = 10_000, 0.1  # of the authors' code (spp-public 32bde49)
CHECK = 50  # steps between two looks at whether the distance still falls
FALLS = 1e-3  # relative: what it falls by in so many steps, at least, if it does
HALVINGS = 10  # of the rate


def restore_isometry(
    parameters: Mapping[str, nn.Parameter],
    mask: Mapping[str, Tensor],
    steps: int = STEPS,
    rate: float = RATE,
) -> dict[str, float]:
    """Moves the weights of masked layers, in place, towards ||(C W)'(C W) - I||_F = 0 (Lee et al.
    2020, Eq. 7).

    C is the mask; W has a column for each output, of all the weights that come to it. By gradient
    descent, each tensor for itself. At the authors' constant rate the distance ends up swinging by
    as much as a step moves it; here the rate is halved whenever the distance has stopped falling,
    up to `HALVINGS` times, which comes nearer to the minimum, and ends long before their 10,000
    steps.

    Args:
        parameters: Parameters by name; those with fewer than two dimensions, and unmasked ones,
            stay.
        mask: What is kept of each.
        steps: Of gradient descent, at most.
        rate: Its learning rate.

    Returns:
        The distance of each tensor after it.
    """
    layers = {
        name: keep.to(parameters[name].device)
        for name, keep in mask.items()
        if parameters[name].ndim >= 2
    }
    return {name: _descend(parameters[name], keep, steps, rate) for name, keep in layers.items()}


def distances(
    parameters: Mapping[str, nn.Parameter], mask: Mapping[str, Tensor]
) -> dict[str, float]:
    """||(C W)'(C W) - I||_F of each masked tensor of two or more dimensions."""
    pairs = {
        name: (parameters[name].detach(), keep)
        for name, keep in mask.items()
        if parameters[name].ndim >= 2
    }
    return {
        name: float(_residual(_rows(w * keep.to(w.device)))[0]) for name, (w, keep) in pairs.items()
    }


@torch.no_grad()
def _descend(weight: nn.Parameter, keep: Tensor, steps: int, rate: float) -> float:
    kept = _rows(keep)
    rows, last, halved = _rows(weight * keep), float("inf"), 0
    for step in range(steps):
        distance, change = _residual(rows)
        if step % CHECK == 0:
            now = float(distance)
            if now == 0 or halved == HALVINGS:
                break
            if now > (1 - FALLS) * last:
                rate, halved = rate / 2, halved + 1
            last = now
        rows = rows - rate * change * kept
    weight.copy_(rows.view(weight.shape))
    return float(_residual(rows)[0])


def _rows(weight: Tensor) -> Tensor:
    """A row for each output, the transpose of the paper's W, in float32 or float64."""
    kind = weight.dtype if weight.dtype == torch.float64 else torch.float32
    return weight.detach().reshape(len(weight), -1).to(kind)


def _residual(rows: Tensor) -> tuple[Tensor, Tensor]:
    """||W'W - I||_F and its gradient, by the smaller one of the two products of the rows."""
    if len(rows) <= rows.shape[1]:
        gram = rows @ rows.T
        gram.diagonal().sub_(1)
        distance = gram.norm()
        return distance, 2 * (gram @ rows) / distance.clamp_min(1e-30)
    gram = rows.T @ rows  # an embedding has a row for each word
    distance = (gram.square().sum() - 2 * rows.square().sum() + len(rows)).clamp_min(0).sqrt()
    return distance, 2 * (rows @ gram - rows) / distance.clamp_min(1e-30)


def jacobian_singular_values(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The singular values of d output / d input at each example, float64 where x is: shape
    (examples, outputs).

    Args:
        forward: Maps a batch of inputs to outputs, shape (batch, outputs), example by example.
        x: Inputs, shape (examples, ...).
    """
    x = x.detach().requires_grad_()
    outputs = forward(x)
    rows = [
        torch.autograd.grad(outputs[:, i].sum(), x, retain_graph=True)[0]
        for i in range(outputs.shape[1])
    ]
    matrix = torch.stack(rows, dim=1).flatten(2)
    return torch.linalg.svdvals(matrix if matrix.dtype == torch.float64 else matrix.float())
