"""Computes the learning rates of a run over its budget, from copies of its schedules.

For example, a cosine schedule with T_max = 100 in a run of 400 steps lets the rate rise again from
step 100. `rate_remarks` reports this before training begins, and `schedule_shape` stores the
lengths of warm-up and schedule with the trial.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from lit_dps.core.trial import SCHEDULE, WARM_UP
from lit_dps.optim.parameter_groups import group_settings
from lit_dps.training.hidden_state import unchanged_attributes
from lit_dps.training.training_pass import with_empty_cells

MOST_STEPS = 200_000  # evaluated steps: about a second of a CPU core
SAME = 1e-6  # rates with a smaller relative difference count as equal


def rate_curve(
    trainer: Trainer, module: LightningModule, steps: int, steps_of_epoch: int | None
) -> list[float] | None:
    """Return the largest learning rate of the optimizer's groups at each of its first steps.

    Optimizer and schedules are copied, without parameters, and stepped as Lightning steps them. A
    schedule that follows a metric stays at its first rate.

    Args:
        trainer: The trainer of a fit that is about to train, with its optimizers and schedules.
        module: The module of the fit.
        steps: Optimizer steps of the budget; at most the first `MOST_STEPS` are evaluated.
        steps_of_epoch: Optimizer steps of an epoch; None if an epoch has no length.

    Returns:
        A rate for each step. None without a schedule, with manual optimization, with several
        optimizers, if the module overrides `lr_scheduler_step`, or if a schedule cannot be copied.
    """
    configs = [config for config in trainer.lr_scheduler_configs if not config.reduce_on_plateau]
    if not configs or not module.automatic_optimization or len(trainer.optimizers) != 1:
        return None
    if is_overridden("lr_scheduler_step", module):
        return None
    accumulated = trainer.accumulate_grad_batches
    rates = rates_of_groups(
        trainer.optimizers[0], configs, steps, steps_of_epoch, accumulated, (module, trainer)
    )
    return largest_rates(rates)


def largest_rates(rates: Sequence[Sequence[float]] | None) -> list[float] | None:
    """Return the largest rate of the groups at each step; None for unknown rates."""
    if rates is None:
        return None
    return [max(of_groups) for of_groups in rates]


def rates_of_groups(
    optimizer: Optimizer,
    configs: Sequence[LRSchedulerConfig],
    steps: int,
    steps_of_epoch: int | None = None,
    accumulated: int = 1,
    shared: Sequence[Any] = (),
) -> list[tuple[float, ...]] | None:
    """Return the learning rate of each group of an optimizer at each of its first steps.

    A function of a schedule may count its calls, in an enclosed variable or in an attribute of the
    module. To leave these counts unchanged, enclosed variables are copied, and the attributes of
    shared modules are restored.

    Args:
        optimizer: The optimizer of a run that is about to train.
        configs: The schedules of the optimizer. None of them follows a metric.
        steps: Optimizer steps of the budget; at most the first `MOST_STEPS` are evaluated.
        steps_of_epoch: Optimizer steps of an epoch; None if an epoch has no length.
        accumulated: Batches of an optimizer step.
        shared: Objects that schedules may refer to, and that are not copied.

    Returns:
        The rates of each step; None if a schedule cannot be copied or stepped.
    """
    steps = min(steps, MOST_STEPS)
    modules = [each for each in shared if isinstance(each, LightningModule)]
    twin = _without_parameters(optimizer)
    # Copies of schedules refer to the twin of the optimizer, and to the shared objects themselves.
    memo: dict[int, Any] = {id(optimizer): twin}
    for each in shared:
        memo[id(each)] = each
    try:
        with unchanged_attributes(*modules), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns because the optimizer is never stepped
            schedule = configs[0].scheduler
            is_only_schedule = len(configs) == 1 and accumulated == 1
            if is_only_schedule and isinstance(schedule, LambdaLR) and _is_plain(configs[0]):
                return _rates_of_lambda(schedule, steps, memo)
            return _evaluated(twin, configs, steps, steps_of_epoch, accumulated, memo)
    except Exception:  # an error of the user's code, which the run itself will report
        return None


def _copy_function(function: Callable, memo: dict[int, Any]) -> Callable:
    """Return a copy of a function and its enclosed variables; a deep copy of other callables."""
    if not isinstance(function, FunctionType):
        return copy.deepcopy(function, memo)
    if id(function) in memo or not function.__closure__:
        return memo.get(id(function), function)
    copied = with_empty_cells(function)
    memo[id(function)] = copied  # before its variables, because a function may enclose itself
    for cell, original in zip(copied.__closure__ or (), function.__closure__, strict=True):
        value = original.cell_contents
        if isinstance(value, FunctionType):
            cell.cell_contents = _copy_function(value, memo)
        else:
            cell.cell_contents = copy.deepcopy(value, memo)
    return copied


def _copy_schedule(schedule: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a schedule and of the variables that its functions enclose."""
    for part in [schedule, *getattr(schedule, "_schedulers", ())]:
        for function in getattr(part, "lr_lambdas", ()):
            if isinstance(function, FunctionType):
                memo[id(function)] = _copy_function(function, memo)
    return copy.deepcopy(schedule, memo)


def _is_plain(config: LRSchedulerConfig) -> bool:
    """Return True if a schedule is a `LambdaLR` itself, stepped once per optimizer step."""
    is_each_step = config.interval == "step" and config.frequency == 1
    return is_each_step and type(config.scheduler) is LambdaLR


