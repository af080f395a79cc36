"""ImageClassifier: the Lightning module of the paper's workloads."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.optim import RateSchedule, Schedule, rule_named
from lit_dps.parallel import ranks

OWN_VALIDATION = "Leave these labels out, or override per_example_error and summed_loss"


class ImageClassifier(LightningModule):
    """A network that is trained with the mean cross-entropy and an update rule.

    It logs `val_error` and `val_loss` (and `test_error`, `test_loss`) over the entire split of all
    ranks. Mistakes are counted as integers and divided once. Batches are (images, classes).

    Args:
        network: Maps images to logits, shape (batch, classes); any `nn.Module`, by class path.
        optimizer: Name of an update rule of `lit_dps.optim.RULES`, "sgd", "momentum", "nesterov",
            "adam", "adamw", "lion", "muon", "soap", "schedule_free_sgd" or "schedule_free_adamw",
            or the class path of another `lit_dps.optim.Rule`.
        learning_rate: Initial learning rate, above 0.
        momentum: Momentum in [0, 1), of momentum, nesterov, muon and schedule_free_sgd.
        schedule: "constant", "linear", "cosine" or "wsd" (warm-up, stable, decay); see
            `lit_dps.optim.RateSchedule`.
        decay_steps: Step at which a schedule ends, warm-up included.
        end_factor: Final learning rate of a schedule as a share of the initial one.
        beta1, beta2: Decay of the averages of adam, adamw, lion, soap and muon's AdamW, in [0, 1).
            The authors of Lion take 0.9 and 0.99, the authors of SOAP 0.95 and 0.95. Of
            schedule_free_adamw, beta1 is the share of x in the weights y.
        epsilon: Added by adam, adamw, soap, schedule_free_adamw and muon's AdamW to the root of the
            second average, above 0.
        weight_decay: Weight decay of adamw, lion, muon, soap and the schedule_free rules,
            and of adam, which adds it to the gradient; 0 or more.
        label_smoothing: Share of a label that is spread evenly over all classes, in [0, 1)
            (Szegedy et al. 2016, Section 7; Shallue et al. 2019 search 0, 0.01 and 0.1). It changes
            the training loss, which pruning uses too; `val_loss` is the plain cross-entropy.
        adamw_ratio: Rate of the AdamW with which muon trains parameters that are no matrices, as a
            multiple of the learning rate, above 0.
        warmup_steps: First steps, in which the rate rises linearly. For a warm-up in examples see
            `lit_dps.training.ScheduleScalingCallback`.
        decay_share: Share of the steps after the warm-up in which wsd decays linearly, in (0, 1].
        refresh_steps: Updates after which soap refreshes its eigenbasis, at least 1.

    Raises:
        ConfigError: for a value out of its range; by `configure_optimizers`, for a network without
            parameters to train.
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
        adamw_ratio: float = 1.0,
        warmup_steps: int = 0,
        decay_share: float = 0.2,
        refresh_steps: int = 10,
    ):
        super().__init__()
        rule_named(optimizer)  # raises for an unknown name
        if not learning_rate > 0:
            raise ConfigError("model.learning_rate", learning_rate, "a number above 0")
        unit = dict(momentum=momentum, beta1=beta1, beta2=beta2, label_smoothing=label_smoothing)
        for key, number in unit.items():
            if not 0 <= number < 1:
                raise ConfigError(f"model.{key}", number, "a number in [0, 1)")
        for key, number in {"epsilon": epsilon, "adamw_ratio": adamw_ratio}.items():
            if not number > 0:
                raise ConfigError(f"model.{key}", number, "a number above 0")
        if not weight_decay >= 0:
            raise ConfigError("model.weight_decay", weight_decay, "a number of 0 or more")
        if refresh_steps < 1 or refresh_steps != int(refresh_steps):
            raise ConfigError("model.refresh_steps", refresh_steps, "a whole number from 1")
        RateSchedule(schedule, decay_steps, end_factor, warmup_steps, decay_share).check()
        self.save_hyperparameters(ignore=["network"])
        self.network = network

    def on_fit_start(self) -> None:
        if self.device.type == "cpu":
            # Convolutions on a CPU are up to twice as fast in this format.
            self.network.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the training loss, a mean over the examples, so that a batch may be divided."""
        x, y = batch
        return F.cross_entropy(self(x), y, label_smoothing=self.hparams["label_smoothing"])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # self.log costs 0.4 ms a step.
        if self._trainer is not None and logs(self.trainer):
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
        """Return the cross-entropy summed over a batch, without smoothing, as in `val_loss`."""
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="sum")

    @property
    def _overridden_validation(self) -> list[str]:
        """The methods of validation that another class or the instance overrides."""
        overridden = []
        for name in ("per_example_error", "summed_loss"):
            method = getattr(self, name)
            if getattr(method, "__func__", None) is not getattr(ImageClassifier, name):
                overridden.append(name)
        return overridden

    def on_validation_epoch_start(self) -> None:
        self._mistakes: Tensor | int = 0
        self._loss: Tensor | float = 0.0
        self._seen = 0
        self._losses = 0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        check_labels(self, y)
        if self._overridden_validation:
            # All loops count the same mistakes: a check that may stop early calls these methods.
            wrong = is_wrong(self.per_example_error(batch))
            loss = self.summed_loss(batch)
        else:
            # One forward pass yields both.
            logits = self(x)
            predicted = logits.argmax(1)
            if predicted.shape != y.shape:
                # A comparison could broadcast the shapes.
                raise ConfigError(
                    "data",
                    f"labels of shape {tuple(y.shape)}",
                    f"the shape {tuple(predicted.shape)}, one class for each prediction; for other "
                    "labels, override per_example_error and summed_loss",
                )
            wrong = predicted != y
            loss = F.cross_entropy(logits, y, reduction="sum")
        self._mistakes += wrong.sum()
        self._seen += wrong.numel()
        self._loss += loss.double()
        self._losses += self._losses_of(y, wrong)

    def _losses_of(self, y: Tensor, wrong: Tensor) -> int:
        """Return how many losses `summed_loss` sums over a batch, as many as the batch has errors.

        The shape of the classes does not count, because they may be probabilities.
        """
        return wrong.numel()

    def on_validation_epoch_end(self) -> None:
        self._log_epoch("val")

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_epoch("test")

    def _log_epoch(self, split: str) -> None:
        mistakes = self._sum_over_ranks(self._mistakes, torch.int64)
        loss = self._sum_over_ranks(self._loss, torch.float64)
        seen = self._sum_over_ranks(self._seen, torch.int64)
        # A subclass with its own `validation_step` counts examples alone.
        losses = self._sum_over_ranks(self._losses or self._seen, torch.int64)
        self.log(f"{split}_error", mistakes / seen, prog_bar=True)
        self.log(f"{split}_loss", loss.float() / losses, prog_bar=True)

    def _sum_over_ranks(self, number: Tensor | float, dtype: torch.dtype) -> Tensor:
        """Return the sum of a number over all ranks; a rank without examples has no tensor."""
        return ranks.all_reduce_sum(torch.as_tensor(number, dtype=dtype, device=self.device))

    def configure_optimizers(self) -> Any:
        if not any(p.requires_grad for p in self.parameters()):
            raise ConfigError(
                "model.network", type(self.network).__name__, "a network with parameters to train"
            )
        arguments: dict[str, Any] = dict(self.hparams)
        rule = rule_named(arguments["optimizer"])
        missing = [name for name in rule.hyperparameters if name not in arguments]
        if missing:
            names = ", ".join(missing)
            allowed = f"a rule whose hyperparameters the module has as arguments; it lacks {names}"
            raise ConfigError("model.optimizer", arguments["optimizer"], allowed)
        # A subclass may use the weight decay in its own loss.
        is_own = type(self).__module__ == __name__
        if is_own and arguments["weight_decay"] > 0 and "weight_decay" not in rule.hyperparameters:
            warnings.warn(
                f"model.weight_decay has no effect with optimizer {arguments['optimizer']}.",
                stacklevel=2,
            )
        hyperparameters = {name: arguments[name] for name in rule.hyperparameters}
        optimizer = rule.make(self.parameters(), arguments["learning_rate"], hyperparameters)
        schedule = RateSchedule(
            arguments["schedule"],
            arguments["decay_steps"],
            arguments["end_factor"],
            arguments["warmup_steps"],
            arguments["decay_share"],
        )
        if schedule.is_constant:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule.scheduler(optimizer), "interval": "step"},
        }


class LanguageModel(ImageClassifier):
    """A network that predicts the next character at every position.

    Batches are (characters, next characters), int64, shape (batch, length). The network maps
    characters to logits, shape (batch, vocabulary, length). The loss is the mean over all
    positions. `val_loss` is in nats per character. `val_error` is the share of wrongly predicted
    characters. Arguments are those of `ImageClassifier`.
    """

    def setup(self, stage: str) -> None:
        """Raise ConfigError if network and text have different numbers of characters."""
        trainer: Any = self.trainer
        characters = getattr(trainer.datamodule, "vocabulary", None)
        vocabulary = getattr(self.network, "vocabulary", characters)
        if characters != vocabulary:
            allowed = f"{characters}, the number of different characters of the text"
            raise ConfigError("model.network.vocabulary", vocabulary, allowed)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        # `per_example_error` judges one class for each example, so checks of windows do not stop
        # early. `EarlyValidation` notices that this method is overridden.
        super().validation_step(batch, batch_idx)

    def _losses_of(self, y: Tensor, wrong: Tensor) -> int:
        # A `per_example_error` of a subclass may judge windows. The loss sums all positions.
        check_classes(y, "Leave these labels out, or override validation_step")
        return y.numel()


def is_wrong(errors: Tensor) -> Tensor:
    """Return True for each example whose `per_example_error` is at least 1 or is nan."""
    return ~(errors < 1)


def check_labels(module: ImageClassifier, y: Tensor) -> None:
    """Raise ConfigError for negative classes, unless a subclass has its own error and loss."""
    if len(module._overridden_validation) < 2:
        check_classes(y)


def check_classes(y: Tensor, hint: str = OWN_VALIDATION) -> None:
    """Raise ConfigError with a hint if a class is negative; probabilities are not checked.

    torch's cross-entropy ignores the class -100, but a mean over the split counts its example.
    """
    if y.is_floating_point() or not y.numel():
        return
    least = int(y.min())
    if least < 0:
        raise ConfigError(
            "data",
            f"a split with the class {least}",
            "a split with classes from 0, because the means of the metrics count all labels",
            hint,
        )


def logs(trainer: Trainer) -> bool:
    """Return True if a logger of the trainer keeps values; a study's logger keeps none."""
    return any(not isinstance(logger, DummyLogger) for logger in trainer.loggers)


def weights_finite(module: nn.Module) -> bool:
    """Return True if every parameter is finite."""
    return bool(torch.stack([p.isfinite().all() for p in module.parameters()]).all())
