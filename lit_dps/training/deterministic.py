"""Settings of torch that make repeated calculations equal.

For example, a dry run compares a resumed trial with an uninterrupted one. By default, convolutions
on a GPU round float32 to the 10 bits of TF32, and some kernels add numbers in an order that differs
from call to call, so the two trials would differ without a fault.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic


@contextmanager
def one_thread() -> Iterator[None]:
    """Calculate with one thread in the block: the number of threads changes how sums are rounded.

    Small calculations take longer with several threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def full_float32() -> Iterator[None]:
    """Calculate in float32 without TF32 in the block."""
    matmul = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    backends = [matmul, cudnn]
    setting, value = "allow_tf32", False
    try:
        before = [getattr(backend, setting) for backend in backends]
    except RuntimeError:
        # The user has set the newer `fp32_precision`, and torch refuses to mix both.
        backends = [matmul, cudnn.conv, cudnn.rnn]
        setting, value = "fp32_precision", "ieee"
        before = [getattr(backend, setting) for backend in backends]
    try:
        for backend in backends:
            setattr(backend, setting, value)
        yield
    finally:
        for backend, value_before in zip(backends, before, strict=True):
            setattr(backend, setting, value_before)


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Use kernels that give equal results in each call, where torch has them, in the block."""
    cudnn: Any = torch.backends.cudnn
    memory: Any = deterministic
    deterministic_before = cudnn.deterministic
    benchmark_before = cudnn.benchmark
    mode_before = torch.get_deterministic_debug_mode()
    fills_before = memory.fill_uninitialized_memory
    try:
        cudnn.deterministic = True
        cudnn.benchmark = False
        # Filling memory would change modules that use torch.empty.
        memory.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*determinis")
            yield
    finally:
        cudnn.deterministic = deterministic_before
        cudnn.benchmark = benchmark_before
        torch.set_deterministic_debug_mode(mode_before)
        memory.fill_uninitialized_memory = fills_before
