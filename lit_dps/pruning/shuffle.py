"""Shuffle: the mask of another method, permuted inside each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lit_dps.core.errors import ConfigError
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import Pruner, pruner_of


class Shuffle(Pruner):
    """A control: each tensor keeps as many elements as under another method, at random places.

    It shows whether the places matter or only the counts by layer (Frankle et al. 2021, Section 5;
    Su et al. 2020). If the other method begins with the weights of a file, this one does too:
    the file should have the weights before they were pruned, because pruned ones may be 0.

    Args:
        of: The other method, by name or class path. Its mask must not change during training.
        options: Arguments of its constructor.
    """

    def __init__(self, of: str = "snip", options: Mapping[str, Any] | None = None):
        if of in ("shuffle", None):
            raise ConfigError(
                "pruning.options.of", of, "the method whose mask is permuted, such as snip"
            )
        self.of = pruner_of(of, options, "pruning.options.of")
        if self.of.every is not None:
            raise ConfigError("pruning.options.of", of, "a method whose mask does not change")
        self.passes = self.of.passes
        self.batch_invariant = self.of.batch_invariant
        self.hits_count = self.of.hits_count
        self.counts = self.of.counts

    def check_sparsity(self, sparsity: float) -> None:
        self.of.check_sparsity(sparsity)

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        mask = self.of.mask(network, sparsity, generator)
        tensors = {}
        for name, keep in mask.items():
            order = torch.randperm(keep.numel(), generator=generator).to(keep.device)
            tensors[name] = keep.flatten()[order].view(keep.shape)
        return Mask(tensors, by_place=mask.by_place, weights=mask.weights)
