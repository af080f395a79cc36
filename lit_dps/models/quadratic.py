"""The noisy quadratic model of Zhang et al. (2019), a workload whose K* can be computed."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.optim import rule_named


class NoisyQuadratic(LightningModule):
    """Copies of the quadratic 1/2 sum h_i w_i^2, h_i = 1 / i, with gradient noise of variance h_i.

    Zhang et al. 2019, "Which Algorithmic Choices Matter at Which Batch Sizes? Insights From a Noisy
    Quadratic Model"; `tests/support/quadratic.py` of the repository computes it in closed form. The
    example x has the loss 1/2 sum h w^2 + sum sqrt(h) x w, with x standard normal
    (`lit_dps.data.GradientNoise`), so the gradient of a batch is h w + z, Var z = h / B.

    Logs `val_loss`, the mean of 1/2 sum h w^2 over the copies. It estimates the expected loss,
    which the paper's K* is about. The loss of one copy would meet a goal early by luck. All copies
    start at w = 1, so that only the noise is sampled (the paper starts at N(0, 1), with the same
    second moments). The copies have one optimizer. The training loss is their sum, so that each
    copy trains at the learning rate. Rules that are linear in the gradient agree with the closed
    form. There is nothing to prune.

    Args:
        dimensions: Axes of the quadratic.
        copies: Copies that the loss is averaged over.
        optimizer: Name of an update rule: sgd, momentum or nesterov.
        learning_rate: Learning rate above 0; plain SGD is stable below 2.
        momentum: Momentum in [0, 1), of momentum and nesterov.

    Raises:
        ConfigError: for a value out of its range, and a rule with other hyperparameters.
    """

    h: Tensor
    root: Tensor

    def __init__(
        self,
        dimensions: int = 100,
        copies: int = 64,
        optimizer: str = "sgd",
        learning_rate: float = 0.1,
        momentum: float = 0.9,
    ):
        super().__init__()
        for key, number in (("dimensions", dimensions), ("copies", copies)):
            if number < 1:
                raise ConfigError(f"model.{key}", number, "at least 1")
        if not learning_rate > 0:
            raise ConfigError("model.learning_rate", learning_rate, "a number above 0")
        if not 0 <= momentum < 1:
            raise ConfigError("model.momentum", momentum, "a number in [0, 1)")
        if {*rule_named(optimizer).hyperparameters} - {"momentum"}:
            raise ConfigError(
                "model.optimizer", optimizer, "sgd, momentum or nesterov: linear in the gradient"
            )
        self.save_hyperparameters()
        self.w = nn.Parameter(torch.ones(copies * dimensions))
        h = 1 / torch.arange(1, dimensions + 1, dtype=torch.float64)
        self.register_buffer("h", h.float().repeat(copies), persistent=False)
        self.register_buffer("root", h.sqrt().float().repeat(copies), persistent=False)

    @property
    def example_size(self) -> int:
        """The length of an example: one number for each axis of each copy."""
        return self.w.numel()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss of examples, shape (batch, copies x dimensions)."""
        # `GradientNoise` repeats the mean of a batch. A copy in another type has no stride of 0.
        is_repeated = len(x) > 1 and (x.stride(0) == 0 or bool((x == x[0]).all()))
        mean = x[0] if is_repeated else x.mean(0)
        if is_repeated:
            data = getattr(self.trainer, "datamodule", None)
            batch_size = getattr(data, "batch_size", len(x))
            if len(x) != batch_size:
                allowed = "entire batches, because GradientNoise draws only their mean"
                raise ConfigError("data", f"{len(x)} of {batch_size} examples", allowed)
        return ((0.5 * self.h * self.w + self.root * mean) * self.w).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = 0.5 * (self.h * self.w.square()).sum() / self.hparams["copies"]
        self.log("val_loss", loss, batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        arguments: dict[str, Any] = dict(self.hparams)
        rule = rule_named(arguments["optimizer"])
        hyperparameters = {name: arguments[name] for name in rule.hyperparameters}
        return rule.make(self.parameters(), arguments["learning_rate"], hyperparameters)
