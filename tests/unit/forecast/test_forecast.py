"""What a study will take, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import re

import pytest

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.search_space import Range
from lit_dps.core.text import WIDTH, format_duration
from lit_dps.core.trial import Cell, TrialResult
from lit_dps.core.trial_config import BatchConfig
from lit_dps.forecast.forecast import forecast, study_table
from lit_dps.forecast.remaining import Runs, remaining_repeats, remaining_trials
from lit_dps.forecast.step_times import Line, Timing
from lit_dps.study.probe_run import RunTimes
from lit_dps.training.workload import Workload
from tests.support.fake_study import analysis_of, result, write_study
from tests.support.setups import setup_of
from tests.support.texts import numbers_in

POINTS = {Cell(2, 0.0): {0, 1, 2}, Cell(8, 0.0): {2}, Cell(2, 0.9): {0, 1, 2}, Cell(8, 0.9): {1, 2}}
TIMING = Timing(
    measured={},
    start=0.5,
    step=Line(0.001, 0.0005),
    check=Line(0.1, 0.2),
    pruning=3.0,
)


def as_before(cell: Cell, batch_size: int) -> float:
    return 1.0


def record_of(results) -> StudyRecord:
    return analysis_of(results, space={}, trials=3, goal=Goal(0.1, 16, 160)).record


def ran(cell: Cell, point: int, steps_run: int, status: str):
    """A finished trial that ran so many steps, checked every 16."""
    steps = list(range(16, steps_run + 1, 16))
    return result(
        cell, point, steps_run if status == "complete" else None, status, curve={"step": steps}
    )


def test_every_trial_left_spends_its_budget_at_most():
    assert remaining_trials(POINTS, dict.fromkeys(POINTS, 160), None, as_before) == {
        Cell(2, 0.0): Runs(3, 160),
        Cell(8, 0.0): Runs(1, 160),
        Cell(2, 0.9): Runs(3, 160),
        Cell(8, 0.9): Runs(2, 160),
    }


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
    }
    most = dict.fromkeys(points, 100)
    assert remaining_trials(points, most, record_of(results), as_before) == {
        Cell(2, 0.9): Runs(1, 100, 96),  # the mean of 32, 160 and 96
        Cell(4, 0.0): Runs(2, 100, 96),
        Cell(5, 0.0): Runs(1, 100, 96),  # 2 and 8 are equally near: the smaller stands
        Cell(6, 0.0): Runs(1, 100, 16),
        Cell(64, 0.0): Runs(2, 100, 16),
    }
    assert remaining_trials(points, dict.fromkeys(points, 48), record_of(results), as_before)[
        Cell(4, 0.0)
    ] == Runs(2, 48, 48)


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
    return dataclasses.replace(record_of(results), repeats={A: list(repeats), B: [], C: []})


def repeats_left(plan: RepeatPlan, points, record: StudyRecord | None) -> dict[Cell, Runs]:
    most = dict.fromkeys(points, 160)
    return remaining_repeats(plan, points, most, record, record, as_before)


def test_repeats_go_to_a_multiple_of_k_star_or_to_the_budget_at_most():
    plan, left = RepeatPlan(count=3, points=2, slack=4.0), {A: set(), B: {1, 2}, C: {0, 1, 2}}
    assert repeats_left(plan, left, stored()) == {
        A: Runs(6, 128, 32),  # 4 x 32 each
        B: Runs(6, 160, 48),  # 4 x 48 is more than the budget
        C: Runs(6, 160, 48),
    }
    # 2.2 x 32 = 70.4 steps end at the validation at 80.
    assert repeats_left(RepeatPlan(3, 2, 2.2), left, stored())[A] == Runs(6, 80, 32)
    one = stored(
        [repeat(A, 0, 1, 48), repeat(A, 2, 1, 48)]
    )  # the latter of a point that is not the best any more
    assert repeats_left(plan, left, one)[A] == Runs(5, 128, 48)
    assert repeats_left(RepeatPlan(3, 2, None), left, one)[A] == Runs(5, 160, 48)
    assert repeats_left(plan, left, None)[B] == Runs(6, 160)
    assert {runs.count for runs in repeats_left(RepeatPlan(), left, one).values()} == {0}


def test_a_cell_whose_trials_are_done_without_a_k_star_has_nothing_to_repeat():
    plan, left = RepeatPlan(3), {A: set(), B: set(), C: set()}
    assert repeats_left(plan, left, stored())[C].count == 0


def table_lines(
    record=None,
    width=WIDTH,
    timing=TIMING,
    goal=GOAL,
    batch=None,
    trainer=None,
    local=None,
    **asked,
) -> list[str]:
    asked = {"sparsities": [0.0], "trials": 3, "workers": 1, **asked}
    study = StudyConfig(batch_sizes=[2, 64], **asked)
    workload = Workload({}, {}, trainer or {})
    setup = setup_of(study, StorageConfig(), workload, goal, {}, {}, local=local or {})
    if batch is not None:
        setup = dataclasses.replace(setup, batch=BatchConfig(**batch))
    points = setup.remaining_points({} if record is None else record.results)
    return study_table(setup, points, record, timing, record, width)


def table(record=None, **asked) -> tuple[dict[str, list[str]], list[str]]:
    lines = table_lines(record, **asked)
    end = lines.index("")
    return {
        row[0]: row[1:] for row in (re.split(r"\s{2,}", line.strip()) for line in lines[:end])
    }, lines[end + 1 :]


# A trial or repeat of 160 steps: 0.5 s, and 10 validations.
TRIAL_2 = 0.5 + 160 * (0.001 + 2 * 0.0005) + 10 * (0.1 + 0.2 / 2)
TRIAL_64 = 0.5 + 160 * (0.001 + 64 * 0.0005) + 10 * (0.1 + 0.2 / 64)


def test_the_table_counts_repeats():
    rows, told = table(repeats=5, repeat_points=2, repeat_slack=3)
    assert rows["repeats"][:3] == ["20", "3,200", "200"]
    assert rows["total"][:3] == ["26", "4,160", "260"]
    assert told[-1].startswith("repeats") and " 3 x K*" in told[-1]
    assert rows["total"][-1] == format_duration(13 * TRIAL_2 + 13 * TRIAL_64)
    assert numbers_in(told[-1]) == [160, 3]
    rows, told = table(repeats=5, goal={**GOAL, "max_examples": 320})
    # No repeat takes more than 320 examples.
    assert rows["repeats"][:3] == ["10", "880", "55"]
    assert numbers_in(told[-1]) == [160, 320, 8]
    assert "runs to 160 steps or 320 examples, or to 8 x K*" in told[-1]


def test_each_sparse_trial_and_repeat_prunes_its_network():
    rows, told = table(sparsities=[0.0, 0.9], repeats=5, repeat_points=2, workers=2)
    # Two workers share 12 trials, the longest one begins last, and one worker runs 40 repeats.
    assert rows["pruning"] == ["26", format_duration(6 * 3.0 / 2 + 3.0 / 2 + 20 * 3.0)]
    trials = 6 * TRIAL_2 + 6 * TRIAL_64 + 6 * 3.0
    repeats = 20 * TRIAL_2 + 20 * TRIAL_64 + 20 * 3.0
    seconds = trials / 2 + (TRIAL_64 + 3.0) / 2 + repeats
    assert rows["total"][-1] == format_duration(seconds)
    assert told[-1].startswith("pruning")


def test_trials_that_do_not_divide_evenly_among_workers_take_longer():
    """Three trials of two workers take at least as long as two of them."""
    rows, _ = table(workers=2)
    assert (
        rows["64"][-1] == format_duration(2 * TRIAL_64) == format_duration(1.5 * TRIAL_64 * 4 / 3)
    )


def test_repeats_without_trials_are_shared_by_the_workers():
    found = {
        cell: [ran(cell, 0, 160, "complete"), *(ran(cell, i, 160, "incomplete") for i in (1, 2))]
        for cell in (Cell(2), Cell(64))
    }
    record = record_of(found)
    rows, _ = table(record, repeats=4, repeat_points=1, workers=2)
    assert rows["total"][0] == "8"
    shared = (4 * TRIAL_2 + 4 * TRIAL_64) / 2 + TRIAL_64 / 2
    assert rows["total"][-2] == format_duration(shared)
    assert rows["total"][-1] == format_duration(2 * TRIAL_2 + 2 * TRIAL_64), "expected"


def test_a_trial_starts_and_prunes_again_after_each_rung():
    """Rungs of 48 and 200 steps; each of the 3 trials builds and prunes its network three times."""
    rows, told = table(
        goal={**GOAL, "check_interval": 4, "max_steps": 800}, sparsities=[0.9], workers=1
    )
    steps = 48 + 200 + 800
    assert rows["2"][1] == f"{3 * steps:,}"
    seconds = 3 * (3 * 0.5 + steps * 0.002 + steps / 4 * 0.2)
    assert rows["2"][-1] == format_duration(seconds)
    assert rows["pruning"] == ["6", format_duration(6 * 3 * 3.0)]
    assert "(48, 200 steps)" in told[0]


def test_several_timed_sizes_bound_the_steps_within_max_seconds():
    """A step takes at least as long as the steps of smaller timed sizes, whatever the line says."""
    measured = {2: RunTimes(0.5, 0.1, 0.2), 8: RunTimes(0.5, 0.2, 0.2)}
    timing = Timing(measured, 0.5, Line(0.1, 0.01), Line(0.2, 0.0))
    rows, _ = table(timing=timing, goal={**GOAL, "max_seconds": 8.0})
    assert rows["2"][1] == "240", "3 x 80 steps of 0.1 s"
    assert rows["64"][1] == "144", "3 x 48 steps, the first validation after 40 steps of 0.2 s"


def test_times_at_most_are_not_below_the_timed_ones():
    """A line with a and b of at least 0 is between two steps that grow faster than their size."""
    measured = {2: RunTimes(0.5, 0.01, 0.2), 64: RunTimes(0.5, 0.9, 0.3)}
    timing = Timing(measured, 0.5, Line(0.0, 0.01), Line(0.25, 0.0))
    rows, _ = table(timing=timing)
    assert rows["2"][-1] == format_duration(3 * (0.5 + 160 * 0.02 + 10 * 0.25))
    assert rows["64"][-1] == format_duration(3 * (0.5 + 160 * 0.9 + 10 * 0.3))


@pytest.mark.parametrize(("step", "shown"), [(0.2, []), (0.22, [9])])
def test_two_timed_sizes_that_miss_the_line_have_a_remark(monkeypatch, step, shown):
    measured = {2: RunTimes(0.5, 0.1, 0.2), 4: RunTimes(0.5, step, 0.2)}
    timing = dataclasses.replace(TIMING, measured=measured, step=Line(0.0, 0.05))
    text = forecast_text(monkeypatch, timing, batch_sizes=[2, 4])
    assert [int(share) for share in re.findall(r"(\d+)% of the timed steps", text)] == shown


def test_smaller_batches_of_a_schedule_may_take_more_steps_within_max_seconds():
    timing = Timing({2: RunTimes(0.5, 0.1, 0.2)}, 0.5, Line(0.1, 0.0), Line(0.2, 0.0))
    goal = {**GOAL, "max_seconds": 8.0}
    schedule = {"schedule": "doubling", "options": {"start": 0.5, "steps": 10}}
    rows, _ = table(timing=timing, goal=goal, batch=schedule)
    assert rows["64"][1] == "480", "3 x max_steps"


SIZE = {"space": {"model.width": Range(8, 64, integer=True)}}
RANKS = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, {"2": "240", "64": "144"}),
        ({"trainer": RANKS}, {"2": "480", "64": "480"}),
        (SIZE, {"2": "480", "64": "480"}),
        # The first value is timed: 240 + 480 and 144 + 480 steps.
        ({"grid": {"model.width": [64, 8]}}, {"2": "720", "64": "624"}),
        ({"grid": {"model.width": [64]}}, {"2": "240", "64": "144"}),
        (
            {"grid": {"pruning.batch_size": [10, 20]}, "sparsities": [0.9]},
            {"2": "480", "64": "288"},
        ),
        # Masks are timed, and dense cells have none.
        ({"sparsities": [0.0, 0.9]}, {"2": "720", "64": "624"}),
        ({"local": {"workers": 2}}, {"2": "240", "64": "144"}),
        ({"local": {"workers": 2, "start": 80}}, {"2": "480", "64": "480"}),
    ],
)
def test_steps_that_may_be_faster_than_timed_are_not_limited_by_seconds(changes, steps):
    """Three trials a cell; 80 timed steps of B = 2 and 48 of B = 64 are within 8 s."""
    measured = {2: RunTimes(0.5, 0.1, 0.2), 8: RunTimes(0.5, 0.2, 0.2)}
    timing = Timing(measured, 0.5, Line(0.1, 0.01), Line(0.2, 0.0))
    rows, _ = table(timing=timing, goal={**GOAL, "max_seconds": 8.0}, **changes)
    assert {name: rows[name][1] for name in steps} == steps


def test_a_remark_says_that_seconds_do_not_limit_faster_steps(monkeypatch):
    limited = {"max_seconds": 8.0}
    assert "faster than timed" in forecast_text(monkeypatch, goal=limited, trainer=RANKS)
    assert "faster than timed" not in forecast_text(monkeypatch, goal=limited)
    assert "faster than timed" not in forecast_text(monkeypatch, trainer=RANKS)


def test_shared_trials_count_once_in_an_expectation():
    """The dense cells of two values of `pruning.batch_size` show the same trials."""
    first, second = (Cell(2, 0.0, (("pruning.batch_size", n),)) for n in (10, 20))
    sparse = Cell(2, 0.9, (("pruning.batch_size", 10),))
    results = {
        first: [ran(first, 0, 32, "complete")],
        sparse: [ran(sparse, 0, 96, "complete")],
    }
    record = record_of({Cell(2): []})
    record = dataclasses.replace(
        record,
        sparsities=(0.0, 0.9),
        axes={"pruning.batch_size": (10, 20)},
        results={**dict.fromkeys(record.cells, ()), **results, second: results[first]},
        shared={second: first},
    )
    (runs,) = remaining_trials({Cell(4): {0}}, {Cell(4): 160}, record, as_before).values()
    assert runs.expected_steps == 64


TIMED = dataclasses.replace(TIMING, measured={2: RunTimes(0.5, 0.1, 0.2)})


def forecast_text(
    monkeypatch, timing=TIMED, trainer=None, goal=None, smoothness=None, pruning=None, **study
):
    """The forecast of a study at B = 2, whose timing is given."""
    monkeypatch.setattr("lit_dps.forecast.forecast.measure", lambda setup: timing)
    study = {"batch_sizes": [2], "sparsities": [0.0], "trials": 2, "workers": 1, **study}
    workload = Workload({}, {}, trainer or {})
    goal = {**GOAL, **(goal or {})}
    setup = setup_of(
        StudyConfig(name="unstored", **study),
        StorageConfig(),
        workload,
        goal,
        pruning or {},
        smoothness or {},
    )
    return forecast(setup)


def test_remarks_name_what_a_timing_leaves_out(monkeypatch):
    plain = forecast_text(monkeypatch)
    for word in ("ranks", "search space", "max_examples", "masks", "smoothness"):
        assert word not in plain
    assert "timing of steps after the trials" in plain
    assert "2 ranks" in forecast_text(monkeypatch, trainer=RANKS)
    assert "max_examples" in forecast_text(monkeypatch, goal={"max_examples": 100})
    space = {"model.width": Range(64, 448, integer=True), "model.lr": Range(0.1, 1.0)}
    text = forecast_text(monkeypatch, space=space)
    assert "timed at model.width = 256, the middle" in text
    moving = {"sparsities": [0.9], "pruning": {"method": "rigl"}}
    assert "masks during training by rigl" in forecast_text(monkeypatch, **moving)
    assert "masks" not in forecast_text(monkeypatch, sparsities=[0.9])


@pytest.mark.parametrize(("noise", "passes"), [(False, 1), (True, 2)])
def test_passes_of_per_example_gradients_are_named(monkeypatch, noise, passes):
    text = forecast_text(monkeypatch, smoothness={"interval": 16, "noise": noise})
    assert text.count("pass of per-example gradients") == passes


def test_axes_at_which_nothing_is_timed_are_not_named(monkeypatch):
    grid = {"local.start": [0, 16], "model.width": [8, 16]}
    text = forecast_text(monkeypatch, grid=grid)
    assert "timed at model.width = 8; " in text and "local.start" not in text


@pytest.mark.parametrize(
    ("stored", "asked", "trials", "races"),
    [
        (2.0, None, 1, False),
        (2.0, 3.0, 1, True),
        (2.0, 2.0, 0, True),
        (2.0, 1.5, 0, True),
        (None, 2.0, 1, False),
    ],
)
def test_the_larger_race_factor_of_run_and_storage_counts(
    tmp_path, monkeypatch, stored, asked, trials, races
):
    """Of two trials one has K* = 48, and the other one stopped at 96 steps."""
    storage = StorageConfig(str(tmp_path))
    cell = Cell(2)
    found = {cell: [ran(cell, 0, 48, "complete"), ran(cell, 1, 96, "outraced")]}
    write_study(storage.optuna_url, found, space={}, goal=Goal(0.1, 16, 160), race_factor=stored)
    timing = dataclasses.replace(TIMING, measured={2: RunTimes(0.5, 0.1, 0.2)})
    monkeypatch.setattr("lit_dps.forecast.forecast.measure", lambda setup: timing)
    study = StudyConfig(
        name="fake", batch_sizes=[2], sparsities=[0.0], trials=2, workers=1, race_factor=asked
    )
    text = forecast(setup_of(study, storage, Workload({}, {}, {}), GOAL, {}, {}))
    (total,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["total"]]
    assert total[1] == str(trials)
    assert ("study.race_factor" in text) == races
