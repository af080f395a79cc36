"""SNIP (Lee et al. 2019): keeps the connections whose removal changes the loss the most."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.pruning.network import Network, absolute_saliency, gradient_sum
from lit_dps.pruning.pruner import OneShot, check_count


class Snip(OneShot):
    """|sum over the batches of w * dL/dw| (Lee et al. 2019, Eq. 6; Lee et al. 2021, Section 2).

    The signed gradients are summed over the entire training split, and then the absolute value is
    taken, as in the code of Lee et al. (2021). Parameters that the loss does not depend on have no
    score and are not pruned, because only their position would decide.

    Args:
        batches: Number of batches, the first ones of the pass; by default all. 1 is Lee et al.
            2019.
        abs_per_batch: Sum the absolute values of the batches' gradients, as Frankle et al. 2021.
    """

    def __init__(self, batches: int | None = None, abs_per_batch: bool = False):
        if batches is not None:
            check_count("batches", batches, "at least 1 batch, or null for all")
        self.batches = batches
        self.abs_per_batch = abs_per_batch

    @property
    def batch_invariant(self) -> bool:
        return self.batches is None and not self.abs_per_batch and type(self).scores is Snip.scores

    @property
    def stackable(self) -> bool:
        return type(self).scores is Snip.scores

    def scores(self, network: Network, generator: torch.Generator) -> dict[str, Tensor]:
        batches = None
        if self.batches is not None:
            batches = network.stream()(min(self.batches, network.length()))
        gradients = gradient_sum(network.parameters, network.losses(batches), self.abs_per_batch)
        return absolute_saliency(gradients, network.parameters)
