"""SmoothnessCallback: the local Lipschitz constant of the gradient along a run.

The convergence theory of Lee et al. (2021) describes a network by the smoothness of its loss and
the noise of its gradient. The functions below compute both from vectors and losses. The callback
measures them during training, and `lit_dps.analysis.theory` combines them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial_config import SmoothnessConfig
from lit_dps.parallel import ranks
from lit_dps.training.pruning_callback import masks_of
from lit_dps.training.stopwatch import stopwatch_of
from lit_dps.training.training_pass import TrainingPass, loss_of

# Dropout draws the same values for every gradient, so that all are gradients of one function.
DROPOUT_SEED = 0

# Per-example gradients of a chunk are in memory at the same time: 2^22 numbers are 16 MiB in
# float32. On a CPU core, larger chunks of the paper's networks are slower (1.4 ms per example at
# 2^22, 2.4 at 2^24), and so are much smaller chunks.
_CHUNK_ELEMENTS = 2**22


class Smoothness(NamedTuple):
    """One measurement between two weights.

    Attributes:
        lipschitz: Local Lipschitz constant of the gradient; nan if the weights are equal.
        squared_gradient: Squared norm of the gradient at the first weights.
    """

    lipschitz: float
    squared_gradient: float


class Moments(NamedTuple):
    """First and second moments of the per-example gradient.

    Attributes:
        loss: Mean loss.
        squared_gradient: Squared norm of the mean gradient.
        variance: Trace of the covariance of the per-example gradient, E||g||^2 - ||E g||^2.
    """

    loss: float
    squared_gradient: float
    variance: float


class SmoothnessCallback(Callback):
    """Measures the local Lipschitz constant of the gradient, and the other terms of the theory.

    Every `interval` steps the callback computes the full training gradient between the weights
    before and after that step (Lee et al. 2021, Eq. 11; see `local_lipschitz`). Before the first
    step, after pruning, it computes the training loss and the variance of the per-example gradient.
    The loss is the loss of the module's `training_step`, in training mode.

    Pruned coordinates do not count. Training itself is not changed. A measurement costs one pass
    over the training split per gamma, and one more; the variance costs several. `examples` limits
    the passes.

    Args:
        interval, delta, last, examples, batch_size, floor, noise:
            Keys of the section `smoothness` (`lit_dps.core.trial_config.SmoothnessConfig`). The
            default interval is the paper's.

    Attributes:
        curve: "step", "lipschitz", "squared_gradient" and with `noise` "noise" of every
            measurement, as in `TrialResult.smoothness`.
        terms: As in `TrialResult.theory`.

    Raises:
        ConfigError: for a value out of its range; in a fit for manual optimization, or if the
            module has no per-example gradients.
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
        SmoothnessConfig(interval, delta, last, examples, batch_size, floor, noise)  # checks
        self.interval = interval
        self.gammas = gammas(delta, last)
        self.examples = examples
        self.batch_size = batch_size
        self.floor = floor
        self.noise = noise
        self._reset()

    @classmethod
    def of(cls, config: SmoothnessConfig) -> Self:
        """Return the callback of a configuration."""
        return cls(**vars(config))

    @property
    def measures_one_network(self) -> bool:
        """Whether anything is measured. Local SGD trains several networks and refuses then."""
        return self.interval is not None

    def _reset(self) -> None:
        self.curve: dict[str, list[float]] = {"step": [], "lipschitz": [], "squared_gradient": []}
        if self.noise:
            self.curve["noise"] = []
        self.terms: dict[str, float] = {}
        self._before: Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning loads the state of a checkpoint after this hook.
        if stage == "fit":
            self._reset()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.interval is None:
            return
        if not pl_module.automatic_optimization:
            allowed = f"null for {type(pl_module).__name__}, which has manual optimization"
            raise ConfigError("smoothness.interval", self.interval, allowed)
        self._pass = TrainingPass(trainer, pl_module, self.batch_size, self.examples)
        self._masks = masks_of(trainer, pl_module)
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                self._parameters[name] = parameter
        if not self.terms:
            self.terms = self._initial_terms(pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.interval is None:
            return
        if trainer.global_step % self.interval == self.interval - 1:
            self._before = flatten(self._parameters.values())
            self._step = trainer.global_step
            self._masks = masks_of(trainer, pl_module)  # a method may change them while training

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.interval is None:
            return
        # The theory has a single learning rate.
        rate = float(optimizer.param_groups[0]["lr"])
        self.terms["steps"] += 1
        self.terms["rate_sum"] += rate
        self.terms["rate_square_sum"] += rate * rate

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # Return if no measurement is due, or if gradients are still accumulated.
        if self._before is None or trainer.global_step == self._step:
            return
        before = self._before
        self._before = None
        after = flatten(self._parameters.values())
        with stopwatch_of(trainer).paused(pl_module.device):
            with self._pass.without_side_effects() as twin:
                gradient = partial(self._gradient, twin)
                measured = local_lipschitz(gradient, before, after, self.gammas)._asdict()
            if self.noise:
                measured["noise"] = self._moments(pl_module, before).variance
        self.curve["step"].append(trainer.global_step)
        for key, value in measured.items():
            self.curve[key].append(value)
        for logger in trainer.loggers:
            logger.log_metrics(measured, step=trainer.global_step)

    def _gradient(self, twin: LightningModule, weights: Tensor) -> Tensor:
        """Return the full training gradient of a copy at these weights, both of shape (p,)."""
        named = dict(twin.named_parameters())
        parameters = [named[name] for name in self._parameters]
        with torch.no_grad():
            for parameter, values in zip(parameters, unflatten(weights, parameters), strict=True):
                parameter.copy_(values)
        torch.manual_seed(DROPOUT_SEED)
        gradient = mean_gradient(parameters, self._pass.losses(twin))
        parts = []
        for name, part in zip(self._parameters, unflatten(gradient, parameters), strict=True):
            if name in self._masks:
                part = part * self._masks[name]
            parts.append(part)
        return flatten(parts)

    def _initial_terms(self, module: LightningModule) -> dict[str, float]:
        """Return the terms of the theory before the first step."""
        moments = self._moments(module, flatten(self._parameters.values()), begin=True)
        return {
            "loss": moments.loss,
            "gradient_variance": moments.variance,
            "squared_gradient": moments.squared_gradient,
            "floor": self.floor,
            "steps": 0,
            "rate_sum": 0.0,
            "rate_square_sum": 0.0,
        }

    def _moments(self, module: LightningModule, weights: Tensor, begin: bool = False) -> Moments:
        """Return the moments of the per-example gradient at these weights, flat, shape (p,).

        Args:
            module: The module of the fit.
            weights: The weights.
            begin: See `TrainingPass.without_side_effects`.
        """
        parts = unflatten(weights, list(self._parameters.values()))
        parameters = {}
        for name, part in zip(self._parameters, parts, strict=True):
            parameters[f"module.{name}"] = part
        masks = {f"module.{name}": mask for name, mask in self._masks.items()}
        with self._pass.without_side_effects(begin) as twin:
            step = _TrainingStep(twin)

            def loss(parameters: dict[str, Tensor], example: Any) -> Tensor:
                batch = tree_map(lambda tensor: tensor[None], example)
                return functional_call(step, parameters, (batch,))

            torch.manual_seed(DROPOUT_SEED)
            try:
                return gradient_moments(loss, parameters, self._batches(twin), masks)
            except (RuntimeError, TypeError, ValueError) as error:
                reason = str(error).splitlines()[0][:200]
                allowed = (
                    f"null for {type(module).__name__}, whose training_step gives no per-example "
                    f"gradients ({reason})"
                )
                raise ConfigError("smoothness.interval", self.interval, allowed) from error

    def _batches(self, twin: LightningModule) -> Iterator[Any]:
        """Yield the batches of the pass, each after the copy's `on_train_batch_start`."""
        for i, (batch, _) in enumerate(self._pass.batches()):
            if twin.on_train_batch_start(batch, i) != -1:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"curve": self.curve, "terms": self.terms}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curve = state_dict["curve"]
        self.terms = state_dict["terms"]


