"""Runs the project's commands as a user does: a process of its own, in a folder of its own.

The processes are forked from one that has imported everything (`tests.e2e.forks`). What an
interpreter of its own does is tested by `real` in test_commands.py, test_scripts.py and
test_ddp.py.
"""

from __future__ import annotations

import io
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from tests.e2e.forks import Command

ROOT = Path(__file__).parents[2]
FAST = Path(__file__).with_name("fast.yaml")
STOPPED_STUDY = Path(__file__).with_name("stopped_study.py")
FAST_TRIALS = {
    (f"fast | B={b} S={s:g}", str(point))
    for b in (16, 64)
    for s in (0.0, 0.5)
    for point in range(4)
}


def command(*args: object) -> list[str]:
    """The argument list of `python cli.py ...`."""
    return [sys.executable, str(ROOT / "cli.py"), *map(str, args)]


def environment() -> dict[str, str]:
    """The environment with one thread a process and no data folder of the caller's."""
    free = {key: value for key, value in os.environ.items() if key != "LIT_DPS_DATA"}
    return free | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(folder: Path, *args: object, timeout: float = 300) -> subprocess.CompletedProcess:
    """Runs a command in a folder to its end."""
    return run_forked(folder, command(*args)[1:], timeout)


def run_forked(folder: Path, argv: list[str], timeout: float = 300) -> subprocess.CompletedProcess:
    """Runs what would follow `python` in a folder to its end.

    Raises:
        AssertionError: if it does not end in time; with the stacks of all its processes.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Command(argv, folder, environment(), out, err, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(5)  # for the stacks
            err.seek(0)
            stacks = [line for line in err if not line.startswith("Extension modules: ")]
            raise AssertionError(f"{late}\n{''.join(stacks)}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read(), err.read())


def real(folder: Path, argv: list[str], timeout: float = 300) -> subprocess.CompletedProcess:
    """The same in an interpreter of its own."""
    command = [sys.executable, *argv]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def run_here(folder: Path, *args: object) -> subprocess.CompletedProcess:
    """The same in this process, which saves the seconds that the imports take."""
    from lit_dps.cli import main

    out, err, argv = io.StringIO(), io.StringIO(), ["lit-dps", *map(str, args)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.delenv("LIT_DPS_DATA", raising=False)
        patch.setattr(sys, "argv", argv)
        code = main(argv[1:])
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def start(folder: Path, *args: object) -> Command:
    """Starts a command in a folder, as the leader of a process group."""
    return start_forked(folder, command(*args)[1:])


def start_forked(folder: Path, argv: list[str]) -> Command:
    """The same of what would follow `python`."""
    with (folder / "output.txt").open("a") as output:
        return Command(argv, folder, environment(), output, output, start_new_session=True)


def results(database: Path) -> Counter:
    """How often each (cell's study, point) has a stored result of a finished trial."""
    if not database.exists():
        return Counter()
    query = """
        select s.study_name, p.value_json from trials t join studies s using (study_id)
        join trial_user_attributes r on r.trial_id = t.trial_id and r.key = 'result'
        join trial_user_attributes p on p.trial_id = t.trial_id and p.key = 'point'
        where t.state in ('COMPLETE', 'PRUNED', 'FAIL')"""
    with closing(sqlite3.connect(database, timeout=30)) as connection:
        try:
            return Counter(connection.execute(query).fetchall())
        except sqlite3.OperationalError:  # the tables are not made yet
            return Counter()


def wait_for_results(database: Path, n: int, process: Command, timeout: float = 200) -> None:
    """Waits until n results are stored."""
    end = time.monotonic() + timeout
    while len(results(database)) < n:
        assert process.poll() is None, "the study ended before it could be interrupted"
        assert time.monotonic() < end, "the study stores nothing"
        time.sleep(0.05)


def is_stopped(pid: int) -> bool:
    """Return True if a process has received SIGSTOP."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


def start_until_claim(folder: Path, claim: int, *args: object, timeout: float = 300) -> Command:
    """Start a command of one worker, and return it when it has stopped itself at a claim.

    Without a stack, it has then stored one result less than it has claimed trials. SIGCONT lets it
    continue.

    Args:
        folder: Of the command.
        claim: The number of the claim, from 1 (`tests.e2e.stopped_study`).
        args: The command.
        timeout: Seconds.
    """
    process = start_forked(folder, [str(STOPPED_STUDY), str(claim), *map(str, args)])
    end = time.monotonic() + timeout
    while not is_stopped(process.pid):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError((folder / "output.txt").read_text())
        time.sleep(0.05)
    return process


def table(folder: Path, study: str = "fast") -> str:
    """The table that a study ended with, but for the notes on who trained its trials."""
    lines = (folder / "mlruns" / "figures" / study / "table.txt").read_text().splitlines()
    on_training = (
        "equals single training",
        "equals one process",
        "compare step times of one loop only",
        "did not run in the fastest loop",
    )
    kept = [line for line in lines if not any(words in line for words in on_training)]
    return "\n".join(kept).rstrip()
