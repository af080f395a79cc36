"""What a study will take, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import re

import pytest

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord, grid
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.text import WIDTH, format_duration
from lit_dps.core.trial import Cell, TrialResult
from lit_dps.forecast.remaining import (
    Work,
    expected_repeat_work,
    expected_work,
    max_repeat_work,
    max_work,
    pruning_passes,
    repeat_pruning_passes,
)
from lit_dps.forecast.step_times import Line, Timing
from lit_dps.forecast.table import (
    noise_seconds,
    pruning_seconds,
    study_table,
    training_seconds,
)
from lit_dps.training.workload import Workload
from tests.support.fake_study import analysis_of, result
from tests.support.setups import setup_of

POINTS = {Cell(2, 0.0): {0, 1, 2}, Cell(8, 0.0): {2}, Cell(2, 0.9): {0, 1, 2}, Cell(8, 0.9): {1, 2}}
TIMING = Timing(
    measured=(),
    start=0.5,
    step=Line(0.001, 0.0005),
    check=Line(0.1, 0.2),
    pruning=Line(3.0, 4.0),
    reuses_scores=True,
)


def ran(cell: Cell, point: int, steps_run: int, status: str):
    """A finished trial that ran so many steps, checked every 16."""
    steps = list(range(16, steps_run + 1, 16))
    return result(
        cell, point, steps_run if status == "complete" else None, status, curve={"step": steps}
    )


def test_every_trial_left_spends_its_budget_at_most():
    assert max_work(POINTS, dict.fromkeys(POINTS, 160), check_interval=16) == {
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
    assert sum(
        max_work(points, dict.fromkeys(points, max_steps), interval).values(), Work()
    ) == Work(5600, steps, checks)


def test_finished_trials_of_the_nearest_batch_size_give_an_expectation():
    points = {
        Cell(2, 0.9): {5},
        Cell(4, 0.0): {0, 1},
        Cell(5, 0.0): {0},
        Cell(6, 0.0): {0},
        Cell(64, 0.0): {7, 8},
    }
    results = {
        Cell(2, 0.0): [
            ran(Cell(2, 0.0), 0, 32, "complete"),
            ran(Cell(2, 0.0), 1, 160, "incomplete"),
        ],
        Cell(2, 0.9): [ran(Cell(2, 0.9), 0, 96, "infeasible")],
        Cell(8, 0.0): [ran(Cell(8, 0.0), 0, 16, "complete")],
        Cell(64, 0.0): [],
    }
    assert expected_work(points, results, 16) == {
        Cell(2, 0.9): Work(1, 96, 6),  # the mean of 32, 160 and 96
        Cell(4, 0.0): Work(2, 192, 12),
        Cell(5, 0.0): Work(1, 96, 6),  # 2 and 8 are equally near: the smaller stands
        Cell(6, 0.0): Work(1, 16, 1),
        Cell(64, 0.0): Work(2, 32, 2),
    }


def test_without_finished_trials_nothing_is_expected():
    assert expected_work(POINTS, {}, 16) is None
    assert expected_work(POINTS, {Cell(2, 0.0): []}, 16) is None


@pytest.mark.parametrize(
    ("workers", "reused", "passes"),
    [
        (1, False, {2: 3, 8: 2}),  # one for each sparse trial
        (1, True, {2: 3}),  # one for each point
        (
            2,
            True,
            {2: 5},
        ),  # each worker might compute each of 3 points, but there are 5 sparse trials
    ],
)
def test_pruning_passes(workers, reused, passes):
    assert pruning_passes(POINTS, workers, reused) == passes


def test_dense_or_finished_cells_prune_nothing():
    points = {Cell(2, 0.0): {0, 1}, Cell(8, 0.9): set()}
    assert pruning_passes(points, 2, True) == pruning_passes(points, 2, False) == {}


def test_time_is_that_of_starts_steps_checks_and_passes():
    work = {Cell(2, 0.0): Work(3, 480, 30), Cell(8, 0.9): Work(2, 320, 20)}
    # B = 2: 3 x 0.5 + 480 x 0.002 + 30 x (0.1 + 0.2 / 2); B = 8: 2 x 0.5 + 320 x 0.005 + 20 x (0.1
    # + 0.2 / 8)
    assert training_seconds(work, TIMING) == pytest.approx(8.46 + 5.1)
    assert pruning_seconds({2: 5, 8: 1}, TIMING) == pytest.approx(5 * 5.0 + 3.5)


def test_checks_that_refuse_early_cost_their_share():
    cells = {Cell(2, 0.0): Work(3, 480, 30)}
    full, early = (training_seconds(cells, TIMING, share) for share in (1.0, 0.25))
    assert full == training_seconds(cells, TIMING)
    assert full - early == pytest.approx(0.75 * 30 * (0.1 + 0.2 / 2))


def test_what_is_left_of_a_study():
    study = StudyConfig(batch_sizes=[2, 8], sparsities=[0.0], trials=3)
    setup = setup_of(study, StorageConfig(), Workload({}, {}, {}), {}, {}, {})
    other = Cell(4, 0.0)
    results = {
        Cell(2, 0.0): [
            result(Cell(2, 0.0), point, 32) for point in (1, 7)
        ],  # 7: of a larger study that it once was
        Cell(8, 0.0): [
            result(Cell(8, 0.0), 2, None, "failed"),
            result(Cell(8, 0.0), 1, None, "stopped"),
        ],
        other: [result(other, 0, 32)],
    }
    assert setup.remaining_points(results) == {Cell(2, 0.0): {0, 2}, Cell(8, 0.0): {0, 2}}
    assert setup.remaining_points({}) == {Cell(2, 0.0): {0, 1, 2}, Cell(8, 0.0): {0, 1, 2}}


GOAL = {"error": 0.1, "check_interval": 16, "max_steps": 160}
A, B, C = Cell(2, 0.0), Cell(8, 0.9), Cell(32, 0.9)


def repeat(cell: Cell, point: int, number: int, steps: int) -> TrialResult:
    found = ran(cell, point, steps, "complete")
    return dataclasses.replace(found, trial=dataclasses.replace(found.trial, repeat=number))


def stored(repeats=()) -> StudyRecord:
    """A's trials are done, B's are not, C has none; the best points of A are 0 and 1, K* 32, and 48
    of B."""
    results = {
        A: [ran(A, 0, 32, "complete"), ran(A, 1, 64, "complete"), ran(A, 2, 160, "incomplete")],
        B: [ran(B, 0, 48, "complete")],
        C: [],
    }
    record = analysis_of(results, space={}, trials=3, goal=Goal(0.1, 16, 160)).record
    return dataclasses.replace(record, repeats={A: list(repeats), B: [], C: []})


def test_repeats_go_to_a_multiple_of_k_star_or_to_the_budget_at_most():
    plan, left = RepeatPlan(count=3, points=2, slack=4.0), {A: set(), B: {1, 2}, C: {0, 1, 2}}
    assert max_repeat_work(plan, left, stored(), dict.fromkeys(left, 160), 16) == {
        A: Work(6, 768, 48),  # 4 x 32 each
        B: Work(6, 960, 60),  # 4 x 48 is more than the budget
        C: Work(6, 960, 60),
    }
    one = stored(
        [repeat(A, 0, 1, 48), repeat(A, 2, 1, 48)]
    )  # the latter of a point that is not the best any more
    assert max_repeat_work(plan, left, one, dict.fromkeys(left, 160), 16)[A] == Work(5, 640, 40)
    assert max_repeat_work(RepeatPlan(3, 2, None), left, one, dict.fromkeys(left, 160), 16)[
        A
    ] == Work(5, 800, 50)
    assert max_repeat_work(plan, left, None, dict.fromkeys(left, 160), 16)[B] == Work(6, 960, 60)
    assert (
        sum(max_repeat_work(RepeatPlan(), left, one, dict.fromkeys(left, 160), 16).values(), Work())
        == Work()
    )


def test_a_cell_whose_trials_are_done_without_a_k_star_has_nothing_to_repeat():
    plan, left = RepeatPlan(3), {A: set(), B: set(), C: set()}
    assert max_repeat_work(plan, left, stored(), dict.fromkeys(left, 160), 16)[C] == Work()
    assert expected_repeat_work(plan, left, stored(), 16)[C] == Work()


def test_repeats_are_expected_to_take_what_finished_ones_took_or_k_star():
    plan, left = RepeatPlan(count=2, points=1, slack=4.0), {A: set(), B: {1, 2}, C: {0, 1, 2}}
    assert expected_repeat_work(plan, left, stored(), 16) == {
        A: Work(2, 64, 4),
        B: Work(2, 96, 6),
        C: Work(2, 96, 6),
    }
    assert expected_repeat_work(plan, left, stored([repeat(A, 0, 1, 80)]), 16) == {
        A: Work(1, 80, 5),
        B: Work(2, 160, 10),
        C: Work(2, 160, 10),
    }
    assert expected_repeat_work(plan, left, None, 16) is None


def test_each_sparse_repeat_is_pruned_by_itself():
    assert repeat_pruning_passes({A: Work(6), B: Work(2), C: Work(0)}) == {8: 2}


def table_lines(record=None, width=WIDTH, **asked) -> list[str]:
    study = StudyConfig(batch_sizes=[2, 64], sparsities=[0.0], trials=3, workers=1, **asked)
    setup = setup_of(study, StorageConfig(), Workload({}, {}, {}), GOAL, {}, {})
    points = setup.remaining_points({} if record is None else record.results)
    return study_table(setup, points, record, TIMING, width=width)


def table(record=None, **asked) -> tuple[dict[str, list[str]], list[str]]:
    lines = table_lines(record, **asked)
    end = lines.index("")
    return {
        row[0]: row[1:] for row in (re.split(r"\s{2,}", line.strip()) for line in lines[:end])
    }, lines[end + 1 :]


def test_the_table_counts_repeats_and_the_run_that_reads_the_noise_scale():
    rows, told = table(repeats=5, repeat_points=2, repeat_slack=3)
    assert rows["repeats"][:3] == ["20", "3,200", "200"]
    assert rows["total"][:3] == ["26", "4,160", "260"]
    assert told[-1].startswith("repeats") and " 3 x K*" in told[-1]
    # 0.5 s to start, and 64 steps at B = 64 with two passes more: 64 x 2 x (0.001 + 64 x 0.0005)
    assert rows["noise scale"] == ["64 steps", format_duration(4.724)]
    repeats = training_seconds(
        {Cell(2): Work(10, 1600, 100), Cell(64): Work(10, 1600, 100)}, TIMING
    )
    trials = training_seconds({Cell(2): Work(3, 480, 30), Cell(64): Work(3, 480, 30)}, TIMING)
    assert rows["total"][-1] == format_duration(repeats + trials + 4.724)


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_the_table_is_as_wide_as_the_terminal_and_names_what_it_omits(width):
    asked = {"repeats": 5, "repeat_points": 2}
    lines = table_lines(width=width, **asked)
    head = lines[0].split("  ")
    narrow = lines[: lines.index("")]
    assert max(map(len, narrow)) <= width
    assert "time at most" in lines[0] and head[-1] == "time at most"
    omitted = [line for line in narrow if line.startswith("Not shown at this width")]
    wide = table_lines(width=200, **asked)
    assert len(omitted) == (width < len(wide[0])) and "share of validation" in wide[0]
    if omitted:
        assert "share of" in omitted[0] and "share of" not in lines[0]
    (total,) = [line for line in narrow if "total" in line]
    assert total.split()[-2:] == wide[wide.index("") - 1].split()[-2:]


def test_a_slow_noise_run_is_left_early():
    slow = dataclasses.replace(TIMING, step=Line(10.0, 0.0))
    setup = setup_of(
        StudyConfig(batch_sizes=[64]), StorageConfig(), Workload({}, {}, {}), {}, {}, {}
    )
    assert noise_seconds(setup, slow) == 60.5


def test_without_repeats_or_a_noise_run_the_table_has_none():
    rows, told = table(noise_scale=False)
    assert not {"repeats", "noise scale"} & {*rows} and len(told) == 1