class _TrainingStep(nn.Module):
    """A module's training step as a forward pass, for `functional_call`."""

    def __init__(self, module: LightningModule):
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor | None:
        return loss_of(self.module, batch, 0)


def gammas(delta: float = 0.1, last: float = 1.0) -> list[float]:
    """Return delta, 2 delta, ... up to `last`: positions between two weights.

    The paper uses 0.1 to 1 (Lee et al. 2021, Eq. 11). The authors' code uses 0.1 to 0.9, which is
    `last` = 0.9.
    """
    return [delta * i for i in range(1, math.floor(last / delta + 1e-9) + 1)]


def local_lipschitz(
    gradient: Callable[[Tensor], Tensor], before: Tensor, after: Tensor, fractions: Sequence[float]
) -> Smoothness:
    """Return the local Lipschitz constant of the gradient between two weights.

    With d = after - before it is the largest ||grad f(before + gamma d) - grad f(before)|| /
    ||gamma d|| over the gammas (Lee et al. 2021, Eq. 11; Zhang et al. 2020, "Why Gradient Clipping
    Accelerates Training", Appendix H).

    Args:
        gradient: Maps weights (p,) to the gradient of the full training loss there (p,).
        before: Weights before an update, shape (p,), of unpruned coordinates (or of all, with zeros
            at the pruned ones).
        after: Weights after the update.
        fractions: The gammas, above 0.
    """
    direction = after.double() - before.double()
    length = float(direction.norm())
    first = gradient(before).double()
    squared_gradient = float(first.square().sum())
    if not length > 0:
        return Smoothness(math.nan, squared_gradient)
    constants = []
    for gamma in fractions:
        weights = (before.double() + gamma * direction).to(before.dtype)
        change = gradient(weights).double() - first
        constants.append(float(change.norm()) / (gamma * length))
    # Python's max() keeps a nan only in some positions; torch always keeps it.
    largest = torch.tensor(constants, dtype=torch.float64).max()
    return Smoothness(float(largest), squared_gradient)


