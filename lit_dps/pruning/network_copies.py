"""Networks with copies of their trained parameters, or with weights computed from parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.weight_norm import WeightNorm

from lit_dps.pruning.attributes import hidden_tensors


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
            made = _computed_weight(module, weight)
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


def _computed_weight(module: nn.Module, weight: str) -> Tensor:
    """Return a weight that a parametrization computes, without side effects."""
    training = module.training
    # In training mode, spectral norm takes a step of its power iteration.
    module.eval()
    try:
        with torch.no_grad():
            return getattr(module, weight)
    finally:
        module.train(training)


def _common_suffix(one: str, other: str) -> str:
    """Return the common last parts of two names."""
    common = []
    for a, b in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if a != b:
            break
        common.append(a)
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
