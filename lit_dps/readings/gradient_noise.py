"""NoiseScaleCallback: the gradient noise scale along a run of any trainer.

GradientNorms records the squared norms of the gradient of a rank's part of a batch and of the whole
batch. Their difference measures the noise of the gradient without an extra pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.noise_scale import NoiseScale, moments_of_parts, noise_scale, unbiased_moments
from lit_dps.core.trial import NOISE_SCALE
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.parallel.example_count import DIVISIBLE, can_be_cut, cut
from lit_dps.training.example_count import examples_of_part, record_batches
from lit_dps.training.masked_tensors import gradient_scale, loss_scale, squared_norm
from lit_dps.training.pruning_callback import masks_by_parameter, trained_ids_of
from lit_dps.training.training_pass import TrainingPass


class GradientNorms(Callback):
    """Records squared norms of the gradient on a rank's part of the batch and on the whole batch.

    On b of a batch's B examples the expected squared norm is ||G||^2 + tr(Sigma)/b (McCandlish et
    al. 2018, Appendix A.1). Each rank records its part. Pruned coordinates do not count, and
    training itself is not changed.

    Args:
        interval: Optimizer steps between readings.
        start: First step with a reading.

    Attributes:
        readings: Equally long lists. "step"; "share", the fraction of the batch on this rank;
            "part", the squared norm of the gradient of the mean loss over this part, before the sum
            over the ranks (nan for an empty part); "whole", the squared norm for the whole batch.

    Raises:
        ConfigError: for an interval below 1, and under gradient accumulation.
    """

    measures_one_network = True  # local SGD trains several networks and refuses this callback

    def __init__(self, interval: int = 1, start: int = 0):
        if interval < 1:
            raise ConfigError("GradientNorms.interval", interval, "at least 1 step")
        self.interval = interval
        self.start = start
        self.readings: dict[str, list[float]] = {"step": [], "share": [], "part": [], "whole": []}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            key = "trainer.accumulate_grad_batches"
            raise ConfigError(
                key,
                trainer.accumulate_grad_batches,
                "1, because GradientNorms needs one batch a step",
            )
        self._masks: dict[Tensor, Tensor] = {}
        if isinstance(trainer.strategy, SharedBatchDDP):
            trainer.strategy.observe_gradients(self._add_bucket)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        steps = trainer.global_step - self.start
        self._is_due = steps >= 0 and steps % self.interval == 0
        if self._is_due:
            self._masks = masks_by_parameter(trainer, pl_module)  # a method may change them
            self._trained = trained_ids_of(trainer)
        self._part_square: Tensor | None = None

    def _add_bucket(self, bucket: GradBucket) -> None:
        """Add the gradients of a DDP bucket to this rank's squared norm, before the reduction."""
        if not self._is_due:
            return
        squares = []
        if self._part_square is not None:
            squares.append(self._part_square)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(parameter) not in self._trained:
                continue
            squares.append(squared_norm(gradient, self._masks.get(parameter)))
        if squares:
            self._part_square = torch.stack(squares).sum()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self._is_due:
            return
        squares = []
        for parameter in pl_module.parameters():
            if parameter.grad is not None and id(parameter) in self._trained:
                squares.append(squared_norm(parameter.grad, self._masks.get(parameter)))
        whole = float(torch.stack(squares).sum()) / gradient_scale(trainer, optimizer) ** 2
        share = getattr(trainer.strategy, "share", 1.0)
        if self._part_square is None:
            part = whole
        elif share:
            # DDP scales a rank's gradient by its share and by the number of ranks, before the
            # gradients are unscaled.
            factor = share * ranks.world() * loss_scale(trainer)
            part = float(self._part_square) / factor**2
        else:
            part = math.nan
        self.readings["step"].append(trainer.global_step)
        self.readings["share"].append(share)
        self.readings["part"].append(part)
        self.readings["whole"].append(whole)


class Reading(NamedTuple):
    """One reading of the gradient noise.

    Attributes:
        squared_gradient: |G|^2; nan if the batch has no parts.
        variance: tr(Sigma); nan if the batch has no parts.
        batch_size: Examples of the optimizer step.
    """

    squared_gradient: float
    variance: float
    batch_size: int


