"""Rule: an update rule as a torch optimizer, and the same update for many networks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]  # of many networks, by name: each of shape (networks, parameters)


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        name: What `model.optimizer` calls it.
        hyperparameters: Its numbers beside the learning rate, as the torch optimizer's parameter
            group names them.
        state: Names of the tensors that the torch optimizer keeps for each parameter, zero before
            the first step.
        make: (parameters, learning rate, hyperparameters by name) -> torch optimizer.
        is_of: Whether a torch optimizer with one parameter group makes this update.
        hyperparameters_of: A parameter group's hyperparameters, in the order of their names.
        counts: Whether the torch optimizer counts its updates, as "step" of each parameter.
        update_: One step, in place: (weights, gradients, state, rate, hyperparameters, step).
            Weights, gradients (may be overwritten) and state have shape (networks, parameters),
            rate and each hyperparameter (networks, 1); step is each network's number of this update
            from 1, float, shape (networks, 1).
    """

    name: str
    hyperparameters: tuple[str, ...]
    state: tuple[str, ...]
    make: Callable[[Iterable[nn.Parameter], float, Mapping[str, float]], torch.optim.Optimizer]
    is_of: Callable[[torch.optim.Optimizer], bool]
    hyperparameters_of: Callable[[Mapping[str, Any]], tuple[float, ...]]
    counts: bool
    update_: Callable[[Tensor, Tensor, State, Tensor, Mapping[str, Tensor], Tensor], None]
