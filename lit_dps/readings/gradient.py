"""GradientNorm and GradientNoise: the norm of a step's gradient, and the noise scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.core.noise_scale import moments_of_parts
from lit_dps.readings.reading import KEY, Moment, Reading, parameters_with_gradient
from lit_dps.training.masked_tensors import squared_norm


class GradientNorm(Reading):
    """The norm of the gradient of the last step before a check (column "gradient_norm").

    It is the gradient that the optimizer steps by, of the whole batch of all ranks: without pruned
    coordinates and before clipping. With `optim.delay` it is the delayed gradient, and 0 before the
    first one. A schedule-free rule takes it at other weights than those that are checked, see
    `lit_dps.optim.schedule_free`. An optimizer that evaluates the loss several times in a step,
    such as LBFGS, has the norm of the last evaluation.

    Raises:
        ConfigError: for a module that steps its optimizers itself: it may have several losses.
    """

    name = "gradient_norm"
    over_ranks = True

    def __init__(self):
        self._norm = math.nan

    def start(self, moment: Moment) -> None:
        if not moment.module.automatic_optimization:
            module = type(moment.module).__name__
            allowed = f"omitted, because {module} has manual optimization"
            raise ConfigError(KEY, self.name, allowed)

    def see_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        self._norm = math.sqrt(_squared_norm(gradients.items(), {}))

    def read(self, moment: Moment) -> Mapping[str, float]:
        return {"gradient_norm": self._norm}


class GradientNoise(Reading):
    """The simple noise scale tr(Sigma) / |G|^2 at checks (McCandlish et al. 2018, Appendix A.1).

    It is measured on the first examples of a pass over the training split (`Moment.losses`), from
    the gradients of its batches. Pruned and untrained parameters do not count, and random draws of
    the module count as noise.

    Columns: "noise_scale" [examples], nan where |G|^2 is not above 0; "noise_squared_gradient",
    |G|^2; "noise_variance", tr(Sigma). Both are unbiased, and either may be negative.

    Args:
        examples: The number of examples. The cost is one forward and backward pass over them.
        part: Examples of a batch of the pass. A batch norm needs several.

    Raises:
        ConfigError: for fewer than two batches.
    """

    name = "gradient_noise"

    def __init__(self, examples: int = 1024, part: int = 32):
        if part < 1:
            raise ConfigError(f"{KEY}.gradient_noise.part", part, "at least 1")
        if examples < 2 * part:
            allowed = f"at least two batches of {part}"
            raise ConfigError(f"{KEY}.gradient_noise.examples", examples, allowed)
        self._examples = examples
        self._part = part

    def read(self, moment: Moment) -> Mapping[str, float]:
        independent = getattr(moment.data, "independent_examples", self._examples)
        if self._examples > independent:
            allowed = f"at most {independent} with {type(moment.data).__name__}"
            raise ConfigError(f"{KEY}.gradient_noise.examples", self._examples, allowed)
        parameters = parameters_with_gradient(moment.module)
        weights = list(parameters.values())
        sums = [torch.zeros_like(weight) for weight in weights]
        squares = []
        sizes = []
        for loss, size in moment.losses(self._part, self._examples):
            gradients = torch.autograd.grad(
                loss, weights, allow_unused=True, materialize_grads=True
            )
            squares.append(_squared_norm(zip(parameters, gradients, strict=True), moment.masks))
            sizes.append(size)
            for total, gradient in zip(sums, gradients, strict=True):
                total += size * gradient
        if len(sizes) < 2:
            allowed = f"data with two batches in their first {self._examples} examples"
            raise ConfigError(KEY, self.name, allowed)
        whole = _squared_norm(zip(parameters, sums, strict=True), moment.masks) / sum(sizes) ** 2
        squared, variance = moments_of_parts(sizes, squares, whole)
        return {
            "noise_scale": variance / squared if squared > 0 else math.nan,
            "noise_squared_gradient": squared,
            "noise_variance": variance,
        }


def _squared_norm(gradients: Iterable[tuple[str, Tensor]], masks: Mapping[str, Tensor]) -> float:
    """Return the squared norm of gradients by parameter, without pruned coordinates."""
    total = 0.0
    for name, gradient in gradients:
        total += float(squared_norm(gradient, masks.get(name)))
    return total
