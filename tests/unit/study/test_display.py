"""The live display: what stands on a terminal of 60 and of 120 columns, and how workers tell of
their trials."""

from __future__ import annotations

import io
import os
import re
import time

import pytest
from rich.console import Console

from lit_dps.core.attempt import Attempt, Validation
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.parallel.process import StopRequest
from lit_dps.study.display import LEAVING, Display, rows_of_line
from lit_dps.study.progress import Progress, ProgressLog, RunPlan
from lit_dps.study.progress_event import ProgressEvent, ProgressReporter

SIZES, GOAL = [2**i for i in range(1, 15)], Goal(0.08, 16, 4000)


def display(
    width: int,
    height: int = 30,
    sizes=tuple(SIZES),
    sparsities=(0.0, 0.9),
    points: int = 2,
    now=time.monotonic,
) -> Display:
    cells = [Cell(b, s) for b in sizes for s in sparsities]
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None
    )
    progress = Progress(RunPlan(dict.fromkeys(cells, GOAL.max_steps), points, at_a_time=2), now=now)
    return Display(progress, "quickstart", GOAL, StopRequest(), console)


def result(cell: Cell, point: int, steps: int | None, seconds: float = 10.0) -> TrialResult:
    status = Status.INCOMPLETE if steps is None else Status.COMPLETE
    return TrialResult(Trial(cell, point), status, steps, seconds=seconds)


def lines(shown: Display) -> list[str]:
    with shown.console.capture() as captured:
        shown.console.print(shown.render())
    return [line.rstrip() for line in captured.get().splitlines()]


def filled(width: int, **kw) -> Display:
    now = [0.0]
    shown = display(width, now=lambda: now[0], **kw)
    for cell, steps in (
        (Cell(2, 0.0), (800, 640)),
        (Cell(2, 0.9), (None, None)),
        (Cell(4, 0.0), (320,)),
    ):
        for point, k in enumerate(steps):
            shown.on_event(ProgressEvent(1, Trial(cell, point)))
            now[0] += 10
            shown.update(result(cell, point, k))
    shown.update(result(Cell(4, 0.9), 0, None))
    shown.on_event(ProgressEvent(1, Trial(Cell(4, 0.9), 1), 48, 0.25, exact=False))
    shown.on_event(ProgressEvent(2, Trial(Cell(4, 0.0), 1), 1600, 0.1125))
    return shown


@pytest.mark.parametrize("width", [60, 120])
def test_bar_times_k_star_of_each_cell_and_running_trials(width):
    said = lines(filled(width))
    assert max(map(len, said)) <= width
    assert (
        said[0].startswith("quickstart ")
        and said[0].endswith(" 6/56 trials")
        and len(said[0]) == width
    )
    # One trial of B = 4 remains at S = 0, of 320 steps at 32 a second. No pruned trial has ended.
    times = re.findall(r"\d:\d\d:\d\d", said[1])
    assert times[0] == "0:00:00" and " 2 of 2 running" in said[1] and "at least" in said[1]
    table = [line.split() for line in said[3 : said.index("", 3)]]
    heads = [line[1:] for line in table if line[0] == "K*"]
    assert sum(heads, []) == [f"B={b}" for b in SIZES] and len(heads) == (1 if width == 120 else 2)
    dense, sparse = (
        [x for line in table if line[0] == f"S={s}" for x in line[1:]] for s in ("0", "0.9")
    )
    assert dense == ["640", "<=320", *"." * 12] and sparse == ["-", "1/2", *"." * 12]
    rows = [line.split() for line in said[said.index("", 3) + 1 :]]
    assert rows == [
        ["running", "step", "best", "val_error"],
        ["B=4", "S=0", "sample", "1", "1,600", "0.1125"],
        [
            "B=4",
            "S=0.9",
            "sample",
            "1",
            "48",
            ">=",
            "0.25",
        ],  # a check that stopped early knows a bound
    ]


def test_a_narrow_terminal_shows_the_whole_line_of_times():
    said = lines(display(60))
    shown = " ".join(said[1 : said.index("")])
    assert len(shown) > 60 and shown.endswith(", 0 of 2 running")


@pytest.mark.parametrize(("width", "height"), [(60, 24), (40, 12), (200, 10), (20, 5)])
def test_a_large_study_fits_the_screen(width, height):
    shown = filled(width, height=height, sparsities=tuple(i / 100 for i in range(91)))
    for point in range(20):
        shown.on_event(ProgressEvent(3, Trial(Cell(8, 0.5), point), 16, 0.5))
    said = lines(shown)
    assert all(len(line) <= width for line in said)
    assert len(said) < height or height < 20, (
        "K* and the trials that run are told of as many as there is room for"
    )
    if height > 20:
        assert " 14 more" in "\n".join(said) and "more series" in "\n".join(said)


