"""Which workers of a file storage are alive: under other host names and clocks, suspended, killed,
and copied."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from filelock import FileLock, Timeout

from lit_dps.storage.locks import Liveness, describe_owner, peers
from lit_dps.storage.schema import OWNER
from lit_dps.storage.take_over import claim_report, take_over
from tests.e2e.commands import environment
from tests.support.runs import trials_of
from tests.unit.storage.test_store import ended
from tests.unit.storage.test_store_shared import declared, opened

# Becomes a worker of a storage under a host name, prints its owner, and waits. It forks first, as
# DataLoaders do, so that a child survives it.
WORK = """
import os, socket, sys, time
url, host, forks = sys.argv[1:]
socket.gethostname = lambda: host
from lit_dps.storage.locks import peers
shared = peers(url)
with shared.lock("storage"):
    owner = shared.owner
child = os.fork() if forks == "1" else -1
if child:
    print(owner, child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


class Worker:
    """A process, on a host of any name, that runs a trial of a study."""

    def __init__(self, url: str, uid: str, host: str = "alpha", forks: bool = False):
        argv = [sys.executable, "-c", WORK, url, host, str(int(forks))]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment())
        self.owner, child = self.process.stdout.readline().split()
        self.child = int(child)
        self.point = run_by(self.owner, url, uid)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def run_by(owner: str, url: str, uid: str) -> int:
    """Claim a trial in the name of another process; return its point."""
    store = opened(url, uid)
    trial = next(trials_of(store))
    store._claims[trial.cell, trial.point, 0].set_user_attr(OWNER, owner)
    return trial.point


@pytest.fixture
def start(url):
    workers = []

    def begin(uid: str, *args, **options) -> Worker:
        workers.append(Worker(url, uid, *args, **options))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.end()
        if worker.child > 0:
            os.kill(worker.child, signal.SIGKILL)


def points_of(store) -> list[int]:
    """The points that a store hands out until nothing is left, each of which ends."""
    points = []
    for trial in trials_of(store):
        points.append(trial.point)
        store.store_result(ended(trial))
    return points


def test_a_killed_worker_is_dead_under_any_host_name_and_clock(url, start, monkeypatch):
    uid = declared(url)
    worker = start(uid)
    assert peers(url).liveness(worker.owner) is Liveness.ALIVE
    assert sorted(points_of(opened(url, uid))) == sorted({0, 1, 2} - {worker.point})
    worker.end()
    monkeypatch.setattr(socket, "gethostname", lambda: "beta")
    now = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: now)
    assert points_of(opened(url, uid)) == [worker.point]
    assert claim_report(url, "s") is None


def test_a_suspended_worker_keeps_its_trial(url, start):
    uid = declared(url)
    worker = start(uid)
    worker.send(signal.SIGSTOP)
    try:
        assert worker.point not in points_of(opened(url, uid))
        left = claim_report(url, "s")
        assert left.is_running
        assert left.reason.startswith("1 trial ")
        assert describe_owner(worker.owner) in left.reason
        assert "--take-over" not in left.reason, "it is known to be alive"
        assert take_over(url, "s") == []
    finally:
        worker.send(signal.SIGCONT)


def test_a_child_that_survives_a_killed_worker_does_not_keep_its_trial(url, start):
    uid = declared(url)
    worker = start(uid, forks=True)
    assert peers(url).alive(worker.owner)
    worker.end()
    os.kill(worker.child, 0)
    assert worker.point in points_of(opened(url, uid))


def test_trials_of_a_copied_folder_are_free_at_once(url, start, tmp_path):
    uid = declared(url)
    worker = start(uid)
    mine = opened(url, uid)
    claimed = next(trials_of(mine))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("study.db", "study.db.workers"):
        source = tmp_path / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    names = {file.name for file in (copy / "study.db.workers").iterdir()}
    assert names == {owner.partition("@")[0] for owner in (worker.owner, mine.peers.owner)}
    copied = opened(f"sqlite:///{copy}/study.db", uid)
    assert sorted(points_of(copied)) == [0, 1, 2]
    theirs = peers(url)
    assert theirs.alive(worker.owner) and theirs.alive(mine.peers.owner), "the original goes on"
    assert sorted(points_of(opened(url, uid))) == sorted({0, 1, 2} - {worker.point, claimed.point})


