"""Which trials the interval loop can train, and which of them it can stack.

The interval loop replaces Lightning's loop if module, data and trainer come from lit_dps, or
override nothing that the loop would leave out (`module_hooks`). A network in a stack must compute
the same as a single network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from lit_dps.core.trial import Trial
from lit_dps.core.trial_config import AVERAGE_KEY
from lit_dps.data import ImageData
from lit_dps.engines.module_hooks import (
    CALLED_HOOKS,
    LIGHTNING_METHODS,
    TRANSFER_HOOKS,
    VALIDATION_METHODS,
    NeedsLightning,
    as_dict,
    detach_trainer,
    end_module,
    optimizer_of,
    overridden,
    show_length,
)
from lit_dps.engines.network_run import build_trial
from lit_dps.engines.schedule_table import reason_against_table, schedule_follows_metric
from lit_dps.engines.stackable_loss import (
    ERROR_LENGTH,
    MAX_DIVIDED_EXAMPLES,
    examples_of_classes,
    reason_against_stacked_loss,
)
from lit_dps.engines.stackable_module import (
    loader_data,
    reason_against_calls,
    reason_against_values,
)
from lit_dps.engines.stackable_update import (
    reason_against_schedule,
    reason_against_update,
    rests_without_gradients,
)
from lit_dps.engines.trial_settings import TrialConfig, TrialSettings
from lit_dps.module import ImageClassifier, logs
from lit_dps.optim import RULES, rule_of
from lit_dps.optim.clipping import Clipping
from lit_dps.optim.parameter_groups import trained_parameters
from lit_dps.pruning import prunable
from lit_dps.pruning.network import copies_of, why_unprunable
from lit_dps.training import lightning_private
from lit_dps.training.delay_callback import requires_closure
from lit_dps.training.early_validation import EarlyValidation
from lit_dps.training.hidden_state import preserve_rng_state, unchanged_attributes
from lit_dps.training.inheritance import adopt_former_methods, inherits
from lit_dps.training.workload import Built

# Reason against the interval loop for one network.
NO_CLASSIFIER = "is not an ImageClassifier"
SHARED_CLOCK = (
    "the goal counts seconds (goal.max_seconds or goal.unit), and all networks of a stack share "
    "one clock"
)

BATCH_METHODS = ("train_dataloader", "epochs", *TRANSFER_HOOKS)
DATA_METHODS = (
    "val_dataloader",
    "validation_batch",
    "validation_size",
    "pruning_dataloader",
    "on_device",
)


def is_no_classifier(settings: TrialSettings, trial: Trial) -> bool:
    """Return True if the module of a trial is no ImageClassifier; False if it cannot be built."""
    try:
        module = settings.workload.module(trial)
    except Exception:  # code of the user may raise anything; `ineligibility_reason` names it
        return False
    return not isinstance(module, ImageClassifier)


def ineligibility_reason(
    settings: TrialSettings, trial: Trial, stacked: bool = False
) -> str | None:
    """Return why the interval loop cannot train a trial, or cannot stack it; None if it can.

    Args:
        settings: The settings of the study.
        trial: The trial.
        stacked: Whether to ask about training in a stack.
    """
    config = settings.resolve(trial)
    try:
        _check_eligible(settings, config, trial, stacked)
    except Exception as error:
        # A trial that cannot be built fails with this error in Lightning's loop. A module that
        # raises it only here trains there.
        return reason_of(error)
    return None


def _check_eligible(
    settings: TrialSettings, config: TrialConfig, trial: Trial, stacked: bool
) -> None:
    """Raise NeedsLightning if the interval loop cannot train a trial, or cannot stack it.

    Code of the user may raise other errors.
    """
    uses_local_sgd = config.local.on
    if stacked and uses_local_sgd:
        raise NeedsLightning("local SGD trains its workers one after another in one network")
    if uses_local_sgd and config.optim.average_half_life:
        raise NeedsLightning(
            f"{AVERAGE_KEY} averages the weights of one network, and local SGD trains several"
        )
    if uses_local_sgd and Clipping.of(settings.workload.trainer_of(trial)):
        raise NeedsLightning(
            "only Lightning's loop clips the gradients of each worker of local SGD "
            "(trainer.gradient_clip_val)"
        )
    _check_readings(settings, stacked, uses_local_sgd)
    built, _ = build_trial(settings, trial)
    if uses_local_sgd and isinstance(built.module, ImageClassifier):
        hooks = overridden(built.module, CALLED_HOOKS)
        if hooks:
            name = type(built.module).__name__
            raise NeedsLightning(
                f"{name} overrides {', '.join(hooks)}, which the workers of local SGD share"
            )
    if stacked and not isinstance(built.module, ImageClassifier):
        _check_logged(built, settings, trial, config.optim.delay)
    else:
        _check_built(built, settings, stacked, config.optim.delay)


def _refuse(reason: str | None) -> None:
    """Raise NeedsLightning if there is a reason."""
    if reason is not None:
        raise NeedsLightning(reason)


def _check_readings(settings: TrialSettings, stacked: bool, uses_local_sgd: bool) -> None:
    """Raise NeedsLightning if a reading needs Lightning's loop, or a network alone."""
    for spec in settings.readings:
        reading = spec.build()
        if uses_local_sgd and reading.follows_steps:
            raise NeedsLightning(
                f"the reading {reading.name} follows one network, and local SGD trains several"
            )
        if stacked and not reading.stacked:
            raise NeedsLightning(f"the reading {reading.name} measures one network at a time")


