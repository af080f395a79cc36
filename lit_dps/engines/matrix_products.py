"""Convolutions of a stack as matrix products, which are faster for small batches on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ConvolutionsAsProducts(TorchFunctionMode):
    """Computes two-dimensional convolutions as matrix products, equal up to rounding.

    Under `torch.vmap` the convolutions of a stack become one convolution with a group for each
    network, and cuDNN computes groups nearly one after another. A product of matrices is one kernel
    for all networks. It needs a copy of the input for each weight of a filter, so that it is faster
    for small batches only. Convolutions with groups or dilation are not changed.

    By default, PyTorch rounds convolutions to TF32 on a GPU, and keeps float32 in matrix products.
    """

    def __torch_function__(
        self,
        func: Callable,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.conv2d:
            return _conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Return what `torch.conv2d` returns for an input (batch, channels, height, width)."""
    if groups != 1 or _pair(dilation) != (1, 1) or isinstance(padding, str) or input.ndim != 4:
        options: Any = (stride, padding, dilation, groups)
        return torch.conv2d(input, weight, bias, *options)
    rows, columns = _pair(padding)
    down, right = _pair(stride)
    padded = input
    if rows or columns:
        padded = F.pad(input, (columns, columns, rows, rows))
    windows = padded.unfold(2, weight.shape[2], down).unfold(3, weight.shape[3], right)
    batch, _, height, width = windows.shape[:4]
    flat = windows.permute(0, 2, 3, 1, 4, 5).reshape(batch * height * width, -1)
    out = flat @ weight.flatten(1).T
    if bias is not None:
        out = out + bias
    return out.view(batch, height, width, -1).permute(0, 3, 1, 2)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Return a setting of convolutions as (vertical, horizontal)."""
    if isinstance(value, int):
        return value, value
    if len(value) == 2:
        return value[0], value[1]
    return value[0], value[0]
