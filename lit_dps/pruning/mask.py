"""Mask: which elements of a network's parameters are kept; and where an object keeps parameters.

`walk_attributes` walks through the attributes of objects at any depth. For example, `self.teacher =
[network]` hides the parameters of a network in a list, where `module.parameters()` does not see
them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lit_dps.core.trial_config import Biases

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# Names of classes: LlamaRMSNorm, LayerNorm2d, FilterResponseNormalization.
_NORM = re.compile("norm(alization)?[0-9]*d?$", re.IGNORECASE)
# Names of biases: bias, in_proj_bias, bias_hh_l0, b, b1, b_ih.
_BIAS = re.compile("bias|^b[0-9_]*$|^b_", re.IGNORECASE)

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
MAX_LENGTH = 1000  # a longer list or dict contains examples, not settings
MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_IGNORED = (Trainer, type, ModuleType, FunctionType)
_LEAVES = (Tensor, np.ndarray, *GENERATORS)


class ElementCounts(NamedTuple):
    """Numbers of elements of a mask.

    Attributes:
        kept: Elements that are not pruned.
        total: All elements.
    """

    kept: int
    total: int


class Mask(Mapping[str, Tensor]):
    """The kept elements of each parameter: a bool tensor by name, True for a kept element.

    Parameters without a mask are not pruned. Masking the weights once and the gradients at every
    step equals masking in the forward pass, also with momentum and weight decay. It needs no
    wrapper around the network.

    Args:
        tensors: The mask of each parameter.
        by_place: Number of elements that are kept with a score of 0, by their position alone.
        weights: Weights and buffers that training begins with, by name; None for those of the
            module.

    Raises:
        ValueError: if a value is not a bool tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        by_place: int = 0,
        weights: Mapping[str, Tensor] | None = None,
    ):
        for name, tensor in tensors.items():
            if tensor.dtype is not torch.bool:
                raise ValueError(f"mask of {name} must be bool, not {tensor.dtype}")
        self._tensors = dict(tensors)
        self.by_place = by_place
        self.weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def count(self) -> ElementCounts:
        """Return the numbers of kept and of all elements of the mask."""
        counts = self.kept().values()
        return ElementCounts(sum(kept for kept, _ in counts), sum(total for _, total in counts))

    def kept(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of kept and of all elements of each tensor."""
        return {name: (int(tensor.sum()), tensor.numel()) for name, tensor in self.items()}

    @property
    def sparsity(self) -> float:
        """The pruned share of the elements of the masked tensors."""
        counts = self.count()
        return 1 - counts.kept / counts.total

    def apply_to_weights(self, network: nn.Module) -> None:
        """Set the pruned weights to zero in place.

        Raises:
            ValueError: if the network lacks a masked parameter, or has it in another shape.
        """
        parameters = dict(network.named_parameters())
        for name, tensor in self.items():
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise ValueError(
                    f"the mask's {name} {tuple(tensor.shape)} is no parameter of this network"
                )
            with torch.no_grad():
                parameters[name].mul_(tensor.to(parameters[name].device))


def prunable(
    network: nn.Module,
    biases: Biases = "paper",
    exclude: Sequence[str] = (),
    held: Container[int] | None = None,
) -> dict[str, nn.Parameter]:
    """Return the parameters that a pruner scores: weights, then biases, in the network's order.

    Weights are the trainable parameters with two or more dimensions. Biases are those with one
    dimension and the name of a bias. Other parameters with one dimension are scales: the slope of a
    PReLU, a temperature, a layer scale. Scales are never pruned, and neither is any parameter of a
    normalization layer. These are the layers of torch, those with such a class name, and those with
    scales and without weights.

    Args:
        network: The network.
        biases: "paper" scores the biases as the authors' code does. Their SNIP scores are exactly 0
            at initialization, where biases are zero. So all biases are pruned at any sparsity above
            0 and stay zero. "keep" leaves them dense.
        exclude: Shell patterns of the names of unpruned parameters: "head.*", "*.cls_token".
        held: `id` of the parameters that an optimizer trains; by default all that are trainable.
    """
    weights, bias_parameters = {}, {}
    seen = set()
    for prefix, module in network.named_modules():
        if _is_normalization(module):
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            is_trained = parameter.requires_grad and (held is None or id(parameter) in held)
            is_excluded = any(fnmatchcase(name, pattern) for pattern in exclude)
            if not is_trained or is_excluded or id(parameter) in seen:
                continue
            seen.add(id(parameter))  # a tied parameter has its first name
            if parameter.ndim >= 2:
                weights[name] = parameter
            elif parameter.ndim == 1 and _BIAS.search(name.rsplit(".", 1)[-1]):
                bias_parameters[name] = parameter
    if biases == "paper":
        return weights | bias_parameters
    return weights


def _is_normalization(module: nn.Module) -> bool:
    """Return True if a module is a normalization layer, see `prunable`."""
    if isinstance(module, _NORMS) or _NORM.search(type(module).__name__):
        return True
    has_scales = False
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim > 1:
            return False
        if parameter.ndim == 1 and not _BIAS.search(name):
            has_scales = True
    return has_scales


def multiply(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Multiply each first tensor by the second one, in place.

    A mask of numbers costs less than one of bools.
    """
    tensors: list[Tensor] = []
    factors: list[Tensor] = []
    for tensor, factor in pairs:
        tensors.append(tensor)
        factors.append(factor)
    if tensors:
        torch._foreach_mul_(tensors, factors)  # pyright: ignore[reportPrivateImportUsage]


def walk_attributes(*owners: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values that objects keep as attributes, in lists and dicts, at any depth.

    Values are numbers, texts, tensors (also parameters and buffers), arrays, generators and all
    other objects without attributes. Trainers, classes, modules of Python and functions are
    skipped. Objects come breadth first, each once.

    Yields:
        The path of names to a value, such as ("teacher", 0, "weight"), and the value.
    """
    queue: list[tuple[tuple[Any, ...], Any]] = [((), owner) for owner in owners]
    seen: set[int] = set()
    for path, item in queue:  # the queue grows meanwhile
        if id(item) in seen or isinstance(item, _IGNORED):
            continue
        seen.add(id(item))
        parts = _parts_of(item)
        if parts is None:
            yield path, item
            continue
        for name, value in parts.items():
            queue.append(((*path, name), value))


def _parts_of(item: Any) -> dict[Any, Any] | None:
    """Return the parts of a list, a dict or an object by name; None if it has no parts."""
    if isinstance(item, (list, tuple, dict)):
        if len(item) > MAX_LENGTH:
            return {}
        if isinstance(item, dict):
            return item
        return dict(enumerate(item))
    if isinstance(item, _LEAVES) or not hasattr(item, "__dict__"):
        return None
    return attributes_of(item)


def attributes_of(item: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, with the parameters and parts of a module."""
    attributes = dict(vars(item))
    if isinstance(item, nn.Module):
        for part in MODULE_PARTS:
            attributes.update(attributes.pop(part, {}))
    return attributes


def hidden_tensors(
    network: nn.Module, keepers: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Return tensors of real numbers that a network keeps beside parameters and buffers.

    Args:
        network: The network.
        keepers: Further objects that may keep tensors, by the name that their paths begin with.

    Returns:
        The tensors by path, such as `teacher.0.weight`.
    """
    registered = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
    hidden = {}
    for path, value in walk_attributes(network, keepers or {}):
        is_hidden = isinstance(value, Tensor) and id(value) not in registered
        if is_hidden and value.is_floating_point():
            hidden[".".join(map(str, path))] = value
    return hidden
