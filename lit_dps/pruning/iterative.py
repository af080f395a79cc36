"""Pruning in rounds: SNIP-it (Verdenius et al. 2020), iterative SNIP and FORCE (de Jorge et al.
2021).

Each round scores the network as the round before left it, on the next batches of the training
split, and keeps fewer. The reference codes of all three take `nll_loss` of raw logits, which is no
loss of a classifier (SNIP-it fec11fc, FORCE 7494eed); here it is the module's own loss, unless
theirs is asked for (`reference_loss`). They keep one element fewer than asked, or drift by the
rounds; here each round's count is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from lit_dps.core.errors import ConfigError
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network, gradient_sum, saliency
from lit_dps.pruning.pruner import Pruner, top_k
from lit_dps.pruning.reference_loss import OWN, check_loss, losses_of


def halving(sparsity: float, rounds: int) -> list[float]:
    """Half first, then half of the way that is left in each round, then all of it; below 0.5 one
    round."""
    if sparsity < 0.5:
        return [sparsity]
    return [*(sparsity - (sparsity - 0.5) * 0.5**i for i in range(rounds)), sparsity]


class IterativePruner(Pruner):
    """Scores |w * dL/dw| under the mask of the round before.

    Args:
        rounds: How many.
        batches: Of each round.
        loss: "module", the training loss, or "nll_on_logits", that of the authors' code.
    """

    returning = (
        False  # whether what was pruned may return: then its score is that of the weight it had
    )

    def __init__(self, rounds: int = 50, batches: int = 1, loss: str = OWN):
        for key, value in (("rounds", rounds), ("batches", batches)):
            if value < 1:
                raise ConfigError(f"pruning.options.{key}", value, "at least 1")
        check_loss(loss)
        self.rounds, self.batches, self.loss = rounds, batches, loss

    def schedule(self, sparsity: float) -> Iterable[float]:
        """The sparsity after each round: the share that is kept falls by the same factor in all of
        them."""
        keep = 1 - sparsity
        return [1 - math.exp(i / self.rounds * math.log(keep)) for i in range(1, self.rounds)] + [
            sparsity
        ]

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        take, mask = network.stream(), None
        for reached in self.schedule(sparsity):
            with network.under(mask):
                gradients = gradient_sum(
                    network.parameters, losses_of(network, take(self.batches), self.loss)
                )
            scores = {name: s.abs() for name, s in saliency(gradients, network.parameters).items()}
            if mask is not None and not self.returning:
                scores = {
                    name: score.masked_fill(~mask[name], -1) for name, score in scores.items()
                }
            mask = top_k(scores, reached)
        return mask


class IterativeSnip(IterativePruner):
    """SNIP in rounds; what is pruned stays pruned (de Jorge et al. 2021, Section 4)."""


class Force(IterativePruner):
    """FORCE: what was pruned may return: its gradient is that of the masked network (de Jorge et
    al. 2021, Eq. 8)."""

    returning = True


class SnipIt(IterativePruner):
    """SNIP-it: half of the weights first, then half of the way that is left in each round
    (Verdenius et al. 2020).

    In evaluation mode. Below a sparsity of 0.5 it is one round, as the rule would go the wrong way.

    Args:
        rounds: Before the last one, which goes all the way.
        batches: Of each round; of the size of `pruning.batch_size`, where the authors have 512
            examples.
        loss: "module", the training loss, or "nll_on_logits", that of the authors' code.
    """

    def __init__(self, rounds: int = 6, batches: int = 5, loss: str = OWN):
        super().__init__(rounds, batches, loss)

    def schedule(self, sparsity: float) -> Iterable[float]:
        return halving(sparsity, self.rounds)

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        with network.evaluating():
            return super().mask(network, sparsity, generator)
