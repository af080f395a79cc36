"""The parameters and the settings in the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, in its order."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def trained_parameters(optimizer: Any) -> list[Tensor]:
    """Return the parameters that an optimizer trains, in its order."""
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group: all entries except its parameters."""
    return {key: value for key, value in group.items() if key != "params"}
