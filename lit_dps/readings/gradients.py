"""Callbacks that measure the gradient along a run, over the unpruned coordinates; training itself
is not touched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.func import functional_call
from torch.utils._pytree import tree_map

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.readings.smoothness import (
    Moments,
    flatten,
    gammas,
    gradient_moments,
    local_lipschitz,
    mean_gradient,
    unflatten,
)
from lit_dps.training.masked_tensors import squared_norm
from lit_dps.training.pruning_callback import masks_by_parameter, masks_of
from lit_dps.training.stopwatch import stopwatch_of
from lit_dps.training.training_pass import TrainingPass, loss_of

NOISE_SEED = (
    0  # dropout draws the same at every gradient, so that all are gradients of one function
)


class SmoothnessCallback(Callback):
    """Measures the local Lipschitz constant of the gradient, and the other terms of the convergence
    theory.

    Every `interval` steps it takes the full training gradient between the weights before and after
    that step (Lee et al. 2021, Eq. 11; see `lit_dps.readings.smoothness.local_lipschitz`). Before
    the first step, after pruning, it takes the training loss and the variance of the per-example
    gradient. The loss is the module's own `training_step`, in training mode.

    A measurement costs as many passes over the training split as there are gammas, and one more;
    the variance costs several. `examples` makes that affordable.

    Args:
        interval: Optimizer steps between measurements; None measures nothing. The paper has 100.
        delta: Distance of the gammas delta, 2 delta, ..., in (0, 1].
        last: Largest gamma, at least `delta`. 1 is the paper's, 0.9 its code's.
        examples: Training examples that the gradients are taken over: the first ones of the pass
            that pruning takes. By default all of the training split.
        batch_size: Examples a batch of those passes; no influence on results but rounding.
        floor: Lower bound f_inf of the training loss: 0 for a cross-entropy.
        noise: Whether each measurement also takes the variance of the per-example gradient before
            the step, by one more pass, of single gradients, which takes from twice to a hundred
            times one in batches.

    Attributes:
        curve: "step", "lipschitz", "squared_gradient" and with `noise` "noise" of every
            measurement, as in `TrialResult.smoothness`.
        terms: As in `TrialResult.theory`.

    Raises:
        ConfigError: for a value out of its range.
    """

    def __init__(
        self,
        interval: int | None = 100,
        delta: float = 0.1,
        last: float = 1.0,
        examples: int | None = None,
        batch_size: int = 1000,
        floor: float = 0.0,
        noise: bool = False,
    ):
        for key, value in (
            ("interval", interval),
            ("examples", examples),
            ("batch_size", batch_size),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"smoothness.{key}", value, "at least 1")
        if not 0 < delta <= 1:
            raise ConfigError("smoothness.delta", delta, "a number in (0, 1]")
        if not delta <= last:
            raise ConfigError("smoothness.last", last, f"at least smoothness.delta = {delta:g}")
        if not math.isfinite(floor):
            raise ConfigError("smoothness.floor", floor, "a finite lower bound of the loss")
        self.interval, self.examples, self.batch_size, self.floor = (
            interval,
            examples,
            batch_size,
            floor,
        )
        self.gammas, self.noise = gammas(delta, last), noise
        self._begin()

    @property
    def measures_one_network(self) -> bool:
        """Whether it measures at all; local SGD trains several networks and refuses then."""
        return self.interval is not None

    def _begin(self) -> None:
        self.curve: dict[str, list[float]] = {"step": [], "lipschitz": [], "squared_gradient": []}
        self.curve |= {"noise": []} if self.noise else {}
        self.terms: dict[str, float] = {}
        self._before: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            self._begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.interval is None:
            return
        if not pl_module.automatic_optimization:
            name = type(pl_module).__name__
            raise ConfigError(
                "smoothness.interval", self.interval, f"null for {name}: it has manual optimization"
            )
        self._pass = TrainingPass(trainer, pl_module, self.batch_size, self.examples)
        self._parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        self._keep = masks_of(trainer, pl_module)
        if not self.terms:
            self.terms = {**self._initial_terms(pl_module), "floor": self.floor}
            self.terms |= {"steps": 0, "rate_sum": 0.0, "rate_square_sum": 0.0}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.interval is not None and trainer.global_step % self.interval == self.interval - 1:
            self._before, self._step = (
                flatten(self._parameters.values()),
                trainer.global_step,
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer
    ) -> None:
        if self.interval is not None:
            rate = float(optimizer.param_groups[0]["lr"])  # the theory knows one rate
            self.terms["steps"] += 1
            self.terms["rate_sum"] += rate
            self.terms["rate_square_sum"] += rate * rate

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if (
            self._before is None or trainer.global_step == self._step
        ):  # none due, or gradients are still accumulated
            return
        after, before, self._before = (
            flatten(self._parameters.values()),
            self._before,
            None,
        )
        with stopwatch_of(trainer).paused(pl_module.device):
            with self._pass.without_side_effects() as twin:
                found = local_lipschitz(
                    partial(self._gradient, twin), before, after, self.gammas
                )._asdict()
            if self.noise:
                found["noise"] = self._moments(pl_module, before).variance
        for key, value in {"step": trainer.global_step, **found}.items():
            self.curve[key].append(value)
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.global_step)

    def _gradient(self, module: LightningModule, weights: Tensor) -> Tensor:
        named = dict(module.named_parameters())
        parameters = [named[name] for name in self._parameters]
        with torch.no_grad():
            for parameter, part in zip(parameters, unflatten(weights, parameters), strict=True):
                parameter.copy_(part)
        torch.manual_seed(NOISE_SEED)
        gradient = mean_gradient(parameters, self._pass.losses(module))
        parts = zip(self._parameters, unflatten(gradient, parameters), strict=True)
        return flatten(
            part * self._keep[name] if name in self._keep else part for name, part in parts
        )

    def _initial_terms(self, module: LightningModule) -> dict[str, float]:
        found = self._moments(module, flatten(self._parameters.values()), begin=True)
        terms = {"loss": found.loss, "gradient_variance": found.variance}
        return terms | {"squared_gradient": found.squared_gradient}

    def _moments(self, module: LightningModule, weights: Tensor, begin: bool = False) -> Moments:
        """Return the moments of the per-example gradient at these weights, flat, shape (p,).

        `begin` is as in `TrainingPass.traceless`.
        """
        parts = unflatten(weights, list(self._parameters.values()))
        parameters = {
            f"module.{name}": part for name, part in zip(self._parameters, parts, strict=True)
        }
        keep = {f"module.{name}": mask for name, mask in self._keep.items()}
        with self._pass.without_side_effects(begin) as twin:
            step = _Step(twin)

            def loss(parameters: dict[str, Tensor], example: Any) -> Tensor:
                return functional_call(step, parameters, (tree_map(lambda x: x[None], example),))

            torch.manual_seed(NOISE_SEED)
            try:
                return gradient_moments(loss, parameters, self._batches(twin), keep)
            except (RuntimeError, TypeError, ValueError) as error:
                why = (
                    "its training_step gives no per-example gradients "
                    f"({str(error).splitlines()[0][:200]})"
                )
                null = f"null for {type(module).__name__}: {why}"
                raise ConfigError("smoothness.interval", self.interval, null) from error

    def _batches(self, twin: LightningModule) -> Iterator[Any]:
        """Yield the batches of the pass, each after the copy's `on_train_batch_start`."""
        for i, (batch, _) in enumerate(self._pass.batches()):
            if twin.on_train_batch_start(batch, i) != -1:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"curve": self.curve, "terms": self.terms}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curve, self.terms = state_dict["curve"], state_dict["terms"]


