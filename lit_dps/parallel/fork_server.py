"""Processes that train: forked from a server which has imported what they need, so that only the
first start is slow.

A fork of this process itself would share its database connections, its threads and its GPUs. The
server has none of them: it imports modules and forks (`multiprocessing`'s forkserver). Where
processes cannot be forked safely they are spawned, and each imports everything anew.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from lit_dps.core.errors import Unguarded
from lit_dps.parallel.process import SIGNALS

# The system libraries of macOS do not survive a fork.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def unguarded() -> bool:
    """Whether this process runs a script whose call of us, unconditional as it stands there, would
    be run again.

    Each process that is started imports the script. A call below any `if` is taken to be guarded:
    then nobody knows before it happens, and `Unguarded` is told by those processes.
    """
    main = sys.modules["__main__"]
    frame = sys._getframe()
    while frame is not None and not (
        frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"
    ):
        frame = frame.f_back
    if frame is None or getattr(main, "__file__", None) is None:  # a notebook, say
        return False
    try:
        tree = ast.parse(Path(main.__file__).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False
    line = frame.f_lineno
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno
    ]
    return bool(around) and not any(isinstance(node, ast.If) for node in around)


def context() -> BaseContext:
    """Makes the pipes and events that processes are given."""
    return multiprocessing.get_context(METHOD)


def start_server(*functions: Callable[..., Any]) -> None:
    """Lets the server import the modules of functions meanwhile; without it, it begins with the
    first process.

    Nothing happens if it runs already.
    """
    if METHOD != "forkserver":
        return
    from multiprocessing import forkserver  # not on every platform

    modules = {function.__module__ for function in functions} - {
        "__main__"
    }  # a script may do anything when imported
    forkserver.set_forkserver_preload(sorted(modules))
    with _for_the_server(block=False):
        resource_tracker.ensure_running()  # begun within the next line it would unblock the signals
    with _for_the_server():
        forkserver.ensure_running()


def start(target: Callable[..., None], name: str, args: tuple) -> BaseProcess:
    """Starts a process that runs `target(*args)`, with this one's environment, and ends when this
    one does.

    The server imports the modules of the target and of functions among the arguments, which are
    pickled. A terminal's Ctrl-C does not reach the process: this one decides. The process may start
    others, such as the workers of a data loader.
    """
    start_server(target, *filter(callable, args))
    method = multiprocessing.get_start_method(allow_none=True)
    begin = {"target": _begin, "args": (dict(os.environ), method, target, args)}
    process = context().Process(**begin, name=f"{Unguarded.PROCESS_PREFIX}{name}", daemon=True)
    process.start()
    return process


def _begin(
    environment: dict[str, str], method: str | None, target: Callable[..., None], args: tuple
) -> None:
    os.environ.clear()  # the server has that of its own start
    os.environ.update(environment)
    # Only the parent needs to know that this process is a daemon; a daemon could not start
    # processes.
    multiprocessing.current_process().daemon = False
    # The server sets its own method. Workers of a data loader start as they do in the parent.
    multiprocessing.set_start_method(method, force=True)
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # for good, whatever handlers are set later
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # else all would draw the numbers of the server, where somebody's module draws without a seed
    np.random.seed()
    target(*args)


def _die_with_parent() -> None:
    """A process whose parent was killed must not train on unseen: it would hold its trials."""
    parent = multiprocessing.parent_process()  # not the server
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _for_the_server(block: bool = True) -> Iterator[None]:
    """Make processes that start in the block search for modules in the same folders as this
    process.

    They do not receive Ctrl-C and the signals that end a job; their children do once they are
    ready. Without the server, nobody would learn how the children end.

    Args:
        block: Whether the signals are blocked.
    """
    # PYTHONSAFEPATH removes the current folder, which `python -c` would put before the standard
    # library.
    folders = [path or os.getcwd() for path in sys.path]
    new = {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in new}
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if block else ())
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