def _check_built(built: Built, settings: TrialSettings, stacked: bool, delay: int) -> None:
    """Raise NeedsLightning if a trial with its data set up cannot be trained, or stacked.

    It cannot be trained afterwards, because its loss is computed and its module changed.
    """
    trainer = lightning_private.make_trainer(built.trainer)
    trainer.datamodule = built.data  # pyright: ignore[reportAttributeAccessIssue]
    with preserve_rng_state(built.module, built.data):
        _check_loop(built, trainer, settings)
        if stacked and settings.goal.build().counts_seconds:
            raise NeedsLightning(SHARED_CLOCK)
        if stacked:
            _check_stack(built, settings.goal.max_steps, delay)


def _check_logged(built: Built, settings: TrialSettings, trial: Trial, delay: int) -> None:
    """Raise NeedsLightning if a trial of a module that is no ImageClassifier cannot be stacked.

    It cannot be trained afterwards. Lightning's loop trains it if it cannot be stacked.
    """
    module = built.module
    name = type(module).__name__
    trainer = Trainer(**built.trainer)
    trainer.datamodule = built.data  # pyright: ignore[reportAttributeAccessIssue]
    _check_trainer(trainer)
    _refuse(reason_against_calls(module, trainer, settings))
    if settings.goal.build().counts_seconds:
        raise NeedsLightning(SHARED_CLOCK)
    if why_unprunable(module) or any(map(is_parametrized, module.modules())):
        raise NeedsLightning(f"{name} computes its weights from other parameters")
    seed = trial.seed_for("order")
    with preserve_rng_state(module, built.data, seed=seed):
        module.to(trainer.strategy.root_device)
        detach_trainer(module)
        steps = settings.visible_steps
        data = loader_data(built, module.device, settings, trial)
        show_length(module, steps, data.steps_of_epoch)
        _check_optimizer(module, module.configure_optimizers(), True)
        _check_stacked_update(module)
        _refuse(reason_against_table(module, steps, data.steps_of_epoch))
        _refuse(reason_against_values(module, data, settings))
        _check_rule(module, delay)


def reason_of(error: Exception) -> str:
    """Return the reason that an error of a module gives against a loop."""
    if isinstance(error, NeedsLightning):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:ERROR_LENGTH]}"


def _check_loop(built: Built, trainer: Trainer, settings: TrialSettings) -> None:
    """Raise NeedsLightning if the interval loop cannot train a trial."""
    module = built.module
    name = type(module).__name__
    _check_trainer(trainer)
    if not isinstance(module, ImageClassifier):
        raise NeedsLightning(f"{name} {NO_CLASSIFIER}")
    _check_steps(module)
    if not standard_data(built.data) or not inherits(built.data, ImageData, DATA_METHODS):
        raise NeedsLightning(
            f"{type(built.data).__name__} does not keep its images in memory as ImageData does"
        )
    _check_validation(module, trainer, settings)
    if why_unprunable(module) or any(map(is_parametrized, module.modules())):
        raise NeedsLightning(f"{name} computes its weights from other parameters")
    with unchanged_attributes(module):  # the module may be trained afterwards
        configured = module.configure_optimizers()
    _check_optimizer(module, configured)
    module.to(trainer.strategy.root_device)
    detach_trainer(module)
    examples = _tried_examples(built)
    hooks = overridden(module, CALLED_HOOKS)
    if hooks:
        optimizer, _ = optimizer_of(configured)
        rule = rule_of(optimizer)
        if rule is not None and rule.gradient_point is not None:
            # In Lightning's loop, the hooks of a step see the weights at which gradients are taken.
            raise NeedsLightning(
                f"{name} overrides {', '.join(hooks)}, which only Lightning's loop calls at the "
                f"weights where {rule.name} takes its gradients"
            )
        _check_hooks(module, optimizer, examples)
    else:
        module.loss(examples)


