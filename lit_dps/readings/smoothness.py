"""What the convergence theory says of a network: the smoothness of its loss and the noise of its
gradient.

Pure functions over vectors and losses; `lit_dps.readings.SmoothnessCallback` measures them along a
run and `lit_dps.analysis.theory` puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from lit_dps.parallel import ranks

# Per-example gradients of a chunk are held at once: 2^22 numbers are 16 MiB in float32. On a CPU
# core larger chunks of the paper's networks are slower (1.4 ms an example at 2^22, 2.4 at 2^24) and
# so are much smaller ones.
_CHUNK_ELEMENTS = 2**22


class Smoothness(NamedTuple):
    """What one measurement between two weights gives.

    Attributes:
        lipschitz: Local Lipschitz constant of the gradient; nan where the weights did not move.
        squared_gradient: Squared norm of the gradient at the first weights.
    """

    lipschitz: float
    squared_gradient: float


class Moments(NamedTuple):
    """First and second moments of the per-example gradient.

    Attributes:
        loss: Mean loss.
        squared_gradient: Squared norm of the mean gradient.
        variance: Trace of the covariance of the per-example gradient, E||g||^2 - ||E g||^2.
    """

    loss: float
    squared_gradient: float
    variance: float


def gammas(delta: float = 0.1, last: float = 1.0) -> list[float]:
    """delta, 2 delta, ... up to `last`: where between two weights the gradient is taken.

    The paper has 0.1 to 1 (Lee et al. 2021, Eq. 11); the authors' code 0.1 to 0.9, which is `last`
    = 0.9.
    """
    return [delta * i for i in range(1, math.floor(last / delta + 1e-9) + 1)]


def local_lipschitz(
    gradient: Callable[[Tensor], Tensor], before: Tensor, after: Tensor, fractions: Sequence[float]
) -> Smoothness:
    """The local Lipschitz constant of the gradient between two weights, d = after - before.

    max over gamma of ||grad f(before + gamma d) - grad f(before)|| / ||gamma d|| (Lee et al. 2021,
    Eq. 11; Zhang et al. 2020, "Why Gradient Clipping Accelerates Training", Appendix H).

    Args:
        gradient: Maps weights (p,) to the gradient of the full training loss there (p,).
        before: Weights before an update, shape (p,), unpruned coordinates (or all, with zeros at
            the pruned ones).
        after: Weights after it.
        fractions: The gammas, above 0.
    """
    direction = after.double() - before.double()
    length, start = float(direction.norm()), gradient(before).double()
    squared = float(start.square().sum())
    if not length > 0:
        return Smoothness(math.nan, squared)
    constants = []
    for gamma in fractions:
        point = (before.double() + gamma * direction).to(before.dtype)
        constants.append(float((gradient(point).double() - start).norm()) / (gamma * length))
    # max() of Python drops or keeps a nan depending on where it stands
    return Smoothness(float(torch.tensor(constants, dtype=torch.float64).max()), squared)


def mean_gradient(parameters: Sequence[Tensor], losses: Iterable[tuple[Tensor, float]]) -> Tensor:
    """The gradient of the mean loss over all examples of all ranks, flat, float64, shape (p,).

    Args:
        parameters: Tensors that the losses depend on.
        losses: Mean loss of each batch, and its number of examples.
    """
    total, examples = torch.zeros_like(flatten(parameters), dtype=torch.float64), 0.0
    for loss, size in losses:
        gradients = torch.autograd.grad(
            loss, list(parameters), allow_unused=True, materialize_grads=True
        )
        total, examples = total + size * flatten(gradients).double(), examples + size
    total, examples = (
        ranks.all_reduce_sum(total),
        float(ranks.all_reduce_sum(torch.tensor(examples, dtype=torch.float64))),
    )
    if not examples:
        raise ValueError("a gradient needs at least one batch")
    return total / examples


def gradient_moments(
    loss: Callable[[dict[str, Tensor], Any], Tensor],
    parameters: dict[str, Tensor],
    batches: Iterable[Any],
    keep: dict[str, Tensor] | None = None,
) -> Moments:
    """Moments of the per-example gradient over all examples of all ranks, exact.

    By vectorised per-example gradients in chunks.

    The gradient variance beta of Lee et al. (2021, Section 4) is the variance here, taken at
    initialization.

    Args:
        loss: (parameters, example) -> loss of that example, for `torch.func`; an example is a batch
            without its first dimension.
        parameters: By name, as `loss` takes them.
        batches: Nests of tensors, all with the examples as first dimension.
        keep: Mask of the unpruned coordinates by parameter name; those it does not name are all
            kept.
    """
    chunk = max(1, _CHUNK_ELEMENTS // sum(p.numel() for p in parameters.values()))
    # torch.func.grad_and_value is not chunked by vmap alike in all versions; grad with the loss as
    # aux output is
    one = vmap(
        grad(lambda p, x: _twice(loss(p, x)), has_aux=True),
        in_dims=(None, 0),
        randomness="different",
    )
    kept = {name: mask.to(parameters[name].dtype) for name, mask in (keep or {}).items()}
    total = torch.zeros_like(flatten(parameters.values()), dtype=torch.float64)
    examples, total_loss, square = 0, 0.0, 0.0
    for batch in batches:
        size = len(tree_leaves(batch)[0])
        for start in range(0, size, chunk):
            part = tree_map(lambda t, start=start: t[start : start + chunk], batch)
            gradients, losses = one(parameters, part)
            masked = [g * kept[name] if name in kept else g for name, g in gradients.items()]
            flat = torch.cat([g.reshape(len(losses), -1) for g in masked], dim=1)
            square += float(flat.square().sum(dtype=torch.float64))
            total += flat.sum(dim=0, dtype=torch.float64)
            total_loss += float(losses.double().sum())
        examples += size
    sums = ranks.all_reduce_sum(torch.tensor([examples, total_loss, square], dtype=torch.float64))
    (examples, total_loss, square), total = sums.tolist(), ranks.all_reduce_sum(total)
    if not examples:
        raise ValueError("moments need at least one example")
    squared_gradient = float((total / examples).square().sum())
    return Moments(total_loss / examples, squared_gradient, square / examples - squared_gradient)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors as one vector, in their order."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `flatten`: parts of a vector in the shapes of some tensors."""
    parts = vector.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _twice(loss: Tensor) -> tuple[Tensor, Tensor]:
    return loss, loss
