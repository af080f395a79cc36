"""Pruning in rounds: SNIP-it, iterative SNIP and FORCE.

Verdenius et al. 2020 propose SNIP-it, and de Jorge et al. 2021 the other two. Each round scores the
network under the mask of the previous round, on the next batches of the training split, and keeps
fewer elements.

The reference code of all three methods computes `nll_loss` of raw logits, which is not the loss of
a classifier (SNIP-it fec11fc, FORCE 7494eed). The default here is the module's training loss; see
`reference_loss`. The reference code also keeps one element too few, or drifts over the rounds. Here
the count of each round is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network, absolute_saliency, gradient_sum
from lit_dps.pruning.pruner import Pruner, check_count, top_k
from lit_dps.pruning.reference_loss import TRAINING_LOSS, check_loss, losses_of


def halving(sparsity: float, rounds: int) -> list[float]:
    """Return the sparsity after each round: 0.5, then half of the remaining way in each round.

    The last round reaches `sparsity`. A sparsity below 0.5 takes one round.
    """
    if sparsity < 0.5:
        return [sparsity]
    sparsities = []
    for i in range(rounds):
        sparsities.append(sparsity - (sparsity - 0.5) * 0.5**i)
    return [*sparsities, sparsity]


def exclude_pruned(scores: Mapping[str, Tensor], mask: Mask | None) -> dict[str, Tensor]:
    """Return scores in which pruned elements have the lowest score, -1. Scores are 0 or more."""
    if mask is None:
        return dict(scores)
    return {name: score.masked_fill(~mask[name], -1) for name, score in scores.items()}


class IterativePruner(Pruner):
    """Scores |w * dL/dw| under the mask of the previous round.

    Args:
        rounds: Number of rounds.
        batches: Batches of each round.
        loss: "module" for the training loss, or "nll_on_logits" for the loss of the authors' code.

    Attributes:
        returning: Whether pruned elements may return. Their initial weights are then scored.
    """

    returning = False

    def __init__(self, rounds: int = 50, batches: int = 1, loss: str = TRAINING_LOSS):
        check_count("rounds", rounds)
        check_count("batches", batches)
        check_loss(loss)
        self.rounds = rounds
        self.batches = batches
        self.loss = loss

    def schedule(self, sparsity: float) -> Iterable[float]:
        """Return the sparsity after each round; the kept share falls by a constant factor."""
        log_keep = math.log(1 - sparsity)
        sparsities = []
        for i in range(1, self.rounds):
            sparsities.append(1 - math.exp(i / self.rounds * log_keep))
        return [*sparsities, sparsity]

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        next_batches = network.stream()
        mask = None
        for round_sparsity in self.schedule(sparsity):
            with network.under(mask):
                losses = losses_of(network, next_batches(self.batches), self.loss)
                gradients = gradient_sum(network.parameters, losses)
            scores = absolute_saliency(gradients, network.parameters)
            if not self.returning:
                scores = exclude_pruned(scores, mask)
            mask = top_k(scores, round_sparsity)
        assert mask is not None
        return mask


class IterativeSnip(IterativePruner):
    """SNIP in rounds; pruned elements stay pruned (de Jorge et al. 2021, Section 4)."""


class Force(IterativePruner):
    """FORCE: pruned elements may return.

    The gradients are of the masked network (de Jorge et al. 2021, Eq. 8).
    """

    returning = True


class SnipIt(IterativePruner):
    """SNIP-it: half of the weights first, then half of the remaining way in each round.

    See Verdenius et al. 2020. The network is in evaluation mode. Below a sparsity of 0.5 there is
    one round, because the rule would go the wrong way.

    Args:
        rounds: Rounds before the last one, which reaches the sparsity.
        batches: Batches of each round, of `pruning.batch_size` examples; the authors use 512.
        loss: "module" for the training loss, or "nll_on_logits" for the loss of the authors' code.
    """

    def __init__(self, rounds: int = 6, batches: int = 5, loss: str = TRAINING_LOSS):
        super().__init__(rounds, batches, loss)

    def schedule(self, sparsity: float) -> Iterable[float]:
        return halving(sparsity, self.rounds)

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        with network.evaluating():
            return super().mask(network, sparsity, generator)