class _Step(nn.Module):
    """A module's training step as a forward pass, for `functional_call`."""

    def __init__(self, module: LightningModule):
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        return loss_of(self.module, batch, 0)


class GradientNorms(Callback):
    """Reads squared norms of the gradient on a rank's part of the batch and on the whole batch.

    The difference of the two tells the noise of the gradient without another pass: on b of a
    batch's B examples the squared norm is expected to be ||G||^2 + tr(Sigma)/b (McCandlish et al.
    2018, Appendix A.1). Each rank keeps its own. It reads gradients as backward() leaves them, so
    of 16-bit floats scaled ones.

    Args:
        interval: Optimizer steps between readings.
        start: The first step that is read.

    Attributes:
        readings: Equally long lists "step"; "share", of the batch that is this rank's part; "part",
            the squared norm of the gradient of the mean loss over that part, before it is added up
            over the ranks (nan for an empty part); and "whole", that of the mean loss over the
            batch.

    Raises:
        ConfigError: for an interval below 1, and under gradient accumulation.
    """

    measures_one_network = True  # local SGD trains several and refuses

    def __init__(self, interval: int = 1, start: int = 0):
        if interval < 1:
            raise ConfigError("GradientNorms.interval", interval, "at least 1 step")
        self.interval, self.start = interval, start
        self.readings: dict[str, list[float]] = {"step": [], "share": [], "part": [], "whole": []}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError(
                "trainer.accumulate_grad_batches",
                trainer.accumulate_grad_batches,
                "1 for GradientNorms",
            )
        self._keep: dict[Tensor, Tensor] | None = None
        if isinstance(trainer.strategy, SharedBatchDDP):
            trainer.strategy.watch(self._read)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._keep is None:  # not before: pruning may come after this callback
            self._keep = masks_by_parameter(trainer, pl_module)
        since = trainer.global_step - self.start
        self._due = since >= 0 and since % self.interval == 0
        self._part: Tensor | None = None

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer
    ) -> None:
        if not self._due:
            return
        squares = [
            squared_norm(p.grad, self._keep.get(p))
            for p in pl_module.parameters()
            if p.grad is not None
        ]
        whole, share = float(torch.stack(squares).sum()), getattr(trainer.strategy, "share", 1.0)
        part = whole
        if self._part is not None:
            part = float(self._part) / (share * ranks.world()) ** 2 if share else math.nan
        for key, value in zip(
            self.readings, (trainer.global_step, share, part, whole), strict=True
        ):
            self.readings[key].append(value)

    def _read(self, bucket: GradBucket) -> None:
        if self._due:
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            squares = [
                squared_norm(gradient, self._keep.get(parameter)) for parameter, gradient in pairs
            ]
            self._part = torch.stack(
                squares if self._part is None else [self._part, *squares]
            ).sum()
