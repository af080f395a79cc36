"""Gathers the ranks that train together: those that torchrun started, or processes started here.

torch.distributed.launcher's `elastic_launch` could start them too, and was tried (torch 2.15). Its own process is no
rank, so that all that a command does, from progress to Ctrl-C, would have to move into a child, and one process more
has to start; it listens on two ports of all addresses (0.0.0.0) also where told to use loopback; and an error of one
line becomes a traceback and a table of twenty. Here rank 0 is the process that runs the command.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch.distributed as dist

from lit_dps.errors import Unguarded, UserError
from lit_dps.parallel import processes, ranks
from lit_dps.parallel.heartbeat import GOES_ON, end_process

HOST = "127.0.0.1"
GRACE = 10  # seconds that the others have to end by themselves
PATIENCE = 20  # seconds that rank 0 has to find out that another ended


@contextmanager
def group_of(world: int, gpu: bool, follow: Callable[..., None], *args: object) -> Iterator[None]:
    """In here this process is one of `world` ranks: the one that torchrun says, else rank 0.

    Unless torchrun has started the others, `follow(*args)` runs in processes that are started here, on this machine.

    Args:
        world: The number of ranks; nothing happens for one, and in a process that is a rank already.
        gpu: As in `ranks.joined`.
        follow, args: What the other ranks do.

    Raises:
        RankLost: if another rank died.
    """
    if world == 1 or ranks.world() > 1:
        yield
    elif ranks.started_by_torchrun():
        with ranks.joined_by_torchrun(gpu):
            yield
    else:
        with _started_here(world, gpu, follow, args):
            yield


@contextmanager
def _started_here(world: int, gpu: bool, follow: Callable[..., None], args: tuple) -> Iterator[None]:
    """The others are ended on the way out, and all connections stay on this machine.

    If one of them dies where rank 0 cannot find out, before it joins say, this process ends.
    """
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    arguments = {"is_master": True, "wait_for_workers": False, "timeout": ranks.TIMEOUT}
    store = dist.TCPStore(HOST, port, **arguments, master_listen_fd=listener.detach())
    others: list[BaseProcess] = []
    grace, left = 0.0, threading.Event()
    try:
        for rank in range(1, world):
            others.append(processes.start(_follow, f"rank {rank}", (rank, world, port, gpu, follow, args)))
        threading.Thread(target=_watch, args=(others, left), daemon=True).start()
        with ranks.joined(store, 0, world, gpu=gpu):
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
                end_process(str(Unguarded()))
    if not left.wait(PATIENCE):
        end_process(f"another rank ended; {GOES_ON}")


def _follow(rank: int, world: int, port: int, gpu: bool, follow: Callable[..., None], args: tuple) -> None:
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=ranks.TIMEOUT)
    try:
        with ranks.joined(store, rank, world, gpu=gpu):
            follow(*args)
    except ranks.RankLost:
        sys.exit(2)  # rank 0 tells, or is the one that died
    except UserError as error:
        print(f"lit-dps: error: rank {rank}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
