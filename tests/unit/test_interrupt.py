"""How a process leaves when it is asked to: at the next check, or at once."""

from __future__ import annotations

import math
import os
import signal

import pytest

from lit_dps.runtime import Interrupted, StopRequest, interruptible, prepare_process
from lit_dps.trial import Cell, Status, Trial
from tests.unit.runs import train_one
from tests.unit.test_engine import GOAL, PARAMS, WORKLOAD


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_waits_to_be_asked_for(signum, capfd):
    stop = StopRequest()
    with interruptible(stop, "{}: leaving\n"):
        stop.check()
        send(signum)
        assert stop and not stop.now
        with pytest.raises(Interrupted, match=signum.name):
            stop.check()
    assert capfd.readouterr().err == f"{signum.name}: leaving\n"


def test_a_second_signal_raises_at_once():
    stop = StopRequest()
    with interruptible(stop):
        send(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGINT"):
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
            stop.check()


def test_another_process_may_ask():
    asked = []
    stop = StopRequest(lambda: bool(asked))
    stop.check()
    asked.append(True)
    with pytest.raises(Interrupted, match="another process"):
        stop.check()


def test_handlers_are_put_back():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with interruptible(StopRequest()):
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_goes_on_after_a_signal_and_leaves_where_it_is_asked():
    """Lightning's own handler of SIGTERM would end the process at the next batch, with exit code 0."""
    prepare_process()
    stop = StopRequest()

    def limit(cell):  # asked at each check
        if not stop:
            send(signal.SIGTERM)
        return math.inf

    with interruptible(stop):
        goal, trial = {**GOAL, "error": 1e-9}, Trial(Cell(16, 0.0), 0, PARAMS)
        for lean in (True, False):
            assert train_one(trial, WORKLOAD, goal, limit=limit, lean=lean).status is Status.INCOMPLETE
            with pytest.raises(Interrupted):
                train_one(trial, WORKLOAD, goal, limit=limit, lean=lean, at_check=stop.check)
