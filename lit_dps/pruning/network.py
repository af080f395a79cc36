"""Network: a network at initialization, as a pruner sees it; and copies of networks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.weight_norm import WeightNorm

from lit_dps.core.errors import UserError
from lit_dps.parallel import ranks
from lit_dps.pruning.mask import Mask, hidden_tensors

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

    def cross_entropy(self, batch: Any, temperature: float) -> Tensor:
        """Return the mean cross-entropy of `logits / temperature`; raises as `logits`."""
        logits, classes = self.logits(batch)
        return F.cross_entropy(logits / temperature, classes)

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

    It has the type of the weight, and at least float32: rounding to 16 bits would make ties.
    """
    scores = {}
    for name, gradient in gradients.items():
        parameter = parameters[name]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        scores[name] = (gradient * parameter.detach()).to(dtype)
    return scores


def absolute_saliency(gradients: Mapping[str, Tensor], parameters: Parameters) -> dict[str, Tensor]:
    """Return |weight times gradient|, the score of SNIP."""
    return {name: score.abs() for name, score in saliency(gradients, parameters).items()}


def copies_of(
    network: nn.Module,
    names: Iterable[str],
    held: Container[int] = (),
    keepers: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return the untrained copies of pruned parameters, such as in a momentum teacher.

    A copy has equal values and the same name in another part of the network: "teacher.0.weight" is
    a copy of "student.0.weight". Weights whose elements differ decide which parts are copies.
    Constant tensors of these parts, such as zero biases, are copies too. Tensors outside of the
    tree of modules (`hidden_tensors`), such as tensors in a list, may have any name.

    Args:
        network: The network, before it is pruned.
        names: Names of its pruned parameters.
        held: `id` of the parameters that an optimizer trains.
        keepers: Other objects that may hold copies, such as callbacks, by name.

    Returns:
        The name of the parameter by the name of its copy.
    """
    tensors: dict[str, Tensor] = dict(network.named_parameters(remove_duplicate=False))
    tensors.update(network.named_buffers())
    pruned = {name: tensors[name] for name in names}
    pruned_ids = {id(tensor) for tensor in pruned.values()}
    hidden = hidden_tensors(network, keepers)
    for name, tensor in hidden.items():
        tensors.setdefault(name, tensor)
    candidates = {}
    for name, tensor in tensors.items():
        if id(tensor) not in pruned_ids and id(tensor) not in held:
            candidates[name] = tensor
    equal = _equal_tensors(candidates, pruned, hidden)
    copied_parts = set()
    for name, parameter in equal:
        if _has_different_elements(candidates[name]):
            copied_parts.add(_parts(name, parameter))
    copies = {}
    for name, parameter in equal:
        if _parts(name, parameter) in copied_parts:
            copies[name] = parameter
    return copies


def _equal_tensors(
    candidates: Mapping[str, Tensor], pruned: Mapping[str, Tensor], hidden: Container[str]
) -> list[tuple[str, str]]:
    """Return the pairs of a candidate and a pruned parameter with equal values.

    Args:
        candidates: Tensors that may be copies.
        pruned: The pruned parameters.
        hidden: Names of candidates that may have any name. The others end as their parameter does.
    """
    by_shape: dict[torch.Size, list[str]] = defaultdict(list)
    for name, tensor in pruned.items():
        by_shape[tensor.shape].append(name)
    equal = []
    for name, tensor in candidates.items():
        for parameter in by_shape[tensor.shape]:
            is_hidden_weight = name in hidden and _has_different_elements(tensor)
            may_be_copy = is_hidden_weight or _common_suffix(name, parameter)
            if may_be_copy and same(tensor, pruned[parameter]):
                equal.append((name, parameter))
    return equal


def why_unprunable(network: nn.Module) -> str | None:
    """Return which layer prevents pruning by zeros in the parameters; None if none does."""
    for name, module in network.named_modules():
        if any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()):
            return f"{name} has weight_norm: where a row is pruned whole it divides 0 by 0"
        if any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            return (
                f"the parameters of {name} have no shape before the first batch: make them in "
                "configure_model()"
            )
    return None


def why_pruned_weights_return(network: nn.Module, mask: Mapping[str, Tensor]) -> str | None:
    """Return why pruned parameters do not make pruned weights, in layers with parametrizations.

    Args:
        network: The network, with pruned parameters.
        mask: The mask of its parameters.

    Returns:
        The reason; None if the weights of all parametrized layers are finite, and zero where they
        are pruned.
    """
    for name, module in network.named_modules():
        if not is_parametrized(module):
            continue
        parametrizations: Any = module.parametrizations
        for weight, chain in parametrizations.items():
            prefix = f"{name}.parametrizations.{weight}.".removeprefix(".")
            pruned = [key for key in mask if key.startswith(prefix)]
            if not pruned:
                continue
            kind = type(chain[0]).__name__.removeprefix("_")
            keep = mask[pruned[0]]
            # In training mode, spectral norm takes a step of its power iteration.
            with in_evaluation_mode(module), torch.no_grad():
                made = getattr(module, weight)
            if len(pruned) > 1 or made.shape != keep.shape or not made.isfinite().all():
                return (
                    f"{name}.{weight} is made from its parameters by {kind}, which pruned "
                    "parameters defeat"
                )
            if made[~keep.to(made.device)].any():
                return (
                    f"{name}.{weight} is made by {kind} and is not zero where its parameter is "
                    "pruned"
                )
    return None


def _common_suffix(one: str, other: str) -> str:
    """Return the common last parts of two names."""
    common = commonprefix([one.split(".")[::-1], other.split(".")[::-1]])
    return ".".join(reversed(common))


def _parts(one: str, other: str) -> tuple[str, str]:
    """Return the beginnings of two names, without their common last parts."""
    suffix = _common_suffix(one, other)
    return one.removesuffix(suffix), other.removesuffix(suffix)


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have equal shapes and values, on any devices."""
    return one.shape == other.shape and torch.equal(one.detach(), other.detach().to(one))


def _has_different_elements(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())
