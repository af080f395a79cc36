"""A process that waits for a lock names the process that holds it: a suspended one keeps its
locks."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
from filelock import FileLock

from lit_dps.storage import locks
from lit_dps.storage.locks import ServerPeers
from lit_dps.tracking.client import open_experiment
from tests.e2e.commands import environment
from tests.e2e.forks import Command

HOLD = """
import sys, time
from lit_dps.storage.locks import storage_lock
with storage_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def suspended(tmp_path):
    """Start processes that are suspended while they hold the storage's lock of a URL."""
    processes = []
    script, output = tmp_path / "hold.py", tmp_path / "held.txt"
    script.write_text(HOLD)

    def start(url: str) -> Command:
        with output.open("w") as file:
            process = Command([str(script), url], tmp_path, environment(), file, file)
        processes.append(process)
        end = time.monotonic() + 100
        while output.read_text() != "held\n":
            assert process.poll() is None and time.monotonic() < end, output.read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(locks, "ANNOUNCE_SECONDS", 1)


def wait_for(url: str, holder: Command, capsys) -> str:
    """Return what is printed while a thread waits for the lock, which the holder's end frees."""
    waiting = threading.Thread(target=_take, args=[url])
    waiting.start()
    printed = ""
    end = time.monotonic() + 20
    while not printed and time.monotonic() < end:
        time.sleep(0.05)
        printed = capsys.readouterr().err
    assert waiting.is_alive()
    holder.kill()
    waiting.join(20)
    assert not waiting.is_alive()
    assert capsys.readouterr().err == ""
    return printed


def _take(url: str) -> None:
    with locks.storage_lock(url):
        pass


def test_the_holder_of_a_file_is_named_once(tmp_path, suspended, capsys):
    url = f"sqlite:///{tmp_path}/study.db"
    holder = suspended(url)
    printed = wait_for(url, holder, capsys)
    assert f"process {holder.pid} on {os.uname().nodename}" in printed
    assert f"kill -CONT {holder.pid}" in printed
    assert f"{tmp_path}/study.db.lock" in printed


@pytest.mark.long
@pytest.mark.slow
def test_the_holder_of_a_lock_of_a_server_is_named_with_its_session(postgres, suspended, capsys):
    holder = suspended(postgres)
    printed = wait_for(postgres, holder, capsys)
    assert f"process {holder.pid} on {os.uname().nodename}" in printed
    session = int(re.search(r"pg_terminate_backend\((\d+)\)", printed)[1])
    assert session != holder.pid
    locks.peers(postgres).close()


@pytest.mark.long
@pytest.mark.slow
def test_a_server_keeps_the_session_of_a_process_that_waited(postgres, suspended, capsys):
    """A time limit of the server must not end the session, by which others know that it lives."""
    owner = locks.peers(postgres).owner
    assert locks.peers(postgres).alive(owner)
    wait_for(postgres, suspended(postgres), capsys)
    other = ServerPeers(postgres)
    assert other.alive(owner)
    other.close()
    locks.peers(postgres).close()


def test_a_wait_for_the_lock_of_mlflow_is_announced(tmp_path, capsys):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    lock = FileLock(tmp_path / ".mlflow.lock")
    waiting = threading.Thread(target=open_experiment, args=[uri, str(tmp_path), "a"])
    with lock:
        waiting.start()
        end = time.monotonic() + 20
        printed = ""
        while not printed and time.monotonic() < end:
            time.sleep(0.05)
            printed = capsys.readouterr().err
    waiting.join(60)
    assert "another process" in printed
    assert f"{tmp_path}/.mlflow.lock" in printed


def test_a_time_limit_is_kept_and_a_lock_is_taken_twice(tmp_path):
    lock = locks.AnnouncedLock(tmp_path / "a.lock")
    with lock, lock:
        assert lock.lock_counter == 2
    assert (tmp_path / "a.lock").read_text() == f"{os.getpid()} {os.uname().nodename}"
