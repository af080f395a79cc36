"""Random pruning: a control that uses neither the weights nor the data."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import OneShot


class Random(OneShot):
    """Draws scores uniformly from [0, 1), so that all weights are kept with equal probability."""

    passes = 0

    def scores(self, network: Network, generator: torch.Generator) -> dict[str, Tensor]:
        scores = {}
        for name, parameter in network.parameters.items():
            scores[name] = torch.rand(parameter.shape, generator=generator).to(parameter.device)
        return scores
