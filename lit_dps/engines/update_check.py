"""Checks that a stack updates weights as the optimizer and the schedule of a module do.

A stack trains several trials at once by the update of a `Rule`; a single trial is trained by its
optimizer. Trials of a cell are comparable only if both updates are equal. So both take some steps
in double precision before trials are stacked.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_dps.optim import OURS, Rule, rule_of
from lit_dps.optim.parameter_groups import trained_parameters

# Some optimizers synchronize slow weights every 5 or 6 steps, or correct a bias from step 6 on.
STEPS = 8
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
        return "it is no LambdaLR that is stepped once a step"
    rates = []
    count = min(steps, SCHEDULE_STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if no optimizer step precedes
        for _ in range(count):
            rates.append(float(schedule.optimizer.param_groups[0]["lr"]))
            schedule.step()
    factor = schedule.lr_lambdas[0]
    base = schedule.base_lrs[0]
    # In reverse order, so that a factor that counts its calls gives other values.
    for step in reversed(range(count)):
        if float(base * factor(step)) != rates[step]:
            again = float(base * factor(step))
            return f"its rate at step {step} is {rates[step]:g}, and {again:g} if computed again"
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
        f"the update of rule {rule.name} differs from the update of its optimizer "
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
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    other = rule.make(parameters, RATE, numbers)
    if rule_of(other) is rule and not _agree(rule, other):
        return f"{differs} at {numbers}"
    return None


@torch.no_grad()
def _agree(rule: Rule, optimizer: Optimizer) -> bool:
    """Return True if rule and optimizer change random weights and their state equally."""
    group = optimizer.param_groups[0]
    parameters = trained_parameters(optimizer)
    group["lr"] = RATE  # a schedule may begin with a rate of 0
    generator = torch.Generator().manual_seed(0)
    size = sum(parameter.numel() for parameter in parameters)
    # Two networks, because an update must not mix them.
    weights = torch.randn(2, size, generator=generator, dtype=torch.float64).to(
        parameters[0].device
    )
    before = weights[0].clone()
    for parameter, values in _parts(parameters, before):
        parameter.copy_(values)
    hyperparameters = {}
    for key, number in zip(rule.hyperparameters, rule.hyperparameters_of(group), strict=True):
        hyperparameters[key] = weights.new_full((2, 1), float(number))
    state = {key: torch.zeros_like(weights) for key in rule.state}
    for step in range(1, STEPS + 1):
        gradients = _gradients(size, generator).to(weights.device)
        for parameter, values in _parts(parameters, gradients[0]):
            parameter.grad = values.clone()
        optimizer.step()
        rate = weights.new_full((2, 1), RATE)
        steps = weights.new_full((2, 1), float(step))
        rule.update_(weights, gradients, state, rate, hyperparameters, steps)
    moved = torch.cat([parameter.flatten() for parameter in parameters])
    if not _close(weights[0] - before, moved - before):
        return False
    for key in rule.state:
        tensors = []
        for parameter in parameters:
            tensor = optimizer.state[parameter].get(key)
            if not isinstance(tensor, Tensor):
                return False
            tensors.append(tensor.flatten())
        if not _close(state[key][0], torch.cat(tensors)):
            return False
    return True


def _parts(parameters: Sequence[Tensor], flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter with its part of a flat tensor, reshaped like the parameter."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    pairs = []
    for parameter, part in zip(parameters, parts, strict=True):
        pairs.append((parameter, part.view(parameter.shape)))
    return pairs


def _gradients(size: int, generator: torch.Generator) -> Tensor:
    """Return gradients of two networks, of sizes from `SMALLEST` to 1, shape (2, size)."""
    signs = torch.randn(2, size, generator=generator, dtype=torch.float64).sign()
    return signs * SMALLEST ** torch.rand(2, size, generator=generator, dtype=torch.float64)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    largest = float(theirs.abs().max())
    return torch.allclose(ours, theirs, rtol=0, atol=RELATIVE * largest + ROUNDING, equal_nan=True)
