"""Locks and liveness through a PostgreSQL server; each peer here has a session of its own, as a
process has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from lit_dps.storage.locks import ServerPeers
from tests.e2e.commands import environment

pytestmark = pytest.mark.slow
HOLD = """
import sys, time
from lit_dps.storage.locks import ServerPeers
peers = ServerPeers(sys.argv[1])
with peers.lock("storage"):
    print(peers.owner, flush=True)
    time.sleep(600)
"""


def run(url: str, statement: str) -> list:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        rows = connection.execute(text(statement)).all()
    engine.dispose()
    return rows


def dies(who: str, peers: ServerPeers) -> bool:
    """Whether a process ends to the others within 20 seconds; the server learns of it after the
    process itself."""
    end = time.monotonic() + 20
    while peers.alive(who) and time.monotonic() < end:
        time.sleep(0.05)
    return not peers.alive(who)


def test_one_holds_a_lock_and_takes_it_again_while_others_wait(postgres):
    one, other, events = ServerPeers(postgres), ServerPeers(postgres), []

    def wait():
        with other.lock("storage"):
            events.append("other")

    waiting = threading.Thread(target=wait)
    with one.lock("storage"), one.lock("storage"):
        with other.lock("view"):
            events.append("another lock")
        waiting.start()
        waiting.join(0.5)
        events.append("one")
    waiting.join(20)
    assert events == ["another lock", "one", "other"]
    one.close(), other.close()


def test_a_peer_lives_as_long_as_its_session(postgres):
    one, other = ServerPeers(postgres), ServerPeers(postgres)
    assert not one.alive(None)
    assert one.alive(one.owner)
    assert not one.alive(other.owner), "it has not begun"
    with other.lock("storage"):
        assert one.alive(other.owner)
    assert one.alive(other.owner)
    assert other.alive(one.owner)
    other.close()
    assert dies(other.owner, one)
    one.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_server_frees_what_a_killed_process_held(postgres, stopped):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, postgres], stdout=subprocess.PIPE, text=True, env=environment()
    )
    who = holder.stdout.readline().strip()
    one = ServerPeers(postgres)
    if stopped:
        os.kill(holder.pid, signal.SIGSTOP)
    time.sleep(0.2)
    assert one.alive(who), "a stopped process still holds its trials"
    holder.kill()
    holder.wait()
    with one.lock("storage"):
        assert dies(who, one)
    one.close()


def test_a_lost_connection_is_said_and_the_next_use_begins_another(postgres):
    one, other = ServerPeers(postgres), ServerPeers(postgres)
    end = (
        "select pg_terminate_backend(pid, 20000) from pg_stat_activity where pid <> "
        "pg_backend_pid() and datname = "
    )
    with pytest.raises(OperationalError), one.lock("storage"):
        run(postgres, end + "current_database()")
    assert dies(one.owner, other)
    with one.lock("storage"):
        assert other.alive(one.owner)
    one.close(), other.close()


def test_the_server_looks_after_dead_machines(postgres):
    """Otherwise a machine without power keeps its trials for the two hours that systems wait by
    default."""
    one = ServerPeers(postgres)
    assert one.alive(one.owner)
    with one.lock("storage"):
        assert one._connection.execute(text("show tcp_keepalives_idle")).scalar() == "30"
    one.close()


def test_host_names_decide_nothing(postgres, monkeypatch):
    """A container that restarts has another name, and two machines may have the same one."""
    here = ServerPeers(postgres)
    with here.lock("storage"):
        pass
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    there = ServerPeers(postgres)
    assert there.owner.startswith("elsewhere:")
    assert there.alive(here.owner)
    assert here.alive(there.owner), "its session began with its question"
    here.close()
    assert dies(here.owner, there)
    there.close()
