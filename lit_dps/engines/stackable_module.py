"""Which LightningModules that are no ImageClassifier can be stacked, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_map

from lit_dps.core.trial import Trial
from lit_dps.engines.functional import Functional, tensors_of
from lit_dps.engines.loader_data import LoaderData
from lit_dps.engines.logged_module import (
    metrics_of_rows,
    objects_of_both_steps,
    training_loss,
    validation_metrics,
)
from lit_dps.engines.module_hooks import (
    CALLED_HOOKS,
    LIGHTNING_METHODS,
    TRANSFER_HOOKS,
    VALIDATION_HOOKS,
    NeedsLightning,
    optimizer_of,
    raise_if_caught,
)
from lit_dps.engines.stackable_loss import (
    TOLERANCE,
    TRIED_EXAMPLES,
    Start,
    clone_tensor,
    equal_with_nan,
    holding,
    moved_tensors,
    reason_against_training,
    same_tensors,
    stacked,
    vmap_reason,
)
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.optim import rule_of
from lit_dps.optim.clipping import Clipping
from lit_dps.optim.parameter_groups import grouping_of
from lit_dps.training.deterministic import full_float32
from lit_dps.training.early_validation import EarlyValidation, evaluating
from lit_dps.training.hidden_state import (
    capture_attributes,
    capture_rng_state,
    equal_states,
    preserve_rng_state,
    unchanged_attributes,
)
from lit_dps.training.inheritance import inherits
from lit_dps.training.workload import Built

# A stack calls these methods of each module, or of one module for all networks.
CALLED = (
    "prepare_data",
    "setup",
    "training_step",
    "validation_step",
    "on_validation_epoch_end",
    "configure_optimizers",
)
TRIED_BATCHES = 2
# Steps that two modules are compared for, because a buffer may count steps.
COMPARED_STEPS = 3
# Relative tolerance of values that two modules compute on a GPU by the same operations. On a CPU
# they are equal.
SAME_TOLERANCE = 1e-6


def overridden_methods(module: LightningModule) -> list[str]:
    """Return the methods of a module that a fit calls and a stack does not."""
    names = ["log", "log_dict", *TRANSFER_HOOKS, *LIGHTNING_METHODS, *CALLED_HOOKS]
    names += [*VALIDATION_HOOKS, "train_dataloader", "val_dataloader"]
    overridden = []
    # The order is part of stored texts.
    for name in sorted(set(names)):
        is_log = name == "log" and type(module).log is LightningModule.log
        if name in CALLED or is_log or inherits(module, LightningModule, (name,)):
            continue
        overridden.append(name)
    return overridden


def reason_against_calls(
    module: LightningModule, trainer: Trainer, settings: TrialSettings
) -> str | None:
    """Return which method or setting of a module a stack would ignore; None if there is none.

    Args:
        module: The module.
        trainer: A trainer with the data module of the trial.
        settings: The settings of the study.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        return f"{name} uses manual optimization"
    methods = overridden_methods(module)
    if methods:
        return f"{name} overrides {', '.join(methods)}"
    goal = settings.goal
    if goal.stops_validations_early and EarlyValidation.supports(trainer, module, goal.monitored):
        return f"{name} has per_example_error but is not an ImageClassifier"
    if trainer.reload_dataloaders_every_n_epochs:  # pyright: ignore[reportAttributeAccessIssue]
        return "trainer.reload_dataloaders_every_n_epochs needs Lightning's loop"
    return None


def reason_against_values(
    module: LightningModule, data: LoaderData, settings: TrialSettings
) -> str | None:
    """Return which value of a module differs in a stack; None if none does.

    The module cannot be trained afterwards. It is left in evaluation mode.
    """
    name = type(module).__name__
    batches = data.epochs()
    order = torch.from_numpy(next(batches)).to(module.device)
    module.train()
    try:
        with full_float32(), raise_if_caught():
            parts = order.split(data.batch_size)
            tried = list(parts[:TRIED_BATCHES])
            if len(parts[-1]) < data.batch_size:
                tried.append(parts[-1])
            for index in tried:
                batch = data.train[index]
                reason = reason_against_training(module, training_loss, batch)
                if reason is not None:
                    return reason
            with torch.no_grad():
                shared = objects_of_both_steps(module, data.train[tried[0]], data.validation[0])
            if shared:
                return f"{name} updates {shared[0]} both in training and in validation"
            return _reason_against_validation(module, data, _names(settings), settings)
    except NeedsLightning as error:
        return str(error)
    except (RuntimeError, TypeError, ValueError) as error:
        return vmap_reason(name, error)


def _names(settings: TrialSettings) -> list[str]:
    """Return the metrics of the goal and of the study."""
    return list(dict.fromkeys([settings.goal.monitored, *settings.metrics]))


