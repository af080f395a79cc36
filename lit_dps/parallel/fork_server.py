"""Starts processes that train, forked from a server that has imported what they need.

Only the first start is slow. A fork of this process itself would share its database connections,
threads and GPUs. The server has none of them: it imports modules and forks (`multiprocessing`'s
forkserver). If processes cannot be forked safely, they are spawned, and each imports everything.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from lit_dps.core.errors import Unguarded
from lit_dps.core.exit_codes import ExitCode
from lit_dps.parallel.process import SIGNALS

# The system libraries of macOS do not survive a fork.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def unguarded() -> bool:
    """Return True if this process runs a script that calls lit_dps without any condition.

    Each started process imports the script, and would run the call again. A call below any `if` is
    assumed to be guarded. If it is not, the started processes detect it, and `Unguarded` is raised.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    line = _line_of_script(main)
    if line is None or file is None:  # such as in a notebook
        return False
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False
    statements = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            statements.append(node)
    has_condition = any(isinstance(node, ast.If) for node in statements)
    return bool(statements) and not has_condition


def _line_of_script(main: ModuleType) -> int | None:
    """Return the line of the script that is being executed; None outside of its top level."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(main) and frame.f_code.co_name == "<module>":
            return frame.f_lineno
        frame = frame.f_back
    return None


def context() -> Any:
    """Return the context that makes processes, and pipes and events for them."""
    return multiprocessing.get_context(METHOD)


def start_server(*functions: Callable[..., Any]) -> None:
    """Start the server, and let it import the modules of functions in the background.

    Nothing happens if the server runs already. Without this call, the first process starts it.
    """
    if METHOD != "forkserver":
        return
    from multiprocessing import forkserver  # not on every platform

    # Importing the user's script could do anything.
    modules = {function.__module__ for function in functions} - {"__main__"}
    forkserver.set_forkserver_preload(sorted(modules))
    # The server would start the resource tracker too, and unblock the signals.
    with _for_the_server(block=False):
        resource_tracker.ensure_running()
    with _for_the_server():
        forkserver.ensure_running()


def start(
    target: Callable[..., None],
    name: str,
    args: tuple,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start a process that runs `target(*args)` with the environment of this process.

    It ends when this process ends. The server imports the modules of the target and of functions
    among the arguments. Arguments are pickled. A terminal's Ctrl-C does not reach the process; this
    process decides. The process may start others, such as the workers of a data loader.

    Args:
        target: What it runs.
        name: Its name.
        args: Arguments of the target.
        environment: Further variables of its environment.
    """
    start_server(target, *filter(callable, args))
    method = multiprocessing.get_start_method(allow_none=True)
    process = context().Process(
        target=_begin,
        args=({**os.environ, **(environment or {})}, method, target, args),
        name=f"{Unguarded.PROCESS_PREFIX}{name}",
        daemon=True,
    )
    process.start()
    return process


def _begin(
    environment: dict[str, str], method: str | None, target: Callable[..., None], args: tuple
) -> None:
    os.environ.clear()  # the environment at the start of the server
    os.environ.update(environment)
    # Only the parent needs to know that this process is a daemon; a daemon could not start
    # processes.
    multiprocessing.current_process().daemon = False
    # The server has set another method. Workers of a data loader start as they do in the parent.
    multiprocessing.set_start_method(method, force=True)
    # Ctrl-C stays blocked, whatever handlers are set later.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # Otherwise all processes would draw the same numbers in code that sets no seed.
    np.random.seed()
    target(*args)


def _die_with_parent() -> None:
    """End this process when its parent ends. Otherwise it would train on and keep its trials."""
    parent = multiprocessing.parent_process()  # the process that called `start`, not the server
    if parent is not None:
        parent.join()
        os._exit(ExitCode.FAILED)


@contextmanager
def _for_the_server(block: bool = True) -> Iterator[None]:
    """Let processes that start in the block import modules from the same folders as this process.

    They do not receive Ctrl-C and the signals that end a job; their children do once they are
    ready. If the server died, the exit codes of the children would be lost.

    Args:
        block: Whether the signals are blocked.
    """
    folders = [path or os.getcwd() for path in sys.path]
    # PYTHONSAFEPATH removes the current folder, which `python -c` would put before the standard
    # library.
    new = {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in new}
    blocked = SIGNALS if block else ()
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
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
