"""The best metric at the whole budget: of all checks, at the last one, its spread, and what is only
a bound."""

import math
from dataclasses import replace

import pytest

from lit_dps.analysis.tables import records
from lit_dps.core.trial import Cell
from lit_dps.report.figures import FIGURES, drawn, write_figures
from lit_dps.report.notebook import Study
from tests.support.fake_study import analysis_of
from tests.support.texts import numbers_in
from tests.unit.analysis.test_budgets import GOAL, trial

pytestmark = pytest.mark.pictures

FIGURE = next(figure for figure in FIGURES if figure.NAME == "quality")


def falls(batch_size, point, best, last, at=60):
    """A trial whose error is `best` at one of its 8 checks and `last` at the last one."""
    errors = [0.9, 0.5, 0.3, 0.2, 0.2, 0.2, 0.2, 0.2]
    errors[at // 10 - 1], errors[-1] = best, last
    met = next((10 * (i + 1) for i, e in enumerate(errors) if e <= 0.1), None)
    return trial(Cell(batch_size), point, errors, met)


def study():
    small = [
        falls(4, i, best, best + 0.01)
        for i, best in enumerate((0.07, 0.05, 0.06, 0.09, 0.08, 0.095))
    ]
    large = [
        falls(16, 0, 0.08, 0.08, at=80),
        trial(Cell(16), 1, [0.02, math.nan], status="infeasible"),
    ]
    return analysis_of({Cell(4): small, Cell(16): large}, goal=GOAL)


def test_best_final_and_spread():
    small, large = records(study().quality)
    assert (small["best"], small["found_at"], small["point"], small["exact"], small["late"]) == (
        0.05,
        60,
        1,
        1,
        0,
    )
    assert (small["trials"], small["top"], small["top_median"], small["top_worst"]) == (
        6,
        5,
        0.07,
        0.09,
    )
    assert small["final"] == pytest.approx(0.06) and small["train_loss"] == 1.0
    # the trial that diverged was best at its first check, and has no last one
    assert (large["best"], large["found_at"], large["exact"], large["trials"]) == (0.02, 10, 1, 2)
    assert (large["final"], large["top_worst"], large["ended_early"]) == (0.08, 0.08, 0)


def test_trials_that_stopped_leave_a_bound():
    stops = trial(Cell(4), 0, [0.5, 0.1], 20)
    (row,) = records(analysis_of({Cell(4): [stops, falls(4, 1, 0.2, 0.2)]}, goal=GOAL).quality)
    assert (row["best"], row["exact"], row["ended_early"], row["trials"]) == (0.1, 0, 1, 1)
    assert (row["top_median"], row["final"]) == (0.2, 0.2)


def test_a_best_value_at_the_end_of_the_budget_is_late(tmp_path):
    late = analysis_of({Cell(b): [falls(b, 0, 0.07, 0.07, at=80)] for b in (4, 16)}, goal=GOAL)
    assert list(late.quality["late"]) == [1, 1]
    (note,) = write_figures([FIGURE], [late], tmp_path, ["quality"])[1]
    assert numbers_in(note)[:2] == [2, 2]


@pytest.mark.parametrize("budget", [{"max_examples": 160}, {"max_seconds": 40.0}])
def test_trials_that_spend_another_budget_are_known_to_their_end(budget):
    trials = []
    for point, errors in enumerate(([0.9, 0.5, 0.3, 0.2], [0.8, 0.6, 0.15, 0.4])):
        spends = trial(Cell(4), point, errors, status="incomplete")
        spends.curve.update(examples=[40, 80, 120, 160], seconds=[10.0, 20.0, 30.0, 40.0])
        trials.append(spends)
    goal = replace(GOAL, **budget)
    (first,) = records(analysis_of({Cell(4): trials[:1]}, goal=goal).quality)
    assert (first["best"], first["exact"], first["ended_early"], first["late"]) == (0.2, 1, 0, 1)
    assert (first["trials"], first["final"]) == (1, 0.2)
    (both,) = records(analysis_of({Cell(4): trials}, goal=goal).quality)
    assert (both["best"], both["found_at"], both["exact"], both["late"]) == (0.15, 30, 1, 0)
    assert (both["trials"], both["top_worst"], both["final"]) == (2, 0.2, 0.2)
    (stopped,) = records(analysis_of({Cell(4): trials}, goal=GOAL).quality)
    assert (stopped["exact"], stopped["ended_early"], stopped["trials"]) == (0, 2, 0)


@pytest.mark.parametrize("budget", [{"max_examples": 150}, {"max_seconds": 39.0}])
def test_the_check_beyond_the_budget_does_not_count(budget):
    """A budget is noticed at the first check after it."""
    spends = trial(Cell(4), 0, [0.9, 0.5, 0.3, 0.2], status="incomplete")
    spends.curve.update(examples=[40, 80, 120, 160], seconds=[10.0, 20.0, 30.0, 40.0])
    at_once = trial(Cell(4), 1, [0.1], status="incomplete")
    at_once.curve.update(examples=[160], seconds=[40.0])
    goal = replace(GOAL, **budget)
    (row,) = records(analysis_of({Cell(4): [spends, at_once]}, goal=goal).quality)
    assert (row["best"], row["found_at"], row["exact"], row["late"]) == (0.3, 30, 1, 1)
    assert (row["trials"], row["top_worst"], row["final"]) == (1, 0.3, 0.3)


def test_the_figure(tmp_path):
    files, notes = write_figures([FIGURE], [study()], tmp_path)
    assert [path.name for path in files] == [
        "quality.csv",
        "quality.png",
        "quality.pdf",
    ] and notes == []
    left, right = drawn(FIGURE, study()).axes
    assert [0.05, 0.02] in [list(line.get_ydata()) for line in left.lines]
    assert pytest.approx([0.06, 0.08]) in [list(line.get_ydata()) for line in right.lines]


def test_studies_whose_trials_stop_at_the_goal_are_drawn_only_where_asked_for(tmp_path):
    stops = analysis_of({Cell(b): [trial(Cell(b), 0, [0.5, 0.1], 20)] for b in (4, 16)}, goal=GOAL)
    assert write_figures([FIGURE], [stops], tmp_path) == ([], [])
    (note,) = write_figures([FIGURE], [stops], tmp_path, ["quality"])[1]
    assert numbers_in(note)[:2] == [2, 2]


def test_a_notebook_reads_it():
    assert list(Study(study().record).quality["best"]) == [0.05, 0.02]
