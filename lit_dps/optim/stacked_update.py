"""StackedUpdate: the update of a rule for many networks, whose tensors are flat rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lit_dps.optim.rule import Rule, State, kept_in_place


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
        groups: Names of the parameters in each group of the optimizer, which has its own rate and
            hyperparameters. By default all parameters are one group.

    Attributes:
        weights: The places of the parameters in a flat tensor of weights or gradients. Parameters
            of a group follow one another.
        state: The places of the tensors of the state, by name.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: Mapping[str, Tensor],
        groups: Sequence[Sequence[str]] | None = None,
    ):
        self.rule = rule
        self._groups = [list(parameters)]
        if groups is not None and len(groups) > 1:
            self._groups = [list(names) for names in groups]
        grouped = {}
        for names in self._groups:
            for name in names:
                grouped[name] = parameters[name]
        self.weights = FlatLayout({name: tensor.shape for name, tensor in grouped.items()})
        shapes: dict[str, dict[str, torch.Size]] = {}
        for name, parameter in grouped.items():
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
            rates, hyperparameters: Shape (networks, groups).
            steps: Shape (networks, 1).
        """
        if self.rule.elementwise and len(self._groups) == 1:
            self.rule.update_(weights, gradients, state, rates, hyperparameters, steps)
            return
        start = 0
        for group, names in enumerate(self._groups):
            column = slice(group, group + 1)
            numbers = {key: each[:, column] for key, each in hyperparameters.items()}
            if self.rule.elementwise:
                size = sum(self.weights.shapes[name].numel() for name in names)
                part = slice(start, start + size)
                of_group = {key: tensor[:, part] for key, tensor in state.items()}
                with kept_in_place(of_group) as tensors:
                    self.rule.update_(
                        weights[:, part],
                        gradients[:, part],
                        tensors,
                        rates[:, column],
                        numbers,
                        steps,
                    )
                start += size
                continue
            weight_parts = self.weights.split(weights)
            gradient_parts = self.weights.split(gradients)
            for name, of_parameter in self._states_of(names, state):
                self.rule.update_parameter(
                    weight_parts[name],
                    gradient_parts[name],
                    of_parameter,
                    rates[:, column],
                    numbers,
                    steps,
                )

    def gradient_points(
        self, weights: Tensor, state: State, hyperparameters: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the weights of all networks at which gradients are taken; arguments as in a step.

        These are the weights themselves, unless the rule has a `gradient_point`.
        """
        if self.rule.gradient_point is None:
            return weights
        weight_parts = self.weights.split(weights)
        points = []
        for group, names in enumerate(self._groups):
            column = slice(group, group + 1)
            numbers = {key: each[:, column] for key, each in hyperparameters.items()}
            for name, of_parameter in self._states_of(names, state):
                point = self.rule.gradient_point_of_parameter(
                    weight_parts[name], of_parameter, numbers
                )
                points.append(point.reshape(len(point), -1))
        return torch.cat(points, dim=1)

    def _states_of(self, names: Sequence[str], state: State) -> Iterator[tuple[str, State]]:
        """Yield the name and the state of each parameter of a group."""
        state_parts = {key: layout.split(state[key]) for key, layout in self.state.items()}
        for name in names:
            of_parameter = {}
            for key, parts in state_parts.items():
                if name in parts:
                    of_parameter[key] = parts[name]
            yield name, of_parameter
