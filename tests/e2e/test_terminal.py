"""A study at a terminal: what its user sees while it runs, and how it looks after Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.commands import FAST, command, environment
from tests.e2e.forks import Command

pytestmark = pytest.mark.slow
CURSOR_AWAY, CURSOR_BACK = "\x1b[?25l", "\x1b[?25h"


class Screen:
    """A terminal of 60 columns that a command writes to, output and errors alike."""

    def __init__(self, folder: Path, *args: object):
        self._read, write = os.openpty()
        fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 60, 0, 0))
        self.text, environ = "", environment() | {"TERM": "xterm", "LANG": "C.UTF-8"}
        with os.fdopen(write, "w") as out:
            self.process = Command(
                command(*args)[1:], folder, environ, out, out, start_new_session=True
            )

    def wait_for(self, pattern: str, timeout: float = 120) -> None:
        """Reads until the screen has shown something; "" reads to the end."""
        end = time.monotonic() + timeout
        while not (pattern and re.search(pattern, self.text)):
            assert time.monotonic() < end, self.text
            if not select.select([self._read], [], [], 0.5)[0]:
                if not pattern and self.process.poll() is not None:
                    return
                continue
            with suppress(OSError):  # the other end is closed
                self.text += os.read(self._read, 65536).decode()
                continue
            assert not pattern, self.text
            return


def test_a_study_shows_bar_k_star_and_the_trials_of_its_workers_and_leaves_the_screen_tidy(
    tmp_path,
):
    options = ("--study.workers", "2", "--study.noise_scale", "false")
    screen = Screen(
        tmp_path, "study", FAST, *options, "--goal.error", "0.01", "--goal.max_steps", "40000"
    )
    screen.wait_for("best val_error")
    screen.wait_for(
        r"B=16 S=0 sample 0\s+[1-9][\d,]*\s+0\.\d+"
    )  # told by a worker, through its pipe
    os.kill(screen.process.pid, signal.SIGINT)
    screen.wait_for(
        "SIGINT: stopping after the next validation|interrupted by SIGINT"
    )  # the next check may come at once
    screen.wait_for("")
    assert screen.process.wait(60) == 130
    last = screen.text.rpartition(CURSOR_AWAY)[2]
    assert CURSOR_BACK in last and "16 trials remain" in " ".join(last.split())
    assert "Traceback" not in screen.text and "0/16 trials" in screen.text
