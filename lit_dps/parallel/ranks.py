"""The ranks that train one network together, and what they tell each other.

A process alone is rank 0 of 1, and every function then does what it does for one process: nobody has to ask.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lit_dps.errors import UserError
from lit_dps.parallel.heartbeat import Heartbeat

T = TypeVar("T")
# Of a collective. Long, since a rank may wait while rank 0 reads a slow database; the dead are found by `Heartbeat`.
TIMEOUT = timedelta(minutes=30)
TRIES = 2  # to connect
LEAVE = 20  # seconds that a rank waits for the others before it leaves
POLL = 0.01  # seconds; not `Store.wait`, under whose lock the heartbeat would stop
_BROKEN = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe")
_NOISE = re.compile(r"^\[\S*\] |\. This is typically .*")  # a line of gloo's source, and where its log is


class RankLost(UserError):
    """Another rank died or cannot be reached."""


@dataclass(frozen=True)
class _Place:
    """Where a process stands on its machine: rank and number of the group's ranks there."""

    rank: int
    ranks: int


_place = _Place(0, 1)


def rank() -> int:
    """This process's rank, from 0 to world() - 1."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """This process's rank among those on its machine: the index of its GPU."""
    return _place.rank


def local_world() -> int:
    """The number of ranks on this machine."""
    return _place.ranks


def shard(n: int, turn: int = 0) -> slice:
    """This rank's part of n examples: all ranks' parts together are all, and sizes differ by 1 at most.

    Args:
        n: Examples.
        turn: Which rank takes which part moves on with it, so that many small batches are shared evenly.
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

    Args:
        call: The call.
        errors: What is raised on every rank if it is raised there. Anything else ends rank 0 alone.
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
    """Whether torchrun (or what sets the same variables) started this process as one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def follows_torchrun() -> bool:
    """Whether torchrun started this process as another rank than the first."""
    return started_by_torchrun() and int(os.environ["RANK"]) > 0


def is_rank_loss(error: BaseException) -> bool:
    """Whether an error says that another rank died or cannot be reached."""
    broken = isinstance(error, RuntimeError) and _BROKEN.search(str(error))
    return isinstance(error, (RankLost, dist.DistError)) or bool(broken)


@contextmanager
def joined_by_torchrun(gpu: bool) -> Iterator[None]:
    """In here this process is the rank that torchrun's variables say."""
    store, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
    place = _Place(int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    with joined(store, rank, world, place, gpu):
        yield


@contextmanager
def joined(store: dist.Store, rank: int, world: int, place: _Place | None = None, gpu: bool = False) -> Iterator[None]:
    """In here this process is one rank of a group.

    Args:
        store: Where the ranks find each other.
        rank: This process's rank.
        world: The number of ranks.
        place: Its place on its machine; by default all ranks are on this one.
        gpu: Whether tensors on GPUs are added up too (NCCL); those on the CPU always are (gloo).

    Raises:
        RankLost: if another rank died.
    """
    global _place
    before, _place = _place, place or _Place(rank, world)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    try:
        try:
            _connect(backend, store, rank, world)
            heartbeat = Heartbeat(dist.PrefixStore("heartbeat", store), rank, world)
            heartbeat.start()
            try:
                yield
                _leave(store, world, LEAVE)
            except BaseException as error:
                if not is_rank_loss(error):
                    _leave(store, world, 0.0)  # the others may be anywhere, and need not wait for this one
                raise
            finally:
                heartbeat.stop()
                dist.destroy_process_group()
        except RuntimeError as error:
            if not is_rank_loss(error):
                raise
            why = _NOISE.sub("", str(error).splitlines()[0])[:200]
            raise RankLost(f"rank {rank}: another of {world} ranks died or cannot be reached ({why})") from error
    finally:
        _place = before


def _connect(backend: str, store: dist.Store, rank: int, world: int) -> None:
    """Makes the group; no rank goes on before all are connected, and all try again together if one could not.

    One that is done early would leave, or die, while another still connects to it, which fails or waits for ever.
    """
    for left in reversed(range(TRIES)):
        tried, failure = dist.PrefixStore(f"group, {left} tries left", store), None
        try:
            dist.init_process_group(backend, store=tried, rank=rank, world_size=world, timeout=TIMEOUT)
        except RuntimeError as error:
            failure = error
            tried.add("failed", 1)
        if _meet(tried, world, TIMEOUT.total_seconds()) and not tried.add("failed", 0):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        if not left:
            raise failure or RankLost(f"rank {rank}: another of {world} ranks could not connect")


def _leave(store: dist.Store, world: int, patience: float) -> None:
    """Waits until all ranks leave, so many seconds at most."""
    with suppress(RuntimeError):  # who holds the store may be gone: then all have been here
        _meet(dist.PrefixStore("leave", store), world, patience)


def _meet(store: dist.Store, world: int, patience: float) -> bool:
    """Waits until all ranks have come here, so many seconds at most. Returns whether they have."""
    store.add("here", 1)
    end = time.monotonic() + patience
    while store.add("here", 0) < world:
        if time.monotonic() > end:
            return False
        time.sleep(POLL)
    return True
