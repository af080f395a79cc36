"""What a stack does when the memory of its device is insufficient."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")
# The limit of modules whose batches are not divided. A training step of them may update running
# statistics before its gradients, so that it must not be computed twice.
WHOLE_BATCHES = sys.maxsize
# Libraries of CUDA allocate their workspaces themselves, and raise plain RuntimeErrors.
_ALLOCATION_FAILED = re.compile(r"CU(BLAS|DNN)_STATUS_ALLOC_FAILED|CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error reports that the memory of a device is insufficient."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_ALLOCATION_FAILED.search(str(error)))


def halve_until_fits(compute: Callable[[], Value], owner: Any, size: int) -> Value:
    """Return the value of a computation, halving its `microbatch` while memory is insufficient.

    Args:
        compute: Computes a value. It must change nothing, because it may fail and begin again.
        owner: The object with `microbatch`, the number of examples that are computed at a time.
        size: Examples in total.

    Raises:
        RuntimeError: If not even one example fits, or if `microbatch` is `WHOLE_BATCHES`.
    """
    while True:
        try:
            return compute()
        except RuntimeError as error:
            examples = min(owner.microbatch, size)
            is_divisible = examples > 1 and owner.microbatch != WHOLE_BATCHES
            if not (is_out_of_memory(error) and is_divisible):
                raise
            owner.microbatch = examples // 2


def free_unused_memory() -> None:
    """Give memory that nothing refers to back to the device, so that other processes can use it."""
    gc.collect()  # tracebacks of errors refer to tensors in cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass
class StackLimit:
    """The largest number of networks of a stack that fits in memory, as far as is known.

    All stacks of a process share it. Another process may use the same device, so that memory may
    become insufficient at any time.

    Attributes:
        size: The number.
    """

    size: int = sys.maxsize

    def halve(self, networks: int, fitting: int = 1) -> None:
        """Halve the limit of a stack, and print one line.

        Args:
            networks: Networks of the stack.
            fitting: How many of them surely fit.
        """
        before = min(self.size, networks)
        self.size = max(fitting, (before + 1) // 2)
        if self.size < before:
            line = f"out of memory: the size of stacks is now {self.size} instead of {before}"
            print(line, file=sys.stderr, flush=True)
