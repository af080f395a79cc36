"""Rule: an update rule, for one network as a torch optimizer and for many networks at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError

State = dict[str, Tensor]  # tensors of one parameter by name, each of shape (networks, ...)
# `Rule.__post_init__` replaces it; the types of the fields hold after that.
_GIVEN_LATER: Any = None


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        name: The value of `model.optimizer` that selects the rule.
        hyperparameters: Names of its numbers except the learning rate, as the torch optimizer's
            parameter group has them.
        state: Names of the tensors that the torch optimizer keeps for each parameter.
        update_: Makes one step of one parameter in place: (weights, gradients, state,
            learning_rate, hyperparameters, step). Weights and gradients (which may be overwritten)
            have the shape of the parameter after a first dimension of networks: (networks, *shape).
            So have the tensors of the state. A scalar is a vector of one element. The learning rate
            and each hyperparameter have shape (networks, 1, ..., 1), with as many dimensions as the
            weights. `step` is each network's number of this update from 1, float, of the same
            shape. Networks must not be mixed.
        make: Makes the torch optimizer: (parameters, learning rate, hyperparameters by name). By
            default a `RuleOptimizer`, which calls `update_`.
        is_of: Returns True if a torch optimizer with one parameter group makes this update. By
            default it recognizes the `RuleOptimizer` of the rule.
        hyperparameters_of: Returns the hyperparameters of a parameter group, in the order of their
            names. By default the entries of these names.
        has_step_counter: Whether the torch optimizer counts its updates, as "step" of each
            parameter. A `RuleOptimizer` does.
        elementwise: Whether each element of the weights depends only on its own gradient and state,
            so that the shape of a parameter does not matter. A stack then updates all parameters by
            one call, with shapes (networks, parameters) and (networks, 1). This is faster.
        make_state: Returns the state of a parameter before its first step: tensors by name, of the
            parameter's type and of any shape. A parameter may lack a name of `state`. By default
            the state is zero and shaped like the parameter.
        gradient_point: Returns the weights at which the gradient of a step is taken, from (weights,
            state, hyperparameters) in the shapes of `update_`. By default it is taken at the
            weights. Only the `RuleOptimizer` may make such an update.
        counts: Earlier name of `has_step_counter`.
    """

    name: str
    hyperparameters: tuple[str, ...]
    state: tuple[str, ...]
    update_: Callable[[Tensor, Tensor, State, Tensor, Mapping[str, Tensor], Tensor], None]
    make: Callable[[Iterable[nn.Parameter], float, Mapping[str, float]], torch.optim.Optimizer] = (
        _GIVEN_LATER
    )
    is_of: Callable[[torch.optim.Optimizer], bool] = _GIVEN_LATER
    hyperparameters_of: Callable[[Mapping[str, Any]], tuple[float, ...]] = _GIVEN_LATER
    has_step_counter: bool = False
    elementwise: bool = False
    make_state: Callable[[Tensor], dict[str, Tensor]] | None = None
    gradient_point: Callable[[Tensor, State, Mapping[str, Tensor]], Tensor] | None = None
    counts: InitVar[bool | None] = None

    def __post_init__(self, counts: bool | None) -> None:
        if counts is not None:
            warnings.warn(
                f"Rule {self.name!r}: 'counts' is deprecated; use 'has_step_counter'",
                FutureWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "has_step_counter", counts)
        if (self.make is None) != (self.is_of is None):
            raise TypeError(f"Rule {self.name!r} needs both make and is_of, or neither of them")
        if self.make is not None and self.gradient_point is not None:
            raise TypeError(f"Rule {self.name!r}: gradient_point needs the default make")
        if "step" in self.state:
            raise TypeError(f"Rule {self.name!r}: 'step' in state is the counter of the optimizer")
        if self.make is None:
            self._use_rule_optimizer()
        if self.hyperparameters_of is None:
            object.__setattr__(self, "hyperparameters_of", self._entries_of)

    def _use_rule_optimizer(self) -> None:
        def is_of(optimizer: torch.optim.Optimizer) -> bool:
            return isinstance(optimizer, RuleOptimizer) and optimizer.rule is self

        object.__setattr__(self, "make", partial(RuleOptimizer, self))
        object.__setattr__(self, "is_of", is_of)
        object.__setattr__(self, "has_step_counter", True)

    def _entries_of(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(group[name] for name in self.hyperparameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rule:
        # A rule does not change, and its optimizer recognizes it by identity.
        return self

    def numbers_of(self, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
        """Return the hyperparameters of an optimizer by name, one number for each group."""
        numbers: dict[str, list[float]] = {name: [] for name in self.hyperparameters}
        for group in optimizer.param_groups:
            of_group = self.hyperparameters_of(group)
            for name, number in zip(self.hyperparameters, of_group, strict=True):
                numbers[name].append(float(number))
        return numbers

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        parameter = parameter.detach()
        if self.make_state is None:
            return {name: torch.zeros_like(parameter) for name in self.state}
        if parameter.ndim == 0:
            parameter = parameter[None]
        state = self.make_state(parameter)
        unknown = sorted(state.keys() - set(self.state))
        if unknown:
            raise TypeError(f"Rule {self.name!r}: make_state returns {unknown}, not in state")
        return state

    def elementwise_state(self, dimensions: int) -> set[str]:
        """Return the names of the state whose elements belong to single weights.

        The matrices of SOAP do not, although they have the shape of a square layer.

        Args:
            dimensions: Dimensions of the parameter.
        """
        # A probe without two equal sizes has the shape of such a state alone.
        probe = torch.zeros(tuple(range(2, 2 + dimensions)))
        names = set()
        for name, tensor in self.initial_state(probe).items():
            if tensor.shape == probe.shape:
                names.add(name)
        return names

    def update_parameter(
        self,
        weights: Tensor,
        gradients: Tensor,
        state: State,
        rates: Tensor,
        hyperparameters: Mapping[str, Tensor],
        steps: Tensor,
    ) -> None:
        """Make one step of one parameter of all networks in place; arguments as in `update_`.

        Rates, hyperparameters and steps have shape (networks, 1).
        """
        weights, state, columns = _in_columns(weights, state, hyperparameters)
        shape = _shape_of_columns(weights)
        gradients = gradients.view(weights.shape)
        with kept_in_place(state) as tensors:
            self.update_(weights, gradients, tensors, rates.view(shape), columns, steps.view(shape))

    def gradient_point_of_parameter(
        self, weights: Tensor, state: State, hyperparameters: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the weights of all networks at which the gradient of one parameter is taken.

        Hyperparameters have shape (networks, 1).
        """
        if self.gradient_point is None:
            return weights
        return self.gradient_point(*_in_columns(weights, state, hyperparameters)).view(
            weights.shape
        )


@contextmanager
def kept_in_place(state: State) -> Iterator[State]:
    """Give a copy of a state for an update; then copy the tensors that it replaced into the state.

    An update may replace a tensor in place of changing it.
    """
    tensors = dict(state)
    yield tensors
    for name, tensor in state.items():
        if tensors[name] is not tensor:
            tensor.copy_(tensors[name])


def _in_columns(
    weights: Tensor, state: State, hyperparameters: Mapping[str, Tensor]
) -> tuple[Tensor, State, dict[str, Tensor]]:
    """Return weights, state and hyperparameters in the shapes of `Rule.update_`."""
    if weights.ndim == 1:
        # Reductions over no dimensions reduce all of them, and would mix the networks.
        weights = _with_elements(weights)
        state = {name: _with_elements(tensor) for name, tensor in state.items()}
    shape = _shape_of_columns(weights)
    columns = {name: numbers.view(shape) for name, numbers in hyperparameters.items()}
    return weights, state, columns


def _shape_of_columns(weights: Tensor) -> tuple[int, ...]:
    """Return the shape of a number for each network, with the dimensions of weights."""
    return (len(weights),) + (1,) * (weights.ndim - 1)


def _with_elements(tensor: Tensor) -> Tensor:
    """Return a tensor of networks, with a second dimension if it has none."""
    if tensor.ndim == 1:
        return tensor[:, None]
    return tensor


class RuleOptimizer(torch.optim.Optimizer):
    """The torch optimizer that makes the update of a rule, for one network.

    For a rule with a `gradient_point`, `step` evaluates its closure there. Without a closure, the
    gradients must come from a block of `at_gradient_point`.

    Args:
        rule: The rule.
        parameters: The parameters of the network, or groups of them.
        rate: The learning rate.
        hyperparameters: The hyperparameters of the rule by name.
    """

    def __init__(
        self,
        rule: Rule,
        parameters: Iterable[nn.Parameter],
        rate: float,
        hyperparameters: Mapping[str, float],
    ):
        self.rule = rule
        self._has_gradients_of_point = False
        super().__init__(parameters, {"lr": rate, **hyperparameters})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rule": self.rule, "_has_gradients_of_point": False}

    def elementwise_state(self, dimensions: int) -> set[str]:
        """Return the names of the state whose elements belong to single weights."""
        return self.rule.elementwise_state(dimensions)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Update the parameters that have a gradient; return the loss of the closure.

        Raises:
            ConfigError: if the rule has a `gradient_point`, and gradients come from other weights.
        """
        loss = None
        if closure is not None:
            if self._has_gradients():
                # They were added up before this call, or computed without the closure.
                raise self._error_of_point()
            with torch.enable_grad(), self.at_gradient_point():
                loss = closure()
        elif self.rule.gradient_point is not None and not self._has_gradients_of_point:
            raise self._error_of_point()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
                if self.rule.gradient_point is not None:
                    parameter.grad = None
        self._has_gradients_of_point = False
        return loss

    def _has_gradients(self) -> bool:
        """Return True if a parameter has a gradient of weights that are no `gradient_point`."""
        if self.rule.gradient_point is None:
            return False
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if self.state.get(parameter):
                    return True
                # Before its first step, most rules take the gradient at the weights.
                if not torch.equal(self._gradient_point(parameter, group), parameter):
                    return True
        return False

    def _error_of_point(self) -> ConfigError:
        allowed = (
            "another rule, because a step has several batches, a scaled loss or manual "
            "optimization. The gradients of this rule are not taken at the weights of "
            "the module"
        )
        return ConfigError("model.optimizer", self.rule.name, allowed)

    @contextmanager
    def at_gradient_point(self) -> Iterator[None]:
        """Let the parameters have the weights at which gradients are taken, within a block."""
        weights: list[tuple[nn.Parameter, Tensor]] = []
        if self.rule.gradient_point is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    # Before the first step the state is the initial one, as in a stack.
                    if self.state.get(parameter) or parameter.requires_grad:
                        weights.append((parameter, parameter.data))
                        parameter.data = self._gradient_point(parameter, group)
        try:
            yield
        finally:
            for parameter, tensor in weights:
                parameter.data = tensor
        self._has_gradients_of_point = True

    def _gradient_point(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """Return the weights at which the gradient of a parameter is taken."""
        return self.rule.gradient_point_of_parameter(
            parameter.detach()[None],
            self._tensors_of(parameter),
            self._numbers_of(parameter, group),
        )[0]

    def _tensors_of(self, parameter: nn.Parameter) -> State:
        """Return the state of a parameter as the only row of a stack."""
        state: Mapping[str, Tensor] = self.state.get(parameter, {})
        if not state:
            _refuse_16_bits(parameter, self.rule.name)
            state = self.rule.initial_state(parameter)
        tensors = {}
        for name in self.rule.state:
            if name in state:
                tensors[name] = state[name][None]
        return tensors

    def _numbers_of(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the hyperparameters of a parameter by name, each of shape (1, 1)."""
        numbers = {}
        of_group = self.rule.hyperparameters_of(group)
        for name, number in zip(self.rule.hyperparameters, of_group, strict=True):
            numbers[name] = parameter.new_tensor([[number]])
        return numbers

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Update a parameter as the only row of a stack."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "step" not in state:
            _refuse_16_bits(parameter, self.rule.name)
            state["step"] = torch.tensor(0.0)
            state.update(self.rule.initial_state(parameter))
        state["step"] += 1
        self.rule.update_parameter(
            parameter.detach()[None],
            parameter.grad.clone()[None],
            self._tensors_of(parameter),
            parameter.new_tensor([[group["lr"]]]),
            self._numbers_of(parameter, group),
            parameter.new_tensor([[float(state["step"])]]),
        )


def _refuse_16_bits(parameter: Tensor, rule: str) -> None:
    """Raise ConfigError for a parameter in which the numbers of a rule would be wrong.

    The numbers have the type of the weights. In bfloat16, a beta of 0.999 is 1, and squares of
    small rates are 0.
    """
    if torch.finfo(parameter.dtype).bits < 32:
        allowed = (
            f"another rule, or weights of 32 bits: this parameter is {parameter.dtype} "
            "(trainer.precision, or the module's own .to())"
        )
        raise ConfigError("model.optimizer", rule, allowed)


def at_gradient_point(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Let the parameters have the weights at which an optimizer takes gradients, within a block."""
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.at_gradient_point()
    return nullcontext()
