"""Lipschitz: the local Lipschitz constant of the gradient along a run.

The convergence theory of Lee et al. (2021) describes a network by the smoothness of its loss and
the noise of its gradient. The functions below compute both from vectors and losses. The reading
measures them during training, and `lit_dps.analysis.theory` combines them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import LIPSCHITZ, THEORY
from lit_dps.core.trial_config import SmoothnessConfig
from lit_dps.parallel import ranks
from lit_dps.readings.reading import Moment, Reading, parameters_with_gradient

# Dropout draws the same values for every gradient, so that all are gradients of one function.
DROPOUT_SEED = 0
SHORT_EXAMPLES = 2  # of a pass in a dry run

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


class Lipschitz(Reading):
    """The local Lipschitz constant of the gradient, and the other terms of the theory.

    Every `interval` steps it computes the full training gradient between the weights before and
    after that step (Lee et al. 2021, Eq. 11; see `local_lipschitz`). Before the first step, after
    pruning, it computes the training loss and the variance of the per-example gradient. The loss is
    the loss of the module's training step, in training mode.

    Pruned coordinates do not count. A measurement costs one pass over the training split per gamma,
    and one more; the variance costs several. `examples` limits the passes.

    Columns: "lipschitz"; "squared_gradient", the squared norm of the training gradient before that
    step; with `noise` "noise", the trace of the covariance of the per-example gradient there. Flags
    "theory/TERM": as in `lit_dps.core.trial.THEORY`.

    Args:
        interval, delta, last, examples, batch_size, floor, noise:
            Keys of the section `smoothness` (`lit_dps.core.trial_config.SmoothnessConfig`). The
            default interval is the paper's.

    Attributes:
        config: These arguments.

    Raises:
        ConfigError: for a value out of its range; in a fit for manual optimization, or if the
            module has no per-example gradients.
    """

    name = LIPSCHITZ
    when = "step"
    over_ranks = True

    def __init__(
        self,
        interval: int = 100,
        delta: float = 0.1,
        last: float = 1.0,
        examples: int | None = None,
        batch_size: int = 1000,
        floor: float = 0.0,
        noise: bool = False,
    ):
        self.config = SmoothnessConfig(interval, delta, last, examples, batch_size, floor, noise)
        self.interval = interval
        self.gammas = gammas(delta, last)
        self.batch_size = batch_size
        self.floor = floor
        self.noise = noise
        self.flags: dict[str, float] = {}
        self._examples = examples
        self._trained: list[str] = []  # names of the trained parameters
        self._before: list[Tensor] = []  # their values before the step to measure
        self._masks: dict[str, Tensor] = {}  # before that step

    def start(self, moment: Moment) -> None:
        module = moment.module
        if not module.automatic_optimization:
            raise self._refused(f"{type(module).__name__}, which has manual optimization")
        self._trained = list(parameters_with_gradient(module))
        self.before(moment)
        moments = self._moments(moment)
        terms = {
            "loss": moments.loss,
            "gradient_variance": moments.variance,
            "squared_gradient": moments.squared_gradient,
            "floor": self.floor,
            "steps": 0,
            "rate_sum": 0.0,
            "rate_square_sum": 0.0,
        }
        self.flags = {f"{THEORY}{name}": value for name, value in terms.items()}

    def before(self, moment: Moment) -> None:
        parameters = self._parameters(moment)
        self._before = [parameter.detach().clone() for parameter in parameters]
        self._masks = dict(moment.masks)  # a pruning method may change them in the step

    def count(self, rate: float) -> None:
        # The theory has a single learning rate.
        self.flags[f"{THEORY}steps"] += 1
        self.flags[f"{THEORY}rate_sum"] += rate
        self.flags[f"{THEORY}rate_square_sum"] += rate * rate

    def read(self, moment: Moment) -> Mapping[str, float]:
        gradient = partial(self._gradient, moment)
        after = flatten(self._parameters(moment))
        before = flatten(self._before)
        measured = local_lipschitz(gradient, before, after, self.gammas)._asdict()
        if self.noise:
            measured["noise"] = self._moments(moment).variance
        return measured

    def _parameters(self, moment: Moment) -> list[Tensor]:
        """Return the trained parameters of the copy."""
        parameters = dict(moment.module.named_parameters())
        return [parameters[name] for name in self._trained]

    def _examples_at(self, moment: Moment) -> int | None:
        """Return the number of examples of the passes."""
        return SHORT_EXAMPLES if moment.is_short else self._examples

    def _gradient(self, moment: Moment, weights: Tensor) -> Tensor:
        """Return the full training gradient of the copy at these weights, both of shape (p,)."""
        parameters = self._parameters(moment)
        with torch.no_grad():
            for parameter, values in zip(parameters, unflatten(weights, parameters), strict=True):
                parameter.copy_(values)
        torch.manual_seed(DROPOUT_SEED)
        losses = moment.losses(self.batch_size, self._examples_at(moment))
        gradient = mean_gradient(parameters, losses)
        parts = []
        for name, part in zip(self._trained, unflatten(gradient, parameters), strict=True):
            if name in self._masks:
                part = part * self._masks[name]
            parts.append(part)
        return flatten(parts)

    def _moments(self, moment: Moment) -> Moments:
        """Return the moments of the per-example gradient at the weights before the step."""
        parameters = {}
        for name, weights in zip(self._trained, self._before, strict=True):
            parameters[f"module.{name}"] = weights
        masks = {f"module.{name}": mask for name, mask in self._masks.items()}
        step = _TrainingStep(moment)

        def loss(parameters: dict[str, Tensor], example: Any) -> Tensor:
            batch = tree_map(lambda tensor: tensor[None], example)
            return functional_call(step, parameters, (batch,))

        torch.manual_seed(DROPOUT_SEED)
        try:
            return gradient_moments(loss, parameters, self._batches(moment), masks)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0][:200]
            name = type(moment.module).__name__
            raise self._refused(
                f"{name}, whose training_step gives no per-example gradients ({reason})"
            ) from error

    def _refused(self, module: str) -> ConfigError:
        return ConfigError("smoothness.interval", self.interval, f"null for {module}")

    def _batches(self, moment: Moment) -> Iterator[Any]:
        """Yield the batches of the pass, each after the copy's `on_train_batch_start`."""
        batches = moment.batches(self.batch_size, self._examples_at(moment))
        for i, (batch, _) in enumerate(batches):
            if moment.module.on_train_batch_start(batch, i) != -1:
                yield batch


class _TrainingStep(nn.Module):
    """The training loss of a copy as a forward pass, for `functional_call`."""

    def __init__(self, moment: Moment):
        super().__init__()
        self.module = moment.module
        self._loss_of = moment.loss_of

    def forward(self, batch: Any) -> Tensor | None:
        return self._loss_of(self.module, batch)


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
    Accelerates Training", Appendix H). The weights at gamma have the type of the weights, so that
    their distance from `before` is measured. A gamma without a distance does not count.

    Args:
        gradient: Maps weights (p,) to the gradient of the full training loss there (p,).
        before: Weights before an update, shape (p,), of unpruned coordinates (or of all, with zeros
            at the pruned ones).
        after: Weights after the update.
        fractions: The gammas, above 0.
    """
    direction = after.double() - before.double()
    first = gradient(before).double()
    squared_gradient = float(first.square().sum())
    constants = []
    for gamma in fractions:
        weights = (before.double() + gamma * direction).to(before.dtype)
        distance = float((weights.double() - before.double()).norm())
        if distance > 0:
            change = gradient(weights).double() - first
            constants.append(float(change.norm()) / distance)
    if not constants:
        return Smoothness(math.nan, squared_gradient)
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
