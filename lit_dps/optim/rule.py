"""Rule: an update rule as a torch optimizer, and the same update for many networks at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]  # state of many networks by name, each of shape (networks, parameters)


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        name: The value of `model.optimizer` that selects the rule.
        hyperparameters: Names of its numbers except the learning rate, as the torch optimizer's
            parameter group has them.
        state: Names of the tensors that the torch optimizer keeps for each parameter. They are zero
            before the first step.
        make: Makes the torch optimizer: (parameters, learning rate, hyperparameters by name).
        is_of: Returns True if a torch optimizer with one parameter group makes this update.
        hyperparameters_of: Returns the hyperparameters of a parameter group, in the order of their
            names.
        update_: Makes one step in place: (weights, gradients, state, learning_rate,
            hyperparameters, step). Weights, gradients (which may be overwritten) and state have
            shape (networks, parameters), the learning rate and each hyperparameter (networks, 1).
            `step` is each network's number of this update from 1, float, shape (networks, 1).
        has_step_counter: Whether the torch optimizer counts its updates, as "step" of each
            parameter.
        counts: Earlier name of `has_step_counter`.
    """

    name: str
    hyperparameters: tuple[str, ...]
    state: tuple[str, ...]
    make: Callable[[Iterable[nn.Parameter], float, Mapping[str, float]], torch.optim.Optimizer]
    is_of: Callable[[torch.optim.Optimizer], bool]
    hyperparameters_of: Callable[[Mapping[str, Any]], tuple[float, ...]]
    update_: Callable[[Tensor, Tensor, State, Tensor, Mapping[str, Tensor], Tensor], None]
    has_step_counter: bool = False
    counts: InitVar[bool | None] = None

    def __post_init__(self, counts: bool | None) -> None:
        if counts is not None:
            warnings.warn(
                f"Rule {self.name!r}: 'counts' is deprecated; use 'has_step_counter'",
                FutureWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "has_step_counter", counts)
