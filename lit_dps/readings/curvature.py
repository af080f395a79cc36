"""Curvature: batch sharpness and the top eigenvalue of the Hessian."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.readings.reading import KEY, Moment, Reading, parameters_with_gradient

NEAR_SIZE = 0.05  # of a batch whose sharpness counts as that of the cell's batch size, as a share


class Curvature(Reading):
    """The curvature that limits the learning rate of SGD, which is stable below 2 / curvature.

    Columns: "batch_sharpness", the mean over batches of g'Hg / g'g with the gradient g and the
    Hessian H of the batch, which stays near 2 / rate along SGD (Andreyev and Beneventano 2024,
    arXiv 2412.20553); "top_eigenvalue", the eigenvalue of largest magnitude of the Hessian over all
    these batches, by power iteration, which does so along full-batch gradient descent (Cohen et
    al. 2021). Both are of the weights that are trained and not pruned.

    Batches have the batch size of the cell, and are the first ones of a pass over the training
    split. A batch without a gradient does not count. A batch of another size counts for
    "top_eigenvalue" alone: the last one may be short. With `drop_last` the pass has nearly equal
    sizes, so a difference of 5 % is allowed. "batch_sharpness" is nan without a batch of such a
    size.

    Args:
        batches: Number of batches. For each batch: one forward and backward pass, then
            1 + `iterations` products with the Hessian. The graphs of all batches stay in memory.
        iterations: Steps of the power iteration.

    Raises:
        ConfigError: for fewer than one batch or iteration.
    """

    name = "curvature"

    def __init__(self, batches: int = 8, iterations: int = 20):
        for key, value in (("batches", batches), ("iterations", iterations)):
            if value < 1:
                raise ConfigError(f"{KEY}.curvature.{key}", value, "at least 1")
        self._batches = batches
        self._iterations = iterations

    def read(self, moment: Moment) -> Mapping[str, float]:
        weights: list[Tensor] = []
        keep: list[Tensor] = []
        masks = moment.masks
        for name, parameter in parameters_with_gradient(moment.module).items():
            weights.append(parameter)
            mask = masks.get(name)
            if mask is None:
                mask = torch.ones_like(parameter)
            keep.append(mask.to(parameter))
        ratios = []
        gradients = []
        sizes = []
        examples = self._batches * moment.batch_size
        for loss, size in moment.losses(moment.batch_size, examples):
            gradient = torch.autograd.grad(
                loss, weights, create_graph=True, allow_unused=True, materialize_grads=True
            )
            gradients.append(gradient)
            sizes.append(size)
            direction = [g.detach() * mask for g, mask in zip(gradient, keep, strict=True)]
            square = float(_dot(direction, direction))
            # The sharpness depends on the batch size.
            is_whole = abs(size - moment.batch_size) <= NEAR_SIZE * moment.batch_size
            if is_whole and square != 0:
                product = _hessian_product(gradient, weights, direction, keep)
                ratios.append(float(_dot(direction, product)) / square)
        sharpness = math.nan
        if ratios:
            sharpness = sum(ratios) / len(ratios)
        top = self._top_eigenvalue(gradients, sizes, weights, keep)
        return {"batch_sharpness": sharpness, "top_eigenvalue": top}

    def _top_eigenvalue(
        self,
        gradients: Sequence[Sequence[Tensor]],
        sizes: Sequence[int],
        weights: Sequence[Tensor],
        keep: Sequence[Tensor],
    ) -> float:
        """Return the eigenvalue of largest magnitude of the Hessian of the mean loss.

        Args:
            gradients: The gradient of each batch, with its graph.
            sizes: The examples of each batch.
            weights: The trained parameters.
            keep: Their masks as numbers.
        """
        vector = [torch.randn_like(mask) * mask for mask in keep]
        value = math.nan
        for _ in range(self._iterations):
            norm = _dot(vector, vector).sqrt()
            if not norm.isfinite():
                return math.nan
            if norm == 0:
                return 0.0  # the Hessian is zero
            vector = [part / norm for part in vector]
            total = [torch.zeros_like(part) for part in vector]
            for gradient, size in zip(gradients, sizes, strict=True):
                product = _hessian_product(gradient, weights, vector, keep)
                for part, addend in zip(total, product, strict=True):
                    part += size / sum(sizes) * addend
            value = float(_dot(vector, total))
            vector = total
        return value


def _hessian_product(
    gradient: Sequence[Tensor],
    weights: Sequence[Tensor],
    vector: Sequence[Tensor],
    keep: Sequence[Tensor],
) -> list[Tensor]:
    """Return the product of the Hessian with a vector, zero at pruned coordinates."""
    # The loss may be linear in a parameter, whose gradient then has no graph.
    curved = [i for i, part in enumerate(gradient) if part.requires_grad]
    if not curved:
        return [torch.zeros_like(mask) for mask in keep]
    products = torch.autograd.grad(
        [gradient[i] for i in curved],
        weights,
        [vector[i] for i in curved],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return [product * mask for product, mask in zip(products, keep, strict=True)]


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Return the inner product of two vectors in parts, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=one[0].device)
    for a, b in zip(one, other, strict=True):
        total += (a.double() * b.double()).sum()
    return total