def test_a_test_by_another_path_does_not_drop_the_lock_of_this_process(url, tmp_path):
    uid = declared(url)
    mine = opened(url, uid)
    claimed = next(trials_of(mine))
    (tmp_path / "link").symlink_to(tmp_path)
    other = peers(f"sqlite:///{tmp_path}/link/study.db")
    assert other.owner != mine.peers.owner
    assert other.alive(mine.peers.owner)
    code = (
        "from lit_dps.storage.locks import peers; "
        f"print(peers({url!r}).liveness({mine.peers.owner!r}))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert said.stdout.strip() == "alive", "another process still sees the lock"
    assert claimed.point not in points_of(opened(url, uid))


def test_files_end_with_their_workers(url, start, tmp_path):
    folder = tmp_path / "study.db.workers"
    uid = declared(url)
    worker = start(uid)
    peers(url).leave()
    assert [file.name for file in folder.iterdir()] == [worker.owner.partition("@")[0]]
    worker.end()
    store = opened(url, uid)
    next(trials_of(store))
    assert [file.name for file in folder.iterdir()] == [store.peers.owner.partition("@")[0]]
    store.leave()
    assert not folder.exists()


@pytest.mark.parametrize("deleted", ["file", "folder"])
def test_a_worker_whose_file_was_deleted_loses_its_trial_and_doubles_nothing(
    url, tmp_path, deleted
):
    uid = declared(url)
    store = opened(url, uid)
    trial = next(trials_of(store))
    shutil.rmtree(tmp_path / "study.db.workers")
    if deleted == "file":
        (tmp_path / "study.db.workers").mkdir()
    assert sorted(points_of(opened(url, uid))) == [0, 1, 2]
    before = claim_report(url, "s")
    store.store_result(ended(trial))
    assert before is None and claim_report(url, "s").is_running is False, (
        "no result more than before"
    )


def test_owners_without_a_file_are_unknown(url):
    here = peers(url)
    assert here.liveness("unknown form") is Liveness.UNKNOWN
    assert here.liveness(None) is Liveness.DEAD
    assert here.liveness("../../study@elsewhere:1") is Liveness.UNKNOWN, "no path out of the folder"


def test_what_does_not_answer_is_named_and_released_on_demand(url):
    uid = declared(url)
    unknown = run_by("elsewhere:7:12", url, uid)
    one = opened(url, uid)
    mine = next(trials_of(one))
    assert points_of(opened(url, uid)) == [2]
    left = claim_report(url, "s")
    assert left.is_running
    process = describe_owner("elsewhere:7:12")
    assert left.reason.startswith("1 trial ") and process in left.reason
    assert "--take-over" in left.reason
    (line,) = take_over(url, "s")
    assert "1 trial " in line and process in line
    assert points_of(opened(url, uid)) == [unknown]
    one.store_result(ended(mine))
    assert claim_report(url, "s") is None


def test_without_locks_a_worker_counts_as_running_until_it_is_taken_over(url, start, monkeypatch):
    uid = declared(url)
    worker = start(uid)
    worker.end()

    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert worker.point not in points_of(opened(url, uid))
    assert describe_owner(worker.owner) in claim_report(url, "s").reason
    assert len(take_over(url, "s")) == 1
    assert points_of(opened(url, uid)) == [worker.point]


def test_owners_are_described_for_people():
    process = describe_owner("0123456789abcdef@alpha:12")
    assert "12" in process and process.endswith(" alpha") and "0123456789abcdef" not in process
    assert describe_owner("alpha:12:3456") == describe_owner("alpha:12:") == process
    assert describe_owner("who?") == "'who?'"


@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="needs unshare, as root"
)
def test_a_worker_in_a_container_of_another_name(url):
    """A real host name, by a UTS namespace, as containers have it."""
    uid = declared(url)
    code = WORK.replace("socket.gethostname = lambda: host\n", "")
    inner = f'hostname inner && exec {sys.executable} -c "$CODE" {url} - 0'
    argv = ["unshare", "--uts", "sh", "-c", inner]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env=environment() | {"CODE": code}
    )
    try:
        line = process.stdout.readline().split()
        if not line:
            pytest.skip("no namespace can be made here")
        owner = line[0]
        assert "@inner:" in owner and socket.gethostname() != "inner"
        point = run_by(owner, url, uid)
        assert point not in points_of(opened(url, uid))
    finally:
        process.kill()
        process.wait()
    assert points_of(opened(url, uid)) == [point]


def test_a_link_to_the_file_names_the_same_workers(url, tmp_path, start):
    worker = start(declared(url))
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "study.db")
    shared = peers(f"sqlite:///{link}")
    with shared.lock("storage"):
        assert shared.liveness(worker.owner) is Liveness.ALIVE
        with pytest.raises(Timeout):
            # The same lock, in another process or another object.
            FileLock(f"{tmp_path}/study.db.lock").acquire(timeout=0)
    worker.end()
    with shared.lock("storage"):
        assert shared.liveness(worker.owner) is Liveness.DEAD
    assert sorted(path.name for path in link.parent.iterdir()) == ["link.db"]
