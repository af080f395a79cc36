"""Random pruning: a control that looks neither at the weights nor at the data."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import OneShot


class Random(OneShot):
    """Uniform in [0, 1), so each weight is kept with the same probability, whatever its layer."""

    passes = 0

    def scores(self, network: Network, generator: torch.Generator) -> dict[str, Tensor]:
        return {
            name: torch.rand(p.shape, generator=generator).to(p.device)
            for name, p in network.parameters.items()
        }
