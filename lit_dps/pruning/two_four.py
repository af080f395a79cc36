"""TwoFour: the pattern 2:4 of sparse tensor cores (Mishra et al. 2021, arXiv 2104.08378)."""

from __future__ import annotations

import torch

from lit_dps.core.errors import ConfigError
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import Pruner


class TwoFour(Pruner):
    """Keeps the 2 largest of each 4 consecutive weights along the input dimension.

    In a convolution these are 4 input channels at the same place of the filter. Weights are assumed
    to have the outputs first; in a transposed convolution the groups are along the outputs. Biases,
    and layers whose number of inputs or input channels is not divisible by 4, are not in the mask
    and stay dense. The sparsity is a share of the other weights; only 0.5 is possible. The mask
    multiplies dense tensors, so that a step takes as long as a dense step, on every device.
    """

    passes = 0
    hits_count = False
    counts = "groups"

    def check_sparsity(self, sparsity: float) -> None:
        if sparsity != 0.5:
            raise ConfigError(
                "study.sparsities",
                sparsity,
                "0.5, because the pattern 2:4 prunes half of the weights",
            )

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        self.check_sparsity(sparsity)
        tensors = {}
        for name, parameter in network.parameters.items():
            if parameter.ndim < 2 or parameter.shape[1] % 4:
                continue
            inputs_last = parameter.detach().abs().movedim(1, -1)
            groups = inputs_last.reshape(-1, 4)
            keep = torch.zeros_like(groups, dtype=torch.bool)
            keep.scatter_(1, groups.topk(2).indices, True)
            tensors[name] = keep.view(inputs_last.shape).movedim(-1, 1).contiguous()
        if not tensors:
            allowed = "another method, because no layer has inputs or input channels in groups of 4"
            raise ConfigError("pruning.method", "two_four", allowed)
        return Mask(tensors)