class NoiseScaleCallback(Callback):
    """Measures |G|^2 and tr(Sigma), whose ratio is the noise scale, every `interval` steps.

    Both follow from squared norms of the gradient of a batch and of its parts
    (`lit_dps.core.noise_scale.unbiased_moments`). The parts are:

    - under lit_dps' DDP: the parts of the ranks, before and after the sum of their gradients;
    - with accumulated gradients on one device: the accumulated batches;
    - otherwise: the two halves of a batch, by a copy of the module. Only this takes an extra
      forward and backward pass per reading. Under other strategies each rank halves its batch.

    Random draws of the module, such as dropout, count as noise, and batch norm uses the statistics
    of each part. Pruned and untrained parameters do not count. Training itself is not changed.
    Loggers get both values of each reading, and the noise scale so far, as noise_scale/*.

    Args:
        interval: Optimizer steps between readings.
        start: First step with a reading. The gradient of an untrained network is not typical of
            training.

    Attributes:
        readings: Equally long lists "step"; "squared_gradient", |G|^2; "variance", tr(Sigma). A
            single reading may be negative; the means are unbiased.
        batch_size: Examples of an optimizer step at the last reading; 0 before.

    Raises:
        ConfigError: for a value out of its range; in a fit for manual optimization, and for batches
            without parts.
    """

    measures_one_network = True  # local SGD trains several networks and refuses this callback

    def __init__(self, interval: int = 1, start: int = 0):
        if interval < 1:
            raise ConfigError("NoiseScaleCallback.interval", interval, "at least 1")
        if start < 0:
            raise ConfigError("NoiseScaleCallback.start", start, "at least 0")
        self.interval = interval
        self.start = start
        self._reset()

    def _reset(self) -> None:
        self.readings: dict[str, list[float]] = {"step": [], "squared_gradient": [], "variance": []}
        self.batch_size = 0

    @property
    def columns(self) -> dict[str, list[float]]:
        """The readings with the names of their columns in the tables of a study."""
        columns = {"step": self.readings["step"]}
        for name in ("squared_gradient", "variance"):
            columns[f"{NOISE_SCALE}_{name}"] = self.readings[name]
        return columns

    def scale(self) -> NoiseScale | None:
        """Return the noise scale of all readings so far; None with fewer than 2 readings."""
        return noise_scale(self.readings, self.batch_size)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning loads the state of a checkpoint after this hook.
        if stage == "fit":
            record_batches(trainer)
            self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            name = type(pl_module).__name__
            raise ConfigError("NoiseScaleCallback", name, "a module without manual optimization")
        self._masks: dict[Tensor, Tensor] = {}
        self._batches_per_step = 1
        if ranks.world() == 1:
            self._batches_per_step = trainer.accumulate_grad_batches
        self._rank_norms: GradientNorms | None = None
        if isinstance(trainer.strategy, SharedBatchDDP) and trainer.accumulate_grad_batches == 1:
            self._rank_norms = GradientNorms(self.interval, self.start)
            self._rank_norms.on_train_start(trainer, pl_module)
        self._pass = TrainingPass(trainer, pl_module, 1)
        self._step = -1

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self._size = examples_of_part(trainer, batch) or 0
        self._is_due = step >= self.start and (step - self.start) % self.interval == 0
        if self._is_due:
            self._masks = masks_by_parameter(trainer, pl_module)  # a method may change them
            self._trained = trained_ids_of(trainer)
        is_first_batch = step != self._step
        self._step = step
        if is_first_batch:
            # The accumulated batches of this step: squared norms, examples, and summed gradients.
            self._squares: list[float] = []
            self._sizes: list[int] = []
            self._sums: dict[Tensor, Tensor] = {}
        if self._rank_norms is not None:
            self._rank_norms.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        elif self._is_due and self._batches_per_step == 1 and is_first_batch:
            self._add(trainer, self._reading_of_halves(pl_module, batch, batch_idx))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_due or self._batches_per_step == 1:
            return
        sums = {}
        gradients = {}
        for parameter in pl_module.parameters():
            # No optimizer sets the gradients of untrained parameters to zero.
            if parameter.grad is None or id(parameter) not in self._trained:
                continue
            sums[parameter] = parameter.grad.detach().clone()
            if parameter in self._sums:
                gradients[parameter] = sums[parameter] - self._sums[parameter]
            else:
                gradients[parameter] = sums[parameter]
        # Lightning divides the loss of each batch by the number of accumulated batches.
        self._squares.append(self._batches_per_step**2 * self._squared_norm(gradients))
        self._sizes.append(self._size)
        self._sums = sums

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self._is_due:
            return
        if self._rank_norms is not None:
            self._rank_norms.on_before_optimizer_step(trainer, pl_module, optimizer)
            part = self._rank_norms.readings["part"][-1]
            whole = self._rank_norms.readings["whole"][-1]
            self._add(trainer, self._reading_of_ranks(part, whole))
        # With batches of different sizes, the step is not the gradient of a mean over examples.
        elif len(self._squares) > 1 and len(set(self._sizes)) == 1:
            self._add(trainer, self._reading_of_accumulated(trainer))

    def _reading_of_accumulated(self, trainer: Trainer) -> Reading:
        """Return the reading from the gradients of the accumulated batches of a step."""
        count = len(self._squares)
        whole = self._squared_norm(self._sums)
        if count < self._batches_per_step:
            # The last step of an epoch may accumulate fewer batches.
            whole *= (self._batches_per_step / count) ** 2
        scale = loss_scale(trainer) ** 2
        part = sum(square / scale for square in self._squares) / count
        total = sum(self._sizes)
        return Reading(*unbiased_moments(self._sizes[0], total, part, whole / scale), total)

    def _reading_of_halves(self, module: LightningModule, batch: Any, batch_idx: int) -> Reading:
        """Return the reading from the gradients of both halves of a batch, by a copy."""
        size = self._size
        if size < 2 and ranks.world() > 1:
            return Reading(math.nan, math.nan, size)
        if size < 2 or not can_be_cut(batch, size):
            examples = "1 example" if size == 1 else f"{size} examples"
            raise UserError(
                f"NoiseScaleCallback cannot halve a batch of {examples}; it needs at least 2 "
                f"examples, and {DIVISIBLE}",
                key="NoiseScaleCallback",
                value=size,
            )
        half = size // 2
        gradients = []
        with self._pass.without_side_effects() as twin:
            for part in (slice(0, half), slice(half, 2 * half)):
                loss = self._pass.loss(twin, cut(batch, part), batch_idx)
                if loss is None:
                    return Reading(math.nan, math.nan, size)
                gradients.append(_gradients_of_twin(loss, module, twin, self._trained))
        first, second = gradients
        mean = {parameter: (first[parameter] + second[parameter]) / 2 for parameter in first}
        part_square = (self._squared_norm(first) + self._squared_norm(second)) / 2
        return Reading(
            *unbiased_moments(half, 2 * half, part_square, self._squared_norm(mean)), size
        )

    def _reading_of_ranks(self, part: float, whole: float) -> Reading:
        """Return the reading from the squared norms of all ranks' parts of a batch."""
        squares = []
        sizes = []
        for square, size in ranks.all_gather((part, self._size)):
            if math.isfinite(square):
                squares.append(square)
                sizes.append(size)
        total = sum(sizes)
        if len(squares) < 2:
            return Reading(math.nan, math.nan, total)
        return Reading(*moments_of_parts(sizes, squares, whole), total)

    def _add(self, trainer: Trainer, reading: Reading) -> None:
        """Store and log a reading, of all ranks together."""
        squared = reading.squared_gradient
        variance = reading.variance
        self.batch_size = reading.batch_size
        if ranks.world() > 1 and self._rank_norms is None:
            # Each rank has read its batch.
            readings = ranks.all_gather(reading)
            squared = sum(each.squared_gradient for each in readings) / len(readings)
            variance = sum(each.variance for each in readings) / len(readings)
            self.batch_size = sum(each.batch_size for each in readings)
        self.readings["step"].append(trainer.global_step)
        self.readings["squared_gradient"].append(squared)
        self.readings["variance"].append(variance)
        logged = {"noise_scale/squared_gradient": squared, "noise_scale/variance": variance}
        scale = self.scale()
        if scale is not None and scale.resolved:
            logged["noise_scale/so_far"] = scale.value
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=trainer.global_step)

    def _squared_norm(self, gradients: dict[Tensor, Tensor]) -> float:
        """Return the squared norm of gradients, given by parameter, without pruned coordinates."""
        total = 0.0
        for parameter, gradient in gradients.items():
            total += float(squared_norm(gradient, self._masks.get(parameter)))
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"readings": self.readings, "batch_size": self.batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.readings = state_dict["readings"]
        self.batch_size = state_dict["batch_size"]


def _gradients_of_twin(
    loss: Tensor, module: nn.Module, twin: nn.Module, trained_ids: set[int]
) -> dict[Tensor, Tensor]:
    """Return the gradients of a copy's loss, by the trained parameters of the module itself.

    Args:
        loss: A loss of the copy.
        module: The module.
        twin: The copy.
        trained_ids: `id` of the parameters that an optimizer trains.
    """
    copies = dict(twin.named_parameters())
    trained = {}
    for name, parameter in module.named_parameters():
        if id(parameter) in trained_ids:
            trained[parameter] = copies[name]
    gradients = torch.autograd.grad(
        loss, list(trained.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(trained, gradients, strict=True))
