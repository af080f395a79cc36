"""Commands that are forked from a process that has imported everything; `Command` is used as a
`subprocess.Popen`."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
START_SECONDS = 300  # for the server's imports, also on a busy machine
ROOM = 4000  # bytes for the command lines that the server's children show


class Command:
    """A command of the server's.

    Args:
        argv: What would follow `python`: a script or `-m` with a module, and its arguments.
        cwd, env, stdin, stdout, stderr, start_new_session: As of `subprocess.Popen`.

    Attributes:
        pid: Of its process, which is a child of the server.
        returncode: How it ended, as a `subprocess.Popen` has it; None while it runs.
    """

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        stdout: IO,
        stderr: IO,
        start_new_session: bool = False,
    ):
        self.args, self.returncode, self._said = list(argv), None, b""
        self._answers, theirs = socket.socketpair()
        request = {
            "argv": self.args,
            "cwd": str(cwd),
            "env": dict(env),
            "session": start_new_session,
        }
        with open(os.devnull) as nothing:
            fds = [theirs.fileno(), nothing.fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(_server().control, [json.dumps(request).encode()], fds)
        theirs.close()
        pid = self._line(START_SECONDS)
        assert pid is not None, f"the fork server starts nothing in {START_SECONDS} s"
        self.pid = int(pid)

    def poll(self) -> int | None:
        """How it ended, or None."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: if it does not come in time.
        """
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to its process if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and (said := self._line(timeout)) is not None:
            self.returncode = int(said)
            self._answers.close()
        return self.returncode

    def _line(self, timeout: float | None) -> str | None:
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._said:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._answers], [], [], left)[0]:
                return None
            part = self._answers.recv(100)
            assert part, "the fork server ended"
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()


class _Server:
    """A process that forks commands. It ends when this process does.

    Attributes:
        control: The socket that requests go by.
        process: The process.
    """

    def __init__(self):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.control.setsockopt(socket.SOL_SOCKET, size, 1 << 20)
        command = [sys.executable, "-m", "tests.e2e.fork_server", str(theirs.fileno()), " " * ROOM]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.process.wait)
        atexit.register(self.control.close)


_started: list[_Server] = []  # the last one serves


def _server() -> _Server:
    """Return the server; another one if it was killed, for example because memory was short.

    Only the commands of the killed server fail, and no later ones.
    """
    if not _started or _started[-1].process.poll() is not None:
        if _started:
            code = _started[-1].process.returncode
            print(f"the fork server ended with {code}; another one starts", file=sys.stderr)
        _started.append(_Server())
    return _started[-1]
