"""Set-up of the current process: memory allocator, log levels, and interruption by signals."""

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

from lit_dps.core.exit_codes import ExitCode

SWITCH = "LIT_DPS_KEEP_MEMORY"  # environment variable; 0 switches `keep_freed_memory` off
_ALLOCATOR_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
# Parameters of mallopt(3), from <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep the memory that this process frees; return True on success.

    By default glibc maps each block of 32 MiB or more separately and unmaps it when it is freed.
    Every step of a large batch and every full validation then page it in again, which takes a third
    to a half of their time on the paper's networks. Results do not change. The process keeps the
    memory of its peak. Fragmentation may add a half to it for batches of thousands of examples.

    Nothing changes if LIT_DPS_KEEP_MEMORY is 0, if the environment configures the allocator
    (MALLOC_TRIM_THRESHOLD_ and similar, GLIBC_TUNABLES), or with another C library.
    """
    is_configured = any(name in os.environ for name in _ALLOCATOR_VARIABLES)
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        is_configured = True
    is_switched_off = os.environ.get(SWITCH) == "0"
    if is_configured or is_switched_off or platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    return bool(set_option(_MMAP_MAX, 0) and set_option(_TRIM_THRESHOLD, 2**31 - 1))


def cpu_wait_seconds() -> float:
    """Return the seconds for which the main thread was ready to run but had no CPU, so far.

    Only Linux measures this (proc(5), schedstat).

    Returns:
        0 on other systems.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


SIGNALS = (signal.SIGINT, signal.SIGTERM)
RESUMES = "the same command resumes the study"
KEPT = f"results that were stored are kept; {RESUMES}"


class Interrupted(BaseException):
    """The process was asked to stop.

    It is no Exception, so that no code takes it for the failure of a trial.

    Attributes:
        now: Whether a second signal raised it, at any place in the code. Other ranks do not know
            of it.
    """

    def __init__(self, by: str, now: bool = False):
        super().__init__(by)
        self.now = now


class StopRequest:
    """Records whether this process was asked to stop. It is true if so.

    An exception from a signal handler is lost if Python runs a destructor at that moment, and it
    interrupts any code at any place. So the first signal is only recorded; `raise_if_requested`
    raises it.

    Args:
        others: Returns True if another process asks this one to stop.

    Attributes:
        signal: Name of the first signal, or None.
        now: Whether there was a second signal.
        shown: Whether a display shows the request to the user. The display sets this.
        reported: Whether the end of the process was printed. The code that prints it sets this.
    """

    def __init__(self, others: Callable[[], bool] = lambda: False):
        self.others = others
        self.signal: str | None = None
        self.now = False
        self.shown = False
        self.reported = False

    def __bool__(self) -> bool:
        return self.signal is not None or self.others()

    def raise_if_requested(self) -> None:
        """Raise Interrupted if the process was asked to stop."""
        if self:
            raise Interrupted(self.signal or "another process")


def is_lost_loader_worker(text: str) -> bool:
    """Return True if an error reports that a worker of a DataLoader was killed.

    A signal to all processes of a command, such as of `timeout`, ends these workers first.
    """
    return "DataLoader worker (pid" in text


@contextmanager
def defer_signals() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block, even if the block fails.

    In other threads, which receive no signals, this does nothing. Signals without a handler in
    Python are not delayed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {}
    received = []
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, lambda signum, frame: received.append((signum, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for signum, frame in received:
            handlers[signum](signum, frame)


@contextmanager
def interruptible(stop: StopRequest, message: str = "") -> Iterator[None]:
    """Store a first Ctrl-C or SIGTERM in `stop`; raise `Interrupted` at the second.

    A third signal ends the process. So does a second signal during a destructor, where Python
    cannot raise an exception. Both are as safe as killing the process.

    Args:
        stop: Records the first signal.
        message: Printed on standard error at the first signal; {} is replaced by its name.
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
            # A signal handler must not call print(), which it may have interrupted.
            os.write(2, message.format(name).encode())

    def leave_at_once(name: str) -> None:
        if message and not stop.reported:
            os.write(2, f"\ninterrupted by {name}: {KEPT}\n".encode())
        os._exit(ExitCode.INTERRUPTED)

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, Interrupted):
            leave_at_once(str(lost.exc_value))
        hook(lost)

    previous_handlers = {number: signal.signal(number, handler) for number in SIGNALS}
    hook = sys.unraisablehook
    sys.unraisablehook = unraisable
    try:
        yield
    except RuntimeError as error:
        if stop and is_lost_loader_worker(str(error)):
            raise Interrupted(stop.signal or "another process") from None
        raise
    finally:
        sys.unraisablehook = hook
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


def prepare_process() -> None:
    """Prepare a process of a study: memory, log levels and warnings."""
    keep_freed_memory()
    # A study prints its progress. Lightning's tips and deprecation warnings would hide it.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
