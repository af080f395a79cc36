"""The unit of K*: costs of trials in examples and seconds, in the race, the law and the tables."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import MEDIAN
from lit_dps.analysis.law_verdict import Trust
from lit_dps.analysis.step_seconds import StepSeconds
from lit_dps.core.attempt import Attempt, Validation
from lit_dps.core.batch_schedule import schedule_named
from lit_dps.core.goal import Goal
from lit_dps.core.racing import race_limit, truncate_at_race_limit
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.statistic import MINIMUM, median_of_best
from lit_dps.core.trial import SCHEDULE, WARM_UP, Cell, Series, Status, Trial, short_name
from lit_dps.core.trial_config import GoalConfig, identity_of
from lit_dps.core.unit import SECONDS, STEPS
from lit_dps.replication.search import _complete_by_twice_k_star
from lit_dps.report.figures import draws, optimizers, ratios
from lit_dps.report.html.page import page
from lit_dps.report.notes import lines_of
from lit_dps.report.screen import screen
from lit_dps.report.trial_notes import SCHEDULES
from lit_dps.report.warnings import study_notes
from lit_dps.storage.read import read_study
from tests.support.errors import refuses
from tests.support.fake_study import write_study

CELL = Cell(16)
PARAMS = {"model.learning_rate": 0.1, "model.momentum": 0.9}


def train(unit, costs, met_at=None, limit=math.inf, point=0, cell=CELL):
    """Return the attempt whose checks cost so much each, in a unit."""
    goal = Goal(0.2, check_interval=4, max_steps=4000, unit=unit)
    attempt = Attempt(Trial(cell, point, PARAMS), goal, read_race_limit=lambda: limit)
    for i, cost in enumerate(costs, 1):
        value = 0.1 if i == met_at else 0.5
        attempt.record(Validation(4 * i, value, True, 1.0, True, spent={unit: cost}))
        if attempt.status is not None:
            break
    return attempt


def test_another_unit_is_refused_and_changes_the_identity():
    with refuses("goal.unit", "epochs"):
        Goal(0.2, unit="epochs")
    with refuses("goal.metric", "examples"):
        Goal(0.2, metric="examples", unit="examples")
    plain = identity_of(GoalConfig(error=0.2))
    assert "unit" not in plain
    assert identity_of(GoalConfig(error=0.2, unit="examples")) == {**plain, "unit": "examples"}
    assert "unit" not in Goal(0.2).to_stored()


@pytest.mark.parametrize("unit", ["examples", "seconds"])
def test_the_race_stops_a_trial_that_has_spent_more(unit):
    # 4 checks of 30 are fewer than 2 of 100, although they take twice as many steps.
    best = train(unit, [30] * 4, met_at=4).result()
    assert (best.steps, best.cost, best.cost_run) == (16, 120, 120)
    limit = race_limit([best.cost], 1.0, MINIMUM)
    assert limit == 120
    slow = train(unit, [100] * 4, met_at=2, limit=limit, point=1)
    # At its goal it has spent 200, so it cannot change K*: the goal decides first.
    assert (slow.status, slow.result().cost) == (Status.COMPLETE, 200)
    missed = train(unit, [70] * 4, limit=limit, point=2)
    assert (missed.status, missed.curve["step"]) == (Status.OUTRACED, [4, 8])

    ended = truncate_at_race_limit([best, slow.result(), missed.result()], 1.0, MINIMUM)
    assert [r.status for r in ended] == [Status.COMPLETE, Status.OUTRACED, Status.OUTRACED]
    assert [r.curve[unit] for r in ended] == [[30, 60, 90, 120], [100, 200], [70, 140]]
    assert truncate_at_race_limit(ended, 1.0, MINIMUM) == ended, "cut again, none must run again"
    paused = replace(train(unit, [70], point=1).result(), status=Status.PAUSED)
    assert truncate_at_race_limit([best, paused], 1.0, MINIMUM) == [best], "70 < 120: it runs on"


def test_costs_of_seconds_are_not_rounded():
    assert MINIMUM.k_star([1.25, None, 1.5]) == 1.25
    assert median_of_best(2).k_star([1.0, 1.5]) == 1.25
    assert median_of_best(2).k_star([100, 101]) == 101


def study(tmp_path, unit, per_step):
    """Return a study whose K is 4000 / B + 100 steps, each of `per_step(B)`."""
    cells = {}
    for batch_size in (8, 32, 128, 512):
        cell = Cell(batch_size)
        cells[cell] = []
        for point, factor in enumerate((1.0, 1.2)):
            checks = round((4000 / batch_size + 100) * factor / 4)
            costs = [4 * per_step(batch_size)] * checks
            attempt = train(unit, costs, checks, point=point, cell=cell)
            cells[cell].append(attempt.result())
    goal = Goal(0.2, check_interval=4, max_steps=4000, unit=unit)
    url = f"sqlite:///{tmp_path}/studies.db"
    write_study(url, cells, goal=goal)
    return Analysis(read_study(url, "fake"))


def test_the_law_in_examples_is_that_of_steps_times_b(tmp_path):
    analysis = study(tmp_path, "examples", lambda b: b)
    table = analysis.table
    assert table["k_star"].tolist() == [8 * 600, 32 * 224, 128 * 132, 512 * 108]
    assert table["unit"].tolist() == ["examples"] * 4
    law = analysis.laws[Series(0.0)]
    assert law.k_star == {8: 600, 32: 224, 128: 132, 512: 108}
    assert law.fit.c1 == pytest.approx(4000, rel=0.02)
    assert law.fit.c2 == pytest.approx(100, rel=0.02)
    curve = analysis.law_curves.dropna(subset=["k_star"])
    assert curve["k_star"].tolist() == table["k_star"].tolist()
    expected = [law.fit.c1 + law.fit.c2 * b for b in (8, 32, 128, 512)]
    assert curve["fit"].tolist() == pytest.approx(expected)
    answer = analysis.answer
    assert answer["examples"].tolist() == pytest.approx(expected)
    assert answer["fewest"].tolist() == [True, False, False, False]
    assert analysis.trials["examples"].tolist()[:2] == [8 * 600, 8 * 720]
    text = screen(analysis, ["cells"])
    assert "K* [examples]" in text and "K* = c1 + c2 B" in text


def test_a_measured_k_star_in_examples_has_the_whole_steps_of_its_trial(tmp_path):
    """1,720 examples in 72 steps: 1720 / 24 * (24 * 72 / 1720) is above 72 in floats."""
    cell = Cell(24)
    attempt = train("examples", [96] * 17 + [88], met_at=18, cell=cell)
    url = f"sqlite:///{tmp_path}/studies.db"
    goal = Goal(0.2, check_interval=4, max_steps=4000, unit="examples")
    write_study(url, {cell: [attempt.result()]}, goal=goal)
    (row,) = Analysis(read_study(url, "fake")).answer.to_dict("records")
    assert (row["k_star"], row["steps"], row["examples"]) == (1720, 72, 1720)


def test_the_answer_in_examples_counts_the_steps_on_short_batches(tmp_path):
    """An epoch of 600 examples has 2 steps of up to 512 examples: 300 on average."""
    mean_sizes = {8: 8, 32: 32, 128: 120, 512: 300}
    analysis = study(tmp_path, "examples", lambda b: mean_sizes[b])
    times = StepSeconds(0.01, 0.01, 0.01)
    analysis.step_seconds = dict.fromkeys(analysis.record.cells, times)
    answer = analysis.answer
    law = analysis.laws[Series(0.0)]
    examples = [law.fit.c1 + law.fit.c2 * b for b in mean_sizes]
    steps = np.array(examples) / list(mean_sizes.values())
    assert answer["examples"].tolist() == pytest.approx(examples)
    assert answer["steps"].tolist() == pytest.approx(steps.tolist())
    assert answer["seconds"].tolist() == pytest.approx((0.01 * steps).tolist())
    assert ((answer["steps_low"] < steps) & (steps < answer["steps_high"])).all()


def test_k_star_in_seconds_has_no_law_and_is_the_time_to_the_goal(tmp_path):
    analysis = study(tmp_path, "seconds", lambda b: 0.001 * (10 + b / 16))
    k_star = [600 * 0.0105, 224 * 0.012, 132 * 0.018, 108 * 0.042]
    assert analysis.table["k_star"].tolist() == pytest.approx(k_star)
    law = analysis.laws[Series(0.0)]
    assert law.fit is None and law.verdict.trust is Trust.MEASURED
    assert analysis.law_table["c1"].isna().all()
    answer = analysis.answer
    assert answer["seconds"].tolist() == pytest.approx(k_star)
    assert answer["steps"].tolist() == [600, 224, 132, 108]
    assert answer["fastest"].tolist() == [False, False, True, False]
    assert (answer["seconds_low"] < answer["seconds"]).all()
    assert sum("goal.unit = seconds" in note for note in study_notes(analysis)) == 1
    text = screen(analysis)
    assert "K* [s]" in text and " 2.38 " in text


def test_the_steps_of_a_run_decide_whether_its_seconds_are_at_the_first_check(tmp_path):
    def runs(batch_size, checks, repeat=0):
        results = []
        for i, (seconds, met_at) in enumerate(checks):
            attempt = train("seconds", [seconds] * met_at, met_at, point=i, cell=Cell(batch_size))
            if repeat:
                trial = Trial(Cell(batch_size), 0, PARAMS, repeat=i + 1)
                results.append(replace(attempt.result(), trial=trial))
            else:
                results.append(attempt.result())
        return results

    # (seconds of a check, the check that met the goal)
    searched = {8: [(0.1, 4), (0.5, 1), (0.6, 1)], 32: [(0.1, 2)] * 3}
    repeated = {8: [(0.02, 4), (0.02, 4), (0.04, 4)], 32: [(0.3, 1), (0.3, 1), (0.01, 2)]}
    url = f"sqlite:///{tmp_path}/studies.db"
    goal = Goal(0.2, check_interval=4, max_steps=4000, unit="seconds")
    write_study(url, {Cell(b): runs(b, checks) for b, checks in searched.items()}, goal=goal)
    repeats = {Cell(b): runs(b, checks, 1) for b, checks in repeated.items()}
    record = replace(read_study(url, "fake"), plan=RepeatPlan(3), repeats=repeats)
    analysis = Analysis(record)
    assert analysis.table["floor"].tolist() == [0, 0]
    draws = analysis.best_of_n_table
    assert draws["median"].tolist()[:3] == pytest.approx([0.5, 0.4, 0.4])
    assert draws["floor"].tolist() == [1, 0, 0, 0, 0, 0]
    rows = analysis.repeat_table
    assert rows["median"].tolist() == pytest.approx([0.08, 0.3])
    assert rows["floor"].tolist() == [0, 1]
    assert rows["bias"].tolist()[0] == pytest.approx(5) and math.isnan(rows["bias"].tolist()[1])
    law = analysis.median_laws[Series(0.0)]
    assert (law.exact_k, law.upper_bounds) == (pytest.approx({8: 0.08}), {32})
    assert law.observations[0].resolution == pytest.approx(0.02)
    assert " <= 0.3 " in screen(analysis, ["repeats"])
    # Steps, examples and seconds of the answer are medians over the repeats.
    answer = analysis.answer
    assert answer["steps"].tolist() == [16, 4]
    assert answer["examples"].tolist() == [16 * 8, 4 * 32]
    assert answer["seconds"].tolist() == pytest.approx([0.08, 0.3])
    assert set(answer["steps_of"]) == {MEDIAN}


def test_texts_name_the_unit(tmp_path):
    assert MINIMUM.describe_in(STEPS) == MINIMUM.describe()
    words = "the median of the seconds of the best 3 trials"
    assert median_of_best(3).describe_in(SECONDS) == words
    assert draws.caption_in(STEPS) == draws.CAPTION
    assert draws.caption_in(SECONDS).startswith("seconds of the best")
    analysis = study(tmp_path, "seconds", lambda b: 0.001 * b)
    html = page(analysis)
    assert "smallest number of seconds" in html and "smallest number of steps" not in html
    (note,) = (note for note in study_notes(analysis) if "goal.unit = seconds" in note)
    assert "ends trials" not in note and "race" not in note
    raced = replace(analysis.record, race_factor=1.0)
    (note,) = (note for note in study_notes(Analysis(raced)) if "goal.unit = seconds" in note)
    assert "study.race_factor" in note


def test_k_star_in_examples_is_compared_with_steps_in_steps(tmp_path):
    def flagged(result):
        return replace(result, flags={WARM_UP: 110, SCHEDULE: 4000})

    analysis = study(tmp_path, "examples", lambda b: b)
    record = analysis.record
    results = {cell: list(map(flagged, of_cell)) for cell, of_cell in record.results.items()}
    lines = lines_of(SCHEDULES, Analysis(replace(record, results=results)))
    # K* is 108 steps at B = 512, and 132 at B = 128.
    assert "B=512 S=0 (step 108 of 110)" in lines[0] and "B=128" not in lines[0]
    # Twice 2160 steps exceed the budget of 4000 at none: all trials are within 2 K*.
    by_size = {cell.batch_size: of_cell for cell, of_cell in record.results.items()}
    complete = _complete_by_twice_k_star(analysis, Series(0.0), by_size)
    assert {b: c.tolist() for b, c in complete.items()} == dict.fromkeys(by_size, [True, True])


def test_studies_of_two_units_are_not_compared(tmp_path):
    (tmp_path / "other").mkdir()
    steps = study(tmp_path, "steps", lambda b: 1)
    examples = study(tmp_path / "other", "examples", lambda b: b)
    for figure in (optimizers, ratios):
        assert "goal.unit" in figure.missing(steps, examples)


def test_an_axis_named_examples_keeps_its_answer(tmp_path):
    cells = {}
    axis = "batch.options.examples"
    for batch_size in (8, 32):
        for examples in (100, 200):
            cell = Cell(batch_size, axes=((axis, examples),))
            attempt = train("examples", [4 * batch_size] * 9, 9, cell=cell)
            cells[cell] = [attempt.result()]
    goal = Goal(0.2, check_interval=4, max_steps=4000, unit="examples")
    url = f"sqlite:///{tmp_path}/studies.db"
    write_study(url, cells, goal=goal, axes={axis: [100, 200]})
    analysis = Analysis(read_study(url, "fake"))
    assert analysis.answer[axis].tolist() == [100, 100, 200, 200]
    assert analysis.answer["examples"].tolist() == [288, 1152] * 2
    assert "B = 8 needs the fewest steps and examples" in screen(analysis, width=1000)
    assert short_name("local.steps") == "local.steps" and short_name("optim.delay") == "delay"


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({}, 400),
        ({"max_examples": 1000}, 64),  # 62.5 steps of 16 examples, checked every 4
        ({"max_examples": 1024}, 64),
        ({"max_examples": 1025}, 68),
        ({"max_examples": 10**9}, 400),
        ({"max_seconds": 1.0}, 100),
        ({"max_seconds": 1.0, "max_examples": 1000}, 64),
    ],
)
def test_budgets_limit_the_steps_of_a_forecast(budget, expected):
    goal = Goal(0.2, check_interval=4, max_steps=400, **budget)
    assert goal.most_steps(16, step_seconds=0.01) == expected


def test_a_forecast_sums_the_sizes_of_a_growing_batch():
    goal = Goal(0.2, check_interval=4, max_steps=400, max_examples=100)
    # Steps of 4, 4, 4, 8, 8, 8, 16, 16, 16, ...: the check at step 12 has 132 examples.
    schedule = schedule_named("doubling", {"start": 0.25, "steps": 3})
    assert goal.most_steps(16, 0.0) == 8
    assert goal.most_steps(16, 0.0, schedule) == 12
    assert replace(goal, max_examples=68).most_steps(16, 0.0, schedule) == 8
