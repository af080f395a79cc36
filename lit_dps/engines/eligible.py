"""Which trials the interval loop trains, and which of them side by side: one predicate, which says
why not.

The interval loop does what Lightning's loop would do where module, data and trainer are ours, or
change nothing that it asks once a step, a check or a fit. Networks trained side by side have to be,
each, what it would be alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lit_dps.data import ImageData
from lit_dps.engines.engine import Training
from lit_dps.engines.update_check import why_not_its_schedule, why_not_its_update
from lit_dps.module import ImageClassifier, logs
from lit_dps.optim import RULES, rule_of
from lit_dps.pruning import prunable
from lit_dps.pruning.network_copies import copies_of, why_unprunable
from lit_dps.training import GoalErrorCallback, lightning_private
from lit_dps.training import rng_state as generators
from lit_dps.training.delay_callback import requires_closure
from lit_dps.training.deterministic import full_float32
from lit_dps.training.early_check import EarlyCheck
from lit_dps.training.hidden_state import equal_states, unchanged_attributes
from lit_dps.training.inheritance import inherits
from lit_dps.training.rng_state import preserve_rng_state
from lit_dps.training.workload import Built

_EXAMPLES = 64
# What Lightning calls once a step, a check or a fit: where one of these is somebody's own, its loop
# is left alone
_TRANSFER = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
_OF_MODULE = (
    *(name for name in dir(LightningModule) if name.startswith("on_")),
    *(
        "setup",
        "teardown",
        "prepare_data",
        "configure_model",
        "configure_callbacks",
        "train",
        "eval",
    ),
    *("training_step", "backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("configure_gradient_clipping", "transfer_batch_to_device"),
)
_BATCHES = ("train_dataloader", "epochs", *_TRANSFER)
_OF_DATA = (
    "val_dataloader",
    "validation_batch",
    "validation_size",
    "pruning_dataloader",
    "on_device",
)
_HALVES = (slice(0, _EXAMPLES // 2), slice(_EXAMPLES // 2, None))
_EQUAL = 1e-4  # relative: between a loss in one part and in two, or alone and side by side


def ineligibility_reason(
    built: Built, training: Training, side_by_side: bool = False
) -> str | None:
    """Why a trial has to be trained by Lightning's loop, or by itself; None if the interval loop
    can train it.

    The trial is built, its data set up, and it is used up: its loss is taken. `side_by_side` asks
    whether it can be trained with others in lockstep.
    """
    try:
        trainer = Trainer(**built.trainer)
        trainer.datamodule = built.data
        with preserve_rng_state(built.module, built.data):
            reason = _why_not_alone(built, trainer, training)
            if reason is None and side_by_side:
                reason = _why_not_side_by_side(built, training.goal.max_steps)
            return reason
    except (
        Exception
    ) as error:  # whatever a user's module does here that it need not do in Lightning
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _why_not_alone(built: Built, trainer: Trainer, training: Training) -> str | None:
    module, name, goal = (
        built.module,
        type(built.module).__name__,
        GoalErrorCallback.of(training.goal),
    )
    if training.smoothness.interval is not None:
        return "smoothness is measured in Lightning's loop"
    if trainer.callbacks or not _standard_trainer(trainer):
        return "the trainer's arguments or callbacks are for Lightning's own loop"
    if not (inherits(module, ImageClassifier, _OF_MODULE) and module.automatic_optimization):
        return f"{name} has a training step or hooks of its own, more than a loss"
    if not (standard_data(built.data) and inherits(built.data, ImageData, _OF_DATA)):
        return f"{type(built.data).__name__} does not keep its images in memory as ImageData does"
    if {*training.metrics} - {"val_loss"}:
        return "of further metrics val_loss alone is taken here"
    own = not goal.early_reject and not inherits(
        module, ImageClassifier, ("wrongness", "validation_step")
    )
    if own or not EarlyCheck.supports(trainer, module, goal.monitor):
        return f"{name} validates in a way of its own, more than wrongness"
    if why_unprunable(module) or any(map(is_parametrized, module.modules())):
        return f"{name} makes its weights from other parameters"
    with unchanged_attributes(module):  # the module may be trained afterwards
        configured = module.configure_optimizers()
    optimizer, schedule = optimizer_of(configured)
    if not isinstance(optimizer, torch.optim.Optimizer) or requires_closure(optimizer):
        return f"{name} has no optimizer that steps by itself"
    if schedule is not None and not _of_the_step(configured["lr_scheduler"]):
        return f"the schedule of {name} is not stepped once a step"
    trained = {
        id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    }
    if copies_of(module, prunable(module, held=trained), trained):
        return f"{name} holds a copy of its network, which is pruned with it"
    module.to(trainer.strategy.root_device)._trainer = _NoTrainer()
    module.loss(_some(built, module.device))
    return None


def optimizer_of(configured: Any) -> tuple[Any, LRScheduler | None]:
    """The optimizer that a module configures, and its schedule if it has one."""
    if not isinstance(configured, dict):
        return configured, None
    schedule = configured.get("lr_scheduler")
    return configured["optimizer"], schedule["scheduler"] if isinstance(
        schedule, Mapping
    ) else schedule


def _of_the_step(schedule: Any) -> bool:
    if not isinstance(schedule, Mapping) or isinstance(schedule["scheduler"], ReduceLROnPlateau):
        return False
    return schedule.get("interval") == "step" and schedule.get("frequency", 1) == 1


def standard_data(data: LightningDataModule | None) -> bool:
    """Whether a data module makes its training batches as `ImageData` does: all of them whole."""
    return inherits(data, ImageData, _BATCHES)


def _standard_trainer(trainer: Trainer) -> bool:
    """Whether a trainer asks for nothing once a step but the updates, on one device in full
    precision."""
    return (
        type(trainer.strategy) is SingleDeviceStrategy
        and type(trainer.precision_plugin) is Precision
        and isinstance(trainer.profiler, PassThroughProfiler)
        and trainer.accumulate_grad_batches == 1
        and type(trainer.limit_train_batches) is float
        and trainer.limit_train_batches == 1.0
        and trainer.gradient_clip_val is None
        and not (
            logs(trainer) or trainer.fast_dev_run or lightning_private.detects_anomalies(trainer)
        )
    )


def _why_not_side_by_side(built: Built, max_steps: int) -> str | None:
    module, name = built.module, type(built.module).__name__
    optimizer, schedule = optimizer_of(module.configure_optimizers())
    if rule_of(optimizer) is None:
        return f"{type(optimizer).__name__} as configured is none of {', '.join(RULES)}"
    if (reason := why_not_its_schedule(schedule, max_steps)) is not None:
        return f"the schedule of {name} cannot be stacked: {reason}"
    hooked = [p for p in module.parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks on its parameters or its optimizer"
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    if {id(p) for p in optimizer.param_groups[0]["params"] if p.requires_grad} != trained:
        return "the optimizer and the trained parameters are not the same"
    reason = _why_not_its_loss(module, _some(built, module.device))
    if reason is not None:
        return reason
    module.double()  # last, because it changes the module
    optimizer, _ = optimizer_of(module.configure_optimizers())
    return why_not_its_update(module, optimizer, rule_of(optimizer))


def _why_not_its_loss(module: LightningModule, batch: tuple[Tensor, Tensor]) -> str | None:
    name, call, (x, y) = type(module).__name__, Functional(module).call, batch
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    before = {n: b.clone() for n, b in module.named_buffers()}
    close = partial(torch.allclose, rtol=_EQUAL)
    try:
        with torch.no_grad(), full_float32():
            state = generators.capture()
            loss = module.loss((x, y))
            if not equal_states(state, generators.capture()):
                return f"{name} draws random numbers in a training step, such as dropout"
            for key, buffer in module.named_buffers():
                if not torch.equal(buffer, before[key]):
                    return (
                        f"a training step of {name} changes its buffer {key}, as batch "
                        "normalization does"
                    )
            halves = torch.stack([module.loss((x[part], y[part])) for part in _HALVES])
            if not close(halves.mean(), loss):
                return f"the loss of {name} is no mean over the examples of a batch"
            two = {key: torch.stack([p, p]) for key, p in {**parameters, **before}.items()}
            if not close(vmap(lambda t: call("loss", t, (x, y)))(two), torch.stack([loss, loss])):
                return f"the loss of {name} is another under torch.vmap"
            module.eval()
            alone = module.wrongness((x, y)).expand(2, -1)
            stacked = vmap(lambda t: call("wrongness", t, (x, y)))(two)
            # the decisions to the bit, whatever is close: they are what a check counts
            if not (torch.equal(stacked >= 1, alone >= 1) and close(stacked, alone)):
                return f"the wrongness of {name} is another under torch.vmap"
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{name} does not run under torch.vmap ({str(error).splitlines()[0][:200]})"
    return None


def _some(built: Built, device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = built.data.on_device("train", device)
    return x[:_EXAMPLES], y[:_EXAMPLES]


class _NoTrainer:
    """Stands for the trainer: a loss that asks it for the step, say, would get another answer in
    the loop."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"it asks the trainer for {name}")


class Functional(nn.Module):
    """A module as a function of its parameters and buffers."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, method: str, batch: Any) -> Tensor:
        return getattr(self.module, method)(batch)

    def call(self, method: str, tensors: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Calls a method with other parameters and buffers than the module's own."""
        named = {f"module.{name}": tensor for name, tensor in tensors.items()}
        return functional_call(self, named, (method, batch))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
