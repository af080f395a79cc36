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
    """A copy of a network that is to be pruned. A pruner may do with it what it likes: the network
    itself is not moved.

    Attributes:
        module: The copy, in training mode.
        parameters: What can be pruned, by name (`prunable`).
        batch_size: Examples of a full batch.
        length: Gives the batches of a pass, of all ranks together.
        batches: Begins a pass over the training split: this rank's batches, in turn with the
            others', on the module's device, each with its number of examples.
        loss_of: (batch, its index) -> the module's own mean training loss, or None where it gives
            none.
    """

    module: nn.Module
    parameters: Parameters
    batch_size: int
    length: Callable[[], int]
    batches: Callable[[], Iterator[tuple[Any, int]]]
    loss_of: Callable[[Any, int], Tensor | None]

    def forward(self, x: Any) -> Any:
        """The network's output for an input of the caller's."""
        return self.module(x)

    def losses(self, batches: Batches | None = None) -> Iterator[tuple[Tensor, float]]:
        """The mean loss of each batch, and its weight, which is less than 1 for a short batch
        alone.

        Args:
            batches: Some batches (`stream`); by default those of one pass.
        """
        for i, (batch, size) in enumerate(self.batches() if batches is None else batches):
            loss = self.loss_of(batch, i)
            if loss is not None:
                yield loss, size / self.batch_size

    def gradients(self, batches: Batches | None = None) -> dict[str, Tensor]:
        """The gradient of the loss, summed over batches of all ranks (`gradient_sum`); arguments as
        of `losses`."""
        return gradient_sum(self.parameters, self.losses(batches))

    def stream(self) -> Callable[[int], Batches]:
        """n -> this rank's among the next n batches of all ranks; passes follow each other without
        an end."""
        taken, current, length = 0, iter(()), self.length()

        def take(n: int) -> Batches:
            nonlocal taken, current
            for _ in range(n):
                i = taken % length
                current = self.batches() if i == 0 else current
                taken += 1
                if ranks.is_mine(i):
                    batch = next(current, None)
                    if batch is None:  # a pass that is cut short, where it is only timed
                        current = self.batches()
                        batch = next(current)
                    yield batch

        return take

    def logits(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The output of a classifier, shape (batch, classes, ...), and the classes, shape (batch,
        ...).

        Further axes are positions, each with a class of its own, as of a text's next characters.

        Raises:
            UserError: for another kind of batch or output.
        """
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            x, y = batch
            z = self.forward(x)
            if (
                isinstance(z, Tensor)
                and z.ndim >= 2
                and isinstance(y, Tensor)
                and y.shape == (len(z), *z.shape[2:])
            ):
                return z, y
        raise UserError(
            "its batches are not (inputs, classes), or its output is not (batch, classes, ...)"
        )

    @contextmanager
    def under(self, mask: Mask | None) -> Iterator[None]:
        """In here the network has the pruned weights at zero; gradients are those of all weights,
        also of pruned ones.

        Raises:
            ValueError: if the mask is of another network.
        """
        named, mask = dict(self.module.named_parameters()), mask or Mask({})
        before = {name: named[name].detach().clone() for name in mask if name in named}
        mask.apply_to_weights(self.module)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weights in before.items():
                    named[name].copy_(weights)

    def evaluating(self) -> AbstractContextManager[None]:
        """In here the network is in evaluation mode."""
        return in_evaluation_mode(self.module)


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """In here a module is in evaluation mode; each of its parts gets its mode back."""
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
    """The weighted sum over the batches of all ranks of dL/dw, of the parameters that the loss
    depends on.

    In float64, so that a mask does not depend on how the batches are divided among the ranks.

    Args:
        parameters: By name.
        losses: As `Network.losses` gives them.
        absolute: Whether the absolute value of each batch's gradient is taken before the sum.
    """
    tensors = list(parameters.values())
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in tensors]
    used = torch.zeros(len(tensors))
    for loss, weight in losses:
        gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
        found = [i for i, gradient in enumerate(gradients) if gradient is not None]
        used[found] = 1
        parts = [gradients[i].abs() if absolute else gradients[i] for i in found]
        torch._foreach_add_([sums[i] for i in found], parts, alpha=weight)  # pyright: ignore[reportPrivateImportUsage]
    used = ranks.all_reduce_sum(used)  # a rank without a batch knows of none
    named = zip(parameters, map(ranks.all_reduce_sum, sums), used.tolist(), strict=True)
    return {name: total for name, total, reached in named if reached}


def saliency(gradients: Mapping[str, Tensor], parameters: Parameters) -> dict[str, Tensor]:
    """Weight times gradient, of the weight's type: how the loss changes with an element of the
    mask."""
    return {
        name: (g * parameters[name].detach()).to(parameters[name].dtype)
        for name, g in gradients.items()
    }
