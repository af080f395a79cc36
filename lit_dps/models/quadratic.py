"""The noisy quadratic model of Zhang et al. (2019) as a Lightning module: a workload whose K* can
be computed."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.optim import rule_named


class NoisyQuadratic(LightningModule):
    """Copies of the quadratic 1/2 sum h_i w_i^2, h_i = 1 / i, whose gradient has noise of variance
    h_i per example.

    Zhang et al. 2019, "Which Algorithmic Choices Matter at Which Batch Sizes? Insights From a Noisy
    Quadratic Model"; `lit_dps.analysis.quadratic` has it in closed form. The example x has the loss
    1/2 sum h w^2 + sum sqrt(h) x w, with x standard normal (`lit_dps.data.GradientNoise`), so the
    batch's gradient is h w + z, Var z = h / B.

    Logs `val_loss`, the mean of 1/2 sum h w^2 over the copies: an estimate of the expected loss,
    for which the paper's K* is. Of one copy it is the sampled loss, which meets a goal early by
    luck. All start at w = 1 (the paper: N(0, 1); the second moments are the same), so only the
    noise is sampled. The copies have one optimizer; the training loss is their sum, so that each
    one trains at the learning rate. Rules that are linear in the gradient keep to the closed form.
    There is nothing to prune.

    Args:
        dimensions: Axes of the quadratic.
        copies: Copies that the loss is averaged over.
        optimizer: Name of an update rule, as of `lit_dps.ImageClassifier`: sgd, momentum or
            nesterov.
        learning_rate: Above 0; plain SGD is stable below 2.
        momentum: In [0, 1), of momentum and nesterov.

    Raises:
        ConfigError: for a value out of its range, and a rule with other hyperparameters.
    """

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
        """Numbers that an example has: one for each axis of each copy."""
        return self.w.numel()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """The mean loss of examples, shape (batch, copies x dimensions)."""
        repeated = len(x) > 1 and x.stride(0) == 0  # a batch that is its own mean, over and over
        if repeated and len(x) != (
            whole := getattr(getattr(self.trainer, "datamodule", None), "batch_size", len(x))
        ):
            raise ConfigError(
                "data",
                f"{len(x)} of {whole} examples",
                "whole batches: GradientNoise draws but their mean",
            )
        mean = x[0] if repeated else x.mean(0)
        return ((0.5 * self.h * self.w + self.root * mean) * self.w).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log(
            "val_loss",
            0.5 * (self.h * self.w.square()).sum() / self.hparams.copies,
            batch_size=len(batch),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rule = rule_named(self.hparams.optimizer)
        given = {name: self.hparams[name] for name in rule.hyperparameters}
        return rule.make(self.parameters(), self.hparams.learning_rate, given)
