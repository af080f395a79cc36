"""Gathers the ranks that train together: those that torchrun started, or processes started here.

torch.distributed.launcher's `elastic_launch` was tried (torch 2.15): its own process is no rank, so
that progress and Ctrl-C would have to move into a child; it listens on all addresses (0.0.0.0); and
an error of one line becomes a traceback and a table. Here rank 0 is the process that runs the
command.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _set_pg_timeout as _set_timeout,
)  # its name before torch had a public one

from lit_dps.core.errors import Unguarded, UserError
from lit_dps.parallel import fork_server as processes
from lit_dps.parallel import ranks

HOST = "127.0.0.1"
# Of a collective. Long, since a rank may wait while rank 0 reads a slow database; the dead are
# found by `Heartbeat`.
TIMEOUT = timedelta(minutes=30)
CONNECT = timedelta(
    minutes=1
)  # of connecting, once all are there: who waits for one that failed is not told of it
TRIES = 2  # to connect
LEAVE = 20  # seconds that a rank waits for the others before it leaves
POLL = 0.01  # seconds; not `Store.wait`, under whose lock the heartbeat would stop
GRACE = 10  # seconds that the others have to end by themselves
PATIENCE = 20  # seconds that rank 0 has to find out that another ended
GOES_ON = "the same command resumes the study"
BEAT = 2.0  # seconds
# own beats in which another rank shows no sign of life; a clock would count time that this one was
# stopped
BEATS = 20
_NOISE = re.compile(
    r"^\[\S*\] |\. This is typically .*"
)  # a line of gloo's source, and where its log is


@contextmanager
def group_of(world: int, gpu: bool, follow: Callable[..., None], *args: object) -> Iterator[None]:
    """In here this process is one of `world` ranks: the one that torchrun says, else rank 0.

    Unless torchrun has started the others, `follow(*args)` runs in processes that are started here,
    on this machine. Nothing happens for a world of one, and in a process that is a rank already.
    `gpu` as in `joined`.

    Raises:
        RankLost: if another rank died.
    """
    if world == 1 or ranks.world() > 1:
        yield
        return
    with (
        joined_by_torchrun(gpu)
        if ranks.started_by_torchrun()
        else _started_here(world, gpu, follow, args)
    ):
        yield


@contextmanager
def joined_by_torchrun(gpu: bool) -> Iterator[None]:
    """In here this process is the rank that torchrun's variables say."""
    with joined(*next(dist.rendezvous("env://", timeout=TIMEOUT)), gpu):
        yield


@contextmanager
def joined(store: dist.Store, rank: int, world: int, gpu: bool = False) -> Iterator[None]:
    """In here this process is one rank of a group, whose ranks find each other in the store.

    With `gpu` tensors on GPUs are added up too (NCCL); those on the CPU always are (gloo).

    Raises:
        RankLost: if another rank died.
    """
    try:
        _connect("cpu:gloo,cuda:nccl" if gpu else "gloo", store, rank, world)
        heartbeat = Heartbeat(dist.PrefixStore("heartbeat", store), rank, world)
        heartbeat.start()
        try:
            yield
            _leave(store, world, LEAVE)
        except BaseException as error:
            if not ranks.is_rank_loss(error):
                _leave(
                    store, world, 0.0
                )  # the others may be anywhere, and need not wait for this one
            raise
        finally:
            heartbeat.stop()
            dist.destroy_process_group()
    except RuntimeError as error:
        if not ranks.is_rank_loss(error):
            raise
        why = _NOISE.sub("", str(error).splitlines()[0])[:200]
        raise ranks.RankLost(
            f"rank {rank}: another of {world} ranks died or cannot be reached ({why})"
        ) from error