def _rates_of_lambda(
    schedule: LambdaLR, steps: int, memo: dict[int, Any]
) -> list[tuple[float, ...]]:
    """Return the rates of a `LambdaLR` without stepping it. Stepping takes ten times as long."""
    groups = []
    for base, function in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True):
        groups.append((base, _copy_function(function, memo)))
    rates = []
    for step in range(schedule.last_epoch, schedule.last_epoch + steps):
        rates.append(tuple(float(base * factor(step)) for base, factor in groups))
    return rates


def _evaluated(
    twin: Optimizer,
    configs: Sequence[LRSchedulerConfig],
    steps: int,
    steps_of_epoch: int | None,
    accumulated: int,
    memo: dict[int, Any],
) -> list[tuple[float, ...]]:
    """Return the rates at each step, by stepping copies of the schedules."""
    schedules = []
    for config in configs:
        schedule = _copy_schedule(config.scheduler, memo)
        schedules.append((schedule, config.interval, config.frequency))
    rates = []
    for step in range(1, steps + 1):
        rates.append(tuple(float(group["lr"]) for group in twin.param_groups))
        step_in_epoch = step
        if steps_of_epoch is not None:
            step_in_epoch = (step - 1) % steps_of_epoch + 1
        for schedule, interval, frequency in schedules:
            if interval == "step":
                # Lightning counts the batches of the current epoch.
                is_due = step_in_epoch * accumulated % frequency == 0
            else:
                is_due = steps_of_epoch is not None and step % (steps_of_epoch * frequency) == 0
            if is_due:
                schedule.step()
    return rates


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer whose groups have settings, but no parameters."""
    twin = copy.copy(optimizer)
    twin.param_groups = []
    for group in optimizer.param_groups:
        twin.param_groups.append({**copy.deepcopy(group_settings(group)), "params": []})
    twin.state = defaultdict(dict)
    return twin


def is_constant(rates: Sequence[float]) -> bool:
    """Return True if all rates are equal."""
    return max(rates) - min(rates) <= SAME * max(map(abs, rates))


def warm_up_steps(rates: Sequence[float]) -> int | None:
    """Return the first step with the largest rate; None if the rate grows until the last step."""
    largest = max(rates)
    first = next(i for i, rate in enumerate(rates) if rate >= largest * (1 - SAME))
    if first > 0 and first == len(rates) - 1:
        return None
    return first


def schedule_steps(rates: Sequence[float]) -> int:
    """Return the steps after which the rate is constant; all steps if it changes until the end."""
    tolerance = SAME * max(rates)
    changing = [i for i, rate in enumerate(rates) if abs(rate - rates[-1]) > tolerance]
    if not changing:
        return len(rates)
    return min(changing[-1] + 2, len(rates))


def schedule_shape(rates: Sequence[float] | None, budget: int) -> dict[str, float]:
    """Return the steps of warm-up and schedule; empty if the rate is constant or unknown.

    Lengths that the rates do not reach are omitted.

    Args:
        rates: The rates of the first steps.
        budget: Steps of the run, of which the rates may be the first `MOST_STEPS`.
    """
    if not rates or is_constant(rates):
        return {}
    is_cut = len(rates) < budget
    shape = {}
    warm_up = warm_up_steps(rates)
    length = schedule_steps(rates)
    if warm_up is not None:
        shape[WARM_UP] = warm_up
    elif not is_cut:
        shape[WARM_UP] = len(rates)
    if length < len(rates) or not is_cut:
        shape[SCHEDULE] = length
    return shape


def rate_remarks(
    rates: Sequence[float], configs: Sequence[Any], steps_of_epoch: int | None, budget: int
) -> list[str]:
    """Return remarks on steps without a positive rate, and on a cosine that rises again.

    Args:
        rates: The rates of the first steps.
        configs: The schedules.
        steps_of_epoch: Optimizer steps of an epoch; None where an epoch has no length.
        budget: Steps of the run, of which the rates may be the first `MOST_STEPS`.
    """
    remarks = []
    for begin, end in _stretches_without_rate(rates):
        # A single step is the first of a warm-up or the last of a decay, with rate 0 by design.
        if end - begin > 1:
            remarks.append(_remark_on_stretch(rates, begin, end, budget))
    for config in configs:
        schedule = config.scheduler
        length = 1 if config.interval == "step" else steps_of_epoch
        if isinstance(schedule, CosineAnnealingLR) and length is not None:
            lowest = schedule.T_max * config.frequency * length
            if lowest < budget - 1:
                remarks.append(
                    f"CosineAnnealingLR has T_max = {schedule.T_max}: the learning rate rises "
                    f"again from step {lowest} of {budget}"
                )
    return remarks


def _stretches_without_rate(rates: Sequence[float]) -> list[tuple[int, int]]:
    """Return the first step and the step after the last of each stretch without a positive rate."""
    stretches = []
    begin = None
    for step, rate in enumerate([*rates, math.inf]):
        if rate <= 0 and begin is None:
            begin = step
        elif rate > 0 and begin is not None:
            stretches.append((begin, step))
            begin = None
    return stretches


def _remark_on_stretch(rates: Sequence[float], begin: int, end: int, budget: int) -> str:
    """Return a remark on a stretch of steps without a positive rate."""
    value = "0 or negative" if any(rates[begin:end]) else "0"
    until = "to the end" if end == budget else f"to step {end - 1}"
    if end == len(rates) < budget:
        until += " at least"
    return f"the learning rate is {value} from step {begin} {until} of {budget}"
