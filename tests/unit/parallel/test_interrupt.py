"""How a process leaves when it is asked to: at the next check, or at once."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.parallel.process import (
    Interrupted,
    StopRequest,
    defer_signals,
    interruptible,
    prepare_process,
)
from lit_dps.study import run, workers
from tests.e2e.commands import FAST, environment, run_here
from tests.support.errors import raises_about
from tests.support.runs import train_one
from tests.unit.engines.test_engine import GOAL, PARAMS, WORKLOAD


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_waits_to_be_asked_for(signum, capfd):
    stop = StopRequest()
    with interruptible(stop, "{}: leaving\n"):
        stop.raise_if_requested()
        send(signum)
        assert stop and not stop.now
        with raises_about(Interrupted, signum.name):
            stop.raise_if_requested()
    assert capfd.readouterr().err == f"{signum.name}: leaving\n"


def test_workers_of_a_loader_that_the_same_signal_ends_are_no_failure():
    lost = "DataLoader worker (pid(s) 12, 13) exited unexpectedly"
    with raises_about(RuntimeError, lost), interruptible(StopRequest()):
        raise RuntimeError(lost)
    with raises_about(Interrupted, "SIGTERM"), interruptible(StopRequest()):
        send(signal.SIGTERM)
        raise RuntimeError(lost)


def test_a_second_signal_raises_at_once():
    stop = StopRequest()
    with interruptible(stop):
        send(signal.SIGTERM)
        with raises_about(Interrupted, "SIGINT"):
            send(signal.SIGINT)
    assert stop.now


def test_a_signal_within_a_destructor_is_not_lost():
    class Thing:
        def __del__(self):
            send(signal.SIGTERM)

    stop = StopRequest()
    with interruptible(stop):
        Thing()
        with pytest.raises(Interrupted):
            stop.raise_if_requested()


def test_another_process_may_ask():
    asked = []
    stop = StopRequest(lambda: bool(asked))
    stop.raise_if_requested()
    asked.append(True)
    with raises_about(Interrupted, "process"):
        stop.raise_if_requested()


def test_handlers_are_put_back():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with interruptible(StopRequest()):
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_goes_on_after_a_signal_and_leaves_where_it_is_asked():
    """Lightning's own handler of SIGTERM would end the process at the next batch, with exit code
    0."""
    prepare_process()
    stop = StopRequest()

    def limit(cell):  # asked at each check
        if not stop:
            send(signal.SIGTERM)
        return math.inf

    with interruptible(stop):
        goal, trial = {**GOAL, "error": 1e-9}, Trial(Cell(16, 0.0), 0, PARAMS)
        for lean in (True, False):
            assert (
                train_one(trial, WORKLOAD, goal, limit=limit, lean=lean).status is Status.INCOMPLETE
            )
            with pytest.raises(Interrupted):
                train_one(
                    trial,
                    WORKLOAD,
                    goal,
                    limit=limit,
                    lean=lean,
                    raise_if_stopped=stop.raise_if_requested,
                )


THIRD = """
import os, signal, sys
from lit_dps.parallel.process import Interrupted, StopRequest, interruptible

def send():
    os.kill(os.getpid(), signal.SIGINT)

class Thing:
    def __del__(self):
        send()

stop = StopRequest()
with interruptible(stop, "{}: leaving\\n"):
    send()
    if sys.argv[1] == "third":
        try:
            send()
        except Interrupted:
            stop.reported = sys.argv[2] == "reported"
            send()
    else:
        Thing()
print("went on")
"""


@pytest.mark.parametrize(
    ("kind", "reported", "lines"),
    [("third", "no", 2), ("third", "reported", 1), ("destructor", "no", 2)],
)
def test_a_signal_that_cannot_be_raised_ends_the_process_with_one_line(kind, reported, lines):
    argv = [sys.executable, "-c", THIRD, kind, reported]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment())
    said = [line for line in done.stderr.splitlines() if line]
    assert (done.returncode, done.stdout, len(said)) == (ExitCode.INTERRUPTED, "", lines), (
        done.stderr
    )
    assert said[0] == "SIGINT: leaving"


@pytest.mark.long
@pytest.mark.parametrize("when", ["counting", "reporting"])
def test_a_second_signal_while_the_first_is_counted_is_one_line(tmp_path, monkeypatch, when):
    """The first comes while trials are trained; the second while what is left is counted, or its
    line is printed."""
    read_study = run.read_study

    def train_remaining(setup, workers, stop, on_event):
        send(signal.SIGINT)
        if when == "counting":
            monkeypatch.setattr(run, "read_study", read_while_signalled)
            stop.raise_if_requested()
        yield from ()

    def read_while_signalled(url, name):
        send(signal.SIGINT)
        return read_study(url, name)

    def publish(*args):
        send(signal.SIGINT)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr(run, "train_remaining", train_remaining)
    if when == "reporting":
        monkeypatch.setattr(run, "publish", publish)
    done = run_here(tmp_path, "study", "--config", FAST, "--study.workers", 1)
    assert done.returncode == ExitCode.INTERRUPTED, done.stderr
    assert done.stdout.count("SIGINT") == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert "resumes" in done.stdout


IMPORTING = """
import os, signal, sys
from lit_dps import cli
if sys.argv[1] == "importing":
    def importing(name):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:  # as some libraries do while they are imported
            pass
    cli.import_module = importing
else:
    class Verb:
        def main(argv):
            raise KeyboardInterrupt
    cli.import_module = lambda name: Verb
signum = sys.argv[2]
sys.argv[1:] = ["configs"]
code = cli.main()
os.kill(os.getpid(), int(signum))  # once more, while the process ends
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("when", "second"),
    [("importing", signal.SIGINT), ("running", signal.SIGINT), ("running", signal.SIGTERM)],
)
def test_an_interrupt_of_a_command_is_one_line_and_130(when, second):
    argv = [sys.executable, "-c", IMPORTING, when, str(int(second))]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment())
    assert done.returncode == ExitCode.INTERRUPTED
    assert done.stderr.strip() == "lit-dps: interrupted"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_in_a_block_are_handled_at_its_end_in_order(signum):
    stop = StopRequest()
    done = []
    with interruptible(stop):
        with raises_about(Interrupted, "SIGTERM"), defer_signals():
            send(signum)
            send(signal.SIGTERM)
            assert not stop
            done.append("block")
        assert (stop.signal, stop.now, done) == (signum.name, True, ["block"])


def test_a_worker_whose_start_is_interrupted_twice_is_ended(monkeypatch):
    started = []

    class Worker:
        pid = 17

        def join(self, timeout):
            started.append("joined")

        def kill(self):
            started.append("killed")

    def start(target, name, args, environment):
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        started.append(name)
        return Worker()

    monkeypatch.setattr(workers.processes, "start", start)
    stop = StopRequest()
    setup = SimpleNamespace(
        ranks=1, workload=SimpleNamespace(trainer={"accelerator": "cpu"}), config=lambda: {}
    )
    with interruptible(stop), raises_about(Interrupted, "SIGTERM"):
        next(workers.work_in_processes(setup, 2, stop))
    assert started == ["worker 0", "joined", "killed"]
