"""WeightAverage: the exponential average of a network's weights, which is validated in their place.

After each optimizer step, average <- average + (1 - 2^(-B / h)) (weights - average), where B are
the examples of the step and h is the half-life in examples. The half-life therefore means the same
at every batch size and under a batch schedule (Zhang et al. 2019, Section 3.3, in steps). The
average begins at the pruned initial weights. It is not corrected for this start, as Adam's averages
are. A pruned weight is zero in the average. Untrained parameters are averaged too, because a module
may train them later.

The average is in double precision, because the share of a step may be below the precision of the
weights. It is cast to the type of the weights for a validation.

Floating-point buffers, such as the running statistics of batch normalization, are averaged with the
same half-life, because they belong to the weights of their time. Other buffers are those of the
trained network. (`lightning.pytorch.callbacks.WeightAveraging` averages them all, in steps.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn


def share_of_step(examples: int, half_life: float) -> float:
    """Return the share of the weights in the average after a step, 1 - 2^(-examples / h)."""
    return -math.expm1(-math.log(2) * examples / half_life)


def averaged_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters and buffers of a module by name."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            tensors[name] = tensor
    return tensors


def type_of_average(tensor: Tensor) -> torch.dtype:
    """Return the type of the average of a tensor: double precision where the device has it."""
    if tensor.device.type == "mps":
        return torch.promote_types(tensor.dtype, torch.float32)
    return torch.promote_types(tensor.dtype, torch.float64)


class WeightAverage:
    """The average of one network.

    Args:
        module: The network, whose tensors keep their places in memory.
        half_life: Half-life in examples, above 0.

    Attributes:
        tensors: The average by name, of `type_of_average`; empty before `begin`.
    """

    def __init__(self, module: nn.Module, half_life: float):
        self.half_life = half_life
        self.tensors: dict[str, Tensor] = {}
        self._module = module
        # The weights of the network while it shows the average.
        self._weights: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin at the present weights, unless the average has begun."""
        if self.tensors:
            return
        for name, tensor in averaged_tensors(self._module).items():
            self.tensors[name] = tensor.detach().to(type_of_average(tensor), copy=True)

    @torch.no_grad()
    def update(self, examples: int) -> None:
        """Move the average towards the weights after a step on this number of examples."""
        share = share_of_step(examples, self.half_life)
        current = averaged_tensors(self._module)
        for name, average in self.tensors.items():
            average.lerp_(current[name].to(average.dtype), share)

    @torch.no_grad()
    def mask(self, masks: Mapping[str, Tensor]) -> None:
        """Set the pruned weights of the average to zero.

        Args:
            masks: Masks by name of the parameter.
        """
        for name, keep in masks.items():
            if name in self.tensors:
                self.tensors[name].mul_(keep.to(self.tensors[name]))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the module have the average within a block."""
        if self._weights:  # it is shown already
            yield
            return
        self.show()
        try:
            yield
        finally:
            self.hide()

    def show(self) -> None:
        """Put the average in place of the weights of the module, until `hide`."""
        self.hide()
        current = averaged_tensors(self._module)
        for name, average in self.tensors.items():
            weights = current[name].data
            self._weights[name] = weights
            current[name].data = average.to(weights.dtype, copy=True)

    def hide(self) -> None:
        """Give the module its weights back, if it shows the average."""
        current = averaged_tensors(self._module)
        for name, weights in self._weights.items():
            current[name].data = weights
        self._weights = {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the average of a checkpoint."""
        self.tensors = {}
        self.begin()
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])


def showing(average: WeightAverage | None) -> AbstractContextManager[None]:
    """Let the module of an average have it within a block; without an average, change nothing."""
    if average is None:
        return nullcontext()
    return average.shown()
