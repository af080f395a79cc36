"""BranchCallback: the critical batch size along a run, from short branches with larger batches."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import whole
from lit_dps.training.adam_scaling import AdamScalingCallback, is_adaptive, scale_groups
from lit_dps.training.example_count import full_batch_size, record_batches
from lit_dps.training.pruning_callback import masks_of
from lit_dps.training.rng_state import preserve_rng_state
from lit_dps.training.training_pass import TrainingPass, fresh

SMOOTH = 0.5  # of the exponential mean of the loss, as in the paper
ERRORS = 2.0  # standard errors that make the tolerance


@dataclass(frozen=True)
class Fork:
    """What the branches from one step say.

    Attributes:
        step: Optimizer step that they begin at.
        batch_size: B, of the run.
        factors: The branches' batch sizes over B, ascending from 1.
        losses: Smoothed training loss at the end of each, the mean over its repetitions.
        tolerance: eps, by which a loss may lie above that of a smaller batch.
    """

    step: int
    batch_size: int
    factors: tuple[int, ...]
    losses: tuple[float, ...]
    tolerance: float

    @property
    def factor(self) -> int:
        """k*, the largest factor up to which no loss lies above that of a smaller one by more than
        the tolerance."""
        best, found = math.inf, self.factors[0]
        for factor, loss in zip(self.factors, self.losses, strict=True):
            if not loss <= best + self.tolerance:  # also a loss that is not finite
                break
            found, best = factor, min(best, loss)
        return found

    @property
    def critical(self) -> tuple[int, float]:
        """The critical batch size lies between these, in examples; the upper one is infinite where
        all branches did."""
        larger = [factor for factor in self.factors if factor > self.factor]
        return self.factor * self.batch_size, min(larger, default=math.inf) * self.batch_size

    def stored(self) -> dict[str, Any]:
        """The fields as plain JSON; a loss that is not finite is null."""
        return {**asdict(self), "losses": [x if math.isfinite(x) else None for x in self.losses]}

    @classmethod
    def of_stored(cls, stored: dict[str, Any]) -> Fork:
        """The inverse of `stored`."""
        losses = tuple(math.nan if x is None else x for x in stored["losses"])
        return cls(**{**stored, "factors": tuple(stored["factors"]), "losses": losses})


class BranchCallback(Callback):
    """Forks a run at some steps: branches with k times its batch size go on for the same number of
    examples.

    A branch has its own copy of the module and of the optimizer with its state; its rate is f(k)
    times the run's, with f(k) = k, or sqrt(k) for an adaptive optimizer. Beside an
    `AdamScalingCallback` second moment and weight decay of the optimizer follow the batch size by
    its rules. Its batches are k of the run's, taken together. After each stretch of examples, equal
    for all branches, its training loss is taken over further batches, the same for all, and
    smoothed along the stretches by an exponential mean (Merrill et al. 2025, arXiv 2505.23971,
    Section 3; there it is the loss of the batches that are trained on, which lags behind in a
    branch of few steps). The largest k whose loss is not above that of any smaller one, by more
    than a tolerance, is the critical factor. Where the paper sets the tolerance to 0.01, it is here
    two standard errors of the differences between branches over repetitions with other examples,
    unless it is given.

    The run itself is not touched. Of a schedule the branches keep the rate at the fork; gradient
    clipping is the trainer's. A fork costs repetitions x branches x stretches x max(factors)
    forward and backward passes of a batch, and about as many forward ones.

    Args:
        at: Steps to fork at.
        factors: k of the branches, ascending from 1.
        stretches: How many stretches of max(factors) batches each branch is trained for.
        repetitions: Draws of examples; at least 2, or a tolerance.
        tolerance: eps, in units of the loss.
        seconds: Since the first fork, after which no other one is begun.

    Attributes:
        forks: A `Fork` for each step that was reached.
        adaptive: Whether the branches' rates grow with sqrt(k), once the fit has begun.
        scaling: The callback that scales the branches; None without one, and before the fit.

    Raises:
        ConfigError: for values out of their range; in a fit for manual optimization, several
            optimizers or ranks.
    """

    def __init__(
        self,
        at: Sequence[int],
        factors: Sequence[int] = (1, 2, 4, 8, 16, 32),
        stretches: int = 4,
        repetitions: int = 3,
        tolerance: float | None = None,
        seconds: float = math.inf,
    ):
        if list(factors) != sorted(set(factors)) or len(factors) < 2 or factors[0] != 1:
            raise ConfigError(
                "BranchCallback.factors", list(factors), "ascending numbers from 1, at least two"
            )
        if any(max(factors) % factor for factor in factors):
            raise ConfigError(
                "BranchCallback.factors", list(factors), "divisors of the largest one"
            )
        if stretches < 1:
            raise ConfigError("BranchCallback.stretches", stretches, "at least 1")
        if repetitions < (2 if tolerance is None else 1):
            raise ConfigError(
                "BranchCallback.repetitions", repetitions, "at least 2, or 1 with a tolerance"
            )
        if tolerance is not None and not 0 <= tolerance < math.inf:
            raise ConfigError(
                "BranchCallback.tolerance", tolerance, "a difference of losses, 0 or more"
            )
        self.at, self.factors, self.stretches = set(at), tuple(factors), stretches
        self.repetitions, self.tolerance, self.seconds = repetitions, tolerance, seconds
        self.forks: list[Fork] = []
        self.adaptive = False
        self.scaling: AdamScalingCallback | None = None
        self.on_fork: Callable[[Fork], None] = lambda fork: None
        self._began: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            record_batches(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name = type(pl_module).__name__
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise ConfigError(
                "BranchCallback",
                name,
                "a module with one optimizer and without manual optimization",
            )
        if ranks.world() > 1:
            raise ConfigError(
                "BranchCallback", ranks.world(), "one rank: branches are trained by one device"
            )
        self._pass, self.adaptive = (
            TrainingPass(trainer, pl_module, 1),
            is_adaptive(trainer.optimizers),
        )
        self.scaling = None
        for callback in trainer.callbacks:
            if isinstance(callback, AdamScalingCallback):
                self.scaling = callback

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step not in self.at or any(fork.step == step for fork in self.forks):
            return
        self._began = time.monotonic() if self._began is None else self._began
        if time.monotonic() - self._began > self.seconds:
            return
        size = full_batch_size(trainer, batch) * trainer.accumulate_grad_batches
        losses = np.array(
            [self._repetition(trainer, pl_module, step, i) for i in range(self.repetitions)]
        )
        tolerance = self.tolerance
        if (
            tolerance is None
        ):  # of the branches that stayed finite, each against the run's own batch size
            apart = (losses - losses[:, :1])[:, np.isfinite(losses).all(axis=0)][:, 1:]
            tolerance = (
                ERRORS * math.sqrt(float(apart.var(axis=0, ddof=1).mean()) / len(apart))
                if apart.size
                else 0.0
            )
        fork = Fork(step, size, self.factors, tuple(map(float, losses.mean(axis=0))), tolerance)
        self.forks.append(fork)
        low, high = fork.critical
        shown = {"branch/critical": float(low)} | (
            {"branch/below": float(high)} if math.isfinite(high) else {}
        )
        for logger in trainer.loggers:
            logger.log_metrics(shown, step=step)
        self.on_fork(fork)

    def _repetition(
        self, trainer: Trainer, module: LightningModule, step: int, number: int
    ) -> list[float]:
        """The smoothed loss at the end of each branch, all on the same examples."""
        parts = trainer.accumulate_grad_batches
        needed, seed = (self.stretches + 1) * max(self.factors) * parts, step * 1000 + number
        data, loader = getattr(trainer, "datamodule", None), whole(trainer.train_dataloader)
        with preserve_rng_state(
            loader,
            getattr(loader, "sampler", None),
            getattr(loader, "batch_sampler", None),
            data,
            seed=seed,
        ):
            batches = list(self._batches(trainer, module, needed))
        return [
            self._branch(trainer, module, batches, factor, parts, seed) for factor in self.factors
        ]

    def _batches(self, trainer: Trainer, module: LightningModule, needed: int) -> Iterator[Any]:
        """So many of the run's own batches, over as many passes as that takes, on the module's
        device."""
        taken = 0
        while True:
            before = taken
            for batch in fresh(whole(trainer.train_dataloader)):
                batch = trainer.precision_plugin.convert_input(batch)
                batch = lightning_private.before_transfer(module, batch)
                yield trainer.strategy.batch_to_device(batch, module.device, 0)
                if (taken := taken + 1) == needed:
                    return
            if taken == before:
                raise ConfigError(
                    "data",
                    type(trainer.train_dataloader).__name__,
                    "a train dataloader with batches",
                )

    def _branch(
        self,
        trainer: Trainer,
        module: LightningModule,
        batches: list,
        factor: int,
        parts: int,
        seed: int,
    ) -> float:
        stretch, together = max(self.factors) * parts, factor * parts
        smooth, seen = math.nan, batches[-stretch:]
        with self._pass.without_side_effects() as twin:
            torch.manual_seed(seed)
            optimizer, keep = (
                _copy_of(trainer.optimizers[0], module, twin),
                masks_of(trainer, module),
            )
            scale = math.sqrt(factor) if self.adaptive else factor
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * scale
            if self.scaling is not None:
                scale_groups(optimizer, factor, 1.0 if self.scaling.rate is None else scale)
            for i, batch in enumerate(batches[:-stretch]):
                loss = self._pass.loss(twin, batch, i)
                if loss is not None:
                    (loss / together).backward()
                if (i + 1) % together == 0:
                    _step(trainer, optimizer, twin, keep)
                if (i + 1) % stretch == 0:
                    mean = self._mean_loss(twin, seen)
                    smooth = mean if math.isnan(smooth) else SMOOTH * smooth + (1 - SMOOTH) * mean
                    if not math.isfinite(mean):
                        return math.inf
        return smooth

    def _mean_loss(self, twin: LightningModule, batches: list) -> float:
        with torch.no_grad():
            losses = [self._pass.loss(twin, batch, i) for i, batch in enumerate(batches)]
        known = [float(loss) for loss in losses if loss is not None]
        return sum(known) / len(known) if known else math.nan


def _step(
    trainer: Trainer, optimizer: Optimizer, twin: LightningModule, keep: dict[str, Tensor]
) -> None:
    if (clip := trainer.gradient_clip_val) is not None:
        by_value = (
            str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower() == "value"
        )
        (nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_)(
            twin.parameters(), clip
        )
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in keep:
                parameter.mul_(keep[name])


def _copy_of(optimizer: Optimizer, module: LightningModule, twin: LightningModule) -> Optimizer:
    """An optimizer of the twin's parameters, with a copy of the state, without the hooks of the
    original."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    theirs = dict(twin.named_parameters())
    new = copy.copy(optimizer)
    groups = [
        {**g, "params": [theirs[names[id(p)]] for p in g["params"]]} for g in optimizer.param_groups
    ]
    new.param_groups = groups
    new.state = type(optimizer.state)(dict)
    for parameter, state in optimizer.state.items():
        new.state[theirs[names[id(parameter)]]] = copy.deepcopy(state)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = None
    return new
