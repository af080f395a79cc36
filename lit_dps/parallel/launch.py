"""Joins the ranks that train together: processes that torchrun started, or that start here.

Rank 0 is the process that runs the command. We do not use `elastic_launch` of
torch.distributed.launcher (torch 2.15) for three reasons. The process that calls it is no rank, so
a child would have to show the progress and handle Ctrl-C. It listens on all addresses (0.0.0.0).
It turns an error of one line into a traceback and a table.
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
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

# `_set_pg_timeout` is the name of `dist.set_timeout` before torch had a public one.
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lit_dps.core.errors import Unguarded, UserError
from lit_dps.core.exit_codes import ExitCode
from lit_dps.parallel import fork_server as processes
from lit_dps.parallel import ranks
from lit_dps.parallel.process import RESUMES

HOST = "127.0.0.1"
# Timeout of a collective. It is long, because a rank may wait while rank 0 reads a slow database.
# `Heartbeat` detects dead ranks much earlier.
TIMEOUT = timedelta(minutes=30)
# Timeout of connecting, once all ranks are there. A rank that waits for a failed one gets no error.
CONNECT_TIMEOUT = timedelta(minutes=1)
CONNECT_TRIES = 2
LEAVE_SECONDS = 20  # how long a rank waits for the others before it leaves the group
POLL_SECONDS = 0.01  # instead of `Store.wait`, whose lock would stop the heartbeat
EXIT_SECONDS = 10  # how long rank 0 waits until the ranks that it started have ended
WATCH_SECONDS = 20  # how long rank 0 may take to notice that another rank has ended
BEAT_SECONDS = 2.0
# A rank is dead if it shows no beat during this many beats of this process. A clock would also
# count the time for which this process was stopped.
MAX_MISSED_BEATS = 20
# Parts of gloo's messages: the line of its source, and where its log is.
_GLOO_DETAILS = re.compile(r"^\[\S*\] |\. This is typically .*")


@contextmanager
def group_of(world: int, gpu: bool, follow: Callable[..., object], *args: object) -> Iterator[None]:
    """Make this process one of several ranks in the body: torchrun's rank, else rank 0.

    Nothing happens for one rank, or if this process is a rank already. Without torchrun, the other
    ranks start here, on this machine, and run `follow(*args)`.

    Args:
        world: Number of ranks.
        gpu: Whether tensors on GPUs are reduced too, as in `joined`.
        follow: What the other ranks run.
        args: Arguments of `follow`.

    Raises:
        RankLost: if another rank died.
    """
    if world == 1 or ranks.world() > 1:
        yield
        return
    if ranks.started_by_torchrun():
        group = joined_by_torchrun(gpu)
    else:
        group = _started_here(world, gpu, follow, args)
    with group:
        yield


@contextmanager
def joined_by_torchrun(gpu: bool) -> Iterator[None]:
    """Make this process, in the body, the rank that torchrun's variables define."""
    meeting = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    with joined(*meeting, gpu):
        yield


@contextmanager
def joined(store: Store, rank: int, world: int, gpu: bool = False) -> Iterator[None]:
    """Make this process one rank of a group in the body.

    Args:
        store: Where the ranks find each other.
        rank: The rank of this process.
        world: Number of ranks.
        gpu: Whether tensors on GPUs are reduced too (NCCL). Tensors on the CPU always are (gloo).

    Raises:
        RankLost: if another rank died.
    """
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    try:
        _connect(backend, store, rank, world)
        heartbeat = Heartbeat(PrefixStore("heartbeat", store), rank, world)
        heartbeat.start()
        try:
            yield
            _leave(store, world, LEAVE_SECONDS)
        except BaseException as error:
            if not ranks.is_rank_loss(error):
                # The others may be anywhere in the code, and need not wait for this rank.
                _leave(store, world, 0.0)
            raise
        finally:
            heartbeat.stop()
            dist.destroy_process_group()
    except RuntimeError as error:
        if not ranks.is_rank_loss(error):
            raise
        reason = _GLOO_DETAILS.sub("", str(error).splitlines()[0])[:200]
        raise ranks.RankLost(
            f"rank {rank}: another of {world} ranks died or cannot be reached ({reason}). "
            "Start the command again on all ranks."
        ) from error


def _connect(backend: str, store: Store, rank: int, world: int) -> None:
    """Make the group. All ranks retry together if one of them could not connect.

    No rank continues before all are connected. An early rank could leave, or die, while another
    still connects to it; the other one would then fail or wait forever.
    """
    failure: RuntimeError | None = None
    for attempt in range(CONNECT_TRIES):
        store_of_attempt = PrefixStore(f"group, attempt {attempt}", store)
        failure = None
        _meet(PrefixStore("begin", store_of_attempt), world, TIMEOUT.total_seconds())
        try:
            dist.init_process_group(
                backend,
                store=store_of_attempt,
                rank=rank,
                world_size=world,
                timeout=CONNECT_TIMEOUT,
            )
            getattr(dist, "set_timeout", _set_pg_timeout)(TIMEOUT)
        except RuntimeError as error:
            failure = error
            store_of_attempt.add("failed", 1)
        have_met = _meet(store_of_attempt, world, TIMEOUT.total_seconds())
        if have_met and store_of_attempt.add("failed", 0) == 0:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
    raise failure or ranks.RankLost(
        f"rank {rank}: another of {world} ranks could not connect. Start the command "
        "again on all ranks."
    )


