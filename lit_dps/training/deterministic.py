"""Settings of torch with which two calculations of one value on a GPU are equal, or equal to
rounding.

By default, convolutions on a GPU round float32 to the 10 bits of TF32, and some kernels add numbers
in an order that differs from call to call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic as memory


@contextmanager
def full_float32() -> Iterator[None]:
    """Calculate in float32 without TF32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    backends, name, full = [matmul, cudnn], "allow_tf32", False
    try:
        before = [getattr(backend, name) for backend in backends]
    except (
        RuntimeError
    ):  # the user has set the newer `fp32_precision`, and torch refuses to mix both
        backends, name, full = [matmul, cudnn.conv, cudnn.rnn], "fp32_precision", "ieee"
        before = [getattr(backend, name) for backend in backends]
    try:
        for backend in backends:
            setattr(backend, name, full)
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            setattr(backend, name, value)


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Use kernels that give equal results in each call, where torch has them."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        memory.fill_uninitialized_memory = (
            False  # it would change what a module does with torch.empty
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*determinis")
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills
