"""WeightAverage: the exponential average of a network's weights, which is checked in their place.

After each optimizer step, average <- average + (1 - 2^(-B / h)) (weights - average), where B are
the examples of the step and h is the half-life in examples. The half-life therefore means the same
at every batch size and under a batch schedule (Zhang et al. 2019, Section 3.3, in steps). The
average begins at the pruned initial weights. A pruned weight is zero in the average.

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
    """Return the trained parameters and floating-point buffers of a module by name."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            tensors[name] = parameter
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            tensors[name] = buffer
    return tensors


class WeightAverage:
    """The average of one network.

    Args:
        module: The network, whose tensors keep their places in memory.
        half_life: Half-life in examples, above 0.

    Attributes:
        tensors: The average by name; empty before `begin`.
    """

    def __init__(self, module: nn.Module, half_life: float):
        self.half_life = half_life
        self.tensors: dict[str, Tensor] = {}
        self._module = module

    def begin(self) -> None:
        """Begin at the present weights, unless the average has begun."""
        if self.tensors:
            return
        for name, tensor in averaged_tensors(self._module).items():
            self.tensors[name] = tensor.detach().clone()

    @torch.no_grad()
    def update(self, examples: int) -> None:
        """Move the average towards the weights after a step on this number of examples."""
        share = share_of_step(examples, self.half_life)
        current = averaged_tensors(self._module)
        for name, average in self.tensors.items():
            average.lerp_(current[name], share)

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
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        """Exchange the weights of the module and the average."""
        current = averaged_tensors(self._module)
        for name, average in self.tensors.items():
            weights = current[name].data
            current[name].data = average
            self.tensors[name] = weights

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the average of a checkpoint."""
        self.tensors = {}
        for name, tensor in averaged_tensors(self._module).items():
            self.tensors[name] = tensor.detach().clone()
            self.tensors[name].copy_(tensors[name])


def showing(average: WeightAverage | None) -> AbstractContextManager[None]:
    """Let the module of an average have it within a block; without an average, change nothing."""
    if average is None:
        return nullcontext()
    return average.shown()
