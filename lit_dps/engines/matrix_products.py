"""Convolutions as matrix products: for small batches of many stacked networks on a GPU.

Under `torch.vmap` the convolutions of a stack become one with as many groups as networks, and cuDNN
takes groups nearly one after another. A product of matrices, one a network, is one kernel for all
of them. What it reads is the input copied once for each weight of a filter, which pays where
batches are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AsProducts(TorchFunctionMode):
    """In here two-dimensional convolutions without groups and dilation are matrix products, equal
    up to rounding.

    Of inputs (batch, channels, height, width), also under `torch.vmap`; what else is called is left
    as it is.
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
    if groups != 1 or _pair(dilation) != (1, 1) or isinstance(padding, str) or input.ndim != 4:
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    (rows, columns), (down, right) = _pair(padding), _pair(stride)
    padded = F.pad(input, (columns, columns, rows, rows)) if rows or columns else input
    windows = padded.unfold(2, weight.shape[2], down).unfold(3, weight.shape[3], right)
    batch, _, height, width = windows.shape[:4]
    flat = windows.permute(0, 2, 3, 1, 4, 5).reshape(batch * height * width, -1)
    out = flat @ weight.flatten(1).T
    out = (out if bias is None else out + bias).view(batch, height, width, -1)
    return out.permute(0, 3, 1, 2)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value if len(value) == 2 else (value[0], value[0])
    return first, second
