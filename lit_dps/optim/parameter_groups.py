"""The parameters and the settings in the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, in its order."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def trained_parameters(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer trains, in its order."""
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]


def trained_ids(optimizers: Iterable[Any]) -> set[int]:
    """Return the `id` of each parameter that an optimizer trains."""
    ids = set()
    for optimizer in optimizers:
        ids.update(map(id, trained_parameters(optimizer)))
    return ids


def names_of_groups(optimizer: Any, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer.

    Args:
        optimizer: The optimizer.
        parameters: Parameters by name. The groups may have others, which have no name here.
    """
    names_by_id = {id(parameter): name for name, parameter in parameters.items()}
    groups = []
    for group in optimizer.param_groups:
        names = [names_by_id[id(each)] for each in group["params"] if id(each) in names_by_id]
        groups.append(names)
    return groups


def trained_by_name(module: Any) -> dict[str, Parameter]:
    """Return the parameters of a module that require gradients, by name."""
    return {name: each for name, each in module.named_parameters() if each.requires_grad}


def grouping_of(module: Any, optimizer: Any) -> list[list[str]]:
    """Return the names of a module's trained parameters in each group of its optimizer."""
    return names_of_groups(optimizer, trained_by_name(module))


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group: all entries except its parameters."""
    return {key: value for key, value in group.items() if key != "params"}
