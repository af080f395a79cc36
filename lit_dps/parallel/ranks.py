"""The ranks that train one network together, and what they tell each other.

A process alone is rank 0 of 1, and every function then does what it does for one process: nobody
has to ask.
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
_BROKEN = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe")


class RankLost(UserError):
    """Another rank died or cannot be reached."""


def rank() -> int:
    """This process's rank, from 0 to world() - 1."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """This process's rank among those on its machine: the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0)) if _in_group_of_torchrun() else rank()


def local_world() -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if _in_group_of_torchrun() else world()


def shard(n: int, turn: int = 0) -> slice:
    """This rank's part of n examples: all ranks' parts together are all, and sizes differ by 1 at
    most.

    Which rank takes which part moves on with the turn, so that many small batches are shared
    evenly.
    """
    place = (rank() + turn) % world()
    return slice(place * n // world(), (place + 1) * n // world())


def is_mine(i: int) -> bool:
    """Whether the i-th of many pieces of work falls to this rank."""
    return i % world() == rank()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum over the ranks, the same on all; leaves the tensor as it is."""
    if world() == 1:
        return tensor
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank; the others' is not looked at."""
    if world() == 1:
        return value
    box = [value if rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def on_rank_zero(call: Callable[[], T], errors: type[Exception] = UserError) -> T:
    """What a call returns on rank 0, on every rank; only rank 0 makes it.

    These errors are raised on every rank if they are raised there. Anything else ends rank 0 alone.
    """
    if world() == 1:
        return call()
    value = error = None
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
    """Every rank's value, in the order of the ranks."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def started_by_torchrun() -> bool:
    """Whether torchrun (or what sets the same variables) started this process as one of several
    ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def follows_torchrun() -> bool:
    """Whether torchrun started this process as another rank than the first."""
    return started_by_torchrun() and int(os.environ["RANK"]) > 0


def is_rank_loss(error: BaseException) -> bool:
    """Whether an error says that another rank died or cannot be reached."""
    broken = isinstance(error, RuntimeError) and _BROKEN.search(str(error))
    return isinstance(error, (RankLost, dist.DistError)) or bool(broken)


def _in_group_of_torchrun() -> bool:
    return dist.is_initialized() and started_by_torchrun()