@torch.no_grad()
def _reason_against_validation(
    module: LightningModule, data: LoaderData, names: Sequence[str], settings: TrialSettings
) -> str | None:
    """Return why the metrics of a module cannot be measured in a stack; None if they can."""
    name = type(module).__name__
    module.eval()
    functional = Functional(module)
    start = tensors_of(module)
    moved = moved_tensors(start)
    two = stacked(start, moved)
    numbers = sorted({0, len(data.validation) - 1})
    batches = [(number, data.validation[number]) for number in numbers]
    before = {key: tensor.clone() for key, tensor in tensors_of(module).items()}
    attributes = capture_attributes(module)
    draws = capture_rng_state(module)
    examples = tree_map(clone_tensor, batches)

    def call_alone(function: Callable, states: Any) -> Any:
        return function(module, states)

    single = validation_metrics(call_alone, batches, names)
    if not same_tensors(examples, batches):
        return f"validation_step of {name} changes its batch"
    if not equal_states(draws, capture_rng_state(module)):
        return f"{name} draws random numbers in validation_step"
    for key, tensor in tensors_of(module).items():
        if not equal_with_nan(tensor, before[key]):
            return f"validation_step of {name} changes {key}"
    rows = torch.arange(2, device=module.device)
    of_two = metrics_of_rows(functional, lambda _: two, rows, batches, names)
    if not equal_states(attributes, capture_attributes(module)):
        return f"validation_step of {name} changes an attribute"
    with holding(module, moved):
        other = validation_metrics(call_alone, batches, names)
    for key in names:
        alone = torch.stack([single[key], other[key]])
        if not torch.allclose(of_two[key], alone, rtol=TOLERANCE, equal_nan=True):
            return f"{name}: its {key} differs under torch.vmap"
    settings.goal.check_scale(float(single[settings.goal.monitored]))
    return None


def loader_data(
    built: Any, device: torch.device, settings: TrialSettings, trial: Trial
) -> LoaderData:
    """Return the data of a trial in memory. Call this under the seed of the trial's order."""
    return LoaderData(
        built.data, built.module, device, trial.cell.batch_size, settings.goal.check_interval
    )


def kind_of(built: Built) -> tuple:
    """Return the properties that all modules of a stack share: rule, clipping, shapes."""
    module = built.module
    shapes = {}
    for name, tensor in tensors_of(module).items():
        shapes[name] = tensor.shape, tensor.dtype, tensor.requires_grad
    with unchanged_attributes(module):  # the module is trained afterwards
        optimizer, _ = optimizer_of(module.configure_optimizers())
    groups = grouping_of(module, optimizer)
    return rule_of(optimizer), groups, Clipping.of(built.trainer), shapes


class LoggedReference:
    """The first module of a stack and its data, for comparison with other attempts.

    Args:
        built: The module and its data in memory.
        device: Where the modules are compared.
        settings: The settings of the study.

    Attributes:
        keeps_untrained: Whether the loss surely changes no untrained parameter. It is unknown.
    """

    keeps_untrained = False

    def __init__(self, built: Built, device: torch.device, settings: TrialSettings):
        assert isinstance(built.data, LoaderData)
        self._names = _names(settings)
        self._device = device
        self._data = built.data
        self._start = Start.of(built.module.to(device))
        self._kind = type(built.module), kind_of(built)
        self._values = self._values_of(built.module)

    def equals(self, built: Built) -> bool:
        """Return True if module and data equal the first ones except for weights and order."""
        assert isinstance(built.data, LoaderData)
        kind = type(built.module), kind_of(built)
        if kind != self._kind or not self._data.equals(built.data):
            return False
        built.data.share(self._data)
        values = self._values_of(built.module)
        if self._device.type == "cpu" or values.shape != self._values.shape:
            return torch.equal(values, self._values)
        largest = float(self._values.abs().max())
        return torch.allclose(
            values, self._values, rtol=SAME_TOLERANCE, atol=SAME_TOLERANCE * largest
        )

    def _values_of(self, module: LightningModule) -> Tensor:
        """Return loss, gradient and metrics of a module with the weights of the first module."""
        functional = Functional(module.to(self._device))
        starts = self._start.parameters
        parameters = {}
        for name, parameter in module.named_parameters():
            start = starts[name].clone()
            parameters[name] = start.requires_grad_(parameter.requires_grad)
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        size = min(len(self._data.train), max(2, min(self._data.batch_size, TRIED_EXAMPLES)))
        batch = self._data.train[torch.arange(size, device=self._device)]
        with preserve_rng_state(seed=0):  # so that all modules draw the same dropout
            losses = []
            after = self._start.buffers
            for _ in range(COMPARED_STEPS):
                loss, after = functional.call_and_update(training_loss, parameters, after, batch)
                losses.append(loss)
            gradients = torch.autograd.grad(torch.stack(losses).sum(), trained, allow_unused=True)
            with evaluating(module):
                tensors = {**parameters, **self._start.buffers}
                metrics = validation_metrics(
                    lambda function, states: functional.call(function, tensors, states),
                    [(0, self._data.validation[0])],
                    self._names,
                )
        values = [*losses, *metrics.values(), *after.values()]
        # A step may move an untrained parameter, such as the weights of a momentum teacher.
        for name, tensor in parameters.items():
            if not tensor.requires_grad and not equal_with_nan(tensor, starts[name]):
                values.append(tensor)
        values += [gradient for gradient in gradients if gradient is not None]
        return torch.cat([value.detach().double().flatten() for value in values])
