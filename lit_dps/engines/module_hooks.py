"""Which methods of a module Lightning calls in a fit, and which of them the interval loop calls.

A subclass of `ImageClassifier` may override any hook of Lightning. It trains in the interval loop
if each hook that it overrides is of one of these kinds:

- The interval loop calls the hook where Lightning does: `START_HOOKS`, `STEP_HOOKS`, `END_HOOKS`.
- A fit does not call the hook, because it is a hook of tests or predictions.
- The hook does nothing: its body and the body of the method it overrides are empty.

It must not use the trainer either, because the interval loop has none. `self.log` is allowed: a
study has no logger, so that the logged values are lost in Lightning's loop too.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FunctionType
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.lr_scheduler import LRScheduler

from lit_dps.module import ImageClassifier
from lit_dps.training.inheritance import inherits

BUILD_HOOKS = ("prepare_data", "setup")  # `prepare_module`
START_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start")
STEP_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
END_HOOKS = ("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown")
CALLED_HOOKS = (*BUILD_HOOKS, *START_HOOKS, *STEP_HOOKS, *END_HOOKS)

# They move batches to a device. The data in memory of the interval loop are there already.
TRANSFER_HOOKS = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")
# Early validations call `per_example_error` instead of all other methods of a validation.
VALIDATION_HOOKS = tuple(name for name in dir(LightningModule) if name.startswith("on_validation_"))
VALIDATION_METHODS = ("per_example_error", "validation_step", *VALIDATION_HOOKS)


def _methods_of_lightning_alone() -> tuple[str, ...]:
    """Return the methods that a fit calls in Lightning's loop, and that the interval loop ignores.

    They include hooks that a later version of Lightning may add.
    """
    ignored = (*CALLED_HOOKS, *VALIDATION_METHODS)
    names = []
    for name in dir(LightningModule):
        in_fit = name.startswith("on_") and not name.startswith(("on_test_", "on_predict_"))
        if in_fit and name not in ignored:
            names.append(name)
    # These replace parts of a training step, build the network or its callbacks, or move batches.
    names += [
        "training_step",
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "lr_scheduler_step",
        "configure_gradient_clipping",
        "clip_gradients",
        "train",
        "eval",
        "configure_model",
        "configure_callbacks",
        "transfer_batch_to_device",
    ]
    return tuple(names)


LIGHTNING_METHODS = _methods_of_lightning_alone()


class NeedsLightning(RuntimeError):
    """A module does what only Lightning's loop supports. The message is the reason.

    Attributes:
        reasons: The messages of all errors of the process so far. Code of a user may catch an
            error, which `raise_if_caught` finds.
    """

    reasons: ClassVar[list[str]] = []

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reasons.append(reason)


@contextmanager
def raise_if_caught() -> Iterator[None]:
    """Raise NeedsLightning after a block in which code of a user caught this error."""
    before = len(NeedsLightning.reasons)
    yield
    if len(NeedsLightning.reasons) > before:
        raise NeedsLightning(NeedsLightning.reasons[-1])


class NoTrainer:
    """Replaces the trainer of a module in the interval loop. Reading an attribute raises.

    Args:
        module: Name of the module's class.
    """

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy.deepcopy` looks for special methods
            raise AttributeError(name)
        raise NeedsLightning(f"{self._module} reads trainer.{name}")


def overridden(module: LightningModule, names: Iterable[str]) -> list[str]:
    """Return the methods among `names` that a module's class overrides with an effect."""
    result = []
    for name in names:
        if inherits(module, ImageClassifier, (name,)):
            continue
        was_empty = does_nothing(getattr(ImageClassifier, name))
        if not (was_empty and does_nothing(getattr(module, name))):
            result.append(name)
    return result


def does_nothing(method: Callable) -> bool:
    """Return True if the body of a method is empty: `pass`, `...`, `return` or a docstring."""
    function = getattr(method, "__func__", method)
    if not isinstance(function, FunctionType):
        return False
    if function.__code__.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        return False
    instructions = []
    for instruction in dis.get_instructions(function):
        if instruction.opname not in ("RESUME", "NOP"):
            instructions.append((instruction.opname, instruction.argval))
    return instructions in (
        [("LOAD_CONST", None), ("RETURN_VALUE", None)],
        [("RETURN_CONST", None)],  # since Python 3.12
    )


def detach_trainer(module: LightningModule) -> None:
    """Make a module raise NeedsLightning if it reads its trainer, and ignore what it logs."""
    trainer: Any = NoTrainer(type(module).__name__)
    module._trainer = trainer
    if type(module).log is LightningModule.log:
        module.__dict__["log"] = _ignore


def show_length(module: LightningModule, steps: int, steps_of_epoch: int) -> None:
    """Let a module without a trainer read the length of training, as its schedule may need it."""
    trainer = module._trainer
    assert isinstance(trainer, NoTrainer)
    epochs = math.ceil(steps / steps_of_epoch)
    vars(trainer).update(max_steps=steps, estimated_stepping_batches=steps, max_epochs=epochs)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Take the arguments of `LightningModule.log`, and do nothing."""


def prepare_module(module: LightningModule) -> None:
    """Call the hooks of a module that Lightning calls before the module is on its device."""
    detach_trainer(module)
    module.prepare_data()
    module.setup(stage=TrainerFn.FITTING)


def end_module(module: LightningModule) -> None:
    """Call the hooks of a module that Lightning calls after the last step."""
    module.on_train_epoch_end()
    module.on_train_end()
    module.on_fit_end()
    module.teardown(stage=TrainerFn.FITTING)


def as_dict(configured: Any) -> Any:
    """Return lists of one optimizer and its schedule as a dict; other values unchanged."""
    if isinstance(configured, (list, tuple)) and len(configured) == 1:
        return configured[0]
    if not isinstance(configured, (list, tuple)) or len(configured) != 2:
        return configured
    optimizers, schedules = configured
    if not isinstance(optimizers, (list, tuple)) or not isinstance(schedules, (list, tuple)):
        return configured
    if len(optimizers) != 1 or len(schedules) > 1:
        return configured
    if not schedules:
        return optimizers[0]
    return {"optimizer": optimizers[0], "lr_scheduler": schedules[0]}


def optimizer_of(configured: Any) -> tuple[Any, LRScheduler | None]:
    """Return optimizer and schedule from what `configure_optimizers` returned."""
    configured = as_dict(configured)
    if not isinstance(configured, dict):
        return configured, None
    schedule = configured.get("lr_scheduler")
    if isinstance(schedule, Mapping):
        schedule = schedule["scheduler"]
    return configured["optimizer"], schedule
