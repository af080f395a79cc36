"""The line that says how far a long computation is."""

from __future__ import annotations

import sys

import pytest

from lit_dps.core.progress_line import (
    FIRST_SECONDS,
    ProgressLine,
    StageLine,
    one_wait,
    print_wrapped,
    replace_line,
    with_progress,
)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The seconds that the line sees, as a list of one."""
    seconds = [0.0]
    monkeypatch.setattr("lit_dps.core.progress_line.time.monotonic", lambda: seconds[0])
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
    assert moved == "\rdrawn: 2 of 9\x1b[K\rdrawn: 4 of 9\x1b[K\r\x1b[K"


def test_a_log_has_a_line_now_and_then_or_none(clock, capsys):
    seconds = [1.0, 2.0, 10.0, 32.0]
    assert written(clock, capsys, seconds) == "drawn: 2 of 9\ndrawn: 4 of 9\n"
    clock[0] = 0.0
    assert written(clock, capsys, seconds, in_logs=False) == ""


def test_a_short_wait_is_silent(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert written(clock, capsys, [0.5, 1.9]) == ""


def test_parts_of_one_wait_share_its_first_seconds(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock[0] = 1.8
    with one_wait(0.0):
        assert written(clock, capsys, [1.9, 2.0]) == "", "no part this short has a line"
        assert (
            written(clock, capsys, [2.4, 2.6, 4.7])
            == "\rdrawn: 2 of 9\x1b[K\rdrawn: 3 of 9\x1b[K\r\x1b[K"
        )
    assert written(clock, capsys, [5.5, 6.5]) == "", "a wait of its own again"


def test_items_pass_a_line_that_counts_those_done(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for now in with_progress("cells read", [1.0, 3.0, 9.0]):
        clock[0] = now
    assert capsys.readouterr().err == "\rcells read: 2 of 3\x1b[K\r\x1b[K"


def test_a_stage_prints_lines_in_a_log_and_nothing_if_it_is_short(clock, capsys):
    with StageLine("probe 1: B = 8", 90.0) as line:
        for second in range(65):
            clock[0] = second
            line.update(f"step {second}")
    assert capsys.readouterr().err.splitlines() == [
        "probe 1: B = 8: step 2, 2 s of at most 90 s",
        "probe 1: B = 8: step 32, 32 s of at most 90 s",
        "probe 1: B = 8: step 62, 62 s of at most 90 s",
    ]
    with StageLine("short") as line:
        clock[0] += FIRST_SECONDS / 2
        line.update("step 1")
    assert capsys.readouterr().err == ""


def test_a_stage_rewrites_its_line_at_a_terminal_and_removes_it(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    with StageLine("training") as line:
        for second in (1.0, 3.0, 3.1, 4.0):
            clock[0] = second
            line.update(f"step {second:g}")
    assert capsys.readouterr().err == (
        "\rtraining: step 3, 3\x1b[K\rtraining: step 4, 4\x1b[K\r\x1b[K"
    )


def test_a_terminal_gets_lines_that_fit_its_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    text = "  probe 1: a step of B = 8 takes 3 ms"
    print_wrapped(text)
    assert capsys.readouterr().err == f"{text}\n", "a log has one line"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_wrapped(text)
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["  probe 1: a step of", "    B = 8 takes 3 ms"]
    monkeypatch.setenv("COLUMNS", "12")
    replace_line("trials logged: 2 of 9")
    assert capsys.readouterr().err == "\rtrials logg\x1b[K"
