"""The ranks that train one network together, and their collective operations.

A single process is rank 0 of 1. Every function works there too, so callers need no special case.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lit_dps.core.errors import UserError

T = TypeVar("T")
# Parts of torch's error messages after the death of a rank. `Wait timeout` is the error of a store
# that waits for a missing rank.
_BROKEN = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|[Ww]ait timeout|Socket Timeout"
)


class RankLost(UserError):
    """Another rank died or cannot be reached."""


def rank() -> int:
    """Return the rank of this process, from 0 to world() - 1."""
    if not dist.is_initialized():
        return 0
    return dist.get_rank()


def world() -> int:
    """Return the number of ranks."""
    if not dist.is_initialized():
        return 1
    return dist.get_world_size()


def local_rank() -> int:
    """Return the rank of this process among those on its machine: the index of its GPU."""
    if _in_group_of_torchrun():
        return int(os.environ.get("LOCAL_RANK", 0))
    return rank()


def local_world() -> int:
    """Return the number of ranks on this machine."""
    if _in_group_of_torchrun():
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return world()


def shard(n: int, turn: int = 0) -> slice:
    """Return this rank's part of n examples. The sizes of the parts differ by at most 1.

    Args:
        n: Number of examples.
        turn: Rotates the parts among the ranks, so that many small batches are shared evenly.
    """
    place = (rank() + turn) % world()
    return slice(place * n // world(), (place + 1) * n // world())


def is_mine(i: int) -> bool:
    """Return True if this rank does the i-th of many pieces of work."""
    return i % world() == rank()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Return, on all ranks, the sum of a tensor over the ranks. The tensor does not change."""
    if world() == 1:
        return tensor
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank. The values of other ranks are ignored."""
    if world() == 1:
        return value
    values: list[Any] = [None]
    if rank() == 0:
        values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def on_rank_zero(call: Callable[[], T], errors: type[Exception] = UserError) -> T:
    """Make a call on rank 0 alone, and return its value on every rank.

    Args:
        call: The call.
        errors: Errors that are raised on every rank. Other errors are raised on rank 0 alone.
    """
    if world() == 1:
        return call()
    value: Any = None
    error: Exception | None = None
    if rank() == 0:
        try:
            value = call()
        except errors as raised:
            error = raised
    value, error = broadcast((value, error))
    if error is not None:
        raise error
    return value


def all_gather(value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def started_by_torchrun() -> bool:
    """Return True if torchrun, or a program like it, started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def follows_torchrun() -> bool:
    """Return True if torchrun started this process as another rank than rank 0."""
    return started_by_torchrun() and int(os.environ["RANK"]) > 0


def is_rank_loss(error: BaseException) -> bool:
    """Return True if an error reports that another rank died or cannot be reached."""
    if isinstance(error, (RankLost, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(_BROKEN.search(str(error)))


def _in_group_of_torchrun() -> bool:
    return dist.is_initialized() and started_by_torchrun()
