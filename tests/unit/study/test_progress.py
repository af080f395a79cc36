"""The progress line, and what it says of the time left."""

from __future__ import annotations

import io

from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.study.progress import Progress, ProgressLog, RunPlan

CELLS = [Cell(4, 0.0), Cell(64, 0.0)]


def result(cell: Cell, point: int, steps: int | None, seconds: float = 10.0) -> TrialResult:
    status = Status.INCOMPLETE if steps is None else Status.COMPLETE
    return TrialResult(Trial(cell, point), status, steps, seconds=seconds)


def remaining(progress: ProgressLog) -> tuple[int, bool]:
    """Return the seconds that remain, and whether they are a lower bound."""
    time_remaining = progress.progress.time_remaining(progress.progress.finished())
    return round(time_remaining.seconds), time_remaining.is_lower_bound


def test_counts_best_and_time_left(golden):
    stream = io.StringIO()
    counted = Progress(RunPlan(CELLS, 3, workers=2), {CELLS[0]: [result(CELLS[0], 0, 160)]})
    progress = ProgressLog(counted, stream, seconds=0.0)
    lines = [progress.line()]
    assert remaining(progress) == (25, False)  # five trials of 10 s by two workers
    progress.update(result(CELLS[0], 1, 96))
    lines.append(progress.line(CELLS[0]))
    assert counted.finished() == {CELLS[0]: 2, CELLS[1]: 0} and counted.k_star(CELLS[0]) == 96
    progress.update(result(CELLS[0], 2, None))
    lines.append(progress.line(CELLS[1]))
    assert counted.k_star(CELLS[1]) is None and remaining(progress) == (15, False)
    progress.update(result(CELLS[1], 0, 32, seconds=100))  # now its own batch size is known
    lines.append(progress.line())
    assert remaining(progress) == (100, False)
    golden.check("study/progress.txt", "\n".join(lines) + "\n")
    progress.close()
    assert stream.getvalue().count("\n") == 4 and "\r" not in stream.getvalue()


def test_nothing_known_yet_and_a_quiet_stream(golden):
    stream = io.StringIO()
    progress = ProgressLog(Progress(RunPlan(CELLS, 1, workers=1)), stream, seconds=1000)
    assert progress.progress.time_remaining(progress.progress.finished()) is None
    assert progress.line().endswith("?")
    for cell in CELLS:
        progress.update(result(cell, 0, 16))
    progress.close()
    golden.check("study/progress-quiet.txt", stream.getvalue())


def stopped(point: int, step: int) -> TrialResult:
    curve = {"step": [step // 2, step], "val_error": [0.5, 0.4]}
    return TrialResult(Trial(CELLS[0], point), Status.OUTRACED, None, curve, seconds=10.0)


def test_a_trial_that_has_to_go_on_is_not_finished(golden):
    counted = Progress(RunPlan(CELLS[:1], 3, workers=1, race_factor=2))
    progress = ProgressLog(counted, io.StringIO())
    for point in range(3):
        progress.update(stopped(point, 80))
    # All pause until one is complete.
    assert counted.finished() == {CELLS[0]: 0} and remaining(progress) == (30, True)
    lines = [progress.line()]
    progress.update(result(CELLS[0], 0, 96))
    # Two like the one that ended remain: the time is no bound any more.
    assert counted.finished() == {CELLS[0]: 1} and remaining(progress) == (20, False)
    progress.update(stopped(1, 192))
    assert counted.finished() == {CELLS[0]: 2}
    progress.update(result(CELLS[0], 2, 160))
    assert counted.finished() == {CELLS[0]: 3} and remaining(progress) == (0, False)
    lines.append(progress.line())
    golden.check("study/progress-raced.txt", "\n".join(lines) + "\n")
