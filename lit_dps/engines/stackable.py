"""Which trials can be stacked: those whose networks, trained side by side, are what each would be alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.func import vmap

from lit_dps.data.images import ImageData
from lit_dps.engines.lean import inherits, standard_data, standard_step, standard_trainer
from lit_dps.engines.stack import Call
from lit_dps.module import ImageClassifier
from lit_dps.optim import rule_of
from lit_dps.pruning import prunable
from lit_dps.pruning.copies import copies_of
from lit_dps.training.early_check import EarlyCheck
from lit_dps.training.workload import Built

_EXAMPLES = 64
# What Lightning calls once a fit, a check or an epoch; a stack calls none of it
_HOOKS = (
    *(name for name in dir(LightningModule) if name.startswith("on_")),
    *("setup", "teardown", "prepare_data", "configure_model", "configure_callbacks", "train", "eval"),
)
_DATA = ("val_dataloader", "validation_batch", "validation_size", "pruning_dataloader", "on_device")
_HALVES = (slice(0, _EXAMPLES // 2), slice(_EXAMPLES // 2, None))
_EQUAL = 1e-4  # relative: between a loss in one part and in two, or alone and side by side


def why_not(built: Built, trainer: Trainer, smoothness: Mapping[str, Any], monitor: str) -> str | None:
    """Why a trial has to be trained by itself; None if it can be stacked.

    Args:
        built: The trial, its data set up.
        trainer: A trainer with its arguments and callbacks, whose data module is its data.
        smoothness: Arguments of `SmoothnessCallback`.
        monitor: What the goal is asked of.
    """
    name = type(built.module).__name__
    if smoothness["interval"] is not None:
        return "smoothness is measured in one network at a time"
    if built.trainer.get("callbacks") or not standard_trainer(trainer):
        return "the trainer's arguments or callbacks are for Lightning's own loop"
    if not standard_step(built.module) or not inherits(built.module, ImageClassifier, _HOOKS):
        return f"{name} has a training step or hooks of its own, more than a loss"
    if not standard_data(built.data) or not inherits(built.data, ImageData, _DATA):
        return f"{type(built.data).__name__} does not keep its images in memory as ImageData does"
    if not EarlyCheck.supports(trainer, built.module, monitor):
        return f"{name} validates in a way of its own, more than wrongness"
    optimizer, schedule = _configured(built.module)
    if rule_of(optimizer) is None:
        return f"{type(optimizer).__name__} as configured is none of sgd, momentum and nesterov"
    if schedule and not _of_the_step(schedule):
        return f"the schedule of {name} is no LambdaLR that is stepped once a step"
    hooked = [p for p in built.module.parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks on its parameters or its optimizer"
    trained = {id(p) for p in built.module.parameters() if p.requires_grad}
    if {id(p) for p in optimizer.param_groups[0]["params"] if p.requires_grad} != trained:
        return "the optimizer and the trained parameters are not the same"
    if copies_of(built.module, prunable(built.module), trained):
        return f"{name} holds a copy of its network, which is pruned with it"
    return _why_not_its_loss(built, trainer.strategy.root_device)


def optimizer_of(
    module: LightningModule,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR | None]:
    """The optimizer of a module that can be stacked, and its schedule if it has one."""
    optimizer, schedule = _configured(module)
    return optimizer, schedule.get("scheduler")


def _configured(module: LightningModule) -> tuple[torch.optim.Optimizer, Mapping[str, Any]]:
    """The optimizer, and Lightning's configuration of its schedule, empty without one."""
    configured = module.configure_optimizers()
    if not isinstance(configured, dict):
        return configured, {}
    schedule = configured.get("lr_scheduler", {})
    return configured["optimizer"], schedule if isinstance(schedule, Mapping) else {"scheduler": schedule}


def _of_the_step(schedule: Mapping[str, Any]) -> bool:
    plain = type(schedule["scheduler"]) is torch.optim.lr_scheduler.LambdaLR
    return plain and schedule.get("interval") == "step" and schedule.get("frequency", 1) == 1


def _why_not_its_loss(built: Built, device: torch.device) -> str | None:
    module = copy.deepcopy(built.module).to(device).train()
    name, call = type(module).__name__, Call(module)
    module._trainer = _NoTrainer()
    x, y = (tensor[:_EXAMPLES] for tensor in built.data.on_device("train", device))
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    before = {n: b.clone() for n, b in module.named_buffers()}
    try:
        with torch.random.fork_rng(), torch.no_grad():
            state = torch.get_rng_state()
            loss = module.loss((x, y))
            if not torch.equal(state, torch.get_rng_state()):
                return f"{name} draws random numbers in a training step, such as dropout"
            for key, buffer in module.named_buffers():
                if not torch.equal(buffer, before[key]):
                    return f"a training step of {name} changes its buffer {key}, as batch normalization does"
            halves = torch.stack([module.loss((x[part], y[part])) for part in _HALVES])
            if not _close(halves.mean(), loss):
                return f"the loss of {name} is no mean over the examples of a batch"
            two = {key: torch.stack([p, p]) for key, p in {**parameters, **before}.items()}
            if not _close(vmap(lambda t: call("loss", t, (x, y)))(two), torch.stack([loss, loss])):
                return f"the loss of {name} is another under torch.vmap"
            module.eval()
            alone = module.wrongness((x, y)).expand(2, -1)
            stacked = vmap(lambda t: call("wrongness", t, (x, y)))(two)
            # the decisions to the bit, whatever is close: they are what a check counts
            if not (torch.equal(stacked >= 1, alone >= 1) and _close(stacked, alone)):
                return f"the wrongness of {name} is another under torch.vmap"
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{name} does not run under torch.vmap ({str(error).splitlines()[0][:200]})"
    return None


class _NoTrainer:
    """Stands for the trainer: a loss that asks it for the step, say, would get another answer in a stack."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"it asks the trainer for {name}")


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_EQUAL)