def test_trials_that_end_or_whose_worker_is_lost_are_gone_and_the_end_is_the_bar():
    shown = filled(60)
    shown.update(result(Cell(4, 0.0), 1, 336))
    text = "\n".join(lines(shown))
    assert str(Trial(Cell(4, 0.0), 1)) not in text and str(Trial(Cell(4, 0.9), 1)) in text
    shown.on_event(ProgressEvent(1))
    assert "sample" not in "\n".join(lines(shown))
    shown.stop.signal = "SIGINT"
    assert lines(shown)[-1] == LEAVING.format("SIGINT")
    shown.show()
    assert shown.stop.shown
    shown.close()
    assert not shown.stop.shown and len(lines(shown)) == 2
    drawn = shown.console.file.getvalue()
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1, "the cursor is back"


def test_k_star_at_the_first_check_is_a_bound():
    shown = display(60, sizes=(8,), sparsities=(0.0,), points=1)
    shown.update(result(Cell(8, 0.0), 0, 16))
    assert "S=0  <=16" in "\n".join(lines(shown))


def test_k_star_is_a_bound_while_failed_trials_may_lower_it():
    """Failed trials run again when the study is resumed."""
    shown = display(60, sizes=(8,), sparsities=(0.0,), points=3)
    shown.update(result(Cell(8, 0.0), 0, 160))
    for point in (1, 2):
        shown.update(TrialResult(Trial(Cell(8, 0.0), point), Status.FAILED, None))
    said = lines(shown)
    assert "S=0  <=160" in "\n".join(said) and ", 2 failed" in said[1]
    assert "  2 failed  " in ProgressLog(shown.progress).line()
    for point in (1, 2):
        shown.update(result(Cell(8, 0.0), point, 320))
    assert "S=0  160" in "\n".join(lines(shown))
    assert "failed" not in ProgressLog(shown.progress).line()


def test_a_reporter_tells_the_best_so_far_now_and_then():
    seen: list[ProgressEvent] = []
    run = Attempt(Trial(Cell(8), 3), GOAL)
    run.enable_early_validations()
    ProgressReporter(seen.append, seconds=0.0).watch(run)
    for step, (found, exact) in enumerate(
        [(0.5, True), (0.3, False), (0.4, True), (float("nan"), True)], 1
    ):
        run.record(Validation(16 * step, found, exact, None, True))
    assert [(s.step, s.best, s.exact) for s in seen] == [
        (0, None, True),
        (16, 0.5, True),
        (32, 0.3, False),
        (48, 0.3, False),
        (64, 0.3, False),
    ]
    assert {s.worker for s in seen} == {os.getpid()} and all(s.trial == run.trial for s in seen)
    rare: list[ProgressEvent] = []
    reporter = ProgressReporter(rare.append, seconds=3600.0)
    run = Attempt(Trial(Cell(8), 3), Goal(0.9, 16, 4000, "val/accuracy", at_least=True))
    reporter.watch(run)
    for step in (16, 32):
        run.record(Validation(step, step / 100, True, None, True))
    assert [(s.step, s.best) for s in rare] == [(0, None), (16, 0.16)]


def test_a_reporter_tells_where_a_resumed_attempt_began():
    seen: list[ProgressEvent] = []
    attempt = Attempt(Trial(Cell(8), 3), GOAL)
    for step in (16, 32):
        attempt.record(Validation(step, 0.5, True, None, True))
    ProgressReporter(seen.append, seconds=0.0).watch(attempt)
    for step in (48, 64):
        attempt.record(Validation(step, 0.5, True, None, True))
    assert [(event.step, event.first_step) for event in seen] == [(0, 0), (48, 32), (64, 32)]


def test_a_narrower_terminal_has_no_old_lines(monkeypatch):
    monkeypatch.delenv("XTERM_VERSION", raising=False)
    shown = display(60, sizes=(8,), sparsities=(0.0,), points=1)
    shown.show()
    shown._live.refresh()
    lengths = shown._live._line_lengths
    assert lengths[0] == 60 and len(lengths) > 2
    shown.console.width = 20
    stream = shown.console.file
    before = len(stream.getvalue())
    shown._live.refresh()
    drawn = stream.getvalue()[before:]
    # The bar of 60 columns takes three rows of 20 columns.
    rows = sum(rows_of_line(length, 20) for length in lengths)
    assert rows_of_line(lengths[0], 20) == 3
    assert drawn.count("\x1b[1A") == rows - 1
    shown.close()


@pytest.mark.parametrize(("length", "rows"), [(0, 1), (20, 1), (21, 2), (60, 3)])
def test_rows_of_a_line(length, rows):
    assert rows_of_line(length, 20) == rows
