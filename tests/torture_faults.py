"""Faults other than killed processes: each happens to a small study, and then the study resumes.

A case trains a part of a study, brings about the fault, and keeps what the next command prints. It
does what the user would do, and gives the command again. `run_faults` then compares the results
with those of an undisturbed study.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from tests.e2e.commands import FAST, run, run_forked, start, wait_for_results
from tests.e2e.forks import Command

POINTS = 6  # of the study: two cells with three trials
# Trials of up to a second: a fault has to come while one is trained.
OPTIONS = ("--study.batch_sizes", "[64]", "--study.trials", 3, "--goal.max_steps", 1200)
RUNNING = "select count(*) from trials where state = 'RUNNING'"
RESULTS = """
    select s.study_name, p.value_json, r.value_json from trials t
    join studies s on s.study_id = t.study_id
    join trial_user_attributes p on p.trial_id = t.trial_id and p.key = 'point'
    join trial_user_attributes r on r.trial_id = t.trial_id and r.key = 'result'
    where t.state in ('COMPLETE', 'PRUNED', 'FAIL')"""
TIMES = re.compile("second|time|wall")  # keys of a result that differ from run to run
PATCHED = """
import sys
{patch}
from lit_dps.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
OTHER_HOST = "import socket; socket.gethostname = lambda: 'elsewhere'"
# Python's clock, and the one that Optuna stores
CLOCK_BEHIND = """
import datetime, time
import optuna.storages._rdb.storage as storage
now = time.time
time.time = lambda: now() - 86400
class Yesterday(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) - datetime.timedelta(days=1)
storage.datetime = Yesterday
"""
NO_ROOM = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))
"""
MODULE = """
from lit_dps.module import ImageClassifier

class Mine(ImageClassifier):
    def loss(self, batch):
        return super().loss(batch) * 1.0
