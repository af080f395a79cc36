"""Settings of torch with which two calculations of one value on a GPU are equal, or equal to rounding.

By default, convolutions on a GPU round float32 to the 10 bits of TF32, and some kernels add numbers in
an order that differs from call to call.
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
    backends = [torch.backends.cudnn, torch.backends.cuda.matmul]
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, is_allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = is_allowed


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Use kernels that give equal results in each call, where torch has them."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        memory.fill_uninitialized_memory = False  # it would change what a module does with torch.empty
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*determinis")
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills
