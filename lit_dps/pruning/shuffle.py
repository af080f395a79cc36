"""Shuffle: the mask of another method, permuted inside each tensor. Is it the mask, or its counts
by layer?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lit_dps.core.errors import ConfigError
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import Pruner, pruner_of


class Shuffle(Pruner):
    """A control (Frankle et al. 2021, Section 5; Su et al. 2020): each tensor keeps as many
    elements, at random places.

    Args:
        of: The other method, by name or class path.
        options: Arguments of its constructor.
    """

    def __init__(self, of: str = "snip", options: Mapping[str, Any] | None = None):
        if of in ("shuffle", None):
            raise ConfigError(
                "pruning.options.of", of, "the method whose mask is permuted, such as snip"
            )
        self.of = pruner_of(of, options, "pruning.options.of")
        self.passes = self.of.passes
        self.hits_count = self.of.hits_count
        self.counts = self.of.counts

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        mask = self.of.mask(network, sparsity, generator)
        return Mask(
            {
                name: keep.flatten()[
                    torch.randperm(keep.numel(), generator=generator).to(keep.device)
                ].view(keep.shape)
                for name, keep in mask.items()
            }
        )
