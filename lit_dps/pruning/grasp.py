"""GraSP (Wang et al. 2020): the weights whose removal would take away most of the gradient's norm
are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_dps.core.errors import ConfigError, UserError
from lit_dps.parallel import ranks
from lit_dps.pruning.network import Batches, Network, gradient_sum, saliency
from lit_dps.pruning.pruner import OneShot


class Grasp(OneShot):
    """w * (H g), signed: the largest are kept (Wang et al. 2020, Eq. 8: its score is the negative,
    the largest go).

    Removing w changes the squared norm of the gradient by -2 w (H g) to first order. The loss is
    the cross-entropy of logits / T. The authors take the product of Hessian and gradient between
    two halves of a small sample, to save memory; here g is of the whole pass, and H g is summed
    over a second one, so it is exact. Their code also draws new weights for linear layers in the
    copy that it scores; here the scored weights are the trained ones. Of a sequence of classes, a
    text's next characters say, the cross-entropy is the mean over its positions. Attention is taken
    by torch's plain kernel, since the fused ones have no second derivative.

    Args:
        temperature: T; null takes the module's own training loss, of whatever problem.
        per_class: Take so many examples of each class, the first ones of the pass, as the authors
            do (10); by default the whole training split. Not of sequences, each of which has many.
    """

    passes = 2

    def __init__(self, temperature: float | None = 200.0, per_class: int | None = None):
        if temperature is not None and not temperature > 0:
            raise ConfigError(
                "pruning.options.temperature", temperature, "a number above 0, or null"
            )
        if per_class is not None and per_class < 1:
            raise ConfigError(
                "pruning.options.per_class", per_class, "at least 1 example, or null for all"
            )
        self.temperature, self.per_class = temperature, per_class

    @sdpa_kernel(SDPBackend.MATH)
    def scores(self, network: Network, generator: torch.Generator) -> dict[str, Tensor]:
        some = None if self.per_class is None else balanced(network.batches(), self.per_class)
        first = gradient_sum(network.parameters, self._losses(network, some))
        reached = {name: network.parameters[name] for name in first}

        def products() -> Iterator[tuple[Tensor, float]]:
            for loss, weight in self._losses(network, some):
                gradients = torch.autograd.grad(loss, list(reached.values()), create_graph=True)
                yield (
                    sum(
                        (g * h.to(g)).sum() for g, h in zip(gradients, first.values(), strict=True)
                    ),
                    weight,
                )

        return saliency(gradient_sum(reached, products()), network.parameters)

    def _losses(self, network: Network, some: list | None) -> Iterator[tuple[Tensor, float]]:
        if self.temperature is None:
            yield from network.losses(some)
            return
        for batch, size in network.batches() if some is None else some:
            try:
                logits, classes = network.logits(batch)
            except UserError as error:
                raise ConfigError(
                    "pruning.method", "grasp", f"options {{temperature: null}} where {error}"
                ) from error
            yield F.cross_entropy(logits / self.temperature, classes), size / network.batch_size


def balanced(batches: Batches, per_class: int) -> list[tuple[Any, int]]:
    """The first examples of each class in a pass of (inputs, classes), as one batch of rank 0; the
    others have none.

    Raises:
        ConfigError: where an example has several classes.
    """
    found: list[tuple[Tensor, Tensor]] = []
    count: Counter[int] = Counter()
    for batch, _ in batches:
        x, y = batch
        if y.ndim != 1:
            raise ConfigError(
                "pruning.options.per_class", per_class, "null where an example has several classes"
            )
        keep = []
        for i, label in enumerate(y.tolist()):
            if count[label] < per_class:
                count[label] += 1
                keep.append(i)
        found.append((x[keep].cpu(), y[keep].cpu()))
    device = y.device if found else None
    every = ranks.all_gather(found)
    if ranks.rank() or device is None:
        return []
    # the ranks' batches in turn, as one process has them
    longest = max(map(len, every))
    order = [part[i] for i in range(longest) for part in every if i < len(part)]
    x, y = torch.cat([a for a, _ in order]), torch.cat([b for _, b in order])
    count.clear()
    keep = []
    for i, label in enumerate(y.tolist()):
        count[label] += 1
        if count[label] <= per_class:
            keep.append(i)
    return [((x[keep].to(device), y[keep].to(device)), len(keep))]
