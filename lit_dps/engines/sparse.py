"""Convolutions of a pruned network that skip the pruned weights, on one CPU thread.

A mask saves no time in a dense convolution. At 90 % sparsity a step of the paper's Simple-CNN
spends three quarters of it on one convolution of which SNIP keeps 7 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lit_dps.core.errors import ConfigError

DENSEST = 0.15  # share of kept weights; at a quarter a dense convolution is as fast, on an AMD EPYC
LANES = 16  # examples of a block: a vector register of float32


def check_sparse() -> None:
    """Raises ConfigError where the kernels cannot be compiled."""
    if find_spec("numba") is None:
        raise ConfigError(
            "study.engine",
            "sparse",
            "another engine as long as Numba is not installed, pip install 'lit_dps[sparse]'",
        )


def skip_pruned(network: nn.Module, mask: Mapping[str, Tensor]) -> list[str]:
    """Lets the convolutions of a network that are pruned to a few weights compute with these alone.

    Those that keep at most `DENSEST` of their weights, of stride 1, in one group, on a CPU. What
    they compute is the same up to rounding, and so are its gradients, but that of a pruned weight
    is 0. There is no second derivative.

    Args:
        network: Its pruned weights are zero, and stay so. Its layers are changed in place.
        mask: What is kept, bool, by name of a parameter.

    Returns:
        The names of these convolutions.
    """
    found = []
    for name, layer in network.named_modules():
        keep = mask.get(f"{name}.weight" if name else "weight")
        if keep is None or type(layer) is not nn.Conv2d or layer.weight.device.type != "cpu":
            continue
        plain = (
            layer.stride == layer.dilation == (1, 1)
            and layer.groups == 1
            and layer.padding_mode == "zeros"
        )
        if plain and not isinstance(layer.padding, str) and keep.float().mean() <= DENSEST:
            layer.forward = partial(
                _convolve, layer, Kept(keep)
            )  # an attribute, so it is in no state_dict
            found.append(name)
    return found


class Kept:
    """Which weights of a convolution are kept, by filter.

    Args:
        keep: Bool, shape (filters, channels, height, width).
    """

    def __init__(self, keep: Tensor):
        self.shape = keep.shape
        self.index = keep.flatten().nonzero()[:, 0]
        filters, *self._place = keep.nonzero(as_tuple=True)
        self.first = torch.searchsorted(filters, torch.arange(len(keep) + 1)).numpy()
        self._offsets: dict[tuple[int, int, int], Any] = {}

    def offset(self, height: int, width: int, lanes: int) -> Any:
        """Where each kept weight begins to read a block of images of this size."""
        if (size := (height, width, lanes)) not in self._offsets:
            channel, row, column = self._place
            self._offsets[size] = (((channel * height + row) * width + column) * lanes).numpy()
        return self._offsets[size]


def _convolve(layer: nn.Conv2d, kept: Kept, x: Tensor) -> Tensor:
    if x.dim() != 4 or not x.dtype == layer.weight.dtype == torch.float32:
        return layer._conv_forward(x, layer.weight, layer.bias)
    high, wide = layer.padding
    return SparseConvolution.apply(
        F.pad(x, (wide, wide, high, high)), layer.weight, layer.bias, kept
    )


class SparseConvolution(torch.autograd.Function):
    """A convolution of stride 1 without padding by the kept weights: images (n, channels, height,
    width), float32."""

    @staticmethod
    def forward(ctx, images: Tensor, weight: Tensor, bias: Tensor | None, kept: Kept) -> Tensor:
        from lit_dps.engines import sparse_kernels

        n, _, height, width = images.shape
        filters, _, rows, columns = kept.shape
        lanes = min(LANES, max(n, 1))
        x, values = _blocks(images, lanes), weight.detach().reshape(-1)[kept.index]
        shift = torch.zeros(filters) if bias is None else bias.detach()
        y = torch.empty(len(x), filters, height - rows + 1, width - columns + 1, lanes)
        where = kept.first, kept.offset(height, width, lanes)
        sparse_kernels.forward(
            *_numpy(x.flatten(1), shift),
            *where,
            values.numpy(),
            width * lanes,
            *_numpy(y.flatten(3)),
        )
        ctx.save_for_backward(x, values)
        ctx.kept, ctx.n, ctx.biased = kept, n, bias is not None
        return _images(y, n)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        from lit_dps.engines import sparse_kernels

        (x, values), kept = ctx.saved_tensors, ctx.kept
        height, width, lanes = x.shape[2:]
        dy, where, line = (
            _blocks(gradient, lanes),
            (kept.first, kept.offset(height, width, lanes)),
            width * lanes,
        )
        of_images = None
        if ctx.needs_input_grad[0]:
            dx = torch.zeros_like(x)
            sparse_kernels.input_gradient(
                *_numpy(dy.flatten(3)), *where, values.numpy(), line, *_numpy(dx.flatten(1))
            )
            of_images = _images(dx, ctx.n)
        of_kept, of_weight = torch.zeros_like(values), torch.zeros(kept.shape)
        sparse_kernels.weight_gradient(
            *_numpy(dy.flatten(3), x.flatten(1)), *where, line, of_kept.numpy()
        )
        of_weight.view(-1)[kept.index] = of_kept
        return of_images, of_weight, dy.sum((0, 2, 3, 4)) if ctx.biased else None, None


def _numpy(*tensors: Tensor) -> list[Any]:
    return [tensor.numpy() for tensor in tensors]


def _blocks(images: Tensor, lanes: int) -> Tensor:
    """(n, channels, height, width) as (blocks, channels, height, width, lanes), the last block
    filled up with zeros."""
    if missing := -len(images) % lanes:
        images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
    return images.unflatten(0, (-1, lanes)).permute(0, 2, 3, 4, 1).contiguous()


def _images(blocks: Tensor, n: int) -> Tensor:
    """The first n images of blocks, with channels last in memory, as the layers around take them
    fastest."""
    return blocks.permute(0, 4, 2, 3, 1).flatten(0, 1)[:n].permute(0, 3, 1, 2)
