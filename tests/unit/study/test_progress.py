"""The progress line, and what it says of the time left."""

from __future__ import annotations

import io

from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.study.progress import Progress, ProgressLog, RunPlan

CELLS = [Cell(4, 0.0), Cell(64, 0.0)]


def result(cell: Cell, point: int, steps: int | None, seconds: float = 10.0) -> TrialResult:
    status = Status.INCOMPLETE if steps is None else Status.COMPLETE
    return TrialResult(Trial(cell, point), status, steps, seconds=seconds)


def test_counts_best_and_time_left():
    stream = io.StringIO()
    counted = Progress(RunPlan(CELLS, 3, workers=2), {CELLS[0]: [result(CELLS[0], 0, 160)]})
    progress = ProgressLog(counted, stream, seconds=0.0)
    assert (
        progress.line() == "cells 0/2  trials 1/6  time left 0:00:25"
    )  # five trials of 10 s by two workers
    progress.update(result(CELLS[0], 1, 96))
    assert progress.line(CELLS[0]) == "cells 0/2  trials 2/6  B=4 S=0: best K 96  time left 0:00:20"
    progress.update(result(CELLS[0], 2, None))
    assert progress.line(CELLS[1]) == "cells 1/2  trials 3/6  B=64 S=0: best K -  time left 0:00:15"
    progress.update(result(CELLS[1], 0, 32, seconds=100))  # now its own batch size is known
    assert progress.line() == "cells 1/2  trials 4/6  time left 0:01:40"
    progress.close()
    assert stream.getvalue().count("\n") == 4 and "\r" not in stream.getvalue()


def test_nothing_known_yet_and_a_quiet_stream():
    stream = io.StringIO()
    progress = ProgressLog(Progress(RunPlan(CELLS, 1, workers=1)), stream, seconds=1000)
    assert progress.line() == "cells 0/2  trials 0/2  time left ?"
    for cell in CELLS:
        progress.update(result(cell, 0, 16))
    progress.close()
    first, last = stream.getvalue().splitlines()
    assert first.startswith("cells 1/2")
    assert last == "cells 2/2  trials 2/2  time left 0:00:00"


def stopped(point: int, step: int) -> TrialResult:
    curve = {"step": [step // 2, step], "val_error": [0.5, 0.4]}
    return TrialResult(Trial(CELLS[0], point), Status.OUTRACED, None, curve, seconds=10.0)


def test_a_trial_that_has_to_go_on_is_not_finished():
    counted = Progress(RunPlan(CELLS[:1], 3, workers=1, race_factor=2))
    progress = ProgressLog(counted, io.StringIO())
    for point in range(3):
        progress.update(stopped(point, 80))
    assert progress.line() == "cells 0/1  trials 0/3  time left at least 0:00:30", (
        "all pause until one is complete"
    )
    progress.update(result(CELLS[0], 0, 96))
    assert progress.line().endswith("trials 1/3  time left 0:00:20"), (
        "two like the one that ended: no bound any more"
    )
    progress.update(stopped(1, 192))
    assert "trials 2/3" in progress.line()
    progress.update(result(CELLS[0], 2, 160))
    assert progress.line() == "cells 1/1  trials 3/3  time left 0:00:00"
