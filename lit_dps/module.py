"""ImageClassifier: the Lightning module of the paper's workloads."""

from __future__ import annotations

from typing import get_args

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.optim import Schedule, make_scheduler, rule_named
from lit_dps.parallel import ranks


class ImageClassifier(LightningModule):
    """A network trained with the mean cross-entropy, of smoothed labels if asked for, and an update
    rule.

    Logs `val_error` and `val_loss` (and `test_error`, `test_loss`) over the entire split, of all
    ranks: mistakes are counted as integers and divided once. Batches are (images, classes).

    Args:
        network: Maps images to logits, shape (batch, classes); any `nn.Module`, by class path.
        optimizer: Name of an update rule of `lit_dps.optim.RULES`, "sgd", "momentum", "nesterov",
            "adam" or "adamw", or the class path of another `lit_dps.optim.Rule`.
        learning_rate: Initial learning rate, above 0.
        momentum: Momentum in [0, 1), of momentum and nesterov.
        schedule: "constant" or "linear" (see `lit_dps.optim.factor`).
        decay_steps: Length of the linear decay, in steps.
        end_factor: Final learning rate of the linear decay as a share of the initial one.
        beta1, beta2: Decay of the averages of adam and adamw, in [0, 1).
        epsilon: What adam and adamw add to the root of the second one, above 0.
        weight_decay: Of adam and adamw, 0 or more.
        label_smoothing: Share of a label that is spread evenly over all classes, in [0, 1), in the
            training loss alone (Szegedy et al. 2016, Section 7; Shallue et al. 2019 search 0, 0.01
            and 0.1). The loss that is pruned by is the training loss; `val_loss` stays the plain
            cross-entropy.

    Raises:
        ConfigError: for a value out of its range; by `configure_optimizers`, for a network with
            nothing to train.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: str = "sgd",
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        schedule: Schedule = "constant",
        decay_steps: int = 40_000,
        end_factor: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        rule_named(optimizer)
        if schedule not in get_args(Schedule):
            raise ConfigError("model.schedule", schedule, f"one of {', '.join(get_args(Schedule))}")
        if not learning_rate > 0:
            raise ConfigError("model.learning_rate", learning_rate, "a number above 0")
        unit = {
            "momentum": momentum,
            "beta1": beta1,
            "beta2": beta2,
            "label_smoothing": label_smoothing,
        }
        for key, number in unit.items():
            if not 0 <= number < 1:
                raise ConfigError(f"model.{key}", number, "a number in [0, 1)")
        if not epsilon > 0:
            raise ConfigError("model.epsilon", epsilon, "a number above 0")
        if not weight_decay >= 0:
            raise ConfigError("model.weight_decay", weight_decay, "a number of 0 or more")
        if decay_steps < 1:
            raise ConfigError("model.decay_steps", decay_steps, "at least 1 step")
        if not 0 <= end_factor <= 1:
            raise ConfigError("model.end_factor", end_factor, "a number in [0, 1]")
        self.save_hyperparameters(ignore=["network"])
        self.network = network

    def on_fit_start(self) -> None:
        if (
            self.device.type == "cpu"
        ):  # convolutions there run up to twice as fast, forward three times
            self.network.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The training loss: a mean over the examples of a batch, so that a batch may be taken in
        parts."""
        x, y = batch
        return F.cross_entropy(self(x), y, label_smoothing=self.hparams.label_smoothing)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self._trainer is not None and logs(self.trainer):  # self.log costs 0.4 ms a step
            self.log("train_loss", loss, prog_bar=True)
        return loss

    def per_example_error(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return how wrong the prediction for each example is, float32, shape (batch,).

        The error is 1 minus the probability of the true class, plus 1 for a wrong prediction. So it
        is at least 1 for a wrong prediction, and below 1 for a correct one.
        """
        x, y = batch
        logits = self(x)
        missed = 1 - logits.float().softmax(1).gather(1, y[:, None])[:, 0]
        # If the network diverged, its probabilities are NaN. Then argmax alone decides.
        return (logits.argmax(1) != y) + missed.nan_to_num(0.0)

    def wrongness(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return `per_example_error`, for subclasses that call it by its former name."""
        return ImageClassifier.per_example_error(self, batch)

    def summed_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The cross-entropy summed over a batch, without smoothing: what `val_loss` is the mean
        of."""
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="sum")

    def on_validation_epoch_start(self) -> None:
        self._mistakes, self._loss, self._seen = 0, 0.0, 0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self._mistakes += (logits.argmax(1) != y).sum()
        self._loss += F.cross_entropy(logits, y, reduction="sum").double()
        self._seen += y.numel()

    def on_validation_epoch_end(self) -> None:
        self._log_epoch("val")

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_epoch("test")

    def _log_epoch(self, split: str) -> None:
        # a rank without examples has plain numbers here
        own = (self._mistakes, torch.int64), (self._loss, torch.float64), (self._seen, torch.int64)
        mistakes, loss, seen = (
            ranks.all_reduce_sum(torch.as_tensor(n, dtype=dtype, device=self.device))
            for n, dtype in own
        )
        self.log(f"{split}_error", mistakes / seen, prog_bar=True)
        self.log(f"{split}_loss", loss.float() / seen, prog_bar=True)

    def configure_optimizers(self):
        if not any(p.requires_grad for p in self.parameters()):
            raise ConfigError(
                "model.network", type(self.network).__name__, "a network with parameters to train"
            )
        h = self.hparams
        rule = rule_named(h.optimizer)
        optimizer = rule.make(
            self.parameters(), h.learning_rate, {name: h[name] for name in rule.hyperparameters}
        )
        if h.schedule == "constant":
            return optimizer
        scheduler = make_scheduler(optimizer, h.schedule, h.decay_steps, h.end_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class LanguageModel(ImageClassifier):
    """A network that predicts the next character at every position, trained as images are.

    Batches are (characters, those that follow), int64, shape (batch, length); the network maps the
    former to logits, shape (batch, vocabulary, length). The loss is the mean over all positions,
    `val_loss` in nats a character, and `val_error` the share of positions whose most probable
    character is another. Arguments are those of `ImageClassifier`.
    """

    def setup(self, stage: str) -> None:
        """Raises ConfigError for a network that was made for another number of characters than the
        text has."""
        found = getattr(self.trainer.datamodule, "vocabulary", None)
        made_for = getattr(self.network, "vocabulary", found)
        if found != made_for:
            raise ConfigError(
                "model.network.vocabulary",
                made_for,
                f"{found}, the different characters of the text",
            )

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        # `per_example_error` judges one class for each example, so checks of windows do not stop
        # early. `EarlyCheck` notices that this method is overridden.
        super().validation_step(batch, batch_idx)


def logs(trainer: Trainer) -> bool:
    """Whether what is logged goes anywhere; a study's logger keeps nothing."""
    return any(not isinstance(logger, DummyLogger) for logger in trainer.loggers)


def weights_finite(module: nn.Module) -> bool:
    """Whether every parameter is finite."""
    return bool(torch.stack([p.isfinite().all() for p in module.parameters()]).all())
