"""Checks that a stack updates weights as the optimizer and the schedule of a module do.

A stack trains several trials at once by the update of a `Rule`; a single trial is trained by its
optimizer. Trials of a cell are comparable only if both updates are equal. So both take some steps
in double precision before trials are stacked.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_dps.optim import OURS, Rule, StackedUpdate, State, rule_of
from lit_dps.optim.parameter_groups import names_of_groups, trained_by_name, trained_parameters
from lit_dps.optim.rule import at_gradient_point

# Some optimizers synchronize slow weights every 5 or 6 steps, or correct a bias from step 6 on.
STEPS = 8
NETWORKS = 3
COMPARED = 1  # the network of the optimizer
SCHEDULE_STEPS = 200  # enough to show a factor that counts its calls
RATE = 0.1
# Tolerance relative to the largest displacement. A weight decay of 1e-6 moves weights by more.
RELATIVE = 1e-9
ROUNDING = 2e-14  # error of STEPS additions to weights of size 1 in double precision
# Smallest gradient. Only small gradients show an epsilon that is added to a root.
SMALLEST = 1e-9


def reason_against_schedule(schedule: LRScheduler | None, steps: int) -> str | None:
    """Return why a stack cannot follow a schedule for `steps` steps; None if it can.

    A stack computes the rate of each step as the initial rate times the factor of a `LambdaLR`. The
    schedule is stepped and cannot be used afterwards.
    """
    if schedule is None:
        return None
    if type(schedule) is not LambdaLR:
        return "it is not a LambdaLR that steps once per optimizer step"
    rates = []
    count = min(steps, SCHEDULE_STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if no optimizer step precedes
        for _ in range(count):
            rates.append([float(group["lr"]) for group in schedule.optimizer.param_groups])
            schedule.step()
    for group, factor in enumerate(schedule.lr_lambdas):
        base: Any = schedule.base_lrs[group]
        # In reverse order, so that a factor that counts its calls gives other values.
        for step in reversed(range(count)):
            rate = rates[step][group]
            if float(base * factor(step)) != rate:
                again = float(base * factor(step))
                return f"its rate at step {step} is {rate:g}, and {again:g} if it is computed again"
    return None


def reason_against_update(module: LightningModule, optimizer: Optimizer, rule: Rule) -> str | None:
    """Return how the update of a stack differs from the module's optimizer; None if both agree.

    The trained parameters of the module become random numbers.

    Args:
        module: The module, in double precision.
        optimizer: The optimizer of the module, without steps so far.
        rule: The rule that `rule_of` finds for the optimizer.
    """
    differs = (
        f"the update of rule {rule.name} differs from the update of the optimizer "
        f"{type(optimizer).__name__}"
    )
    if not _agree(rule, optimizer):
        return differs
    if rule in OURS:
        return None
    # Other trials of the stack have other hyperparameters, and the rule must use them all.
    numbers = {}
    for place, key in enumerate(rule.hyperparameters):
        numbers[key] = 0.3 + 0.1 * place
    other = rule.make(list(trained_by_name(module).values()), RATE, numbers)
    if rule_of(other) is rule and not _agree(rule, other):
        return f"{differs} at {numbers}"
    return None


@torch.no_grad()
def rests_without_gradients(module: LightningModule, rule: Rule) -> bool:
    """Return True if a rule changes neither weights nor state at gradients and rates of 0.

    A stack makes such updates until the first delayed gradient is due. A network alone makes none.

    Args:
        module: The module, in double precision.
        rule: The rule of its optimizer.
    """
    parameters = {name: each.detach() for name, each in trained_by_name(module).items()}
    update = StackedUpdate(rule, parameters)
    weights = update.weights.flatten(parameters)[None]
    state = {key: tensor[None] for key, tensor in update.flat_state(parameters, {}).items()}
    before = {"weights": weights.clone(), **{key: each.clone() for key, each in state.items()}}
    none = torch.zeros_like(weights)
    hyperparameters = {}
    for place, key in enumerate(rule.hyperparameters):
        hyperparameters[key] = weights.new_tensor([[0.3 + 0.1 * place]])
    rate = weights.new_zeros(1, 1)
    for _ in range(2):
        update(weights, none.clone(), state, rate, hyperparameters, weights.new_ones(1, 1))
    after = {"weights": weights, **state}
    return all(torch.equal(after[key], tensor) for key, tensor in before.items())


@torch.no_grad()
def _agree(rule: Rule, optimizer: Optimizer) -> bool:
    """Return True if rule and optimizer change random weights and their state equally.

    The network of the optimizer is the middle one of three. The others have other weights, rates,
    hyperparameters and numbers of steps, because an update must not mix networks.
    """
    parameters = {str(place): each for place, each in enumerate(trained_parameters(optimizer))}
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        group["lr"] = (1 + number) * RATE  # a schedule may begin with a rate of 0
    generator = torch.Generator().manual_seed(0)
    device = parameters["0"].device
    update = StackedUpdate(rule, parameters, names_of_groups(optimizer, parameters))
    size = update.weights.size
    weights = torch.randn(NETWORKS, size, generator=generator, dtype=torch.float64).to(device)
    before = weights[COMPARED].clone()
    for name, values in update.weights.split(before).items():
        parameters[name].copy_(values)
    hyperparameters = {}
    for key, numbers in rule.numbers_of(optimizer).items():
        columns = []
        for number in numbers:
            columns.append(_of_networks(weights, number, 0.5 * number + 0.1))
        hyperparameters[key] = torch.cat(columns, dim=1)
    state = {}
    for key, tensor in update.flat_state(parameters, {}).items():
        state[key] = tensor.repeat(NETWORKS, 1)
    rates = torch.cat(
        [_of_networks(weights, group["lr"], 2 * group["lr"]) for group in groups], dim=1
    )
    for step in range(1, STEPS + 1):
        gradients = _gradients(size, generator).to(device)
        with at_gradient_point(optimizer):
            for name, values in update.weights.split(gradients[COMPARED]).items():
                parameters[name].grad = values.clone()
        optimizer.step()
        steps = _of_networks(weights, step, step + 5)
        update(weights, gradients, state, rates, hyperparameters, steps)
    moved = update.weights.flatten(parameters)
    if not _close(weights[COMPARED] - before, moved - before):
        return False
    return _same_state(update, state, parameters, optimizer)


def _same_state(
    update: StackedUpdate, state: State, parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> bool:
    """Return True if the optimizer has the same state as the compared network."""
    for key, layout in update.state.items():
        tensors = {}
        for name, shape in layout.shapes.items():
            tensor = optimizer.state[parameters[name]].get(key)
            if not isinstance(tensor, Tensor) or tensor.shape != shape:
                return False
            tensors[name] = tensor
        if not _close(state[key][COMPARED], layout.flatten(tensors)):
            return False
    return True


def _of_networks(weights: Tensor, compared: float, others: float) -> Tensor:
    """Return a number of each network, shape (networks, 1), with the type of the weights."""
    numbers = weights.new_full((NETWORKS, 1), others)
    numbers[COMPARED] = compared
    return numbers


def _gradients(size: int, generator: torch.Generator) -> Tensor:
    """Return gradients of sizes from `SMALLEST` to 1, shape (networks, size)."""
    shape = NETWORKS, size
    signs = torch.randn(shape, generator=generator, dtype=torch.float64).sign()
    return signs * SMALLEST ** torch.rand(shape, generator=generator, dtype=torch.float64)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    largest = float(theirs.abs().max())
    return torch.allclose(ours, theirs, rtol=0, atol=RELATIVE * largest + ROUNDING, equal_nan=True)
