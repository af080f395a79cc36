"""How a process leaves when it is asked to: at the next check, or at once."""

from __future__ import annotations

import dataclasses
import math
import os
import signal

import pytest

from lit_dps.engines.lightning import LightningEngine
from lit_dps.study.group import prepare_process
from lit_dps.study.interrupt import Interrupted, Leave, interruptible
from lit_dps.trial import Cell, Status, Trial
from tests.unit.test_engine import GOAL, PARAMS, WORKLOAD


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_waits_to_be_asked_for(signum, capfd):
    leave = Leave()
    with interruptible(leave, "{}: leaving\n"):
        leave.check()
        send(signum)
        assert leave and not leave.now
        with pytest.raises(Interrupted, match=signum.name):
            leave.check()
    assert capfd.readouterr().err == f"{signum.name}: leaving\n"


def test_a_second_signal_raises_at_once():
    leave = Leave()
    with interruptible(leave):
        send(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGINT"):
            send(signal.SIGINT)
    assert leave.now


def test_a_signal_within_a_destructor_is_not_lost():
    class Thing:
        def __del__(self):
            send(signal.SIGTERM)

    leave = Leave()
    with interruptible(leave):
        Thing()
        with pytest.raises(Interrupted):
            leave.check()


def test_another_process_may_ask():
    asked = []
    leave = Leave(lambda: bool(asked))
    leave.check()
    asked.append(True)
    with pytest.raises(Interrupted, match="another process"):
        leave.check()


def test_handlers_are_put_back():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with interruptible(Leave()):
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_goes_on_after_a_signal_and_leaves_where_it_is_asked():
    """Lightning's own handler of SIGTERM would end the process at the next batch, with exit code 0."""
    prepare_process()
    leave = Leave()

    def limit(cell):  # asked at each check
        if not leave:
            send(signal.SIGTERM)
        return math.inf

    with interruptible(leave):
        engine = LightningEngine(WORKLOAD, {**GOAL, "error": 1e-9}, limit=limit)
        trial = Trial(Cell(16, 0.0), 0, PARAMS)
        assert engine.train(trial).status is Status.INCOMPLETE
        with pytest.raises(Interrupted):
            dataclasses.replace(engine, after_check=leave.check).train(trial)
