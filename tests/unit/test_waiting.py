"""The line that says how far a long computation is."""

from __future__ import annotations

import sys

import pytest

from lit_dps.analysis.waiting import ProgressLine


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The seconds that the line sees, as a list of one."""
    seconds = [0.0]
    monkeypatch.setattr("lit_dps.analysis.waiting.time.monotonic", lambda: seconds[0])
    return seconds


def written(clock, capsys, seconds, **arguments) -> str:
    """What is written of an update at each of these seconds, the n-th with n done."""
    line = ProgressLine("drawn", 9, **arguments)
    for done, now in enumerate(seconds, 1):
        clock[0] = now
        line.update(done)
    line.end()
    return capsys.readouterr().err


def test_a_terminal_sees_one_line_that_moves_on(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    moved = written(clock, capsys, [1.0, 2.0, 3.0, 4.5], in_logs=False)
    assert moved == "\rdrawn: 2 of 9\rdrawn: 4 of 9\n"


def test_a_log_has_a_line_now_and_then_or_none(clock, capsys):
    seconds = [1.0, 2.0, 10.0, 32.0]
    assert written(clock, capsys, seconds) == "drawn: 2 of 9\ndrawn: 4 of 9\n"
    clock[0] = 0.0
    assert written(clock, capsys, seconds, in_logs=False) == ""


def test_a_short_wait_is_silent(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert written(clock, capsys, [0.5, 1.9]) == ""
