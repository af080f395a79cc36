"""NoiseScaleCallback: reads the gradient noise scale along a run of any trainer."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.core.noise_scale import NoiseScale, noise_scale, two_sizes
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.parallel.example_count import can_be_cut, cut
from lit_dps.readings.gradients import GradientNorms
from lit_dps.training.example_count import examples_of_part, record_batches
from lit_dps.training.masked_tensors import squared_norm
from lit_dps.training.pruning_callback import masks_by_parameter
from lit_dps.training.training_pass import TrainingPass


class NoiseScaleCallback(Callback):
    """Reads |G|^2 and tr(Sigma), whose ratio is the noise scale, every `interval` steps; training
    is not touched.

    Both come from squared norms of the gradient of a batch and of its parts
    (`lit_dps.core.noise_scale.two_sizes`). The parts are

    - the ranks' own, before and after their gradients are added up, under lit_dps' DDP: no further
      pass;
    - the accumulated batches, where the trainer accumulates gradients on one device: no further
      pass;
    - else the two halves of a batch, by a copy of the module: one more forward and backward pass a
      reading. Under other strategies for several ranks each takes the halves of its own batch.

    What the module draws for itself, as dropout, counts as noise, and a batch norm takes the
    statistics of each part. Norms are over the trained parameters that are not pruned. Loggers get
    both parts of each reading, and the noise scale so far, as noise_scale/*.

    Args:
        interval: Optimizer steps between readings.
        start: The first step that is read: the gradient of an untrained network says little of
            training.

    Attributes:
        readings: Equally long lists "step"; "squared_gradient", |G|^2; "variance", tr(Sigma).
            Either may be negative in a reading; their means are unbiased.
        batch_size: Examples of an optimizer step, in the last reading; 0 before.

    Raises:
        ConfigError: for a value out of its range; in a fit for manual optimization, and for batches
            that have no parts.
    """

    measures_one_network = True  # local SGD trains several and refuses

    def __init__(self, interval: int = 1, start: int = 0):
        for key, value, least in (("interval", interval, 1), ("start", start, 0)):
            if value < least:
                raise ConfigError(f"NoiseScaleCallback.{key}", value, f"at least {least}")
        self.interval, self.start = interval, start
        self._begin()

    def _begin(self) -> None:
        self.readings: dict[str, list[float]] = {"step": [], "squared_gradient": [], "variance": []}
        self.batch_size = 0

    def scale(self) -> NoiseScale | None:
        """The noise scale of all readings so far; None of fewer than 2."""
        return noise_scale(self.readings, self.batch_size)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            record_batches(trainer)
            self._begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            name = type(pl_module).__name__
            raise ConfigError("NoiseScaleCallback", name, "a module without manual optimization")
        self._keep: dict[Tensor, Tensor] | None = None
        self._accumulated = trainer.accumulate_grad_batches if ranks.world() == 1 else 1
        self._norms = None
        if isinstance(trainer.strategy, SharedBatchDDP) and trainer.accumulate_grad_batches == 1:
            self._norms = GradientNorms(self.interval, self.start)
            self._norms.on_train_start(trainer, pl_module)
        self._pass = TrainingPass(trainer, pl_module, 1)
        self._step = -1

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._keep is None:  # not before: pruning may come after this callback
            self._keep = masks_by_parameter(trainer, pl_module)
        self._size, step = examples_of_part(trainer, batch) or 0, trainer.global_step
        self._due = step >= self.start and (step - self.start) % self.interval == 0
        begins, self._step = step != self._step, step
        if (
            begins
        ):  # of the batches that this step accumulates: squared norms, examples, and the sum so far
            self._squares, self._sizes, self._sum = [], [], []
        if self._norms is not None:
            self._norms.on_train_batch_start(trainer, pl_module, batch, batch_idx)
        elif self._due and self._accumulated == 1 and begins:
            self._keep_reading(trainer, self._halves(pl_module, batch, batch_idx))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._due or self._accumulated == 1:
            return
        gradients = [
            None if p.grad is None else p.grad.detach().clone() for p in pl_module.parameters()
        ]
        before = self._sum or [None] * len(gradients)
        parts = [
            g if b is None else g - b
            for g, b in zip(gradients, before, strict=True)
            if g is not None
        ]
        named = [p for p, g in zip(pl_module.parameters(), gradients, strict=True) if g is not None]
        self._squares.append(
            self._accumulated**2 * self._norm(named, parts)
        )  # each is of the loss over their number
        self._sizes.append(self._size)
        self._sum = gradients

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if not self._due:
            return
        if self._norms is not None:
            self._norms.on_before_optimizer_step(trainer, pl_module, optimizer)
            part, whole = (self._norms.readings[key][-1] for key in ("part", "whole"))
            self._keep_reading(trainer, self._ranks(part, whole))
        elif self._accumulated > 1 and len(self._squares) > 1:
            named = [
                p for p, g in zip(pl_module.parameters(), self._sum, strict=True) if g is not None
            ]
            whole = self._norm(named, [g for g in self._sum if g is not None])
            if len(self._squares) < self._accumulated:  # the last ones of an epoch
                whole *= (self._accumulated / len(self._squares)) ** 2
            scale = (
                getattr(
                    getattr(trainer.precision_plugin, "scaler", None), "get_scale", lambda: 1.0
                )()
                ** 2
            )
            squares, sizes = [square / scale for square in self._squares], self._sizes
            if len(set(sizes)) == 1:  # else the step is no mean over its examples
                found = two_sizes(sizes[0], sum(sizes), sum(squares) / len(squares), whole / scale)
                self._keep_reading(trainer, (*found, sum(sizes)))

    def _halves(
        self, module: LightningModule, batch: Any, batch_idx: int
    ) -> tuple[float, float, int]:
        n = self._size
        if n < 2 and ranks.world() > 1:
            return math.nan, math.nan, n
        if n < 2 or not can_be_cut(batch, n):
            raise ConfigError(
                "NoiseScaleCallback",
                n,
                "batches of at least 2 examples, with these first in tensors",
            )
        half, squares, gradients = n // 2, [], []
        with self._pass.without_side_effects() as twin:
            names = [name for name, p in module.named_parameters() if p.requires_grad]
            theirs, ours = dict(twin.named_parameters()), dict(module.named_parameters())
            for part in (slice(0, half), slice(half, 2 * half)):
                loss = self._pass.loss(twin, cut(batch, part), batch_idx)
                if loss is None:
                    return math.nan, math.nan, n
                found = torch.autograd.grad(
                    loss, [theirs[name] for name in names], allow_unused=True
                )
                gradients.append(
                    [
                        torch.zeros_like(theirs[name]) if g is None else g
                        for name, g in zip(names, found, strict=True)
                    ]
                )
                squares.append(self._norm([ours[name] for name in names], gradients[-1]))
            mean = [(a + b) / 2 for a, b in zip(*gradients, strict=True)]
            whole = self._norm([ours[name] for name in names], mean)
        return *two_sizes(half, 2 * half, sum(squares) / 2, whole), n

    def _ranks(self, part: float, whole: float) -> tuple[float, float, int]:
        parts = [
            (square, n)
            for square, n in ranks.all_gather((part, self._size))
            if math.isfinite(square)
        ]
        total = sum(n for _, n in parts)
        if len(parts) < 2:
            return math.nan, math.nan, total
        # E |g_i|^2 = |G|^2 + tr(Sigma) / b_i, so parts of different size have the harmonic mean of
        # their sizes
        size = len(parts) / sum(1 / n for _, n in parts)
        return *two_sizes(
            size, total, sum(square for square, _ in parts) / len(parts), whole
        ), total

    def _keep_reading(self, trainer: Trainer, found: tuple[float, float, int]) -> None:
        squared, variance, self.batch_size = found
        if ranks.world() > 1 and self._norms is None:  # each has read its own batch
            every = ranks.all_gather(found)
            squared, variance, self.batch_size = (
                sum(values) for values in zip(*every, strict=True)
            )
            squared, variance = squared / len(every), variance / len(every)
        for key, value in zip(self.readings, (trainer.global_step, squared, variance), strict=True):
            self.readings[key].append(value)
        logged = {"squared_gradient": squared, "variance": variance}
        if (so_far := self.scale()) is not None and so_far.resolved:
            logged["so_far"] = so_far.value
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"noise_scale/{key}": x for key, x in logged.items()}, step=trainer.global_step
            )

    def _norm(self, parameters: list[Tensor], gradients: list[Tensor]) -> float:
        pairs = zip(parameters, gradients, strict=True)
        return sum(
            float(squared_norm(gradient, self._keep.get(parameter)))
            for parameter, gradient in pairs
        )

    def state_dict(self) -> dict[str, Any]:
        return {"readings": self.readings, "batch_size": self.batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.readings, self.batch_size = state_dict["readings"], state_dict["batch_size"]