def _check_steps(module: ImageClassifier) -> None:
    """Raise NeedsLightning if the training steps of a module need Lightning's loop."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise NeedsLightning(f"{name} uses manual optimization")
    methods = overridden(module, LIGHTNING_METHODS)
    if methods:
        raise NeedsLightning(f"{name} overrides {', '.join(methods)}")


def _check_validation(module: ImageClassifier, trainer: Trainer, settings: TrialSettings) -> None:
    """Raise NeedsLightning if the validation of a module needs Lightning's loop."""
    name = type(module).__name__
    metrics = sorted({*settings.metrics} - {"val_loss"})
    if metrics:
        raise NeedsLightning(
            f"only Lightning's loop measures {', '.join(metrics)} of study.metrics"
        )
    goal = settings.goal
    adopt_former_methods(module)
    methods = overridden(module, VALIDATION_METHODS)
    if methods and not goal.stops_validations_early:
        raise NeedsLightning(
            f"{name} overrides {', '.join(methods)}, and goal.early_reject is false"
        )
    if EarlyValidation.supports(trainer, module, goal.monitored):
        return
    if methods:
        raise NeedsLightning(f"{name} overrides {', '.join(methods)} but not per_example_error")
    raise NeedsLightning(f"{name} does not compute {goal.monitored} by per_example_error")


def _check_optimizer(module: LightningModule, configured: Any, any_schedule: bool = False) -> None:
    """Raise NeedsLightning if an optimizer or schedule needs Lightning's loop.

    Args:
        module: The module.
        configured: The value of its `configure_optimizers`.
        any_schedule: Whether a schedule may be stepped once an epoch.
    """
    name = type(module).__name__
    configured = as_dict(configured)
    optimizer, schedule = optimizer_of(configured)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise NeedsLightning(
            f"configure_optimizers of {name} does not return exactly one torch optimizer"
        )
    if requires_closure(optimizer):
        raise NeedsLightning(f"the optimizer of {name} needs a closure")
    has_schedule = schedule is not None and not any_schedule
    if has_schedule and not _is_stepped_every_step(configured["lr_scheduler"]):
        raise NeedsLightning(f"the schedule of {name} does not step once per optimizer step")
    trained_ids = set(map(id, trained_parameters(optimizer)))
    if copies_of(module, prunable(module, held=trained_ids), trained_ids):
        raise NeedsLightning(f"{name} keeps a copy of its network, which must be pruned too")


