"""Approximate isometry after pruning (Lee et al. 2020, "A Signal Propagation Perspective for Pruning Neural Networks").

Pruning takes signal away: the singular values of the network's Jacobian fall. Weights that are moved, under their mask,
towards orthogonal columns in each layer let it through again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

STEPS, RATE = 10_000, 0.1  # of the authors' code (spp-public 32bde49)
CHECK = 100  # steps between two looks at whether it has come to rest
REST = 1e-6  # relative change of the distance over so many steps, below which it has


def restore_isometry(
    parameters: Mapping[str, nn.Parameter], mask: Mapping[str, Tensor], steps: int = STEPS, rate: float = RATE
) -> dict[str, float]:
    """Moves the weights of masked layers, in place, towards ||(C W)'(C W) - I||_F = 0 (Lee et al. 2020, Eq. 7).

    C is the mask; W has a column for each output, of all the weights that come to it. By gradient descent, each layer
    for itself. It ends sooner than the authors' 10,000 steps where it has come to rest.

    Args:
        parameters: Parameters by name; those with fewer than two dimensions, and unmasked ones, stay.
        mask: What is kept of each.
        steps: Of gradient descent, at most.
        rate: Its learning rate.

    Returns:
        The distance of each layer after it.
    """
    found = {}
    for name, keep in mask.items():
        weight = parameters[name]
        if weight.ndim < 2:
            continue
        kept = keep.to(weight.device)
        with torch.enable_grad():
            found[name] = _descend(weight, kept, steps, rate)
    return found


def _descend(weight: nn.Parameter, kept: Tensor, steps: int, rate: float) -> float:
    moved = (weight.detach() * kept).requires_grad_()
    identity = torch.eye(len(moved), device=moved.device, dtype=moved.dtype)
    last = distance = float("inf")
    for step in range(steps):
        rows = (moved * kept).flatten(1)  # a row is an output: the transpose of the paper's W
        loss = (rows @ rows.T - identity).norm()
        (gradient,) = torch.autograd.grad(loss, moved)
        with torch.no_grad():
            moved.sub_(rate * gradient)
        if step % CHECK == CHECK - 1:
            distance = float(loss.detach())
            if abs(last - distance) <= REST * distance:
                break
            last = distance
    with torch.no_grad():
        weight.copy_(moved * kept)
    return float((weight.detach().flatten(1) @ weight.detach().flatten(1).T - identity).norm())


def jacobian_singular_values(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The singular values of d output / d input at each example, float64 where x is: shape (examples, outputs).

    Args:
        forward: Maps a batch of inputs to outputs, shape (batch, outputs), example by example.
        x: Inputs, shape (examples, ...).
    """
    x = x.detach().requires_grad_()
    outputs = forward(x)
    rows = [torch.autograd.grad(outputs[:, i].sum(), x, retain_graph=True)[0] for i in range(outputs.shape[1])]
    return torch.linalg.svdvals(torch.stack(rows, dim=1).flatten(2))
