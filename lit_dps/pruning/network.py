"""Network: a network at initialization, as a pruner sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_dps.core.errors import UserError
from lit_dps.parallel import ranks
from lit_dps.pruning.mask import Mask

Parameters = Mapping[str, nn.Parameter]
Losses = Iterable[tuple[Tensor, float]]  # mean loss of a batch, and the batch's weight in the sum
Batches = Iterable[tuple[Any, int]]  # a batch, and its number of examples


@dataclass(frozen=True)
class Network:
    """A copy of a network that will be pruned. A pruner may change the copy.

    Attributes:
        module: The copy, in training mode.
        parameters: The parameters that can be pruned, by name (`prunable`).
        batch_size: Examples of a full batch.
        length: Returns the number of batches of a pass, of all ranks together.
        batches: Begins a pass over the training split. It yields this rank's batches on the
            module's device, each with its number of examples; ranks take turns.
        loss_of: Returns the module's mean training loss of a batch, given the batch and its index;
            None if the module returns none.
    """

    module: nn.Module
    parameters: Parameters
    batch_size: int
    length: Callable[[], int]
    batches: Callable[[], Iterator[tuple[Any, int]]]
    loss_of: Callable[[Any, int], Tensor | None]

    def forward(self, x: Any) -> Any:
        """Return the network's output for an input."""
        return self.module(x)

    def losses(self, batches: Batches | None = None) -> Iterator[tuple[Tensor, float]]:
        """Yield the mean loss of each batch, and its weight: below 1 only for a short batch.

        Args:
            batches: Some batches (`stream`); by default the batches of one pass.
        """
        if batches is None:
            batches = self.batches()
        for i, (batch, size) in enumerate(batches):
            loss = self.loss_of(batch, i)
            if loss is not None:
                yield loss, size / self.batch_size

    def gradients(self, batches: Batches | None = None) -> dict[str, Tensor]:
        """Return the gradient of the loss, summed over batches of all ranks (`gradient_sum`).

        Args:
            batches: See `losses`.
        """
        return gradient_sum(self.parameters, self.losses(batches))

    def stream(self) -> Callable[[int], Batches]:
        """Return a function that yields this rank's part of the next n batches of all ranks.

        When a pass ends, the next one begins.
        """
        taken = 0
        length = self.length()
        current: Iterator[tuple[Any, int]] = iter(())

        def take(n: int) -> Batches:
            nonlocal taken, current
            for _ in range(n):
                i = taken % length
                if i == 0:
                    current = self.batches()
                taken += 1
                if not ranks.is_mine(i):
                    continue
                batch = next(current, None)
                if batch is None:
                    # The pass was shorter than its length, as in a timing run.
                    current = self.batches()
                    batch = next(current)
                yield batch

        return take

    def logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the output of a classifier, shape (batch, classes, ...), and the classes.

        The classes have shape (batch, ...). Further dimensions are positions with a class each, as
        the next characters of a text.

        Raises:
            UserError: for another kind of batch or output.
        """
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            x, y = batch
            logits = self.forward(x)
            are_tensors = isinstance(logits, Tensor) and isinstance(y, Tensor)
            if are_tensors and logits.ndim >= 2 and y.shape == (len(logits), *logits.shape[2:]):
                return logits, y
        raise UserError(
            "its batches are not (inputs, classes), or its output is not (batch, classes, ...)"
        )

    @contextmanager
    def under(self, mask: Mask | None) -> Iterator[None]:
        """Set the pruned weights to zero in this block. All weights have gradients, also pruned.

        Raises:
            ValueError: if the mask is of another network.
        """
        named = dict(self.module.named_parameters())
        mask = mask or Mask({})
        before = {name: named[name].detach().clone() for name in mask if name in named}
        mask.apply_to_weights(self.module)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weights in before.items():
                    named[name].copy_(weights)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a block in which the network is in evaluation mode."""
        return in_evaluation_mode(self.module)


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode in this block; then restore the mode of each part."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def gradient_sum(
    parameters: Parameters, losses: Losses, absolute: bool = False
) -> dict[str, Tensor]:
    """Return the weighted sum of dL/dw over the batches of all ranks, by parameter.

    Parameters that the loss does not depend on are not among them. The sum is in float64, so that a
    mask does not depend on how the batches are divided among the ranks.

    Args:
        parameters: Parameters by name.
        losses: Losses and weights, as from `Network.losses`.
        absolute: Whether to sum the absolute values of the batches' gradients.
    """
    tensors = list(parameters.values())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in tensors]
    used = torch.zeros(len(tensors))
    for loss, weight in losses:
        gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
        totals: list[Tensor] = []
        parts: list[Tensor] = []
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            used[i] = 1
            totals.append(sums[i])
            parts.append(gradient.abs() if absolute else gradient)
        torch_private: Any = torch
        torch_private._foreach_add_(totals, parts, alpha=weight)
    # A rank may have no batch.
    used = ranks.all_reduce_sum(used).tolist()
    result = {}
    for name, total, is_used in zip(parameters, sums, used, strict=True):
        total = ranks.all_reduce_sum(total)
        if is_used:
            result[name] = total
    return result


def saliency(gradients: Mapping[str, Tensor], parameters: Parameters) -> dict[str, Tensor]:
    """Return weight times gradient: the derivative of the loss by the elements of the mask.

    It has the type of the weight.
    """
    scores = {}
    for name, gradient in gradients.items():
        parameter = parameters[name]
        scores[name] = (gradient * parameter.detach()).to(parameter.dtype)
    return scores


def absolute_saliency(gradients: Mapping[str, Tensor], parameters: Parameters) -> dict[str, Tensor]:
    """Return |weight times gradient|, the score of SNIP."""
    return {name: score.abs() for name, score in saliency(gradients, parameters).items()}