def _connect(backend: str, store: dist.Store, rank: int, world: int) -> None:
    """Makes the group; no rank goes on before all are connected, and all try again together if one
    could not.

    One that is done early would leave, or die, while another still connects to it, which fails or
    waits for ever.
    """
    for left in reversed(range(TRIES)):
        tried, failure = dist.PrefixStore(f"group, {left} tries left", store), None
        _meet(dist.PrefixStore("begin", tried), world, TIMEOUT.total_seconds())
        try:
            dist.init_process_group(
                backend, store=tried, rank=rank, world_size=world, timeout=CONNECT
            )
            getattr(dist, "set_timeout", _set_timeout)(TIMEOUT)
        except RuntimeError as error:
            failure = error
            tried.add("failed", 1)
        if _meet(tried, world, TIMEOUT.total_seconds()) and not tried.add("failed", 0):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        if not left:
            raise failure or ranks.RankLost(
                f"rank {rank}: another of {world} ranks could not connect"
            )


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


class Heartbeat(threading.Thread):
    """A thread that shows the other ranks that its process lives, and ends the process when one of
    them does not.

    A process that is killed closes its connections, and whoever waits for it with gloo is told. Not
    so with NCCL, for a process that is stopped, or for a machine that loses its power.
    """

    def __init__(self, store: dist.Store, rank: int, world: int):
        super().__init__(daemon=True, name="heartbeat")
        self.store, self.rank, self.others = (
            store,
            rank,
            [other for other in range(world) if other != rank],
        )
        self._end = threading.Event()

    def run(self) -> None:
        count, seen = 0, dict.fromkeys(self.others, (b"", 0))
        while not self._end.wait(BEAT):
            count += 1
            try:
                self.store.set(str(self.rank), str(count))
                now = {
                    n: self.store.get(str(n)) if self.store.check([str(n)]) else b""
                    for n in self.others
                }
            except RuntimeError:
                self._die("the rank that holds the group together is gone")
                return
            for other, value in now.items():
                if value != seen[other][0]:
                    seen[other] = value, count
                elif count - seen[other][1] >= BEATS:
                    self._die(f"rank {other} has shown no sign of life for {BEATS * BEAT:g} s")

    def stop(self) -> None:
        """Ends the thread at its next beat; the process lives on."""
        self._end.set()

    def _die(self, why: str) -> None:
        if not self._end.is_set():
            _end_process(f"rank {self.rank}: {why}; {GOES_ON}")


def _end_process(why: str) -> None:
    """Ends this process and the ranks that it started: its main thread may wait for the dead for
    ever."""
    print(f"lit-dps: error: {why}", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(2)


@contextmanager
def _started_here(
    world: int, gpu: bool, follow: Callable[..., None], args: tuple
) -> Iterator[None]:
    """The others are ended on the way out, and all connections stay on this machine.

    If one of them dies where rank 0 cannot find out, before it joins say, this process ends.
    """
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    arguments = {"is_master": True, "wait_for_workers": False, "timeout": TIMEOUT}
    store = dist.TCPStore(HOST, port, **arguments, master_listen_fd=listener.detach())
    others: list[BaseProcess] = []
    grace, left = 0.0, threading.Event()
    try:
        for rank in range(1, world):
            others.append(
                processes.start(_follow, f"rank {rank}", (rank, world, port, gpu, follow, args))
            )
        threading.Thread(target=_watch, args=(others, left), daemon=True).start()
        with joined(store, 0, world, gpu):
            yield
        grace = GRACE
    finally:
        left.set()
        end = time.monotonic() + grace
        for process in others:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()


def _watch(others: list[BaseProcess], left: threading.Event) -> None:
    """Ends the process if it waits on for another one that ended."""
    ended = wait([process.sentinel for process in others])
    for process in others:
        if process.sentinel in ended:
            process.join(1)  # its exit code is known a little later than its end
            if process.exitcode == Unguarded.EXIT_CODE:
                _end_process(str(Unguarded()))
    if not left.wait(PATIENCE):
        _end_process(f"another rank ended; {GOES_ON}")


def _follow(
    rank: int, world: int, port: int, gpu: bool, follow: Callable[..., None], args: tuple
) -> None:
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    try:
        with joined(store, rank, world, gpu):
            follow(*args)
    except ranks.RankLost:
        sys.exit(2)  # rank 0 tells, or is the one that died
    except UserError as error:
        print(f"lit-dps: error: rank {rank}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
