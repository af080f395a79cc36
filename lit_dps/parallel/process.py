"""What a process of a study does to itself: memory that it keeps, what it prints, and how it is
asked to leave."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SWITCH = "LIT_DPS_KEEP_MEMORY"
_OWN = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3), from <malloc.h>


def keep_freed_memory() -> bool:
    """Tells the C library's allocator to keep what this process frees. Returns whether it was told.

    By default glibc maps each block of 32 MiB or more by itself and gives it back when it is freed,
    so every step of a large batch and every full check pays for all its pages anew: a third to a
    half of its time on the paper's networks. It changes no result. A process keeps the memory of
    its peak, which is the same but for batches of thousands, where what lies between the blocks may
    add a half.

    LIT_DPS_KEEP_MEMORY=0 in the environment switches it off, and so does a setting of the allocator
    there (MALLOC_TRIM_THRESHOLD_ and its like, GLIBC_TUNABLES). Other C libraries are left as they
    are.
    """
    environment = os.environ
    configured = any(name in environment for name in _OWN) or "glibc.malloc" in environment.get(
        "GLIBC_TUNABLES", ""
    )
    if configured or environment.get(SWITCH) == "0" or platform.libc_ver()[0] != "glibc":
        return False
    tell = ctypes.CDLL(None).mallopt
    return bool(tell(_MMAP_MAX, 0) and tell(_TRIM_THRESHOLD, 2**31 - 1))


def waited_for_cpu() -> float:
    """Seconds that this process's main thread was ready to run and waited for a CPU, so far; 0
    where nobody tells.

    Linux alone tells (proc(5), schedstat).
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code of a process that Ctrl-C ended
RESUMES = "results that were stored are kept; the same command resumes the study"


class Interrupted(BaseException):
    """The process was asked to leave. No Exception, so that nothing on the way takes it for a
    failed trial.

    Attributes:
        now: Whether it was raised by a second signal, wherever the process was: other ranks know
            nothing of it.
    """

    def __init__(self, by: str, now: bool = False):
        super().__init__(by)
        self.now = now


class StopRequest:
    """Whether this process was asked to leave.

    An exception out of a signal handler is lost where Python happens to run a destructor, and cuts
    whatever runs in two. So a first signal is only remembered, and raised where somebody asks.

    Args:
        others: Whether another process asks this one to leave.

    Attributes:
        signal: Name of the first signal, or None.
        now: Whether there was a second.
        shown: Whether something on the screen tells the user of the first. Set by it.
        reported: Whether the end of the process was printed. The code that prints it sets this.
    """

    def __init__(self, others: Callable[[], bool] = lambda: False):
        self.others, self.signal, self.now, self.shown = others, None, False, False
        self.reported = False

    def __bool__(self) -> bool:
        return self.signal is not None or self.others()

    def check(self) -> None:
        """Raises Interrupted if the process was asked to leave."""
        if self:
            raise Interrupted(self.signal or "another process")


def is_lost_loader_worker(text: str) -> bool:
    """Return True if an error reports that a worker of a DataLoader was killed.

    A signal to all processes of a command, such as of `timeout`, ends these workers first.
    """
    return "DataLoader worker (pid" in text


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block, also of a block that fails. Only the main thread
    does this."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    signal.signal(signal.SIGINT, lambda signum, frame: received.append((signum, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])


@contextmanager
def interruptible(stop: StopRequest, said: str = "") -> Iterator[None]:
    """Store a first Ctrl-C or SIGTERM in `stop`; raise `Interrupted` at the second.

    A third signal ends the process. So does a second signal during a destructor, where Python
    cannot raise an exception. Both are as safe as killing the process.

    Args:
        stop: Remembers the first.
        said: What to tell the user then, on standard error.
    """

    def handler(signum, frame):
        name = signal.Signals(signum).name
        if stop.now:
            leave_at_once(name)
        if stop.signal is not None:
            stop.now = True
            raise Interrupted(name, now=True)
        stop.signal = name
        if not stop.shown:
            os.write(
                2, said.format(name).encode()
            )  # print() is not to be called where it may have been interrupted

    def leave_at_once(name: str) -> None:
        if said and not stop.reported:
            os.write(2, f"\ninterrupted by {name}: {RESUMES}\n".encode())
        os._exit(INTERRUPTED)

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, Interrupted):
            leave_at_once(str(lost.exc_value))
        hook(lost)

    before = {s: signal.signal(s, handler) for s in SIGNALS}
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield
    except RuntimeError as error:
        if stop and is_lost_loader_worker(str(error)):
            raise Interrupted(stop.signal or "another process") from None
        raise
    finally:
        sys.unraisablehook = hook
        for s, previous in before.items():
            signal.signal(s, previous)


def prepare_process() -> None:
    """What every process of a study begins with."""
    keep_freed_memory()
    # a study prints its own progress; Lightning's tips and deprecation warnings would bury it
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
