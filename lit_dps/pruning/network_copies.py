"""Networks that hold more than what an optimizer trains: copies of it, and weights that are made
from parameters."""

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
    """Tensors of a network that are copies of pruned parameters and are not trained, such as a
    momentum teacher's.

    A copy stands at the same place of another part ("teacher.0.weight" to "student.0.weight"), with
    equal values. Which parts are copies is told by weights whose elements differ; their constant
    tensors, zero biases say, follow. Tensors that are kept outside of the tree of modules
    (`hidden_tensors`), in a list say, may stand anywhere.

    Args:
        network: The network, before it is pruned.
        names: Names of its pruned parameters.
        held: `id` of the parameters that an optimizer trains.
        keepers: Other objects that may hold copies, such as callbacks, by name.

    Returns:
        Name of the copy -> name of the parameter.
    """
    state = {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers()),
    }
    pruned = {name: state[name] for name in names}
    places = {id(tensor) for tensor in pruned.values()}
    hidden = hidden_tensors(network, keepers)
    state |= {name: tensor for name, tensor in hidden.items() if name not in state}
    others = {name: t for name, t in state.items() if id(t) not in places and id(t) not in held}
    alike = defaultdict(list)
    for name, tensor in pruned.items():
        alike[tensor.shape].append(name)
    equal = [
        (o, p)
        for o, other in others.items()
        for p in alike[other.shape]
        if (_suffix(o, p) or o in hidden and _differs(other)) and same(other, pruned[p])
    ]
    parts = {_parts(o, p) for o, p in equal if _differs(others[o])}
    return {o: p for o, p in equal if _parts(o, p) in parts}


def why_unprunable(network: nn.Module) -> str | None:
    """Why a network cannot be pruned by zeros in its parameters, as far as its layers tell; None if
    it can be."""
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
    """Why zeros in the parameters do not make zeros in the weights that are made from them
    (parametrizations).

    Args:
        network: The network, its parameters pruned.
        mask: Of its parameters, by name.

    Returns:
        The reason; None if the weights of all parametrized layers are finite, and zero where they
        are pruned.
    """
    for name, module in network.named_modules():
        if not is_parametrized(module):
            continue
        parametrizations: Any = module.parametrizations
        for weight, chain in parametrizations.items():
            prefix = f"{name}.parametrizations.{weight}." if name else f"parametrizations.{weight}."
            pruned = [key for key in mask if key.startswith(prefix)]
            if not pruned:
                continue
            kind = type(chain[0]).__name__.removeprefix("_")
            keep, made = mask[pruned[0]], _made(module, weight)
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


def _made(module: nn.Module, weight: str) -> Tensor:
    training = module.training
    module.eval()  # spectral norm takes a step of its power iteration in training mode
    try:
        with torch.no_grad():
            return getattr(module, weight)
    finally:
        module.train(training)


def _suffix(one: str, other: str) -> str:
    """The common last parts of two names."""
    common = []
    for a, b in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if a != b:
            break
        common.append(a)
    return ".".join(reversed(common))


def _parts(one: str, other: str) -> tuple[str, str]:
    """What two names begin with before their common last parts."""
    suffix = _suffix(one, other)
    return one.removesuffix(suffix), other.removesuffix(suffix)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one shape and equal values, wherever they are."""
    return one.shape == other.shape and torch.equal(one.detach(), other.detach().to(one))


def _differs(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())
