"""StackedUpdate: the update of a rule for many networks, whose tensors are flat rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_dps.optim.rule import Rule, State


class FlatLayout:
    """The places of named tensors in one flat tensor.

    Args:
        shapes: The shape of each tensor, in their order.
    """

    def __init__(self, shapes: Mapping[str, torch.Size]):
        self.shapes = dict(shapes)
        self._sizes = [shape.numel() for shape in self.shapes.values()]
        self.size = sum(self._sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the flat tensor of one network, shape (size,)."""
        return torch.cat([tensors[name].flatten() for name in self.shapes])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of the tensors in a flat tensor, shape (size,) or (rows, size)."""
        parts = flat.split(self._sizes, dim=-1)
        by_name = {}
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            by_name[name] = part.view((*part.shape[:-1], *shape))
        return by_name


class StackedUpdate:
    """The update of a rule for many networks of one architecture at once.

    Args:
        rule: The rule.
        parameters: The trained parameters of one of the networks, by name.

    Attributes:
        weights: The places of the parameters in a flat tensor of weights or gradients.
        state: The places of the tensors of the state, by name.
    """

    def __init__(self, rule: Rule, parameters: Mapping[str, Tensor]):
        self.rule = rule
        self.weights = FlatLayout({name: tensor.shape for name, tensor in parameters.items()})
        shapes: dict[str, dict[str, torch.Size]] = {}
        for name, parameter in parameters.items():
            for key, tensor in rule.initial_state(parameter).items():
                shapes.setdefault(key, {})[name] = tensor.shape
        self.state = {key: FlatLayout(shapes[key]) for key in shapes}

    def flat_state(
        self, parameters: Mapping[str, Tensor], optimizer_state: Mapping[Tensor, Mapping]
    ) -> State:
        """Return the state that an optimizer has of a network, flat, by name.

        Args:
            parameters: The trained parameters of the network, by name.
            optimizer_state: The state of its optimizer by parameter. Where it lacks a tensor, the
                parameter has its initial state.
        """
        tensors: dict[str, dict[str, Tensor]] = {key: {} for key in self.state}
        for name, parameter in parameters.items():
            saved = optimizer_state.get(parameter, {})
            for key, tensor in self.rule.initial_state(parameter).items():
                tensors[key][name] = saved.get(key, tensor)
        return {key: layout.flatten(tensors[key]) for key, layout in self.state.items()}

    def __call__(
        self,
        weights: Tensor,
        gradients: Tensor,
        state: State,
        rates: Tensor,
        hyperparameters: Mapping[str, Tensor],
        steps: Tensor,
    ) -> None:
        """Make one step of all networks in place.

        Args:
            weights, gradients: Shape (networks, parameters). Gradients may be overwritten.
            state: By name, each of shape (networks, size).
            rates, hyperparameters, steps: Shape (networks, 1).
        """
        if self.rule.elementwise:
            self.rule.update_(weights, gradients, state, rates, hyperparameters, steps)
            return
        state_parts = {key: layout.split(state[key]) for key, layout in self.state.items()}
        gradient_parts = self.weights.split(gradients)
        for name, part in self.weights.split(weights).items():
            of_parameter = {}
            for key, parts in state_parts.items():
                if name in parts:
                    of_parameter[key] = parts[name]
            self.rule.update_parameter(
                part, gradient_parts[name], of_parameter, rates, hyperparameters, steps
            )
