"""Sparsity that moves during training: RigL, SET, gradual magnitude pruning, and SNIP-it in steps.

`lit_dps.pruning.mask_changes` says when a mask changes. K* of these methods belongs to the average
density along the run, which the tables show, and not to the final sparsity alone: the quality of a
network goes with its average number of parameters (Jin et al. 2025, arXiv 2501.12486).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.pruning.iterative import exclude_pruned, halving
from lit_dps.pruning.layerwise import erdos_renyi_counts, random_mask, uniform_counts
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import MaskUpdate, Pruner, check_count, top_k

Start = Literal["erk", "uniform"]
STARTS = {"erk": erdos_renyi_counts, "uniform": uniform_counts}


class Regrowth(Pruner):
    """Drops the smallest weights of each tensor, and grows as many others.

    Each tensor keeps its number of weights. Candidates for growth are all weights that are not
    kept, also those just dropped, as in the code of Evci et al. (google-research/rigl 112a9bf). A
    weight that is dropped and grown in the same change keeps its value. The reference replaces the
    optimizer step by the change; here the step is taken too.

    All biases are pruned, and none grows. With `pruning.biases: keep` they stay dense, as in the
    reference.

    Args:
        every: Optimizer steps between changes.
        share: Share of the weights of a tensor that the first change replaces.
        end: Share of the step budget after which the mask stays.
        start: Random mask of the start: "erk" keeps a share of each tensor in proportion to the sum
            of its dimensions over their product, "uniform" keeps equal shares.
    """

    passes = 0

    def __init__(
        self, every: int = 100, share: float = 0.3, end: float = 0.75, start: Start = "erk"
    ):
        _check_share("share", share)
        _check_share("end", end)
        if start not in STARTS:
            raise ConfigError("pruning.options.start", start, " or ".join(STARTS))
        self.every = every
        self.share = share
        self.end = end
        self.start = start

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        return random_mask(network, STARTS[self.start](network, sparsity), generator)

    def next_mask(self, update: MaskUpdate) -> Mask:
        if update.step >= self.end * update.max_steps:
            return update.mask
        share = self.share_at(update.step, update.max_steps)
        tensors = {}
        for name, mask in update.mask.items():
            keep = mask.flatten().clone()
            count = int(share * int(keep.sum()))
            size = update.weights[name].flatten().abs().masked_fill(~keep, math.inf)
            keep[size.argsort(stable=True)[:count]] = False
            growth = self.growth(name, update).flatten().masked_fill(keep, -1)
            keep[growth.argsort(descending=True, stable=True)[:count]] = True
            tensors[name] = keep.view(mask.shape)
        return Mask(tensors)

    @abstractmethod
    def share_at(self, step: int, max_steps: int) -> float:
        """Return the share of weights that a change replaces."""

    @abstractmethod
    def growth(self, name: str, update: MaskUpdate) -> Tensor:
        """Return the scores of a tensor's elements, at least 0; the highest ones grow."""


class RigL(Regrowth):
    """RigL (Evci et al. 2020, Algorithm 1): grows the weights with the largest gradients.

    The gradients are those of the last step's batch. The replaced share falls along a cosine
    (their Equation 2), from `share` to 0 at `end`.
    """

    def share_at(self, step: int, max_steps: int) -> float:
        return self.share / 2 * (1 + math.cos(math.pi * step / (self.end * max_steps)))

    def growth(self, name: str, update: MaskUpdate) -> Tensor:
        return update.gradients[name].abs()


class SparseEvolution(Regrowth):
    """SET (Mocanu et al. 2018): grows random weights; the replaced share is constant.

    Mocanu et al. change the mask at the end of each epoch but the last, and drop the smallest
    positive and the largest negative weights separately. Here the smallest magnitudes are dropped,
    as in the code of Evci et al.
    """

    def __init__(
        self, every: int = 100, share: float = 0.3, end: float = 1.0, start: Start = "erk"
    ):
        super().__init__(every, share, end, start)

    def share_at(self, step: int, max_steps: int) -> float:
        return self.share

    def growth(self, name: str, update: MaskUpdate) -> Tensor:
        scores = torch.rand(update.mask[name].shape, generator=update.generator)
        return scores.to(update.mask[name].device)


class FallingDensity(Pruner):
    """A method that begins with a dense network and prunes it while it trains.

    The sparsity of the cell is the final one. A trial may meet its goal before it is reached.
    """

    passes = 0
    hits_count = False

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        tensors = {}
        for name, parameter in network.parameters.items():
            tensors[name] = torch.ones_like(parameter, dtype=torch.bool)
        return Mask(tensors)

    def next_mask(self, update: MaskUpdate) -> Mask:
        scores = {}
        for name in update.mask:
            scores[name] = self.score(update.weights[name], update.gradients[name])
        sparsity = self.sparsity_at(update.step, update.max_steps, update.sparsity)
        return top_k(exclude_pruned(scores, update.mask), sparsity)

    @abstractmethod
    def sparsity_at(self, step: int, max_steps: int, final: float) -> float:
        """Return the sparsity after a step; it never falls."""

    @abstractmethod
    def score(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the scores of elements, at least 0; the highest ones are kept."""


class Gradual(FallingDensity):
    """Gradual magnitude pruning: a cubic schedule (Zhu and Gupta 2017, Equation 1).

    The smallest weights of all tensors together are pruned. Zhu and Gupta prune each tensor to the
    same sparsity.

    Args:
        every: Optimizer steps between changes.
        begin: Share of the step budget at which pruning begins.
        end: Share of the step budget at which the final sparsity is reached.
    """

    def __init__(self, every: int = 100, begin: float = 0.0, end: float = 0.5):
        _check_share("end", end)
        if not 0 <= begin < end:
            raise ConfigError("pruning.options.begin", begin, f"a share from 0 to below {end:g}")
        self.every = every
        self.begin = begin
        self.end = end

    def sparsity_at(self, step: int, max_steps: int, final: float) -> float:
        progress = (step / max_steps - self.begin) / (self.end - self.begin)
        progress = min(max(progress, 0.0), 1.0)
        return final * (1 - (1 - progress) ** 3)

    def score(self, weight: Tensor, gradient: Tensor) -> Tensor:
        return weight.abs()


class SnipItDuring(FallingDensity):
    """SNIP-it during training (Verdenius et al. 2020): prunes by |w * dL/dw| in several steps.

    The sparsity after a change is 0.5, then half of the remaining way is taken at each change, as
    before training (`halving`). The authors score on several batches after some epochs. Here the
    gradient is that of the last step's batch, so that the scores of a small batch are noisy.

    Args:
        every: Optimizer steps between changes.
        rounds: Changes before the last one, which reaches the sparsity.
    """

    def __init__(self, every: int = 100, rounds: int = 6):
        check_count("rounds", rounds)
        self.every = every
        self.rounds = rounds

    def sparsity_at(self, step: int, max_steps: int, final: float) -> float:
        sparsities = halving(final, self.rounds)
        assert self.every is not None
        # In a dry run the mask changes after each step, before the first multiple of `every`.
        changes = max(step // self.every, 1)
        return sparsities[min(changes, len(sparsities)) - 1]

    def score(self, weight: Tensor, gradient: Tensor) -> Tensor:
        return (weight * gradient).abs()


def _check_share(name: str, value: float) -> None:
    """Raise ConfigError unless an option is a share above 0."""
    if not 0 < value <= 1:
        raise ConfigError(f"pruning.options.{name}", value, "a share above 0 and up to 1")
