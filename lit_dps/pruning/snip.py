"""SNIP (Lee et al. 2019): the connections whose removal changes the loss most are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.pruning.network import Network, gradient_sum, saliency
from lit_dps.pruning.pruner import OneShot


class Snip(OneShot):
    """|sum over the batches of w * dL/dw| (Lee et al. 2019, Eq. 6; Lee et al. 2021, Section 2).

    The signed gradients are summed over the whole training split before the absolute value is
    taken, as in the code of Lee et al. (2021). Parameters that the loss does not depend on have no
    score, and are not pruned: they would be kept or pruned by their place alone.

    Args:
        batches: Take the first ones alone; 1 is Lee et al. 2019.
        abs_per_batch: Take the absolute value of each batch's gradient before the sum, as Frankle
            et al. 2021 do.
    """

    def __init__(self, batches: int | None = None, abs_per_batch: bool = False):
        if batches is not None and batches < 1:
            raise ConfigError(
                "pruning.options.batches", batches, "at least 1 batch, or null for all"
            )
        self.batches, self.abs_per_batch = batches, abs_per_batch

    @property
    def batch_invariant(self) -> bool:
        return self.batches is None and not self.abs_per_batch and type(self).scores is Snip.scores

    def scores(self, network: Network, generator: torch.Generator) -> dict[str, Tensor]:
        batches = (
            None if self.batches is None else network.stream()(min(self.batches, network.length()))
        )
        gradients = gradient_sum(network.parameters, network.losses(batches), self.abs_per_batch)
        return {name: s.abs() for name, s in saliency(gradients, network.parameters).items()}
