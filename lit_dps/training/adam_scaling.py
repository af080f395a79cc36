"""Scales settings of Adam-like optimizers with the batch size (Malladi et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lit_dps.core.batch_scaling import scaled_beta2, scaled_decay
from lit_dps.core.errors import ConfigError
from lit_dps.core.optimizer_kind import OptimizerKind
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.batch_schedule_callback import refuse_batch_schedule
from lit_dps.training.example_count import full_batch_size, record_batches
from lit_dps.training.optimizer_groups import group_rule, initial_rates


class AdamScalingCallback(Callback):
    """Scale beta2 and weight decay of Adam-like optimizers from batch size B0 to batch size B.

    The averages of the optimizer then cover the same number of examples as at B0, where it was
    tuned. `lit_dps.core.batch_scaling.scaled_beta2` scales the decay rate of a second moment (beta2
    of Adam, alpha of RMSprop, rho of Adadelta), and `lit_dps.core.batch_scaling.scaled_decay` a
    decoupled weight decay (AdamW, Lion, Muon). A weight decay that is added to the gradient, as in
    Adam, stays, because it is a part of the loss. eta is the rate of a group when training starts,
    before its schedule. SGD-like groups are not changed (`group_rule`). With several groups or
    optimizers, such as Muon and AdamW, each group is scaled by its own rule. B is the size of a
    full batch (`full_batch_size`).

    Args:
        reference: B0, in examples of an optimizer step.
        rate: eta0, the rate at which weight decay was tuned at B0: a list with the rate of each
            group of each optimizer, or the rate of the first group that is not SGD-like. The ratio
            eta / eta0 of that group then holds for all. None assumes that eta = eta0.

    Attributes:
        factor: B / B0, after the first batch has begun; 0 before.

    Raises:
        ConfigError: if the reference is below 1, or if a rate is not positive. When a fit begins,
            for a batch schedule, or if the number of rates differs from the number of groups.
    """

    def __init__(self, reference: int, rate: float | list[float] | None = None):
        if reference < 1:
            raise ConfigError("AdamScalingCallback.reference", reference, "at least 1 example")
        rates = rate
        if not isinstance(rates, list):
            rates = [] if rates is None else [rates]
        if rate == [] or not all(0 < each < math.inf for each in rates):
            allowed = "a learning rate above 0, a list of them, or null"
            raise ConfigError("AdamScalingCallback.rate", rate, allowed)
        self.reference = reference
        self.rate = rate
        self.factor = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_batch_schedule(trainer, "AdamScalingCallback")
            record_batches(trainer)
            # A checkpoint is loaded after this; its optimizers are scaled already.
            self.factor = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = len(initial_rates(trainer.optimizers))
        if isinstance(self.rate, list) and len(self.rate) != groups:
            allowed = f"a rate for each of the {groups} parameter groups of the optimizers"
            raise ConfigError("AdamScalingCallback.rate", self.rate, allowed)

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
        ratios = self._rate_ratios(trainer.optimizers)
        for optimizer in trainer.optimizers:
            count = len(optimizer.param_groups)
            scale_groups(optimizer, self.factor, ratios[:count])
            ratios = ratios[count:]

    def _rate_ratios(self, optimizers: Sequence[Optimizer]) -> list[float]:
        """Return eta / eta0 of each group; 1 if one of the rates is unknown or 0."""
        rates = initial_rates(optimizers)
        if isinstance(self.rate, list):
            ratios = []
            for rate, reference in zip(rates, self.rate, strict=True):
                ratios.append(rate / reference if rate else 1.0)
            return ratios
        ratio = 1.0
        scales = adam_scales_of(optimizers)
        if self.rate is not None and scales is not None and scales.rate is not None:
            ratio = scales.rate / self.rate
        return [ratio] * len(rates)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.factor = state_dict["factor"]


@dataclass(frozen=True)
class AdamScales:
    """Settings of optimizers that are not SGD-like, at the user's batch size.

    Attributes:
        beta2: The decay rate of the first second moment; None without a second moment.
        weight_decay: The largest decoupled weight decay of the groups.
        rate: Learning rate of the first such group at the start of training; None if it is 0.
        rates: The rates of all groups of all optimizers; () if they are unknown.
    """

    beta2: float | None
    weight_decay: float
    rate: float | None = None
    rates: tuple[float, ...] = field(default=(), compare=False)

    @property
    def reference_rates(self) -> float | list[float] | None:
        """The argument `rate` of `AdamScalingCallback`: a list if the groups' rates differ."""
        if len(set(self.rates)) > 1 and all(rate > 0 for rate in self.rates):
            return list(self.rates)
        return self.rate


def scale_groups(optimizer: Optimizer, factor: float, rate_ratio: float | Sequence[float]) -> None:
    """Set second moments and weight decays of an optimizer for another batch size.

    Args:
        optimizer: The optimizer. SGD-like optimizers do not change.
        factor: B / B0.
        rate_ratio: eta / eta0, the rate at B divided by the rate at B0, of all groups or of each.
            The rate itself is not changed.
    """
    ratios = rate_ratio
    if isinstance(ratios, int | float):
        ratios = [ratios] * len(optimizer.param_groups)
    for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
        rule = group_rule(optimizer, group)
        beta = rule.second_moment
        if beta is not None:
            group[beta.name] = beta.changed(group, scaled_beta2(beta.of(group), factor))
        if rule.scales_decay and group.get("weight_decay"):
            group["weight_decay"] = scaled_decay(group["weight_decay"], factor, ratio)


def adam_scales_of(optimizers: Sequence[Optimizer]) -> AdamScales | None:
    """Return the settings that depend on the batch size; None if all groups are SGD-like."""
    beta2 = None
    weight_decay = 0.0
    rate = None
    found = False
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rule = group_rule(optimizer, group)
            if rule.kind is OptimizerKind.SGD_LIKE:
                continue
            if not found:
                rate = float(group.get("initial_lr", group["lr"])) or None
            found = True
            if beta2 is None and rule.second_moment is not None:
                beta2 = rule.second_moment.of(group)
            if rule.scales_decay:
                weight_decay = max(weight_decay, group.get("weight_decay") or 0.0)
    if not found:
        return None
    rates = tuple(initial_rates(optimizers))
    return AdamScales(beta2, weight_decay, rate, rates)
