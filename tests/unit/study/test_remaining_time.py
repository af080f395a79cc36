"""The remaining time of a study: expected ends of trials, and replays of a made-up study."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from benchmarks.time_left import End, Estimate, Recorded, Replay
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.study.progress_event import ProgressEvent
from lit_dps.study.remaining_time import StepRates, expected_ends

COMPLETE, INCOMPLETE, INFEASIBLE = Status.COMPLETE, Status.INCOMPLETE, Status.INFEASIBLE


def mean_below(mean: float, limit: float) -> float:
    """Return the mean of an exponential distribution that is cut at a limit."""
    return mean * (1 - math.exp(-limit / mean))


@pytest.mark.parametrize(
    ("ended", "censored", "starts", "expected"),
    [
        ([], [], [0.0], [100.0]),  # nothing is known but the limit
        # Beyond the last end: (half of the first end + the steps since it) over the ends.
        ([20.0, 60.0], [], [0.0, 30.0, 80.0], [40.0, 60.0, 80 + mean_below(25, 20)]),
        # One of four ended at 20; the others have gone 30 steps further.
        (
            [20.0],
            [50.0] * 3,
            [0.0, 50.0],
            [20 + 0.75 * mean_below(100, 80), 50 + mean_below(100, 50)],
        ),
        # An end beyond the limit counts as the limit.
        ([400.0], [], [0.0], [100.0]),
        # A trial beyond the limit ends at once.
        ([20.0], [], [120.0], [120.0]),
    ],
)
def test_expected_ends(ended, censored, starts, expected):
    assert expected_ends(ended, ended, censored, 100.0, starts) == pytest.approx(expected)


def test_a_trial_that_diverged_early_shortens_the_others_only_by_its_share():
    ends = expected_ends([10.0, 10.0, 80.0, 80.0], [80.0, 80.0], [], 80.0, [0.0, 10.0])
    assert ends == pytest.approx([45.0, 80.0])


def test_rates_count_running_trials_and_not_what_a_resumed_trial_did_before():
    now = [0.0]
    rates = StepRates(lambda: now[0])
    small, large = Cell(4), Cell(64)
    assert rates.rate(small) is None
    for point in range(2):
        rates.on_event(ProgressEvent(1, Trial(small, point)))
    rates.on_event(ProgressEvent(1, Trial(large, 0)))  # waits
    now[0] = 10.0
    rates.on_event(ProgressEvent(1, Trial(small, 0), 160))
    rates.on_event(ProgressEvent(1, Trial(small, 1), 1160, first_step=1000))
    now[0] = 20.0
    rates.on_end(Trial(small, 0), 320)
    rates.on_end(Trial(small, 1), 1320)
    # Until the first step, the waiting trial has its share of the time.
    assert rates.rate(small) == pytest.approx(640 / (10 + 10 * 2 / 3))
    assert rates.rate(large) is None and len(rates.running) == 1
    rates.on_event(ProgressEvent(1))  # this worker was killed
    assert not rates.running


def study(race_factor: float | None, cells: Sequence[Cell], points: int = 40) -> Recorded:
    """Return a study: K* is 480 + 7,680 / B, twice that for pruned networks."""
    ends = {}
    step_seconds = {}
    for cell in cells:
        k_star = (480 + 7680 / cell.batch_size) * (1 + (cell.sparsity > 0))
        ends[cell] = []
        for point in range(points):
            spread = (point * 17 % points) / points  # evenly in 0 to 1, in a mixed order
            step = 16 * round(k_star * (1 + 3 * spread) / 16)
            ends[cell].append(End(INFEASIBLE, 48) if point % 9 == 5 else End(COMPLETE, step))
        step_seconds[cell] = 0.01 + 0.0005 * cell.batch_size
    return Recorded("made-up", ends, step_seconds, 8000, 16, race_factor)


def ratios(estimates: Sequence[Estimate], total: float) -> list[float]:
    """Return estimated over true remaining times after the first minute, bounds excluded."""
    found = []
    for estimate in estimates:
        if estimate.remaining is None or not 60 < estimate.time < 0.95 * total:
            continue
        ratio = estimate.remaining.seconds / (total - estimate.time)
        if estimate.remaining.is_lower_bound:
            assert ratio < 1.25
        else:
            found.append(ratio)
    return found


@pytest.mark.parametrize("race_factor", [None, pytest.param(1.0, marks=pytest.mark.long), 2.0])
@pytest.mark.parametrize(
    ("stack_size", "workers"),
    [
        (1, 1),
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(32, 1, marks=pytest.mark.long),
        (16, 2),
    ],
)
def test_estimates_are_right_within_a_factor_of_two(race_factor, stack_size, workers):
    cells = [Cell(size, sparsity) for size in (16, 32, 64) for sparsity in (0.0, 0.9)]
    replay = Replay(study(race_factor, cells), stack_size, workers)
    estimates = replay.run(lambda seconds: max(1.0, seconds / 40))
    found = ratios(estimates, replay.time)
    assert len(found) > 50
    right = sum(0.5 < ratio < 2 for ratio in found)
    assert right > 0.9 * len(found)
    assert min(found) > 1 / 3 and max(found) < 3


def test_nothing_is_estimated_before_a_trial_meets_the_goal():
    made_up = study(1.0, [Cell(16)])
    replay = Replay(made_up, 64, 1)
    k_star = min(end.step for end in made_up.ends[Cell(16)] if end.status is COMPLETE)
    estimates = replay.run(lambda seconds: 1.0)
    assert k_star == 960 and len(estimates) > 20
    # All trials reach the first rung and stop at K*: 480 steps, or these again from the first one.
    assert all(estimate.remaining is None for estimate in estimates[:-2])
