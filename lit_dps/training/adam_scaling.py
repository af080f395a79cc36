"""Scales settings of Adam-like optimizers with the batch size (Malladi et al. 2022)."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import optim
from torch.optim import Optimizer

from lit_dps.core.batch_scaling import scaled_beta2, scaled_decay
from lit_dps.core.errors import ConfigError
from lit_dps.optim.parameter_groups import group_settings
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.batch_schedule_callback import refuse_batch_schedule
from lit_dps.training.example_count import full_batch_size, record_batches

# The update of these optimizers does not grow with the gradient: they divide by its size.
_ADAPTIVE = (
    optim.Adadelta,
    optim.Adafactor,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.Muon,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SparseAdam,
)
# The update of these optimizers grows with the gradient.
_NOT_ADAPTIVE = (optim.SGD, optim.ASGD, optim.LBFGS)
# Optimizers of other packages that use the sign of the gradient. Their betas belong to the
# momentum.
_SIGN_BASED = ("Lion", "SignSGD")
# These have a decoupled weight decay, but no betas.
_DECOUPLED_DECAY = (optim.Muon, optim.Adafactor)
# RAdam divides by the second moment only after some steps.
_STEPS_BEFORE_MEASUREMENT = 12
_GRADIENT_FACTOR = 10.0


class AdamScalingCallback(Callback):
    """Scale beta2 and weight decay of Adam-like optimizers from batch size B0 to batch size B.

    The averages of the optimizer then cover the same number of examples as at B0, where it was
    tuned. `lit_dps.core.batch_scaling.scaled_beta2` scales the second moment, and
    `lit_dps.core.batch_scaling.scaled_decay` the weight decay. eta is the rate of the optimizer
    when training starts, before its schedule. Optimizers whose update grows with the gradient are
    not changed (`is_adaptive`). B is the size of a full batch (`full_batch_size`).

    Args:
        reference: B0, in examples of an optimizer step.
        rate: eta0, the rate at which weight decay was tuned at B0; None assumes that eta = eta0.

    Attributes:
        factor: B / B0, after the first batch has begun; 0 before.

    Raises:
        ConfigError: if the reference is below 1, or if the rate is not positive. When a fit begins,
            for a batch schedule.
    """

    def __init__(self, reference: int, rate: float | None = None):
        if reference < 1:
            raise ConfigError("AdamScalingCallback.reference", reference, "at least 1 example")
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError("AdamScalingCallback.rate", rate, "a learning rate above 0, or null")
        self.reference, self.rate, self.factor = reference, rate, 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_batch_schedule(trainer, "AdamScalingCallback")
            record_batches(trainer)
            # A checkpoint is loaded after this; its optimizers are scaled already.
            self.factor = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.factor:
            return
        size = full_batch_size(trainer, batch)
        if not isinstance(trainer.strategy, SharedBatchDDP):
            size = sum(ranks.all_gather(size))  # each rank has different batches
        self.factor = size * trainer.accumulate_grad_batches / self.reference
        if not self.factor:
            return
        used = initial_rate(trainer.optimizers)
        rate_ratio = 1.0
        if self.rate is not None and used:
            rate_ratio = used / self.rate
        for optimizer in trainer.optimizers:
            scale_groups(optimizer, self.factor, rate_ratio)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.factor = state_dict["factor"]


@dataclass(frozen=True)
class AdamScales:
    """Settings of an adaptive optimizer at the user's batch size.

    Attributes:
        beta2: beta2 of the second moment; None without a second moment.
        weight_decay: The largest weight decay of the groups.
        rate: Learning rate at the start of training; None if it is 0.
    """

    beta2: float | None
    weight_decay: float
    rate: float | None = None


def scale_groups(optimizer: Optimizer, factor: float, rate_ratio: float) -> None:
    """Set second moment and weight decay of an adaptive optimizer for another batch size.

    Args:
        factor: B / B0.
        rate_ratio: eta / eta0, the rate at B divided by the rate at B0. The rate itself is not
            changed.
    """
    if not is_adaptive([optimizer]):
        return
    for group in optimizer.param_groups:
        if _has_second_moment(optimizer, group):
            beta1, beta2 = group["betas"]
            group["betas"] = beta1, scaled_beta2(beta2, factor)
        if group.get("weight_decay") and (
            "betas" in group or isinstance(optimizer, _DECOUPLED_DECAY)
        ):
            group["weight_decay"] = scaled_decay(group["weight_decay"], factor, rate_ratio)


def initial_rate(optimizers: Sequence[Optimizer]) -> float | None:
    """Return the initial rate of the first group, before its schedule; None if it is 0."""
    group = optimizers[0].param_groups[0]
    return float(group.get("initial_lr", group["lr"])) or None


def is_adaptive(optimizers: Sequence[Optimizer]) -> bool:
    """Return True if the update of an optimizer does not grow with the gradient.

    The learning rate of such an optimizer grows as sqrt(B) (Malladi et al. 2022, arXiv 2205.10287).
    The classes of torch.optim and some sign-based optimizers are known; others are measured
    (`measured_adaptive`).
    """
    return any(_is_adaptive(optimizer) for optimizer in optimizers)


def adam_scales_of(optimizers: Sequence[Optimizer]) -> AdamScales | None:
    """Return the settings that depend on the batch size; None if no optimizer is adaptive."""
    adaptive = [optimizer for optimizer in optimizers if _is_adaptive(optimizer)]
    if not adaptive:
        return None
    beta2 = None
    weight_decay = 0.0
    for optimizer in adaptive:
        for group in optimizer.param_groups:
            if beta2 is None and _has_second_moment(optimizer, group):
                beta2 = group["betas"][1]
            if _scales_decay(optimizer, group):
                weight_decay = max(weight_decay, group.get("weight_decay") or 0.0)
    return AdamScales(beta2, weight_decay, initial_rate(adaptive))


def needs_measurement(optimizer: Optimizer) -> bool:
    """Return True if `is_adaptive` has to measure an optimizer, because its class is not listed."""
    is_listed = isinstance(optimizer, _ADAPTIVE + _NOT_ADAPTIVE)
    return not is_listed and type(optimizer).__name__ not in _SIGN_BASED


def _is_adaptive(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, _ADAPTIVE) or type(optimizer).__name__ in _SIGN_BASED:
        return True
    if isinstance(optimizer, _NOT_ADAPTIVE):
        return False
    measured = measured_adaptive(optimizer)
    if measured is None:
        return any("betas" in group for group in optimizer.param_groups)
    return measured


def measured_adaptive(optimizer: Optimizer) -> bool | None:
    """Return True if a tenfold gradient gives less than sqrt(10) times the update.

    A copy of the optimizer updates a small matrix, with the settings of its first group but without
    weight decay. After some steps, one step is measured.

    Returns:
        None if the copy fails or does not move the matrix.
    """
    try:
        small = _update_norm(optimizer, 1.0)
        large = _update_norm(optimizer, _GRADIENT_FACTOR)
    except Exception:  # such as of an optimizer that needs a closure
        return None
    if not small > 0:
        return None
    return large / small < math.sqrt(_GRADIENT_FACTOR)


def _update_norm(optimizer: Optimizer, scale: float) -> float:
    """Return how far a step moves a matrix with gradients of this scale, after some steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start, gradient = torch.randn(4, 4), torch.randn(4, 4)
    parameter = torch.nn.Parameter(start.clone())
    twin = copy.copy(optimizer)
    settings = copy.deepcopy(group_settings(optimizer.param_groups[0]))
    if "weight_decay" in settings:
        settings["weight_decay"] = 0.0
    if not float(settings.get("lr", 1.0)):  # a warm-up may begin at 0
        settings["lr"] = 1e-3
    twin.param_groups = [{**settings, "params": [parameter]}]
    twin.state = defaultdict(dict)
    before = start
    for _ in range(_STEPS_BEFORE_MEASUREMENT + 1):
        before = parameter.detach().clone()
        parameter.grad = scale * gradient
        # A schedule or a strategy may have wrapped the step of the instance. Call the class's step.
        type(optimizer).step(twin)
    return float((parameter.detach() - before).norm())


def _has_second_moment(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    return "betas" in group and type(optimizer).__name__ not in _SIGN_BASED


def _scales_decay(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    return "betas" in group or isinstance(optimizer, _DECOUPLED_DECAY)
