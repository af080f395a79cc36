"""check_rule: the conformance test of an update rule."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_dps.optim import Rule, StackedUpdate, State
from lit_dps.optim.rule import at_gradient_point
from lit_dps.testing.failure import require
from lit_dps.training.hidden_state import preserve_rng_state

Shapes = Mapping[str, tuple[int, ...]]
Gradients = list[dict[str, Tensor]]  # of each step, by parameter

SHAPES: Shapes = {"matrix": (4, 3), "filter": (2, 3, 2, 2), "bias": (4,), "scalar": ()}
# Values that suit the hyperparameters of `ImageClassifier`.
NUMBERS = {
    "momentum": 0.9,
    "beta1": 0.8,
    "beta2": 0.95,
    "epsilon": 1e-6,
    "weight_decay": 0.05,
    "refresh_steps": 2,
}
OTHER_NUMBER = 0.5  # of a hyperparameter with another name
# The networks of a stack have other rates and hyperparameters, because rows must not be mixed.
RATES = (0.1, 0.02, 0.05)
SHARES = (1.0, 0.9, 0.5)  # of the hyperparameters
STEPS = 8
SAVED_AFTER = 3
# Relative to the largest weight. Sums of a matrix product are rounded in another order in a stack.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


class _Network(NamedTuple):
    """A network with its gradients, learning rate and hyperparameters."""

    parameters: dict[str, nn.Parameter]
    gradients: Gradients
    rate: float
    numbers: dict[str, float]


def check_rule(
    rule: Rule,
    hyperparameters: Mapping[str, float] | None = None,
    shapes: Shapes | None = None,
    quick: bool = False,
) -> None:
    """Raise ConformanceError if an update rule does not do what lit_dps requires.

    - The optimizer of the rule is recognized, with its hyperparameters.
    - Two runs from the same state are equal to the bit: there is no hidden state.
    - A run that is saved and resumed equals an uninterrupted one to the bit.
    - Parameters without a gradient stay. A parameter of zeros with a gradient of zeros stays
      finite, as in a layer that is pruned completely.
    - Weights and state keep their type, float32 or float64.
    - Not in the quick part: A network alone equals its row of a stack, with rates that change. A
      step at a rate of 0 changes no weight.

    Args:
        rule: The rule.
        hyperparameters: Values of its hyperparameters; by default values that suit those of
            `ImageClassifier`, and 0.5 for others.
        shapes: Shapes of the parameters by name, for an optimizer that takes some shapes only.
        quick: Whether to run the quick part only.
    """
    numbers = {}
    for name in rule.hyperparameters:
        numbers[name] = (hyperparameters or NUMBERS).get(name, OTHER_NUMBER)
    shapes = shapes or SHAPES
    with preserve_rng_state(seed=0):
        _check_recognized(rule, _networks(shapes, numbers, torch.float64)[0])
        for dtype in (torch.float64, torch.float32):
            _check_repeated(rule, shapes, numbers, dtype)
            _check_resumed(rule, shapes, numbers, dtype)
        _check_frozen(rule, shapes, numbers)
        _check_zeros(rule, shapes, numbers)
        if quick:
            return
        for dtype in (torch.float64, torch.float32):
            _check_stack(rule, shapes, numbers, dtype)
        _check_rate_of_zero(rule, shapes, numbers)


def _networks(shapes: Shapes, numbers: Mapping[str, float], dtype: torch.dtype) -> list[_Network]:
    """Return three networks that differ in weights, gradients, rate and hyperparameters."""
    networks = []
    generator = torch.Generator().manual_seed(1)

    def draw() -> dict[str, Tensor]:
        tensors = {}
        for name, shape in shapes.items():
            tensors[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return tensors

    for rate, share in zip(RATES, SHARES, strict=True):
        parameters = {name: nn.Parameter(tensor) for name, tensor in draw().items()}
        gradients = [draw() for _ in range(STEPS)]
        of_network = {name: share * number for name, number in numbers.items()}
        networks.append(_Network(parameters, gradients, rate, of_network))
    return networks


def _make(rule: Rule, network: _Network) -> torch.optim.Optimizer:
    return rule.make(list(network.parameters.values()), network.rate, network.numbers)


def _rate_at(network: _Network, step: int) -> float:
    """Return the learning rate of a schedule, for step number `step` from 0."""
    return network.rate / (1 + step)


def _train(optimizer: torch.optim.Optimizer, network: _Network, steps: Sequence[int]) -> None:
    """Take these steps of a network."""
    for step in steps:
        with at_gradient_point(optimizer):
            for name, gradient in network.gradients[step].items():
                network.parameters[name].grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = _rate_at(network, step)
        optimizer.step()


def _check_recognized(rule: Rule, network: _Network) -> None:
    optimizer = _make(rule, network)
    kind = type(optimizer).__name__
    require(
        "recognized",
        rule.is_of(optimizer),
        f"is_of does not recognize the {kind} that make returns",
        "True",
        f"hyperparameters {network.numbers}",
    )
    reported = rule.hyperparameters_of(optimizer.param_groups[0])
    require(
        "hyperparameters",
        list(reported) == list(network.numbers.values()),
        f"hyperparameters_of returns {tuple(reported)}",
        f"{tuple(network.numbers.values())}, in the order of Rule.hyperparameters",
        f"the parameter group of the {kind} that make returns",
    )


def _check_repeated(
    rule: Rule, shapes: Shapes, numbers: Mapping[str, float], dtype: torch.dtype
) -> None:
    """Check that two runs from the same state are equal, and keep the type."""
    first, second = (_networks(shapes, numbers, dtype)[0] for _ in range(2))
    for network in (first, second):
        optimizer = _make(rule, network)
        with preserve_rng_state(seed=0):
            _train(optimizer, network, range(STEPS))
        _check_state_type(rule, optimizer, network, dtype)
    for name, parameter in first.parameters.items():
        require(
            "type",
            parameter.dtype == dtype,
            f"an update changes the type of weights to {parameter.dtype}",
            str(dtype),
            f"parameter of shape {tuple(shapes[name])}",
        )
        require(
            "repeated",
            _same(parameter, second.parameters[name]),
            "two runs from the same weights and gradients differ",
            "equal weights to the bit; keep all state in Rule.state",
            f"parameter of shape {tuple(shapes[name])}, {dtype}, {STEPS} steps",
        )


def _check_state_type(
    rule: Rule, optimizer: torch.optim.Optimizer, network: _Network, dtype: torch.dtype
) -> None:
    """Check that the state has the type of the weights, to which torch converts a saved state."""
    for parameter in network.parameters.values():
        for key in rule.state:
            value = optimizer.state[parameter].get(key)
            kind = value.dtype if isinstance(value, Tensor) else dtype
            require(
                "state_type",
                kind == dtype,
                f"state {key!r} is {kind}",
                f"{dtype} as the parameter, such as parameter.new_zeros(...) in make_state",
                f"parameter of shape {tuple(parameter.shape)}",
            )


def _check_resumed(
    rule: Rule, shapes: Shapes, numbers: Mapping[str, float], dtype: torch.dtype
) -> None:
    """Check that a run that is saved and resumed equals an uninterrupted one."""
    unbroken, resumed = (_networks(shapes, numbers, dtype)[0] for _ in range(2))
    with preserve_rng_state(seed=0):
        _train(_make(rule, unbroken), unbroken, range(STEPS))
    with preserve_rng_state(seed=0):
        optimizer = _make(rule, resumed)
        _train(optimizer, resumed, range(SAVED_AFTER))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer = _make(rule, resumed)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        _train(optimizer, resumed, range(SAVED_AFTER, STEPS))
    for name, parameter in unbroken.parameters.items():
        require(
            "resumed",
            _same(parameter, resumed.parameters[name]),
            f"a run resumed after step {SAVED_AFTER} differs from an uninterrupted run",
            "equal weights to the bit; the optimizer's state_dict has all of its state",
            f"parameter of shape {tuple(shapes[name])}, {dtype}, {STEPS} steps",
        )


def _same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal to the bit, also where they are undefined."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


class _Stack(NamedTuple):
    """The flat tensors of a stack of networks."""

    update: StackedUpdate
    weights: Tensor
    state: State


def _stack(rule: Rule, networks: Sequence[_Network]) -> _Stack:
    update = StackedUpdate(rule, networks[0].parameters)
    weights = []
    states = []
    for network in networks:
        weights.append(update.weights.flatten(network.parameters).detach())
        states.append(update.flat_state(network.parameters, {}))
    state = {}
    for key in update.state:
        state[key] = torch.stack([each[key] for each in states])
    return _Stack(update, torch.stack(weights), state)


def _hyperparameters_of_rows(
    rule: Rule, stack: _Stack, networks: Sequence[_Network]
) -> dict[str, Tensor]:
    """Return the hyperparameters of a stack by name, each of shape (networks, 1)."""
    hyperparameters = {}
    for name in rule.hyperparameters:
        numbers = [[network.numbers[name]] for network in networks]
        hyperparameters[name] = stack.weights.new_tensor(numbers)
    return hyperparameters


def _train_stack(
    rule: Rule, stack: _Stack, networks: Sequence[_Network], steps: Sequence[int]
) -> None:
    """Take these steps of all networks of a stack."""
    hyperparameters = _hyperparameters_of_rows(rule, stack, networks)
    for step in steps:
        gradients = []
        rates = []
        for network in networks:
            gradients.append(stack.update.weights.flatten(network.gradients[step]))
            rates.append([_rate_at(network, step)])
        stack.update(
            stack.weights,
            torch.stack(gradients),
            stack.state,
            stack.weights.new_tensor(rates),
            hyperparameters,
            stack.weights.new_full((len(networks), 1), step + 1.0),
        )


def _check_stack(
    rule: Rule, shapes: Shapes, numbers: Mapping[str, float], dtype: torch.dtype
) -> None:
    """Check that each network alone equals its row of a stack."""
    networks = _networks(shapes, numbers, dtype)
    stack = _stack(rule, networks)
    _train_stack(rule, stack, networks, range(STEPS))
    points = stack.update.gradient_points(
        stack.weights, stack.state, _hyperparameters_of_rows(rule, stack, networks)
    )
    for row, network in enumerate(networks):
        optimizer = _make(rule, network)
        _train(optimizer, network, range(STEPS))
        with at_gradient_point(optimizer):
            for name, ours in stack.update.weights.split(points[row]).items():
                parameter = network.parameters[name]
                _require_close(ours, parameter, "points of gradients", shapes[name], row)
        for name, ours in stack.update.weights.split(stack.weights[row]).items():
            _require_close(ours, network.parameters[name], "weights", shapes[name], row)
        for key, layout in stack.update.state.items():
            for name, ours in layout.split(stack.state[key][row]).items():
                theirs = optimizer.state[network.parameters[name]].get(key)
                require(
                    "state",
                    isinstance(theirs, Tensor) and theirs.shape == ours.shape,
                    f"the optimizer keeps no state {key!r} of shape {tuple(ours.shape)}",
                    "the tensors that Rule.state names",
                    f"parameter of shape {tuple(shapes[name])}",
                )
                _require_close(ours, theirs, f"state {key!r}", shapes[name], row)


def _require_close(
    ours: Tensor, theirs: Tensor, what: str, shape: tuple[int, ...], row: int
) -> None:
    """Raise ConformanceError if a row of a stack differs from its network alone."""
    difference = float((ours - theirs.detach()).abs().max())
    largest = float(theirs.detach().abs().max())
    tolerance = TOLERANCE[ours.dtype] * max(largest, 1.0)
    require(
        "stacked",
        difference <= tolerance,
        f"{what} of a network in a stack differ by {difference:.3g} from the network alone",
        f"at most {tolerance:.3g}; update_ must not mix networks, and must equal the optimizer",
        f"parameter of shape {tuple(shape)}, {ours.dtype}, network {row + 1} of {len(RATES)}, "
        f"{STEPS} steps at falling rates",
    )


def _check_frozen(rule: Rule, shapes: Shapes, numbers: Mapping[str, float]) -> None:
    """Check that parameters without a gradient stay."""
    network = _networks(shapes, numbers, torch.float64)[0]
    frozen = next(iter(shapes))
    before = network.parameters[frozen].detach().clone()
    for gradients in network.gradients:
        del gradients[frozen]
    _train(_make(rule, network), network, range(STEPS))
    require(
        "frozen",
        torch.equal(network.parameters[frozen], before),
        "the optimizer moves a parameter without a gradient",
        "it stays, as a frozen parameter",
        f"parameter of shape {tuple(shapes[frozen])} whose grad is None",
    )


def _check_zeros(rule: Rule, shapes: Shapes, numbers: Mapping[str, float]) -> None:
    """Check that zeros with gradients of zero stay finite."""
    network = _networks(shapes, numbers, torch.float64)[0]
    for name, parameter in network.parameters.items():
        parameter.detach().zero_()
        for gradients in network.gradients:
            gradients[name].zero_()
    _train(_make(rule, network), network, range(STEPS))
    for name, parameter in network.parameters.items():
        require(
            "zeros",
            bool(parameter.isfinite().all()),
            "weights of 0 with gradients of 0 become infinite or undefined",
            "finite weights, as of a layer that is pruned completely",
            f"parameter of shape {tuple(shapes[name])} of zeros",
        )


def _check_rate_of_zero(rule: Rule, shapes: Shapes, numbers: Mapping[str, float]) -> None:
    """Check that a step at a rate of 0 changes no weight, as in a stack before a delay is over."""
    network = _networks(shapes, numbers, torch.float64)[0]._replace(rate=0.0)
    before = {name: each.detach().clone() for name, each in network.parameters.items()}
    stack = _stack(rule, [network])
    _train_stack(rule, stack, [network], range(1))
    for name, weights in stack.update.weights.split(stack.weights[0]).items():
        require(
            "rate",
            torch.equal(weights, before[name]),
            "a step at a learning rate of 0 changes weights",
            "equal weights; the update is proportional to the learning rate",
            f"parameter of shape {tuple(shapes[name])}",
        )
