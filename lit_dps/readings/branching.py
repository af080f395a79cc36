"""BranchCallback: the critical batch size along a run, from short branches with larger batches."""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from scipy import special
from torch import Tensor
from torch.optim import Optimizer

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import unsharded
from lit_dps.training.adam_scaling import AdamScalingCallback, scale_groups
from lit_dps.training.batch_schedule_callback import refuse_batch_schedule
from lit_dps.training.branch_batches import (
    batches_of_branch,
    seed_generators,
    skipped_batches,
)
from lit_dps.training.example_count import full_batch_size, record_batches
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.optimizer_groups import clip_gradients, is_adaptive
from lit_dps.training.pruning_callback import masks_of
from lit_dps.training.stopwatch import stopwatch_of
from lit_dps.training.training_pass import TrainingPass, refuse_read_once

# Of the exponential mean of the loss, as in the paper. It is over the last stretches of the window,
# because the weights of earlier ones are below a sixteenth.
SMOOTHING = 0.5
SMOOTHED_STRETCHES = 4
# A loss that is higher by this is a loss of progress: the tolerance of the paper. It is of losses
# near 3, so a share of the loss replaces it where the loss is below 1.
TOLERANCE = 0.01
# One-sided confidence of the limits of a difference.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Fork:
    """The results of all branches from one step.

    Attributes:
        step: Optimizer step at which the branches begin.
        batch_size: B, the batch size of the run.
        factors: The branches' batch sizes over B, ascending from 1.
        losses: Smoothed training loss at the end of each branch, the mean over the repetitions; nan
            if the learning rate is 0.
        margins: From the difference of each loss to the first one to the 95 % limits of this
            difference, one-sided, by Student's t over the repetitions; nan if it is unknown.
        tolerance: eps, by which a loss may exceed the first one.
        has_no_rate: Whether the learning rate is 0 at the fork, so that no branch was trained.
    """

    step: int
    batch_size: int
    factors: tuple[int, ...]
    losses: tuple[float, ...]
    margins: tuple[float, ...]
    tolerance: float
    has_no_rate: bool = False

    @property
    def excess(self) -> tuple[float, ...]:
        """The difference of each loss to the first one."""
        return tuple(loss - self.losses[0] for loss in self.losses)

    @property
    def factor(self) -> int:
        """k*: up to it, the upper limit of the excess of the loss is at most the tolerance.

        So noise makes k* smaller. With two standard errors of the noise as the tolerance, noise
        would make it larger.
        """
        largest = self.factors[0]
        for factor, excess, margin in self._larger():
            # `not <=` also stops at a loss that is nan.
            if not excess + margin <= self.tolerance:
                break
            largest = factor
        return largest

    @property
    def has_equal_repetitions(self) -> bool:
        """Whether two repetitions had the same losses, so that no margin is known."""
        return all(map(math.isfinite, self.losses[:2])) and math.isnan(self.margins[1])

    @property
    def critical(self) -> tuple[int, float]:
        """Lower and upper bound of the critical batch size, in examples.

        The upper bound is of the smallest larger factor whose excess surely exceeds the tolerance.
        It is infinite without one, and if the branch of the run's batch size has diverged.
        """
        low = self.factor
        high = math.inf
        for factor, excess, margin in self._larger():
            is_worse = not math.isfinite(excess) or excess - margin > self.tolerance
            if math.isfinite(self.losses[0]) and factor > low and is_worse:
                high = factor
                break
        return low * self.batch_size, high * self.batch_size

    def _larger(self) -> list[tuple[int, float, float]]:
        """Return factor, excess and margin of each branch with a larger batch size."""
        return list(zip(self.factors, self.excess, self.margins, strict=True))[1:]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON; a number that is not finite is null."""
        return {
            **asdict(self),
            "losses": _finite_or_none(self.losses),
            "margins": _finite_or_none(self.margins),
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Fork:
        """Return a fork from the output of `to_dict`."""
        losses = tuple(np.array(stored["losses"], float).tolist())
        margins = tuple(np.array(stored["margins"], float).tolist())
        factors = tuple(stored["factors"])
        return cls(**{**stored, "factors": factors, "losses": losses, "margins": margins})


def _finite_or_none(numbers: Sequence[float]) -> list[float | None]:
    """Return numbers with None in place of those that are not finite."""
    values: list[float | None] = []
    for number in numbers:
        if math.isfinite(number):
            values.append(number)
        else:
            values.append(None)
    return values


class BranchCallback(Callback):
    """Forks a run into branches with k times its batch size, to find the critical batch size.

    All branches train on the same number of examples (Merrill et al. 2025, arXiv 2505.23971,
    Section 3). A branch has a copy of the module, and of the optimizer with its state. Its learning
    rate is f(k) times the rate of the run, with f(k) = k, or sqrt(k) for an adaptive optimizer.
    With an `AdamScalingCallback`, second moment and weight decay follow the batch size by its
    rules. A batch of the branch is k batches of the run.

    A branch trains on a window of stretches x max(factors) batches. The branch of the largest batch
    size makes one step per stretch. It needs at least 32, because a new rate has a transient. After
    each of the last stretches the callback computes the training loss over further batches, the
    same for all branches, and averages it exponentially. (The paper uses the loss of the batches
    that are trained on. It lags behind in a branch of few steps.) The critical factor is the
    largest k up to which the loss is shown not to exceed the loss of the run's batch size by more
    than a tolerance: the upper 95 % limit of the difference over repetitions with other examples.
    The tolerance is 0.01 as in the paper, or 1 % of the loss if the loss is below 1.

    Each repetition has its own seed, for the global generators and those of the loader. If the
    loader does not shuffle by them, each repetition begins at another place of the order. If two
    repetitions have equal losses nevertheless, as with one batch of all examples, the margins are
    nan, and no larger batch size is shown to lose nothing. At a learning rate of 0 all losses are
    nan.

    The run itself is not changed. The branches keep the rate of a schedule at the fork, and clip
    gradients like the trainer. A fork costs repetitions x branches x window forward and backward
    passes of a batch (`cost`), which can be more than a whole run at a larger batch size.

    Args:
        at: Steps to fork at.
        factors: k of the branches, ascending from 1.
        stretches: Steps of the branch of the largest batch size; the other branches make more.
        repetitions: Draws of examples, at least 2.
        tolerance: eps, in units of the loss; None as above.
        seconds: Seconds of the run in which forks have to end. A fork does not begin if it would
            end later, by the longest fork so far, or by `fork_seconds`.

    Attributes:
        forks: A `Fork` for each step that was reached.
        adaptive: Whether the branches' rates grow with sqrt(k), once the fit has begun.
        scaling: The callback that scales the branches; None without one, and before the fit.
        on_fork: Called with each new fork.
        fork_seconds: The expected seconds of a fork.

    Raises:
        ConfigError: for values out of their range; in a fit for a batch schedule, manual
            optimization, several optimizers, ranks or train dataloaders, and data that can be read
            only once.
    """

    def __init__(
        self,
        at: Sequence[int],
        factors: Sequence[int] = (1, 2, 4, 8, 16, 32),
        stretches: int = 32,
        repetitions: int = 4,
        tolerance: float | None = None,
        seconds: float = math.inf,
    ):
        if list(factors) != sorted(set(factors)) or len(factors) < 2 or factors[0] != 1:
            allowed = "ascending numbers from 1, at least two"
            raise ConfigError("BranchCallback.factors", list(factors), allowed)
        if any(max(factors) % factor for factor in factors):
            allowed = "divisors of the largest factor"
            raise ConfigError("BranchCallback.factors", list(factors), allowed)
        if stretches < 1:
            raise ConfigError("BranchCallback.stretches", stretches, "at least 1")
        if repetitions < 2:
            allowed = "at least 2, because single losses are noisy"
            raise ConfigError("BranchCallback.repetitions", repetitions, allowed)
        if tolerance is not None and not 0 <= tolerance < math.inf:
            allowed = "a difference of losses, 0 or more"
            raise ConfigError("BranchCallback.tolerance", tolerance, allowed)
        self.at = set(at)
        self.factors = tuple(factors)
        self.stretches = stretches
        self.repetitions = repetitions
        self.tolerance = tolerance
        self.seconds = seconds
        self.forks: list[Fork] = []
        self.adaptive = False
        self.scaling: AdamScalingCallback | None = None
        self.on_fork: Callable[[Fork], None] = lambda fork: None
        self._began = math.nan
        self.fork_seconds = 0.0

    @property
    def window(self) -> int:
        """The steps of the run on whose examples a branch trains."""
        return self.stretches * max(self.factors)

    @property
    def cost(self) -> int:
        """Forward and backward passes of a fork, in steps of the run.

        A forward pass for the loss counts as a third of a step.
        """
        evaluations = min(SMOOTHED_STRETCHES, self.stretches) * max(self.factors)
        of_branch = self.window + math.ceil(evaluations / 3)
        return self.repetitions * len(self.factors) * of_branch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_batch_schedule(trainer, "BranchCallback")
            record_batches(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            allowed = "a module with one optimizer and without manual optimization"
            raise ConfigError("BranchCallback", type(pl_module).__name__, allowed)
        if ranks.world() > 1:
            allowed = "one rank, because one device trains the branches"
            raise ConfigError("BranchCallback", ranks.world(), allowed)
        loader = unsharded(trainer.train_dataloader)
        if isinstance(loader, (dict, list, tuple, CombinedLoader)):
            allowed = "one train dataloader, because branches read it several times"
            raise ConfigError("data", type(loader).__name__, allowed)
        refuse_read_once(loader)
        self._began = time.monotonic()
        self._pass = TrainingPass(trainer, pl_module, 1)
        self.adaptive = is_adaptive(trainer.optimizers)
        self.scaling = None
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, AdamScalingCallback):
                self.scaling = callback

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step not in self.at or any(fork.step == step for fork in self.forks):
            return
        begin = time.monotonic()
        if begin - self._began + self.fork_seconds > self.seconds:
            return
        with stopwatch_of(trainer).paused(pl_module.device):
            self._fork(trainer, pl_module, batch)
        self.fork_seconds = max(self.fork_seconds, time.monotonic() - begin)

    def _fork(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """Train the branches, and add, log and report the fork."""
        step = trainer.global_step
        batch_size = full_batch_size(trainer, batch) * trainer.accumulate_grad_batches
        # With a rate of 0 all branches would be equal, as if larger batches lost nothing.
        has_no_rate = all(group["lr"] == 0 for group in trainer.optimizers[0].param_groups)
        losses = np.full((self.repetitions, len(self.factors)), math.nan)
        if not has_no_rate:
            for repetition in range(self.repetitions):
                losses[repetition] = self._losses_of_branches(trainer, pl_module, repetition)
        mean_losses = tuple(map(float, losses.mean(axis=0)))
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = TOLERANCE * min(1.0, abs(mean_losses[0]))
        margins = margins_of(losses)
        fork = Fork(step, batch_size, self.factors, mean_losses, margins, tolerance, has_no_rate)
        self.forks.append(fork)
        low, high = fork.critical
        logged = {"branch/critical": float(low)}
        if math.isfinite(high):
            logged["branch/below"] = float(high)
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=step)
        self.on_fork(fork)

    def _losses_of_branches(
        self, trainer: Trainer, module: LightningModule, repetition: int
    ) -> list[float]:
        """Return the smoothed loss at the end of each branch. All branches use the same examples.

        Args:
            trainer: The trainer of the fit.
            module: The module of the fit.
            repetition: With the step, it determines the examples, and the draws of the module.
        """
        losses = []
        for factor in self.factors:
            losses.append(self._loss_of_branch(trainer, module, factor, repetition))
        return losses

    def _loss_of_branch(
        self, trainer: Trainer, module: LightningModule, factor: int, repetition: int
    ) -> float:
        """Return the smoothed loss at the end of one branch; infinity if the branch diverges.

        The examples are drawn anew for each branch, with the same seed, because a window of batches
        may not fit into memory. The first ones are for the loss.
        """
        batches_per_step = factor * trainer.accumulate_grad_batches
        batches_per_stretch = max(self.factors) * trainer.accumulate_grad_batches
        loader = unsharded(trainer.train_dataloader)
        samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
        data = getattr(trainer, "datamodule", None)
        seed = trainer.global_step * 1000 + repetition
        count = (self.stretches + 1) * batches_per_stretch
        smoothed = math.nan
        with (
            self._pass.without_side_effects() as twin,
            preserve_rng_state(loader, *samplers, data, seed=seed),
        ):
            seed_generators(seed, loader, *samplers, data)
            skipped = skipped_batches(trainer, repetition, self.repetitions, count)
            batches = batches_of_branch(trainer, module, count, skipped)
            evaluation_batches = list(islice(batches, batches_per_stretch))
            optimizer = self._optimizer_of_branch(trainer.optimizers[0], module, twin, factor)
            # A schedule-free rule takes gradients at other weights.
            at_gradient_point = getattr(optimizer, "at_gradient_point", nullcontext)
            masks = masks_of(trainer, module)
            for i, batch in enumerate(batches, 1):
                with at_gradient_point():
                    loss = self._pass.loss(twin, batch, i - 1)
                    if loss is not None:
                        (loss / batches_per_step).backward()
                if i % batches_per_step == 0:
                    _mask_gradients(twin, masks)
                    clip_gradients(trainer, optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
                    _apply_masks(twin, masks)
                stretch = i // batches_per_stretch
                is_end_of_stretch = i % batches_per_stretch == 0
                if is_end_of_stretch and stretch > self.stretches - SMOOTHED_STRETCHES:
                    mean = self._mean_loss(twin, evaluation_batches)
                    if not math.isfinite(mean):
                        return math.inf
                    if math.isnan(smoothed):
                        smoothed = mean
                    else:
                        smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * mean
        return smoothed

    def _optimizer_of_branch(
        self, optimizer: Optimizer, module: LightningModule, twin: LightningModule, factor: int
    ) -> Optimizer:
        """Return a copy of the optimizer for the copy of the module, scaled to its batch size."""
        scaled = _copy_optimizer(optimizer, module, twin)
        rate_factor = factor
        if self.adaptive:
            rate_factor = math.sqrt(factor)
        for group in scaled.param_groups:
            group["lr"] = group["lr"] * rate_factor
        if self.scaling is not None:
            if self.scaling.rate is None:
                rate_factor = 1.0
            scale_groups(scaled, factor, rate_factor)
        return scaled

    def _mean_loss(self, twin: LightningModule, batches: list) -> float:
        """Return the mean loss of batches; nan if no batch has a loss."""
        losses = []
        with torch.no_grad():
            for i, batch in enumerate(batches):
                loss = self._pass.loss(twin, batch, i)
                if loss is not None:
                    losses.append(float(loss))
        if not losses:
            return math.nan
        return sum(losses) / len(losses)


def margins_of(losses: np.ndarray) -> tuple[float, ...]:
    """Return the margin of the difference of each branch to the first one, as in `Fork`.

    Args:
        losses: Shape (repetitions, branches). The repetition pairs the branches, because they use
            the same examples. The margin of a branch with a loss that is not finite is nan. If two
            repetitions have equal losses, they had the same examples, and all margins but the first
            are nan.
    """
    repetitions = len(losses)
    if len(np.unique(losses, axis=0)) < repetitions:
        return (0.0, *[math.nan] * (losses.shape[1] - 1))
    finite_losses = np.where(np.isfinite(losses), losses, math.nan)
    differences = finite_losses - finite_losses[:, :1]
    standard_errors = differences.std(axis=0, ddof=1) / math.sqrt(repetitions)
    quantile = special.stdtrit(repetitions - 1, CONFIDENCE)
    return tuple(map(float, quantile * standard_errors))


def _mask_gradients(twin: LightningModule, masks: dict[str, Tensor]) -> None:
    for name, parameter in twin.named_parameters():
        if name in masks and parameter.grad is not None:
            parameter.grad.mul_(masks[name])


@torch.no_grad()
def _apply_masks(twin: LightningModule, masks: dict[str, Tensor]) -> None:
    for name, parameter in twin.named_parameters():
        if name in masks:
            parameter.mul_(masks[name])


def _copy_optimizer(
    optimizer: Optimizer, module: LightningModule, twin: LightningModule
) -> Optimizer:
    """Return an optimizer of the copy's parameters, with a copy of the state and without hooks."""
    copies_by_name = dict(twin.named_parameters())
    copies = {}
    for name, parameter in module.named_parameters():
        copies[parameter] = copies_by_name[name]
    copied = copy.copy(optimizer)
    copied.param_groups = []
    for group in optimizer.param_groups:
        parameters = [copies[parameter] for parameter in group["params"]]
        copied.param_groups.append({**group, "params": parameters})
        for parameter in parameters:
            parameter.grad = None
    copied.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        copied.state[copies[parameter]] = copy.deepcopy(state)
    return copied
