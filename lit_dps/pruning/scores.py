"""Pruning scores: (parameters, loss of each batch) -> a score of each element; the highest are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from lit_dps.parallel import ranks

Parameters = Mapping[str, nn.Parameter]
Losses = Iterable[tuple[Tensor, float]]  # mean loss of a batch, and the batch's weight in the sum
Score = Callable[[Parameters, Losses, torch.Generator], dict[str, Tensor]]


def signed_saliency(parameters: Parameters, losses: Losses) -> dict[str, Tensor]:
    """The sum over the batches of all ranks of w * dL/dw, signed, of the parameters that the loss depends on.

    Summed in float64, so that a mask does not depend on how the batches are divided among the ranks.
    """
    tensors = list(parameters.values())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in tensors]
    used = torch.zeros(len(tensors))
    for loss, weight in losses:
        gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
        found = [i for i, gradient in enumerate(gradients) if gradient is not None]
        used[found] = 1
        torch._foreach_add_([sums[i] for i in found], [gradients[i] for i in found], alpha=weight)
    used = ranks.all_reduce_sum(used)  # a rank without a batch knows of none
    named = zip(parameters.items(), map(ranks.all_reduce_sum, sums), used.tolist(), strict=True)
    return {name: (s * p.detach()).to(p.dtype) for (name, p), s, reached in named if reached}


def snip(parameters: Parameters, losses: Losses, generator: torch.Generator) -> dict[str, Tensor]:
    """SNIP: |sum over the batches of w * dL/dw| (Lee et al. 2019, Eq. 6; Lee et al. 2021, Section 2).

    The signed gradients are summed over the whole training split before the absolute value is taken, as in the
    authors' code. Parameters that the loss does not depend on have no score, and are not pruned: they would be kept or
    pruned by their place alone.
    """
    return {name: s.abs() for name, s in signed_saliency(parameters, losses).items()}


def magnitude(parameters: Parameters, losses: Losses, generator: torch.Generator) -> dict[str, Tensor]:
    """|w|."""
    return {name: p.detach().abs() for name, p in parameters.items()}


def random(parameters: Parameters, losses: Losses, generator: torch.Generator) -> dict[str, Tensor]:
    """Uniform in [0, 1), from the generator (a CPU one, so that every device draws the same)."""
    return {name: torch.rand(p.shape, generator=generator).to(p.device) for name, p in parameters.items()}


SCORES: dict[str, Score] = {"snip": snip, "magnitude": magnitude, "random": random}
WITHOUT_DATA = ("magnitude", "random")


def take_scores(
    method: str, parameters: Parameters, losses: Iterable[tuple[Tensor, int]], batch_size: int, seed: int
) -> dict[str, Tensor]:
    """The scores of a method over one pass of the training split.

    Args:
        method: A key of `SCORES`.
        parameters: What is scored, by name.
        losses: Mean loss of each batch, and its number of examples.
        batch_size: Examples of a full batch; a short one weighs as much as its share.
        seed: Seed of the "random" score.
    """
    weighted = ((loss, size / batch_size) for loss, size in losses)
    return SCORES[method](parameters, weighted, torch.Generator().manual_seed(seed))
