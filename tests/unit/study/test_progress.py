"""The progress line: its cells and its time left, which does not grow by itself."""

from __future__ import annotations

import io

from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.study.progress import Progress, ProgressLog, RunPlan
from lit_dps.study.progress_event import ProgressEvent
from lit_dps.study.remaining_time import SteadyEstimate, TimeRemaining, rounded_seconds

CELLS = [Cell(4, 0.0), Cell(64, 0.0)]


def result(cell: Cell, point: int, steps: int | None, seconds: float = 10.0) -> TrialResult:
    status = Status.INCOMPLETE if steps is None else Status.COMPLETE
    return TrialResult(Trial(cell, point), status, steps, seconds=seconds)


def test_counts_best_and_time_left(golden):
    stream = io.StringIO()
    earlier = {CELLS[0]: [result(CELLS[0], 0, 160)]}
    now = [0.0]
    counted = Progress(RunPlan(dict.fromkeys(CELLS, 400), 3), earlier, now=lambda: now[0])
    progress = ProgressLog(counted, stream, seconds=0.0)
    lines = [progress.line()]
    # How fast this run is cannot be known from an earlier one.
    assert counted.time_remaining() is None
    progress.on_event(ProgressEvent(1, Trial(CELLS[0], 1)))
    now[0] = 12.0
    progress.update(result(CELLS[0], 1, 96))
    lines.append(progress.line())
    assert counted.finished() == {CELLS[0]: 2, CELLS[1]: 0} and counted.k_star(CELLS[0]) == 96
    # Eight steps a second. A trial takes 128 steps = 16 s. B = 64 is too far from B = 4.
    seconds, is_lower_bound = counted.time_remaining()
    assert is_lower_bound and 16 < seconds < 2 * 16
    progress.update(result(CELLS[0], 2, None))
    lines.append(progress.line())
    assert counted.k_star(CELLS[1]) is None
    progress.on_event(ProgressEvent(1, Trial(CELLS[1], 0)))
    now[0] = 44.0
    progress.update(result(CELLS[1], 0, 32))  # now its own batch size is known: one step a second
    lines.append(progress.line())
    assert counted.time_remaining() == (2 * 32, False)
    golden.check("study/progress.txt", "\n".join(lines) + "\n")
    progress.close()
    assert stream.getvalue().count("\n") == 4 and "\r" not in stream.getvalue()


def test_nothing_known_yet_and_a_quiet_stream(golden):
    stream = io.StringIO()
    now = [0.0]
    counted = Progress(RunPlan(dict.fromkeys(CELLS, 400), 1, 1.0), now=lambda: now[0])
    progress = ProgressLog(counted, stream, seconds=1000)
    assert counted.time_remaining() is None
    assert progress.line().endswith("remaining time unknown until a trial meets the goal")
    for cell in CELLS:
        progress.on_event(ProgressEvent(1, Trial(cell, 0), 8))
        now[0] += 4
        progress.update(result(cell, 0, 16))
    progress.close()
    golden.check("study/progress-quiet.txt", stream.getvalue())


def stopped(point: int, step: int) -> TrialResult:
    curve = {"step": [step // 2, step], "val_error": [0.5, 0.4]}
    return TrialResult(Trial(CELLS[0], point), Status.OUTRACED, None, curve, seconds=10.0)


def test_a_trial_that_has_to_go_on_is_not_finished(golden):
    now = [0.0]
    counted = Progress(RunPlan(dict.fromkeys(CELLS[:1], 400), 3, race_factor=2), now=lambda: now[0])
    progress = ProgressLog(counted, io.StringIO())
    for point in range(3):
        progress.on_event(ProgressEvent(1, Trial(CELLS[0], point)))
        now[0] += 10
        progress.update(stopped(point, 80))
    # All pause until one is complete.
    assert counted.finished() == {CELLS[0]: 0} and counted.time_remaining() is None
    lines = [progress.line()]
    progress.on_event(ProgressEvent(1, Trial(CELLS[0], 0)))
    now[0] += 12
    progress.update(result(CELLS[0], 0, 96))
    # Two trials remain, of 96 to 192 steps at 8 steps a second.
    assert counted.finished() == {CELLS[0]: 1}
    seconds, is_lower_bound = counted.time_remaining()
    assert 2 * 96 / 8 < seconds < 2 * 192 / 8 and not is_lower_bound
    progress.update(stopped(1, 192))
    assert counted.finished() == {CELLS[0]: 2}
    progress.update(result(CELLS[0], 2, 160))
    assert counted.finished() == {CELLS[0]: 3} and counted.time_remaining() == (0, False)
    lines.append(progress.line())
    golden.check("study/progress-raced.txt", "\n".join(lines) + "\n")


def test_a_resumed_study_with_every_k_star_does_not_wait_for_one():
    plan = RunPlan(dict.fromkeys(CELLS, 400), 2, 1.0)
    counted = Progress(plan, {cell: [result(cell, 0, 16)] for cell in CELLS})
    assert counted.remaining_time_text() == "unknown until a trial has run for some time"
    assert Progress(plan).remaining_time_text() == "unknown until a trial meets the goal"


def test_running_cells_are_named_with_their_trials():
    sizes = (1, 2, 3, 4, 5)
    counted = Progress(RunPlan(dict.fromkeys([Cell(b) for b in sizes], 400), 3, at_a_time=6))
    assert counted.running_text() == "0 of 6"
    for cell, point in ((Cell(2), 0), (Cell(2), 1), (Cell(1), 0)):
        counted.on_event(ProgressEvent(1, Trial(cell, point)))
    assert counted.running_text() == f"3 of 6 ({Cell(1)}, {Cell(2)} x2)"
    for cell in (Cell(3), Cell(4), Cell(5)):
        counted.on_event(ProgressEvent(1, Trial(cell, 0)))
    assert counted.running_text().endswith(f"{Cell(3)}, 2 more cells)")


def estimates(*seconds: float):
    """Return a function that gives one estimate of the remaining time after the other."""
    return iter([TimeRemaining(each, False) for each in seconds]).__next__


def test_the_time_left_grows_only_when_a_trial_has_ended():
    now = [0.0]
    left = SteadyEstimate(estimates(100, 130, 50, 200, 300), lambda: now[0])
    assert left.remaining() == (100, False)
    now[0] = 4
    assert left.remaining() == (96, False), "it counts down between two estimates"
    now[0] = 10
    assert left.remaining() == (90, True), "a longer estimate only makes it a lower bound"
    now[0] = 20
    assert left.remaining() == (50, False), "a shorter one does"
    left.expire()  # a trial has ended
    assert left.remaining() == (200, False)
    now[0] = 221
    assert left.remaining() == (300, False), "the end that was shown has passed"


def test_a_remaining_time_is_rounded_up():
    assert [rounded_seconds(x) for x in (0, 1, 299, 301, 3700)] == [0, 5, 300, 360, 3900]
