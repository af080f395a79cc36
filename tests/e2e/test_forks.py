"""The server that forks commands survives a stray signal, and a dead one is replaced."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.e2e import forks
from tests.e2e.forks import Command


def ended(folder, code: str) -> int:
    """Return the exit code of a command."""
    script = folder / "script.py"
    script.write_text(code)
    return Command([str(script)], folder, os.environ, sys.stderr, sys.stderr).wait(60)


@pytest.mark.long
def test_a_server_that_was_killed_fails_no_later_command(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(forks, "_started", [])
    try:
        assert ended(tmp_path, "raise SystemExit(3)") == 3
        server = forks._server()
        server.process.terminate()
        # Commands get the default action of SIGTERM, which the server ignores.
        kill_itself = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
        assert ended(tmp_path, kill_itself) == -signal.SIGTERM
        assert forks._server() is server and server.process.poll() is None

        server.process.kill()
        server.process.wait()
        assert ended(tmp_path, "raise SystemExit(4)") == 4
        assert "the fork server ended with -9; another one starts" in capfd.readouterr().err
    finally:
        forks._server().control.close()
        assert forks._server().process.wait(60) == 0
