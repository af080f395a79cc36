"""Network: a network at initialization, as a pruner sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_dps.parallel import ranks
from lit_dps.pruning.mask import Mask

Parameters = Mapping[str, nn.Parameter]
Losses = Iterable[tuple[Tensor, float]]  # mean loss of a batch, and the batch's weight in the sum


@dataclass(frozen=True)
class Network:
    """A copy of a network that is to be pruned. A pruner may do with it what it likes: the network itself is not moved.

    Attributes:
        module: The copy, in training mode.
        parameters: What can be pruned, by name (`prunable`).
        batch_size: Examples of a full batch.
        batches: Begins a pass over the training split: this rank's batches, on the module's device, each with its
            number of examples.
        loss_of: (batch, its index) -> the module's own mean training loss, or None where it gives none.
    """

    module: nn.Module
    parameters: Parameters
    batch_size: int
    batches: Callable[[], Iterator[tuple[Any, int]]]
    loss_of: Callable[[Any, int], Tensor | None]

    def forward(self, x: Any) -> Any:
        """The network's output for an input of the caller's."""
        return self.module(x)

    def losses(self) -> Iterator[tuple[Tensor, float]]:
        """One pass: the mean loss of each batch, and its weight, which is less than 1 for a short batch alone."""
        for i, (batch, size) in enumerate(self.batches()):
            loss = self.loss_of(batch, i)
            if loss is not None:
                yield loss, size / self.batch_size

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of the loss, summed over one pass (`gradient_sum`)."""
        return gradient_sum(self.parameters, self.losses())

    @contextmanager
    def under(self, mask: Mask) -> Iterator[None]:
        """In here the network has the pruned weights at zero; gradients are those of all weights, also of pruned ones.

        Raises:
            ValueError: if the mask is of another network.
        """
        before = {name: self.parameters[name].detach().clone() for name in mask if name in self.parameters}
        mask.apply_to_weights(self.module)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weights in before.items():
                    self.parameters[name].copy_(weights)


def gradient_sum(parameters: Parameters, losses: Losses) -> dict[str, Tensor]:
    """The weighted sum over the batches of all ranks of dL/dw, of the parameters that the loss depends on.

    In float64, so that a mask does not depend on how the batches are divided among the ranks.
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
    named = zip(parameters, map(ranks.all_reduce_sum, sums), used.tolist(), strict=True)
    return {name: total for name, total, reached in named if reached}
