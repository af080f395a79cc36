"""Random masks with given counts in each layer: the same share everywhere, or smart ratios (Su et
al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import Pruner

LAST = 0.3  # share of the last layer that smart ratios keep


class RandomLayerwise(Pruner):
    """The same share of each tensor, at random; counts by largest remainder, so that their sum is
    exact."""

    passes = 0

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        sizes = {name: p.numel() for name, p in network.parameters.items()}
        shares = {name: n * (1 - sparsity) for name, n in sizes.items()}
        return drawn(
            network, rounded(shares, sizes, round(sum(sizes.values()) * (1 - sparsity))), generator
        )


class SmartRatio(Pruner):
    """At random, with densities that fall towards the output (Su et al. 2020, Section 4.1).

    Layer l of L keeps a share in proportion to (L - l + 1)^2 + (L - l + 1), over l^2 unless
    `residual`; the last one keeps 0.3. Where a share exceeds 1 it is cut and the surplus goes to
    all layers below 1, by the same factor; the authors' code hands it to the following layers and
    stops at the first one with room. It holds every linear layer at 0.3, so that a network without
    convolutions has nothing left to divide; here the hidden linear layers count as convolutions do:
    an extension. The last layer gets at most half of what is kept. Biases are pruned.

    Args:
        residual: Whether the network is a ResNet.
    """

    passes = 0

    def __init__(self, residual: bool = False):
        self.residual = residual

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        sizes = {name: p.numel() for name, p in network.parameters.items()}
        keep = round(sum(sizes.values()) * (1 - sparsity))
        return drawn(network, rounded(self.shares(network, keep), sizes, keep), generator)

    def shares(self, network: Network, keep: int) -> dict[str, float]:
        """How many elements each tensor keeps, before rounding; their sum is `keep`."""
        layers = [name for name, p in network.parameters.items() if p.ndim >= 2]
        sizes = {name: network.parameters[name].numel() for name in layers}
        *hidden, last = layers
        room = sum(sizes[name] for name in hidden)
        of_last = max(
            min(LAST * sizes[last], keep / 2), keep - room
        )  # what the others cannot hold is the last one's
        ratios = {}
        for i, name in enumerate(hidden, start=1):
            rest = len(layers) - i + 1
            ratios[name] = (rest**2 + rest) / (1 if self.residual else i**2)
        shares = water_filled(ratios, sizes, keep - of_last)
        others = {name: 0.0 for name in network.parameters if name not in sizes}
        return {**shares, last: of_last, **others}


def water_filled(
    ratios: Mapping[str, float], sizes: Mapping[str, int], keep: float
) -> dict[str, float]:
    """Counts in proportion to ratio x size, none above its size, with the sum `keep`."""
    counts, left = {}, dict(ratios)
    while left:
        scale = (keep - sum(counts.values())) / sum(
            ratio * sizes[name] for name, ratio in left.items()
        )
        full = {name for name, ratio in left.items() if scale * ratio > 1} or {*left}
        for name in full:
            counts[name] = min(scale * left.pop(name), 1.0) * sizes[name]
    return counts


def rounded(shares: Mapping[str, float], sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Whole numbers near some shares with a given sum, by largest remainder; none above its
    size."""
    counts = {name: min(int(share), sizes[name]) for name, share in shares.items()}
    order = sorted(shares, key=lambda name: shares[name] - counts[name], reverse=True)
    while (rest := total - sum(counts.values())) > 0:
        for name in [name for name in order if counts[name] < sizes[name]][:rest]:
            counts[name] += 1
    return counts


def drawn(network: Network, counts: Mapping[str, int], generator: torch.Generator) -> Mask:
    """A mask that keeps so many elements of each tensor, at random."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in network.parameters.items():
        kept = torch.zeros(parameter.numel(), dtype=torch.bool)
        kept[torch.randperm(parameter.numel(), generator=generator)[: counts[name]]] = True
        tensors[name] = kept.view(parameter.shape).to(parameter.device)
    return Mask(tensors)
