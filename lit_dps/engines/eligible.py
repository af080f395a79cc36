"""Which trials the interval loop can train, and which of them it can stack.

The interval loop replaces Lightning's loop if module, data and trainer are those of lit_dps, or
override nothing that Lightning asks in a step, a check or a fit. A network in a stack must compute
what it would compute by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from lit_dps.training.delay_callback import requires_closure
from lit_dps.training.deterministic import full_float32
from lit_dps.training.early_check import EarlyCheck
from lit_dps.training.hidden_state import equal_states, unchanged_attributes
from lit_dps.training.inheritance import adopt_former_methods, inherits
from lit_dps.training.rng_state import capture, preserve_rng_state
from lit_dps.training.workload import Built

EXAMPLES = 64  # of the training split, for trying a loss
HALVES = (slice(0, EXAMPLES // 2), slice(EXAMPLES // 2, None))
# Relative tolerance between a loss over a batch and over its halves, or with and without vmap.
TOLERANCE = 1e-4
ERROR_LENGTH = 200  # characters of an error message in a reason

# Methods that Lightning calls in a step, a check or a fit. Lightning's loop is used if a user's
# class overrides one of them.
TRANSFER_HOOKS = (
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
)
MODULE_HOOKS = (
    *(name for name in dir(LightningModule) if name.startswith("on_")),
    "setup",
    "teardown",
    "prepare_data",
    "configure_model",
    "configure_callbacks",
    "train",
    "eval",
    "training_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "configure_gradient_clipping",
    "transfer_batch_to_device",
)
BATCH_METHODS = ("train_dataloader", "epochs", *TRANSFER_HOOKS)
DATA_METHODS = (
    "val_dataloader",
    "validation_batch",
    "validation_size",
    "pruning_dataloader",
    "on_device",
)


def ineligibility_reason(built: Built, training: Training, stacked: bool = False) -> str | None:
    """Return why the interval loop cannot train a trial, or cannot stack it; None if it can.

    Args:
        built: The trial with its data set up. It cannot be trained afterwards, because its loss is
            computed and its module changed.
        training: The settings of the study.
        stacked: Whether to ask about training in a stack.
    """
    try:
        trainer = Trainer(**built.trainer)
        trainer.datamodule = built.data  # pyright: ignore[reportAttributeAccessIssue]
        with preserve_rng_state(built.module, built.data):
            reason = _reason_against_loop(built, trainer, training)
            if reason is None and stacked:
                reason = _reason_against_stack(built, training.goal.max_steps)
            return reason
    except Exception as error:  # a user's module may raise here and not in Lightning's loop
        return f"{type(error).__name__}: {' '.join(str(error).split())[:ERROR_LENGTH]}"


def _reason_against_loop(built: Built, trainer: Trainer, training: Training) -> str | None:
    """Return why a trial needs Lightning's loop; None if the interval loop can train it."""
    module, data = built.module, built.data
    name = type(module).__name__
    if training.smoothness.interval is not None:
        return "smoothness is measured in Lightning's loop"
    if trainer.callbacks or not _is_standard_trainer(trainer):  # pyright: ignore[reportAttributeAccessIssue]
        return "the trainer's arguments or callbacks are for Lightning's own loop"
    if not (inherits(module, ImageClassifier, MODULE_HOOKS) and module.automatic_optimization):
        return f"{name} has a training step or hooks of its own, more than a loss"
    if not (standard_data(data) and inherits(data, ImageData, DATA_METHODS)):
        return f"{type(data).__name__} does not keep its images in memory as ImageData does"
    if {*training.metrics} - {"val_loss"}:
        return "of further metrics val_loss alone is taken here"
    goal = GoalErrorCallback.of(training.goal)
    adopt_former_methods(module)
    validation = ("per_example_error", "validation_step")
    standard_validation = inherits(module, ImageClassifier, validation)
    if not (goal.early_reject or standard_validation) or not EarlyCheck.supports(
        trainer, module, goal.monitor
    ):
        return f"{name} validates in a way of its own, more than per_example_error"
    if why_unprunable(module) or any(map(is_parametrized, module.modules())):
        return f"{name} makes its weights from other parameters"
    with unchanged_attributes(module):  # the module may be trained afterwards
        configured: Any = module.configure_optimizers()
    optimizer, schedule = optimizer_of(configured)
    if not isinstance(optimizer, torch.optim.Optimizer) or requires_closure(optimizer):
        return f"{name} has no optimizer that steps by itself"
    if schedule is not None and not _is_stepped_every_step(configured["lr_scheduler"]):
        return f"the schedule of {name} is not stepped once a step"
    trained = set()
    for group in optimizer.param_groups:
        trained.update(id(p) for p in group["params"] if p.requires_grad)
    if copies_of(module, prunable(module, held=trained), trained):
        return f"{name} holds a copy of its network, which is pruned with it"
    module.to(trainer.strategy.root_device)
    module._trainer = _NoTrainer()  # pyright: ignore[reportAttributeAccessIssue]
    module.loss(_first_examples(built))  # pyright: ignore[reportCallIssue]
    return None


def optimizer_of(configured: Any) -> tuple[Any, LRScheduler | None]:
    """Return optimizer and schedule from what `configure_optimizers` returned."""
    if not isinstance(configured, dict):
        return configured, None
    schedule = configured.get("lr_scheduler")
    if isinstance(schedule, Mapping):
        schedule = schedule["scheduler"]
    return configured["optimizer"], schedule


