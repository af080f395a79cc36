"""What a study will take, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from lit_dps.config import StorageConfig, StudyConfig
from lit_dps.record import grid
from lit_dps.study.forecast import Work, at_most, duration, expected, pruning_passes, pruning_seconds, training_seconds
from lit_dps.study.setup import StudySetup
from lit_dps.study.timing import Line, Timing
from lit_dps.training.workload import Workload
from lit_dps.trial import Cell
from tests.unit.fake_study import result

POINTS = {Cell(2, 0.0): {0, 1, 2}, Cell(8, 0.0): {2}, Cell(2, 0.9): {0, 1, 2}, Cell(8, 0.9): {1, 2}}
TIMING = Timing(
    measured=(), start=0.5, step=Line(0.001, 0.0005), check=Line(0.1, 0.2), pruning=Line(3.0, 4.0), reused=True
)


def ran(cell: Cell, point: int, steps_run: int, status: str):
    """A finished trial that ran so many steps, checked every 16."""
    steps = list(range(16, steps_run + 1, 16))
    return result(cell, point, steps_run if status == "complete" else None, status, curve={"step": steps})


def test_every_trial_left_spends_its_budget_at_most():
    assert at_most(POINTS, max_steps=160, check_interval=16) == {
        Cell(2, 0.0): Work(3, 480, 30),
        Cell(8, 0.0): Work(1, 160, 10),
        Cell(2, 0.9): Work(3, 480, 30),
        Cell(8, 0.9): Work(2, 320, 20),
    }


@pytest.mark.parametrize(
    ("max_steps", "interval", "steps", "checks"),
    [(40_000, 16, 224_000_000, 14_000_000), (100_000, 32, 560_000_000, 17_500_000)],
)
def test_the_papers_protocol(max_steps, interval, steps, checks):
    """Appendix B speaks of 14 million passes over the validation split."""
    paper = StudyConfig()
    points = dict.fromkeys(grid(paper.batch_sizes, paper.sparsities), range(paper.trials))
    assert sum(at_most(points, max_steps, interval).values(), Work()) == Work(5600, steps, checks)


def test_finished_trials_of_the_nearest_batch_size_give_an_expectation():
    points = {Cell(2, 0.9): {5}, Cell(4, 0.0): {0, 1}, Cell(5, 0.0): {0}, Cell(6, 0.0): {0}, Cell(64, 0.0): {7, 8}}
    results = {
        Cell(2, 0.0): [ran(Cell(2, 0.0), 0, 32, "complete"), ran(Cell(2, 0.0), 1, 160, "incomplete")],
        Cell(2, 0.9): [ran(Cell(2, 0.9), 0, 96, "infeasible")],
        Cell(8, 0.0): [ran(Cell(8, 0.0), 0, 16, "complete")],
        Cell(64, 0.0): [],
    }
    assert expected(points, results, 16) == {
        Cell(2, 0.9): Work(1, 96, 6),  # the mean of 32, 160 and 96
        Cell(4, 0.0): Work(2, 192, 12),
        Cell(5, 0.0): Work(1, 96, 6),  # 2 and 8 are equally near: the smaller stands
        Cell(6, 0.0): Work(1, 16, 1),
        Cell(64, 0.0): Work(2, 32, 2),
    }


def test_without_finished_trials_nothing_is_expected():
    assert expected(POINTS, {}, 16) is None
    assert expected(POINTS, {Cell(2, 0.0): []}, 16) is None


@pytest.mark.parametrize(
    ("workers", "reused", "passes"),
    [
        (1, False, {2: 3, 8: 2}),  # one for each sparse trial
        (1, True, {2: 3}),  # one for each point
        (2, True, {2: 5}),  # each worker might compute each of 3 points, but there are 5 sparse trials
    ],
)
def test_pruning_passes(workers, reused, passes):
    assert pruning_passes(POINTS, workers, reused) == passes


def test_dense_or_finished_cells_prune_nothing():
    points = {Cell(2, 0.0): {0, 1}, Cell(8, 0.9): set()}
    assert pruning_passes(points, 2, True) == pruning_passes(points, 2, False) == {}


def test_time_is_that_of_starts_steps_checks_and_passes():
    work = {Cell(2, 0.0): Work(3, 480, 30), Cell(8, 0.9): Work(2, 320, 20)}
    # B = 2: 3 x 0.5 + 480 x 0.002 + 30 x (0.1 + 0.2 / 2); B = 8: 2 x 0.5 + 320 x 0.005 + 20 x (0.1 + 0.2 / 8)
    assert training_seconds(work, TIMING) == pytest.approx(8.46 + 5.1)
    assert pruning_seconds({2: 5, 8: 1}, TIMING) == pytest.approx(5 * 5.0 + 3.5)


def test_checks_that_refuse_early_cost_their_share():
    cells = {Cell(2, 0.0): Work(3, 480, 30)}
    full, early = (training_seconds(cells, TIMING, share) for share in (1.0, 0.25))
    assert full == training_seconds(cells, TIMING)
    assert full - early == pytest.approx(0.75 * 30 * (0.1 + 0.2 / 2))


def test_what_is_left_of_a_study():
    study = StudyConfig(batch_sizes=[2, 8], sparsities=[0.0], trials=3)
    setup = StudySetup(study, StorageConfig(), Workload({}, {}, {}), {}, {}, {})
    other = Cell(4, 0.0)
    results = {
        Cell(2, 0.0): [result(Cell(2, 0.0), point, 32) for point in (1, 7)],  # 7: of a larger study that it once was
        Cell(8, 0.0): [result(Cell(8, 0.0), 2, None, "failed"), result(Cell(8, 0.0), 1, None, "stopped")],
        other: [result(other, 0, 32)],
    }
    assert setup.left(results) == {Cell(2, 0.0): {0, 2}, Cell(8, 0.0): {0, 2}}
    assert setup.left({}) == {Cell(2, 0.0): {0, 1, 2}, Cell(8, 0.0): {0, 1, 2}}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.00265, "2.65 ms"),
        (1.346, "1.35 s"),
        (59, "59 s"),
        (750, "12.5 min"),
        (3600, "1 h"),
        (86_400 * 162, "162 days"),
        (86_400 * 18_363.4, "18,363 days"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
