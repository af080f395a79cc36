"""Random masks with a count for each layer.

Layers keep equal shares, smart ratios (Su et al. 2020), or Erdos-Renyi shares (Evci et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import Pruner

LAST_LAYER_SHARE = 0.3  # kept share of the last layer under smart ratios


class RandomLayerwise(Pruner):
    """Keeps the same share of each tensor, at random places.

    The counts are rounded by largest remainder, so that their sum is exact.
    """

    passes = 0

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        sizes = _sizes(network)
        shares = {name: n * (1 - sparsity) for name, n in sizes.items()}
        keep = round(sum(sizes.values()) * (1 - sparsity))
        return random_mask(network, rounded(shares, sizes, keep), generator)


class SmartRatio(Pruner):
    """Keeps random weights, with densities that fall towards the output.

    See Su et al. 2020, Section 4.1. Layer l of L keeps a share in proportion to
    (L - l + 1)^2 + (L - l + 1), divided by l^2 unless `residual`. The last layer keeps 0.3, but at
    most half of all kept weights. Biases are pruned.

    A share above 1 is cut, and the surplus goes to all layers below 1, by the same factor. The
    authors' code gives it to the following layers and stops at the first one with room. Their code
    also keeps 0.3 of every linear layer, so that a network without convolutions has nothing to
    divide. Here hidden linear layers are treated as convolutions, which is an extension.

    Args:
        residual: Whether the network is a ResNet.
    """

    passes = 0

    def __init__(self, residual: bool = False):
        self.residual = residual

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        sizes = _sizes(network)
        keep = round(sum(sizes.values()) * (1 - sparsity))
        counts = rounded(self.shares(network, keep), sizes, keep)
        return random_mask(network, counts, generator)

    def shares(self, network: Network, keep: int) -> dict[str, float]:
        """Return the kept elements of each tensor before rounding; their sum is `keep`."""
        sizes: dict[str, int] = {}
        biases: dict[str, float] = {}
        for name, parameter in network.parameters.items():
            if parameter.ndim >= 2:
                sizes[name] = parameter.numel()
            else:
                biases[name] = 0.0
        *hidden, last = sizes
        room = sum(sizes.values()) - sizes[last]
        # The last layer also keeps what does not fit into the others.
        last_keep = max(min(LAST_LAYER_SHARE * sizes[last], keep / 2), keep - room)
        ratios: dict[str, float] = {}
        for i, name in enumerate(hidden, start=1):
            height = len(sizes) - i + 1
            ratios[name] = height**2 + height
            if not self.residual:
                ratios[name] /= i**2
        return {**water_filled(ratios, sizes, keep - last_keep), last: last_keep, **biases}


def uniform_counts(network: Network, sparsity: float) -> dict[str, int]:
    """Return the kept elements of each tensor: equal shares of all weights, and no bias."""
    return _counts_of_weights(network, sparsity, lambda shape: 1.0)


def erdos_renyi_counts(network: Network, sparsity: float) -> dict[str, int]:
    """Return the kept elements of each tensor by the Erdos-Renyi kernel, and no bias.

    The kept share of a tensor is in proportion to the sum of its dimensions over their product, so
    that small layers are denser (Evci et al. 2020, Section 3). A share above 1 is cut, and the
    others are scaled up.
    """
    return _counts_of_weights(network, sparsity, lambda shape: sum(shape) / math.prod(shape))


def _counts_of_weights(
    network: Network, sparsity: float, ratio_of: Callable[[Sequence[int]], float]
) -> dict[str, int]:
    """Return counts of weights in proportion to ratio x size; biases keep what does not fit."""
    sizes = _sizes(network)
    keep = round(sum(sizes.values()) * (1 - sparsity))
    ratios: dict[str, float] = {}
    biases: dict[str, float] = {}
    for name, parameter in network.parameters.items():
        if parameter.ndim >= 2:
            ratios[name] = ratio_of(parameter.shape)
        else:
            biases[name] = 1.0
    room = sum(sizes[name] for name in ratios)
    shares = water_filled(ratios, sizes, min(keep, room))
    shares |= water_filled(biases, sizes, max(keep - room, 0))
    return rounded(shares, sizes, keep)


def _sizes(network: Network) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in network.parameters.items()}


def water_filled(
    ratios: Mapping[str, float], sizes: Mapping[str, int], keep: float
) -> dict[str, float]:
    """Return counts in proportion to ratio x size, none above its size, with the sum `keep`."""
    counts: dict[str, float] = {}
    remaining = dict(ratios)
    while remaining:
        total = sum(ratio * sizes[name] for name, ratio in remaining.items())
        scale = (keep - sum(counts.values())) / total
        full = [name for name, ratio in remaining.items() if scale * ratio > 1]
        for name in full or list(remaining):
            counts[name] = min(scale * remaining.pop(name), 1.0) * sizes[name]
    return counts


def rounded(shares: Mapping[str, float], sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Return shares rounded to whole numbers with the sum `total`, none above its size.

    The shares with the largest remainders are rounded up.
    """
    counts = {name: min(int(share), sizes[name]) for name, share in shares.items()}
    order = sorted(shares, key=lambda name: shares[name] - counts[name], reverse=True)
    missing = total - sum(counts.values())
    while missing > 0:
        for name in order:
            if missing > 0 and counts[name] < sizes[name]:
                counts[name] += 1
                missing -= 1
    return counts


def random_mask(network: Network, counts: Mapping[str, int], generator: torch.Generator) -> Mask:
    """Return a mask that keeps `counts` elements of each tensor, at random places."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in network.parameters.items():
        kept = torch.zeros(parameter.numel(), dtype=torch.bool)
        kept[torch.randperm(parameter.numel(), generator=generator)[: counts[name]]] = True
        tensors[name] = kept.view(parameter.shape).to(parameter.device)
    return Mask(tensors)