"""

Stored = Counter[tuple[str, str, str]]  # (cell, point, result) -> how often


@dataclass
class Fault:
    """What became of a fault.

    Attributes:
        what: What was tried.
        tried: How often.
        lost: Results that were stored before the fault and are not stored at the end as they were.
        changed: Points without the result that an undisturbed study has, times left out.
        doubled: Results of a point that has one already.
        said: What the command after the fault printed, with its exit code.
        unexpected: Commands that ended otherwise than they should.
    """

    what: str
    tried: int = 0
    lost: int = 0
    changed: int = 0
    doubled: int = 0
    said: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    may_lose: bool = False  # where the user restores a copy that lacks results

    @property
    def good(self) -> bool:
        is_lost = self.lost > 0 and not self.may_lose
        return not (is_lost or self.changed or self.doubled or self.unexpected)

    def say(self, text: str) -> None:
        """Keep what a command printed, once."""
        if text not in self.said:
            self.said.append(text)


class Victim:
    """A small study in a folder of its own."""

    def __init__(self, folder: Path, fault: Fault, config: Path = FAST):
        folder.mkdir(exist_ok=True)
        self.folder, self.fault = folder, fault
        self.database = folder / "mlruns" / "study.db"
        self.study = ("study", "--config", config, *OPTIONS)
        self.before: Stored = Counter()

    def begin(self, results: int = 2) -> Command:
        """Start the study, and return its process while it trains a trial after so many results."""
        process = start(self.folder, *self.study)
        wait_for_results(self.database, results, process)
        end = time.monotonic() + 60
        while not self._is_training():
            assert process.poll() is None and time.monotonic() < end, "no trial is trained"
            time.sleep(0.02)
        time.sleep(0.2)
        return process

    def kill(self, process: Command) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.before = stored(self.database)

    def run(self, patch: str = "") -> subprocess.CompletedProcess:
        """Give the command, in a process that a patch has changed."""
        if not patch:
            return run(self.folder, *self.study)
        script = self.folder / "patched.py"
        script.write_text(PATCHED.format(patch=patch))
        return run_forked(self.folder, [str(script), *map(str, self.study)])

    def expect(self, code: int, found: int | None, output: str, words: str) -> None:
        """Keep the line with these words that a command printed, and check its exit code."""
        lines = [line for line in output.splitlines() if words in line]
        if found != code or len(lines) != 1 or "Traceback" in output:
            last = [line for line in output.splitlines() if line.strip()][-1:]
            what = f"exit code {found}, {len(lines)} lines with {words!r}: {last}"
            self.fault.unexpected.append(what)
        if lines:
            self.fault.say(f"`{first_clause(self._without_names(lines[0]))}`, exit code {found}")

    def resume(self, patch: str = "", is_first: bool = False) -> None:
        """Give the command again, which should end the study.

        Args:
            patch: As in `run`.
            is_first: Whether this is the first command after the fault, whose words are reported.
        """
        done = self.run(patch)
        if done.returncode != 0 or "Traceback" in done.stderr:
            last = self._without_names(" ".join(done.stderr.split())[-300:])
            self.fault.unexpected.append(f"exit code {done.returncode}: {last}")
        elif is_first:
            self.fault.say("nothing about it, exit code 0")

    def count(self, undisturbed: dict[tuple[str, str], Any]) -> None:
        """Compare what is stored with what was stored, and with an undisturbed study."""
        after = stored(self.database)
        points = Counter((cell, point) for cell, point, _ in after.elements())
        self.fault.lost += len(self.before.keys() - after.keys())
        self.fault.doubled += after.total() - len(points)
        same = outcomes(after)
        self.fault.changed += sum(same.get(key) != outcome for key, outcome in undisturbed.items())

    def _is_training(self) -> bool:
        with closing(sqlite3.connect(self.database, timeout=30)) as connection:
            return connection.execute(RUNNING).fetchone()[0] > 0

    def _without_names(self, line: str) -> str:
        """Return a line without what differs from run to run and between machines."""
        line = line.strip().replace(f"{self.folder.resolve()}/", "")
        line = line.replace(socket.gethostname(), "HOST")
        line = re.sub(r"process \d+", "process N", line)
        line = re.sub(r"(\d{4}-\d\d-\d\d )?\b\d\d:\d\d\b", "TIME", line)
        return re.sub(r"\b\d+ trials remain", "N trials remain", line).replace("|", "/")


def first_clause(line: str) -> str:
    """Return a message without its remedy, which follows a bracket or a semicolon."""
    return re.split(r" \(|;", line, maxsplit=1)[0]


def stored(database: Path) -> Stored:
    with closing(sqlite3.connect(database, timeout=30)) as connection:
        return Counter(connection.execute(RESULTS).fetchall())


def outcomes(found: Stored) -> dict[tuple[str, str], Any]:
    """Return by cell and point what was trained: the result without its times."""
    return {(cell, point): _without_times(json.loads(result)) for cell, point, result in found}


def _without_times(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_times(each) for key, each in value.items() if not TIMES.search(key)}


def other_host(victim: Victim) -> None:
    victim.kill(victim.begin())
    victim.resume(OTHER_HOST, is_first=True)


def clock_behind(victim: Victim) -> None:
    victim.kill(victim.begin())
    victim.resume(CLOCK_BEHIND, is_first=True)


def suspend(victim: Victim, process: Command) -> None:
    """Suspend a command while it trains and holds no lock, for which other commands would wait."""
    lock = FileLock(f"{victim.database}.lock")
    for _ in range(100):
        os.killpg(process.pid, signal.SIGSTOP)
        with closing(sqlite3.connect(victim.database, timeout=0.1)) as connection:
            try:
                with lock.acquire(timeout=0.1):
                    connection.execute("begin immediate")
                    is_training = connection.execute(RUNNING).fetchone()[0] > 0
            except (sqlite3.OperationalError, Timeout):
                is_training = False
        if is_training:
            return
        os.killpg(process.pid, signal.SIGCONT)
        time.sleep(0.1)
    raise AssertionError("no moment with a trial in training and without a lock")


def suspended(victim: Victim) -> None:
    first = victim.begin()
    suspend(victim, first)
    try:
        victim.before = stored(victim.database)
        second = victim.run()
        victim.expect(4, second.returncode, second.stdout, "still run by process")
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    first.wait(300)
    victim.resume()


def copied(victim: Victim) -> None:
    """The original continues, and the copy is resumed beside it; `count` looks at the copy."""
    first = victim.begin()
    original = victim.folder
    os.killpg(first.pid, signal.SIGSTOP)  # as a snapshot of a file system is: of one moment
    shutil.copytree(original / "mlruns", original / "copy" / "mlruns")
    os.killpg(first.pid, signal.SIGCONT)
    copy = Victim(original / "copy", victim.fault)
    before = stored(copy.database)
    copy.resume(is_first=True)
    first.wait(300)
    if first.returncode != 0:
        victim.fault.unexpected.append(f"the original ended with {first.returncode}")
    in_original = stored(victim.database)
    victim.fault.lost += len(before.keys() - in_original.keys())
    victim.fault.doubled += in_original.total() - len(outcomes(in_original))
    victim.before, victim.database = before, copy.database


def interrupted_twice(victim: Victim) -> None:
    process = victim.begin()
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    victim.before = stored(victim.database)
    output = (victim.folder / "output.txt").read_text()
    victim.expect(130, process.returncode, output, "interrupted by SIGINT")
    victim.resume()


def full_disk(victim: Victim) -> None:
    victim.kill(victim.begin())
    size = victim.database.stat().st_size + 4096
    done = victim.run(NO_ROOM.format(size=size))
    victim.expect(2, done.returncode, done.stderr, "lit-dps: error")
    victim.resume()


def truncated(victim: Victim) -> None:
    """The restored copy lacks the results since it was made: they are lost, and trained again."""
    victim.kill(victim.begin(1))
    copy = victim.database.read_bytes()
    victim.kill(victim.begin(3))
    os.truncate(victim.database, victim.database.stat().st_size // 2)
    victim.database.with_name("study.db-journal").unlink(missing_ok=True)
    done = victim.run()
    victim.expect(2, done.returncode, done.stderr, "lit-dps: error")
    victim.database.write_bytes(copy)
    victim.resume()


def edited_code(victim: Victim) -> None:
    config = yaml.safe_load(FAST.read_text())
    config["model"]["class_path"] = "mine_of_torture.Mine"
    (victim.folder / "mine.yaml").write_text(yaml.safe_dump(config))
    victim.study = ("study", "--config", victim.folder / "mine.yaml", *OPTIONS)
    module = victim.folder / "mine_of_torture.py"
    module.write_text(MODULE)
    victim.kill(victim.begin())
    module.write_text(MODULE.replace("1.0", "1.5"))
    done = victim.run()
    victim.expect(2, done.returncode, done.stderr, "lit-dps: error")
    module.write_text(MODULE)
    victim.resume()


CASES: dict[str, Callable[[Victim], None]] = {
    "A process is killed; the next command runs under another host name": other_host,
    "A process is killed; the clock of the next command is a day behind": clock_behind,
    "A process is suspended (SIGSTOP); a second command runs beside it": suspended,
    "The folder is copied while a trial is trained; copy and original are both resumed": copied,
    "Ctrl-C, and a second one after 0.05 s": interrupted_twice,
    "A process is killed; no file may grow during the next command (full disk)": full_disk,
    "The database is cut in half; a copy that lacks the last results is restored": truncated,
    "The user's module is edited, and the edit is undone after the refusal": edited_code,
}


def run_faults(times: int) -> list[Fault]:
    """Try each fault so many times, and return what became of it."""
    faults = [Fault(what, may_lose=case is truncated) for what, case in CASES.items()]
    with tempfile.TemporaryDirectory(prefix="lit_dps-faults-") as name:
        calm = Victim(Path(name) / "undisturbed", Fault("undisturbed"))
        calm.resume()
        undisturbed = outcomes(stored(calm.database))
        assert len(undisturbed) == POINTS and calm.fault.good, calm.fault
        for i in range(times):
            for number, fault in enumerate(faults):
                victim = Victim(Path(name) / f"{number}-{i}", fault)
                CASES[fault.what](victim)
                victim.count(undisturbed)
                fault.tried += 1
                print(fault, file=sys.stderr, flush=True)
    return faults
