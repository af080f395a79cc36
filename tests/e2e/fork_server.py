"""A process that has imported everything, and becomes a command of ours by fork: a start takes 20
ms instead of 5 s.

    python -m tests.e2e.fork_server FD PADDING

FD is a socket that requests come by; see `tests.e2e.forks`. A command finds what a new interpreter
would give it: its own folder, environment, standard streams, arguments, main module, session and
signal handlers. Nothing runs in the server but the imports: it has no threads, no pool of OpenMP
and its allocator is as the C library sets it.

The children that a command starts by multiprocessing are forked too, from a second copy of the
server that the command has for this purpose, and are then its children as if it had started them
itself. PADDING leaves room for the command line that `ps` shows.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing import process, util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
LONGEST = 1 << 18  # bytes of a request
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>: an orphan of mine becomes my child
VERBS = ("study", "analyze", "figures", "merge", "replicate")
# Modules that a study imports late.
LATER = (
    "lit_dps.tracking.sync",
    "lit_dps.report.html",
    "mlflow.store.tracking.sqlalchemy_store",
    "sklearn.datasets",
    "sqlalchemy.dialects.sqlite",
)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    # It ends with its control socket alone. A signal that a test sends too widely spares it.
    # `_enter` resets both in the commands.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    gc.disable()  # during the imports
    for name in VERBS:
        import_module(f"lit_dps.cli.{name}")
    import_module("tests.support.schema").use_copies()
    import_module("tests.support.installed").look_up_once()
    import_module("tests.support.pictures").use_placeholders(are_made=True)
    for name in LATER:
        import_module(name)
    import_module("sqlalchemy.orm").configure_mappers()
    # Imported objects stay until the end. Without this line, every command would look at all of
    # them in its collections, which takes 1 s and copies their pages.
    gc.freeze()
    gc.enable()
    threads = [
        Path(f"/proc/self/task/{task}/comm").read_text().strip()
        for task in os.listdir("/proc/self/task")
    ]
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) == 1, (
        threads
    )  # pyarrow's minds a fork
    request, fds = _serve(control)
    faulthandler.enable()  # a command that hangs is aborted, and says where it was
    _end(_exit_code(_become_command(request, fds)))


def _exit_code(run: Callable[[], None]) -> int:
    """Run a process, print what ends it, and return its exit code, as the interpreter does."""
    try:
        run()
    except SystemExit as error:
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> None:
    """End this process as the interpreter does, but keep its objects: freeing them takes 1 s."""
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _serve(control: socket.socket) -> tuple[dict, list[int]]:
    """Forks for each request and tells its sender when the child ends; returns in the children
    alone."""
    watched: dict[
        int, tuple[int, int]
    ] = {}  # by the file descriptor of a child: its process, and whom to tell
    while True:
        ready, _, _ = select.select([control, *watched], [], [])
        for fd in ready:
            if fd is control:
                text, (answers, *fds) = _receive(control)
                if not text:
                    os._exit(0)  # nobody asks any more
                pid = os.fork()
                if not pid:
                    for other in (
                        control.detach(),
                        answers,
                        *watched,
                        *(to for _, to in watched.values()),
                    ):
                        os.close(other)
                    return json.loads(text), fds
                for other in fds:
                    os.close(other)
                with suppress(BrokenPipeError):  # the sender waited no longer
                    os.write(answers, f"{pid}\n".encode())
                watched[os.pidfd_open(pid)] = pid, answers
            else:
                pid, answers = watched.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    os.write(answers, f"{code}\n".encode())
                os.close(answers)
                os.close(fd)


def _become_command(request: dict, fds: list[int]) -> Callable[[], None]:
    """What to run, in the command and in every process that it starts by multiprocessing."""
    if request["session"]:
        os.setsid()
    _place(dict(zip(fds, (0, 1, 2), strict=True)))
    _enter(request["cwd"], request["env"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.set_inheritable(ours.fileno(), False)
    assert ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0) == 0
    template = os.fork()
    if not template:
        ours.close()
        return _serve_children(theirs)
    theirs.close()

    def end_template() -> None:
        ours.shutdown(socket.SHUT_RDWR)  # `close` would leave the copies of living workers open
        os.waitpid(template, 0)

    atexit.register(end_template)
    util.spawnv_passfds = lambda path, args, fds: _start_child(ours, args, {fd: fd for fd in fds})
    _fork_subprocesses(ours)
    argv = request["argv"]
    _show([sys.executable, *argv])
    return lambda: _interpret(argv)


def _interpret(argv: list[str]) -> None:
    """As `python ARGV` does."""
    if argv[0] == "-u":
        argv = argv[1:]
    sys.path[:] = [
        str(ROOT),
        *(path for path in sys.path if path not in ("", str(ROOT), os.getcwd())),
    ]
    if argv[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    folder = str(Path(argv[0]).resolve().parent)
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    sys.argv[:] = argv
    runpy.run_path(argv[0], run_name="__main__")


def _start_child(
    template: socket.socket,
    args: list,
    fds: dict[int, int],
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    session: bool = False,
) -> int:
    """Starts a child by fork; `fds` are numbers of file descriptors there, and which of ours they
    are."""
    args = [os.fsdecode(arg) for arg in args]
    request = {"args": args, "fds": list(fds), "session": session}
    request |= {"env": dict(os.environ if env is None else env), "cwd": cwd or os.getcwd()}
    socket.send_fds(template, [json.dumps(request).encode()], list(fds.values()))
    return int(template.recv(100))


def _fork_subprocesses(template: socket.socket) -> None:
    """Commands of ours that a command starts by `subprocess`, as torchrun does, are forked too."""
    execute = subprocess.Popen._execute_child

    def fork(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        is_command = isinstance(args, (list, tuple)) and str(ROOT / "cli.py") in args
        if not is_command or args[0] != sys.executable:
            return execute(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        pipes, session = rest[3:9], rest[-2]
        standard = {0: pipes[0], 1: pipes[3], 2: pipes[5]}
        fds = {number: number if fd == -1 else fd for number, fd in standard.items()}
        self.pid = _start_child(template, list(args), fds, env, cwd, session)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    subprocess.Popen._execute_child = fork


def _serve_children(control: socket.socket) -> Callable[[], None]:
    """Forks the children of a command until it ends; returns in the children alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is meant for a whole session
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _show(["a template of processes"])
    while True:
        text, fds = _receive(control)
        if not text:
            os._exit(0)
        pipe, told = os.pipe()
        between = os.fork()
        if not between:  # it ends at once, and its child becomes the command's
            pid = os.fork()
            if pid:
                os.write(told, str(pid).encode())
                os._exit(0)
            control.close()
            os.close(pipe)
            os.close(told)
            request = json.loads(text)
            if request["session"]:
                os.setsid()
            _place(dict(zip(fds, request["fds"], strict=True)))
            _enter(request["cwd"], request["env"])
            _show(request["args"])
            return lambda: _run_child(request["args"])
        os.close(told)
        for fd in fds:
            os.close(fd)
        os.waitpid(between, 0)
        control.send(os.read(pipe, 100))
        os.close(pipe)