def _check_hooks(
    module: ImageClassifier, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> None:
    """Call the hooks of a fit once; raise NeedsLightning if they need Lightning's loop."""
    before = [(id(p), p.requires_grad) for p in module.parameters()]
    module.on_fit_start()
    module.on_train_start()
    module.on_train_epoch_start()
    loss = module.loss(batch)
    module.on_before_zero_grad(optimizer)
    module.on_before_backward(loss)
    loss.backward()
    module.on_after_backward()
    module.on_before_optimizer_step(optimizer)
    end_module(module)
    if [(id(p), p.requires_grad) for p in module.parameters()] != before:
        raise NeedsLightning(f"a hook of {type(module).__name__} changes which weights are trained")


def _is_stepped_every_step(schedule: Any) -> bool:
    """Return True if Lightning steps a configured schedule after every optimizer step."""
    if not isinstance(schedule, Mapping) or schedule_follows_metric(
        schedule["scheduler"], schedule
    ):
        return False
    return schedule.get("interval") == "step" and schedule.get("frequency", 1) == 1


def standard_data(data: LightningDataModule | None) -> bool:
    """Return True if a data module makes its training batches as `ImageData` does."""
    return inherits(data, ImageData, BATCH_METHODS)


def _check_trainer(trainer: Trainer) -> None:
    """Raise NeedsLightning if a setting of a trainer needs Lightning's loop.

    The interval loop only updates weights in a step, on one device in full precision.
    """
    callbacks = lightning_private.callbacks_of(trainer)
    if callbacks:
        names = ", ".join(type(callback).__name__ for callback in callbacks)
        raise NeedsLightning(f"trainer.callbacks contains {names}")
    loggers = [type(logger).__name__ for logger in trainer.loggers]
    profiler: Any = trainer.profiler  # pyright: ignore[reportAttributeAccessIssue]
    settings = {
        "strategy": type(trainer.strategy) is not SingleDeviceStrategy,
        "precision": type(trainer.precision_plugin) is not Precision,
        "profiler": not isinstance(profiler, PassThroughProfiler),
        "accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
        # The integer 1 means one batch.
        "limit_train_batches": repr(trainer.limit_train_batches) != "1.0",
        f"logger {', '.join(loggers)}": logs(trainer),
        "fast_dev_run": lightning_private.is_fast_dev_run(trainer),
        "detect_anomaly": lightning_private.detects_anomalies(trainer),
    }
    for name, needs_lightning in settings.items():
        if needs_lightning:
            raise NeedsLightning(f"trainer.{name} needs Lightning's loop")


def _check_stack(built: Built, max_steps: int, delay: int) -> None:
    """Raise NeedsLightning if a trial that the interval loop can train cannot be stacked."""
    module = built.module
    assert isinstance(module, ImageClassifier)
    name = type(module).__name__
    hooks = overridden(module, CALLED_HOOKS)
    if hooks:
        raise NeedsLightning(
            f"{name} overrides {', '.join(hooks)}, which are called for one network at a time"
        )
    _, schedule = optimizer_of(module.configure_optimizers())
    reason = reason_against_schedule(schedule, max_steps)
    if reason is not None:
        raise NeedsLightning(f"the schedule of {name} cannot be stacked: {reason}")
    _check_stacked_update(module)
    whole_batch = _whole_batch(built)
    _refuse(reason_against_stacked_loss(module, _tried_examples(built), whole_batch))
    _check_rule(module, delay)


def _check_stacked_update(module: LightningModule) -> None:
    """Raise NeedsLightning if the optimizer or hooks of a module cannot be stacked."""
    name = type(module).__name__
    optimizer, _ = optimizer_of(module.configure_optimizers())
    if not rule_of(optimizer):
        raise NeedsLightning(
            f"no stackable update rule matches {type(optimizer).__name__} as configured (rules: "
            f"{', '.join(RULES)})"
        )
    # Those that a stack holds: a subclass may override `parameters()` to train some of them.
    parameters = [parameter for _, parameter in module.named_parameters()]
    if any(map(_has_hooks, parameters)):
        raise NeedsLightning(f"{name} has hooks on its parameters")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise NeedsLightning(f"{name} has hooks on its optimizer")
    trained_ids = {id(p) for p in parameters if p.requires_grad}
    if set(map(id, trained_parameters(optimizer))) != trained_ids:
        raise NeedsLightning("the parameters of the optimizer differ from the trained parameters")
    # A stack keeps weights, rates and numbers of steps in one type, which 16 bits would round.
    kinds = {str(p.dtype).removeprefix("torch.") for p in parameters if p.requires_grad}
    if kinds not in ({"float32"}, {"float64"}):
        raise NeedsLightning(
            f"the trained parameters of {name} are {' and '.join(sorted(kinds))}, and a stack "
            "needs float32 or float64 for all"
        )


def _check_rule(module: LightningModule, delay: int) -> None:
    """Raise NeedsLightning if the update of a stack differs from the optimizer's.

    The module is left in double precision.
    """
    module.double()
    optimizer, _ = optimizer_of(module.configure_optimizers())
    rule = rule_of(optimizer)
    assert rule is not None
    if delay and not rests_without_gradients(module, rule):
        raise NeedsLightning(
            f"optim.delay is {delay}, and the rule {rule.name} changes weights or state without a "
            "gradient"
        )
    _refuse(reason_against_update(module, optimizer, rule))


def _has_hooks(parameter: Any) -> bool:
    """Return True if a parameter has hooks on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _tried_examples(built: Built) -> tuple[Tensor, Tensor]:
    """Return examples of the training split on the module's device (`examples_of_classes`)."""
    assert isinstance(built.data, ImageData)
    x, y = built.data.on_device("train", built.module.device)
    index = examples_of_classes(y[: built.data.training_size])
    return x[index], y[index]


def _whole_batch(built: Built) -> tuple[Tensor, Tensor]:
    """Return a batch of the training split, of at most `MAX_DIVIDED_EXAMPLES` examples."""
    assert isinstance(built.data, ImageData)
    x, y = built.data.on_device("train", built.module.device)
    size = min(built.data.batch_size, built.data.training_size, MAX_DIVIDED_EXAMPLES)
    return x[:size], y[:size]