def _leave(store: Store, world: int, seconds: float) -> None:
    """Wait until all ranks leave, or until the seconds are over."""
    # The rank that holds the store may be gone. Then all ranks have been here.
    with suppress(RuntimeError):
        _meet(PrefixStore("leave", store), world, seconds)


def _meet(store: Store, world: int, seconds: float) -> bool:
    """Wait until all ranks have called this; return False if the seconds are over first."""
    store.add("here", 1)
    end = time.monotonic() + seconds
    while store.add("here", 0) < world:
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


class Heartbeat(threading.Thread):
    """A thread that shows other ranks that this process lives, and ends it if another one died.

    With gloo, ranks notice that a killed process has closed its connections. They do not notice it
    with NCCL, if a process is stopped, or if a machine loses its power.
    """

    def __init__(self, store: Store, rank: int, world: int):
        super().__init__(daemon=True, name="heartbeat")
        self.store = store
        self.rank = rank
        self.others = [other for other in range(world) if other != rank]
        self._stop_event = threading.Event()

    def run(self) -> None:
        beat = 0
        last_value = dict.fromkeys(self.others, b"")
        last_change = dict.fromkeys(self.others, 0)
        while not self._stop_event.wait(BEAT_SECONDS):
            beat += 1
            try:
                self.store.set(str(self.rank), str(beat))
                values = {other: self._value_of(other) for other in self.others}
            except RuntimeError:
                self._die("the rank that holds the group together is gone")
                return
            for other, value in values.items():
                if value != last_value[other]:
                    last_value[other] = value
                    last_change[other] = beat
                elif beat - last_change[other] >= MAX_MISSED_BEATS:
                    seconds = MAX_MISSED_BEATS * BEAT_SECONDS
                    self._die(f"rank {other} has shown no sign of life for {seconds:g} s")

    def _value_of(self, other: int) -> bytes:
        """Return the last beat of another rank; empty before its first one."""
        if not self.store.check([str(other)]):
            return b""
        return self.store.get(str(other))

    def stop(self) -> None:
        """End the thread at its next beat. The process continues."""
        self._stop_event.set()

    def _die(self, reason: str) -> None:
        if not self._stop_event.is_set():
            _end_process(f"rank {self.rank}: {reason}; {RESUMES}")


def _end_process(reason: str) -> None:
    """End this process and the ranks that it started, from any thread.

    The main thread may wait forever for a dead rank.
    """
    print(f"lit-dps: error: {reason}", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(ExitCode.REFUSED)


@contextmanager
def _started_here(
    world: int, gpu: bool, follow: Callable[..., object], args: tuple
) -> Iterator[None]:
    """Start the other ranks on this machine; this process is rank 0 in the body.

    The others end with the body, and all connections stay on this machine. This process ends if
    another rank dies without its notice, for example before it joins.
    """
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    arguments = {"is_master": True, "wait_for_workers": False, "timeout": TIMEOUT}
    store = TCPStore(HOST, port, **arguments, master_listen_fd=listener.detach())
    others: list[BaseProcess] = []
    exit_seconds = 0.0
    body_ended = threading.Event()
    try:
        for rank in range(1, world):
            arguments_of_rank = (rank, world, port, gpu, follow, args)
            others.append(processes.start(_follow, f"rank {rank}", arguments_of_rank))
        threading.Thread(target=_watch, args=(others, body_ended), daemon=True).start()
        with joined(store, 0, world, gpu):
            yield
        exit_seconds = EXIT_SECONDS
    finally:
        body_ended.set()
        end = time.monotonic() + exit_seconds
        for process in others:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()


def _watch(others: list[BaseProcess], body_ended: threading.Event) -> None:
    """Wait until one of the other ranks ends, and end this process unless it notices soon."""
    ended = wait([process.sentinel for process in others])
    for process in others:
        if process.sentinel in ended:
            process.join(1)  # the exit code is known a little later than the end
            if process.exitcode == Unguarded.EXIT_CODE:
                _end_process(str(Unguarded()))
    if not body_ended.wait(WATCH_SECONDS):
        _end_process(f"another rank ended; {RESUMES}")


def _follow(
    rank: int, world: int, port: int, gpu: bool, follow: Callable[..., object], args: tuple
) -> None:
    store = TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    try:
        with joined(store, rank, world, gpu):
            try:
                follow(*args)
            except UserError as error:  # rank 0 ends this process once it leaves the group
                line = " ".join(str(error).split())
                print(f"lit-dps: error: rank {rank}: {line}", file=sys.stderr, flush=True)
                raise
    except UserError:  # of `joined`: rank 0 reports it, or is the one that died
        sys.exit(ExitCode.REFUSED)
