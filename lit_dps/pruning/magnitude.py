"""Magnitude pruning: the largest weights are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import OneShot


class Magnitude(OneShot):
    """Scores |w|."""

    passes = 0

    def scores(self, network: Network, generator: torch.Generator) -> dict[str, Tensor]:
        return {name: p.detach().abs() for name, p in network.parameters.items()}
