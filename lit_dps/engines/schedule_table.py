"""The learning rates of a run as a table, for schedules that a stack does not step itself.

A schedule may be any that torch steps once a step or once an epoch. Its copy is stepped once over
the whole budget, before training.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lit_dps.engines.module_hooks import as_dict, optimizer_of
from lit_dps.optim.parameter_groups import group_settings
from lit_dps.training.rate_curve import rates_of_groups

# Steps at which the table of a `LambdaLR` is compared with the schedule itself. Other schedules are
# compared at all steps: a part of a `SequentialLR` may change the momentum at a late step.
COMPARED_STEPS = 200


def schedule_config(configured: Any) -> LRSchedulerConfig | None:
    """Return how a schedule is stepped, as Lightning reads `configure_optimizers`; None without."""
    configured = as_dict(configured)
    _, schedule = optimizer_of(configured)
    if schedule is None:
        return None
    settings = configured["lr_scheduler"]
    if not isinstance(settings, Mapping):
        settings = {}
    return LRSchedulerConfig(
        schedule,
        interval=settings.get("interval", "epoch"),
        frequency=settings.get("frequency", 1),
        reduce_on_plateau=schedule_follows_metric(schedule, settings),
    )


def schedule_follows_metric(schedule: Any, settings: Mapping[str, Any]) -> bool:
    """Return True if Lightning steps a schedule with the value of a metric.

    Args:
        schedule: The schedule.
        settings: The entries of "lr_scheduler"; a schedule of any class may set reduce_on_plateau.
    """
    return isinstance(schedule, ReduceLROnPlateau) or bool(settings.get("reduce_on_plateau"))


def table_of_rates(
    module: LightningModule, configured: Any, steps: int, steps_of_epoch: int
) -> list[tuple[float, ...]] | None:
    """Return the rates of the groups at each step; None if constant or if they are unknown.

    Args:
        module: The module.
        configured: The value of its `configure_optimizers`, without steps so far.
        steps: Steps of the budget.
        steps_of_epoch: Steps of an epoch.
    """
    config = schedule_config(configured)
    if config is None or config.reduce_on_plateau:
        return None
    optimizer, _ = optimizer_of(configured)
    return rates_of_groups(optimizer, [config], steps, steps_of_epoch, shared=(module,))


def reason_against_table(module: LightningModule, steps: int, steps_of_epoch: int) -> str | None:
    """Return why no table can replace the schedule of a module; None if one can.

    Args:
        module: The module.
        steps: Steps of the budget.
        steps_of_epoch: Steps of an epoch.
    """
    configured = module.configure_optimizers()
    config = schedule_config(configured)
    if config is None:
        return None
    name = type(module).__name__
    if config.reduce_on_plateau:
        return f"the schedule of {name} follows a metric"
    rates = table_of_rates(module, configured, steps, steps_of_epoch)
    if rates is None or len(rates) < steps:
        return f"the rates of the schedule of {name} cannot be computed before training"
    optimizer, _ = optimizer_of(configured)
    differing = _first_difference(config, optimizer, rates, steps_of_epoch)
    if differing is not None:
        return f"the schedule of {name} {differing}"
    return None


def _first_difference(
    config: LRSchedulerConfig,
    optimizer: Optimizer,
    rates: Sequence[tuple[float, ...]],
    steps_of_epoch: int,
) -> str | None:
    """Step a schedule; return how it differs from its table, None if it does not."""
    settings = _other_settings(optimizer)
    schedule: Any = config.scheduler
    if type(schedule) is LambdaLR:
        rates = rates[:COMPARED_STEPS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if no optimizer step precedes
        for step, of_groups in enumerate(rates):
            if tuple(float(group["lr"]) for group in optimizer.param_groups) != of_groups:
                return f"gives another rate at step {step} if it is computed again"
            if _other_settings(optimizer) != settings:
                return "changes more than the rate"
            interval = config.frequency
            if config.interval == "epoch":
                interval *= steps_of_epoch
            elif (step + 1) % steps_of_epoch == 0 and steps_of_epoch % interval:
                return "is not stepped at equal intervals"
            if (step + 1) % interval == 0:
                schedule.step()
    return None


def _other_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group except for its rate."""
    of_groups = []
    for group in optimizer.param_groups:
        settings = dict(group_settings(group))
        settings.pop("lr", None)
        of_groups.append(settings)
    return of_groups