def _run_child(args: list[str]) -> None:
    """As `python -c CODE ARGS` does, or `python SCRIPT ARGS`."""
    if "-c" not in args:
        return _interpret(args[1:])
    at = args.index("-c")
    sys.argv[:] = ["-c", *args[at + 2 :]]
    sys.modules["__main__"] = ModuleType("__main__")
    exec(args[at + 1], sys.modules["__main__"].__dict__)


def _enter(folder: str, environment: dict[str, str]) -> None:
    """Makes the process as good as new in a folder and an environment."""
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    process.ORIGINAL_DIR = os.getcwd()  # multiprocessing finds a relative main script from it
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    import numpy

    numpy.random.seed()


def _place(wanted: dict[int, int]) -> None:
    """Moves file descriptors to the numbers that they are known by."""
    import fcntl

    high = {fcntl.fcntl(fd, fcntl.F_DUPFD, 500): number for fd, number in wanted.items()}
    for fd in wanted:
        os.close(fd)
    for fd, number in high.items():
        os.dup2(fd, number)
        os.close(fd)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    text, data, _, _ = control.recvmsg(LONGEST, socket.CMSG_SPACE(64 * 4))
    fds = array("i")
    for _, _, part in data:
        fds.frombytes(part)
    return text, list(fds) or [-1]


def _show(args: list[str]) -> None:
    """Writes over the process's command line, as /proc and so `ps` and `pgrep` read it."""
    start, end = map(int, Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[45:47])
    line = b"".join(arg.encode() + b"\0" for arg in args)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
