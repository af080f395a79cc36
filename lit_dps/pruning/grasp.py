"""GraSP (Wang et al. 2020): keeps the weights whose removal reduces the gradient norm most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_dps.core.errors import ConfigError, UserError
from lit_dps.parallel import ranks
from lit_dps.pruning.network import Batches, Network, gradient_sum, saliency
from lit_dps.pruning.pruner import OneShot, check_count


class Grasp(OneShot):
    """Scores w * (H g) with its sign; the largest are kept.

    Removing w changes the squared norm of the gradient by -2 w (H g) to first order. The score of
    Wang et al. 2020, Eq. 8 has the opposite sign. The loss is the cross-entropy of logits / T; for
    a sequence of classes, such as the next characters of a text, it is the mean over positions.

    The authors compute the product of Hessian and gradient between two halves of a small sample, to
    save memory. Here g is the gradient of a whole pass and H g is summed over a second pass, so
    that it is exact. Their code also draws new weights for the linear layers of the scored copy;
    here the scored weights are the trained ones. Attention is computed by torch's plain kernel,
    because the fused kernels have no second derivative.

    Args:
        temperature: T; null takes the module's training loss, which may be of any problem.
        per_class: Examples of each class, the first ones of the pass; the authors use 10. By
            default the whole training split. It must be null for sequences, which have many
            classes each.
    """

    passes = 2

    def __init__(self, temperature: float | None = 200.0, per_class: int | None = None):
        if temperature is not None and not temperature > 0:
            raise ConfigError(
                "pruning.options.temperature", temperature, "a number above 0, or null"
            )
        if per_class is not None:
            check_count("per_class", per_class, "at least 1 example, or null for all")
        self.temperature = temperature
        self.per_class = per_class

    @property
    def stackable(self) -> bool:
        return type(self).scores is Grasp.scores and type(self)._losses is Grasp._losses

    @sdpa_kernel(SDPBackend.MATH)
    def scores(self, network: Network, generator: torch.Generator) -> dict[str, Tensor]:
        sample = None
        if self.per_class is not None:
            sample = balanced(network.batches(), self.per_class)
        gradient = gradient_sum(network.parameters, self._losses(network, sample))
        parameters = {name: network.parameters[name] for name in gradient}

        def products() -> Iterator[tuple[Tensor, float]]:
            """Yield the products of the batches' gradients with the pass's, and their weights."""
            for loss, weight in self._losses(network, sample):
                of_batch = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
                terms = []
                for ours, whole in zip(of_batch, gradient.values(), strict=True):
                    terms.append((ours * whole.to(ours)).sum())
                yield sum(terms, start=torch.zeros_like(loss)), weight

        return saliency(gradient_sum(parameters, products()), network.parameters)

    def _losses(self, network: Network, sample: list | None) -> Iterator[tuple[Tensor, float]]:
        """Yield the loss of each batch and its weight; see `Network.losses`."""
        if self.temperature is None:
            yield from network.losses(sample)
            return
        batches = sample
        if batches is None:
            batches = network.batches()
        for batch, size in batches:
            try:
                loss = network.cross_entropy(batch, self.temperature)
            except UserError as error:
                raise ConfigError(
                    "pruning.method",
                    "grasp",
                    f"used with the options {{temperature: null}}, because {error}",
                ) from error
            yield loss, size / network.batch_size


def balanced(batches: Batches, per_class: int) -> list[tuple[Any, int]]:
    """Return the first examples of each class in a pass of (inputs, classes), as one batch.

    Rank 0 has the batch; the list of the other ranks is empty.

    Raises:
        ConfigError: if an example has several classes.
    """
    device = None
    candidates: list[tuple[Tensor, Tensor]] = []
    count: Counter[int] = Counter()
    for batch, _ in batches:
        x, y = batch
        if y.ndim != 1:
            raise ConfigError(
                "pruning.options.per_class",
                per_class,
                "null, because an example has several classes",
            )
        device = y.device
        first = _first_of_classes(y, per_class, count)
        candidates.append((x[first].cpu(), y[first].cpu()))
    by_rank = ranks.all_gather(candidates)
    if ranks.rank() > 0 or device is None:
        return []
    # Rank r has the batches r, r + world, ... of the pass.
    inputs: list[Tensor] = []
    classes: list[Tensor] = []
    for round_of_ranks in zip_longest(*by_rank):
        for part in filter(None, round_of_ranks):
            inputs.append(part[0])
            classes.append(part[1])
    x = torch.cat(inputs)
    y = torch.cat(classes)
    first = _first_of_classes(y, per_class, Counter())
    return [((x[first].to(device), y[first].to(device)), len(first))]


def _first_of_classes(classes: Tensor, per_class: int, count: Counter[int]) -> list[int]:
    """Return the indices of examples whose class has been counted less often than `per_class`.

    Args:
        classes: The class of each example.
        per_class: The most examples of a class.
        count: Examples of each class so far. It is increased by the returned ones.
    """
    indices = []
    for i, label in enumerate(classes.tolist()):
        if count[label] < per_class:
            count[label] += 1
            indices.append(i)
    return indices