def mean_gradient(parameters: Sequence[Tensor], losses: Iterable[tuple[Tensor, float]]) -> Tensor:
    """Return the gradient of the mean loss over all examples of all ranks, float64, shape (p,).

    Args:
        parameters: Tensors that the losses depend on.
        losses: Mean loss of each batch, and its number of examples.

    Raises:
        ValueError: without a batch.
    """
    total = torch.zeros_like(flatten(parameters), dtype=torch.float64)
    examples = 0.0
    for loss, size in losses:
        gradients = torch.autograd.grad(
            loss, list(parameters), allow_unused=True, materialize_grads=True
        )
        total = total + size * flatten(gradients).double()
        examples = examples + size
    total = ranks.all_reduce_sum(total)
    examples = float(ranks.all_reduce_sum(torch.tensor(examples, dtype=torch.float64)))
    if not examples:
        raise ValueError("a gradient needs at least one batch")
    return total / examples


def gradient_moments(
    loss: Callable[[dict[str, Tensor], Any], Tensor],
    parameters: dict[str, Tensor],
    batches: Iterable[Any],
    masks: dict[str, Tensor] | None = None,
) -> Moments:
    """Return the moments of the per-example gradient over all examples of all ranks.

    They are exact, from vectorised per-example gradients in chunks. At initialization the variance
    is the gradient variance beta of Lee et al. (2021, Section 4).

    Args:
        loss: (parameters, example) -> loss of the example, for `torch.func`; an example is a batch
            without its first dimension.
        parameters: By name, as `loss` takes them.
        batches: Nests of tensors, all with the examples as first dimension.
        masks: Masks of the unpruned coordinates by parameter name. All coordinates of a parameter
            without a mask count.

    Raises:
        ValueError: without an example.
    """
    chunk = max(1, _CHUNK_ELEMENTS // sum(p.numel() for p in parameters.values()))
    masks = {name: mask.to(parameters[name].dtype) for name, mask in (masks or {}).items()}

    gradients_and_losses = _per_example(loss)
    total_gradient = torch.zeros_like(flatten(parameters.values()), dtype=torch.float64)
    examples = 0
    total_loss = 0.0
    total_square = 0.0
    for batch in batches:
        size = len(tree_leaves(batch)[0])
        for start in range(0, size, chunk):
            part = tree_map(lambda tensor, start=start: tensor[start : start + chunk], batch)
            gradients, losses = gradients_and_losses(parameters, part)
            rows = _masked_rows(gradients, masks)
            total_square += float(rows.square().sum(dtype=torch.float64))
            total_gradient += rows.sum(dim=0, dtype=torch.float64)
            total_loss += float(losses.double().sum())
        examples += size
    sums = torch.tensor([examples, total_loss, total_square], dtype=torch.float64)
    sums = ranks.all_reduce_sum(sums)
    examples = float(sums[0])
    total_gradient = ranks.all_reduce_sum(total_gradient)
    if not examples:
        raise ValueError("moments need at least one example")
    mean_loss = float(sums[1]) / examples
    squared_gradient = float((total_gradient / examples).square().sum())
    variance = float(sums[2]) / examples - squared_gradient
    return Moments(mean_loss, squared_gradient, variance)


def _per_example(
    loss: Callable[[dict[str, Tensor], Any], Tensor],
) -> Callable[[dict[str, Tensor], Any], tuple[dict[str, Tensor], Tensor]]:
    """Return the function (parameters, batch) -> per-example gradients and losses."""

    def loss_twice(parameters: dict[str, Tensor], example: Any) -> tuple[Tensor, Tensor]:
        value = loss(parameters, example)
        return value, value

    # Not every version of torch splits `grad_and_value` into chunks by vmap. All versions split
    # `grad` with the loss as auxiliary output.
    return vmap(grad(loss_twice, has_aux=True), in_dims=(None, 0), randomness="different")


def _masked_rows(gradients: dict[str, Tensor], masks: dict[str, Tensor]) -> Tensor:
    """Return per-example gradients as one matrix, shape (examples, p), without pruned values."""
    columns = []
    for name, gradient in gradients.items():
        if name in masks:
            gradient = gradient * masks[name]
        columns.append(gradient.reshape(len(gradient), -1))
    return torch.cat(columns, dim=1)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Return tensors as one vector, in their order."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector in the shapes of some tensors, the inverse of `flatten`."""
    parts = vector.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