def _is_stepped_every_step(schedule: Any) -> bool:
    """Return True if Lightning steps a configured schedule after every optimizer step."""
    if not isinstance(schedule, Mapping) or isinstance(schedule["scheduler"], ReduceLROnPlateau):
        return False
    return schedule.get("interval") == "step" and schedule.get("frequency", 1) == 1


def standard_data(data: LightningDataModule | None) -> bool:
    """Return True if a data module makes its training batches as `ImageData` does."""
    return inherits(data, ImageData, BATCH_METHODS)


def _is_standard_trainer(trainer: Trainer) -> bool:
    """Return True if a trainer only updates weights in a step, on one device in full precision."""
    return (
        type(trainer.strategy) is SingleDeviceStrategy
        and type(trainer.precision_plugin) is Precision
        and isinstance(trainer.profiler, PassThroughProfiler)  # pyright: ignore[reportAttributeAccessIssue]
        and trainer.accumulate_grad_batches == 1
        and type(trainer.limit_train_batches) is float
        and trainer.limit_train_batches == 1.0
        and trainer.gradient_clip_val is None
        and not logs(trainer)
        and not trainer.fast_dev_run  # pyright: ignore[reportAttributeAccessIssue]
        and not lightning_private.detects_anomalies(trainer)
    )


def _reason_against_stack(built: Built, max_steps: int) -> str | None:
    """Return why a trial cannot be stacked, of those that the interval loop can train."""
    module = built.module
    assert isinstance(module, ImageClassifier)
    name = type(module).__name__
    optimizer, schedule = optimizer_of(module.configure_optimizers())
    if rule_of(optimizer) is None:
        return f"{type(optimizer).__name__} as configured is none of {', '.join(RULES)}"
    reason = why_not_its_schedule(schedule, max_steps)
    if reason is not None:
        return f"the schedule of {name} cannot be stacked: {reason}"
    parameters = list(module.parameters())
    has_hooks = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)  # pyright: ignore[reportAttributeAccessIssue]
    if has_hooks or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks on its parameters or its optimizer"
    trained = {id(p) for p in parameters if p.requires_grad}
    if {id(p) for p in optimizer.param_groups[0]["params"] if p.requires_grad} != trained:
        return "the optimizer and the trained parameters are not the same"
    reason = _reason_against_stacked_loss(module, _first_examples(built))
    if reason is not None:
        return reason
    module.double()  # last, because it changes the module
    optimizer, _ = optimizer_of(module.configure_optimizers())
    rule = rule_of(optimizer)
    assert rule is not None
    return why_not_its_update(module, optimizer, rule)


def _reason_against_stacked_loss(
    module: ImageClassifier, batch: tuple[Tensor, Tensor]
) -> str | None:
    """Return why loss or errors of a module cannot be computed for a stack; None if they can."""
    name = type(module).__name__
    try:
        with torch.no_grad(), full_float32():
            reason = _reason_against_loss(module, batch)
            if reason is None:
                reason = _reason_against_vmap(module, batch)
            return reason
    except (RuntimeError, TypeError, ValueError) as error:
        text = str(error).splitlines()[0][:ERROR_LENGTH]
        return f"{name} does not run under torch.vmap ({text})"


def _reason_against_loss(module: ImageClassifier, batch: tuple[Tensor, Tensor]) -> str | None:
    """Return why a loss is not a deterministic mean over examples without side effects."""
    name = type(module).__name__
    before = {key: buffer.clone() for key, buffer in module.named_buffers()}
    state = capture()
    loss = module.loss(batch)
    if not equal_states(state, capture()):
        return f"{name} draws random numbers in a training step, such as dropout"
    for key, buffer in module.named_buffers():
        if not torch.equal(buffer, before[key]):
            return (
                f"a training step of {name} changes its buffer {key}, as batch normalization does"
            )
    x, y = batch
    halves = torch.stack([module.loss((x[half], y[half])) for half in HALVES])
    if not torch.allclose(halves.mean(), loss, rtol=TOLERANCE):
        return f"the loss of {name} is no mean over the examples of a batch"
    return None


def _reason_against_vmap(module: ImageClassifier, batch: tuple[Tensor, Tensor]) -> str | None:
    """Return which method of a module differs under torch.vmap; leaves it in evaluation mode."""
    name = type(module).__name__
    call = Functional(module).call
    loss = module.loss(batch)
    two = {}
    for key, tensor in tensors_of(module).items():
        two[key] = torch.stack([tensor.detach(), tensor.detach()])
    stacked_loss = vmap(lambda tensors: call("loss", tensors, batch))(two)
    if not torch.allclose(stacked_loss, torch.stack([loss, loss]), rtol=TOLERANCE):
        return f"the loss of {name} is another under torch.vmap"
    module.eval()
    alone = module.per_example_error(batch).expand(2, -1)
    stacked = vmap(lambda tensors: call("per_example_error", tensors, batch))(two)
    # A check counts decisions, so these must be equal and not only close.
    same_decisions = torch.equal(stacked >= 1, alone >= 1)
    if not same_decisions or not torch.allclose(stacked, alone, rtol=TOLERANCE):
        return f"the per_example_error of {name} is another under torch.vmap"
    return None


def _first_examples(built: Built) -> tuple[Tensor, Tensor]:
    """Return the first examples of the training split on the module's device."""
    assert isinstance(built.data, ImageData)
    x, y = built.data.on_device("train", built.module.device)
    return x[:EXAMPLES], y[:EXAMPLES]


class _NoTrainer:
    """Replaces the trainer, so that a loss that reads it raises: it would differ in the loop."""

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
        """Call a method of the module with these parameters and buffers, by name."""
        named = {f"module.{name}": tensor for name, tensor in tensors.items()}
        return functional_call(self, named, (method, batch))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
