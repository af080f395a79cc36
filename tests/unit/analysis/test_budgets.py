"""The best metric under budgets: known curves, and what of them is only a bound."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from lit_dps.analysis.budgets import (
    EXAMPLES,
    STEPS,
    Budget,
    budget_rows,
    example_budgets,
    step_budgets,
)
from lit_dps.analysis.tables import records
from lit_dps.core.batch_schedule import CONSTANT_BATCH
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell
from lit_dps.report.figures import FIGURES, drawn, write_figures
from lit_dps.report.notebook import Study
from tests.support.fake_study import analysis_of, result
from tests.support.texts import numbers_in

pytestmark = pytest.mark.pictures

GOAL = Goal(0.1, check_interval=10, max_steps=80)
FIGURE = next(figure for figure in FIGURES if figure.NAME == "budgets")


def trial(cell, point, errors, steps=None, status="complete", exact=None, **kw):
    """A trial with these errors at its checks, every 10 steps."""
    at = [10 * (i + 1) for i in range(len(errors))]
    curve = {"step": at, "val_error": errors, "train_loss": [1.0] * len(errors)}
    curve |= {} if exact is None else {"exact": exact}
    params = {"model.learning_rate": 0.1 * (point + 1), "model.momentum": 0.9}
    return result(cell, point, steps, status, params, curve=curve, **kw)


def table(*trials, steps=(10, 40, 80), examples=(), goal=GOAL, **kw):
    cells = {}
    for one in trials:
        cells.setdefault(one.trial.cell, []).append(one)
    study = analysis_of(cells, goal=goal, **kw)
    budgets = [Budget(STEPS, size) for size in steps]
    budgets += [Budget(EXAMPLES, size) for size in examples]
    return budget_rows(study.record, study.cells, budgets)


def values(rows: pd.DataFrame, *names):
    return [tuple(row[name] for name in names) for row in records(rows)]


A = Cell(4)
FALLS = [0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.12]
DIPS = [0.7, 0.35, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9]


def test_the_best_of_all_trials_and_all_their_checks_within_the_budget():
    rows = table(trial(A, 0, FALLS), trial(A, 1, DIPS))
    assert values(rows, "size", "step", "best", "found_at", "point", "exact", "ended_early") == [
        (10, 10, 0.7, 10, 1, 1, 0),
        (40, 40, 0.35, 20, 1, 1, 0),
        (80, 80, 0.12, 80, 0, 1, 0),
    ]
    assert list(rows["learning_rate"]) == pytest.approx([0.2, 0.2, 0.1])


def test_a_budget_between_two_checks_counts_those_before_it():
    rows = table(trial(A, 0, FALLS), steps=(9, 39, 41, 81, 1000))
    assert values(rows, "size", "step", "best") == [(39, 30, 0.5), (41, 40, 0.4), (81, 80, 0.12)]


def test_a_budget_of_examples_is_one_of_steps_for_each_batch_size():
    b = Cell(16)
    rows = table(trial(A, 0, FALLS), trial(b, 0, DIPS), steps=(), examples=(160, 320, 640))
    assert values(rows, "batch_size", "size", "step", "best") == [
        *((4, 160, 40, 0.4), (4, 320, 80, 0.12)),  # 640 examples are 160 steps: beyond what was run
        *((16, 160, 10, 0.7), (16, 320, 20, 0.35), (16, 640, 40, 0.35)),
    ]


def test_a_trial_that_stopped_at_the_goal_leaves_a_bound_after_it():
    stops = trial(A, 0, [0.5, 0.3, 0.1], steps=30)
    rows = table(stops, trial(A, 1, FALLS), steps=(20, 30, 39, 40, 80))
    assert values(rows, "step", "best", "exact", "ended_early") == [
        *((20, 0.3, 1, 0), (30, 0.1, 1, 0), (30, 0.1, 1, 0)),
        *((40, 0.1, 0, 1), (80, 0.1, 0, 1)),  # it might have gone lower
    ]


def test_a_trial_that_goes_on_after_the_goal_makes_it_whole():
    goes_on = trial(A, 0, [0.5, 0.3, 0.1, 0.08, 0.05, 0.06, 0.07, 0.09], steps=30)
    rows = table(goes_on, trial(A, 1, FALLS), steps=(30, 40, 80))
    assert values(rows, "best", "found_at", "exact") == [(0.1, 30, 1), (0.08, 40, 1), (0.05, 50, 1)]


def test_an_outraced_trial_leaves_a_bound_and_a_diverged_one_does_not():
    ends, goes_on = (
        trial(A, 0, [0.9, 0.8, 0.7, 0.6], status="outraced"),
        trial(A, 1, [0.5, 0.1, *[0.08] * 6], steps=20),
    )
    rows = table(ends, goes_on, race_factor=2.0)
    assert values(rows, "best", "exact", "ended_early") == [(0.5, 1, 0), (0.08, 1, 0), (0.08, 0, 1)]
    diverges = trial(A, 0, [0.5, math.nan], status="infeasible")
    rows = table(diverges, trial(A, 1, FALLS))
    assert values(rows, "best", "exact", "point") == [(0.5, 1, 0), (0.4, 1, 1), (0.12, 1, 1)]


def test_a_trial_that_diverged_after_its_goal_is_known_to_the_end_and_one_that_was_stopped_is_not():
    rows = table(trial(A, 0, [0.5, 0.1, 0.08, 0.9], steps=20), trial(A, 1, FALLS))
    assert values(rows, "best", "exact") == [(0.5, 1), (0.08, 1), (0.08, 1)]
    rows = table(trial(A, 0, [0.5, 0.1, 0.08, 0.9], steps=20, failure="enough"), trial(A, 1, FALLS))
    assert values(rows, "best", "exact") == [(0.5, 1), (0.08, 1), (0.08, 0)]


def test_a_lower_bound_of_an_early_check_is_no_value():
    """Exact where the bound lies above the best; else the truth lies between them."""
    bounded = trial(A, 0, [0.6, 0.3, 0.3, 0.2], steps=None, exact=[1, 0, 0, 1])
    other = trial(A, 1, [0.7, 0.4, 0.25, 0.25])
    rows = table(bounded, other, steps=(10, 20, 30, 40), goal=Goal(0.1, 10, 40))
    assert values(rows, "best", "exact", "point") == [
        (0.6, 1, 0),
        (0.4, 0, 1),
        (0.25, 1, 1),
        (0.2, 1, 0),
    ]


def test_a_metric_that_rises():
    goal = Goal(0.9, 10, 30, metric="accuracy", at_least=True)

    def rising(point, found, steps=None):
        curve = {
            "step": [10, 20, 30][: len(found)],
            "accuracy": found,
            "train_loss": [1.0] * len(found),
        }
        return result(A, point, steps, curve=curve, params={})

    rows = table(
        rising(0, [0.5, 0.92], 20),
        rising(1, [0.6, 0.7, 0.8]),
        steps=(10, 20, 30),
        goal=goal,
        space={},
    )
    assert values(rows, "best", "exact", "point") == [(0.6, 1, 1), (0.92, 1, 0), (0.92, 0, 0)]


def test_an_error_of_zero_cannot_be_beaten():
    assert values(table(trial(A, 0, [0.5, 0.0], steps=20)), "best", "exact") == [
        (0.5, 1),
        (0.0, 1),
        (0.0, 1),
    ]


def test_ties_go_to_the_lowest_point_and_the_first_check():
    rows = table(
        trial(A, 0, [0.4, 0.3, 0.3]),
        trial(A, 1, [0.3, 0.3, 0.3]),
        steps=(30,),
        goal=Goal(0.1, 10, 30),
    )
    assert values(rows, "best", "found_at", "point") == [(0.3, 20, 0)]


def test_the_families_of_budgets():
    long = step_budgets(Goal(0.1, 16, 40_000))
    assert long == [(STEPS, size) for size in (32, 144, 624, 2496, 10_000, 40_000)]
    assert step_budgets(GOAL) == [(STEPS, size) for size in (10, 20, 40, 80)]
    by_examples = example_budgets(GOAL, (4, 16, 64), [CONSTANT_BATCH])
    assert by_examples == [(EXAMPLES, size) for size in (160, 320, 640, 1280)]
    for budget in by_examples:
        assert sum(10 <= budget.last_check(CONSTANT_BATCH, b, 10) <= 80 for b in (4, 16, 64)) >= 2
    assert example_budgets(GOAL, (4,), [CONSTANT_BATCH]) == []


def ran_on():
    """At B = 4 and 16: trials that go on to the budget; 16 examples a step find in half the steps
    what 4 find."""
    quick = [0.6, 0.4, 0.2, 0.12, 0.1, 0.09, 0.08, 0.07]
    return analysis_of(
        {A: [trial(A, 0, FALLS)], Cell(16): [trial(Cell(16), 0, quick, steps=50)]}, goal=GOAL
    )


def test_the_figure_draws_its_rows(tmp_path):
    study = ran_on()
    assert FIGURE.by_default(study)
    left, right = drawn(FIGURE, study).axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in left.lines]
    assert ([4, 16], [0.12, 0.07]) in lines and ([4, 16], [0.8, 0.6]) in lines
    assert ([4, 16], [0.8, 0.6]) not in [
        (list(line.get_xdata()), list(line.get_ydata())) for line in right.lines
    ]
    assert [text.get_text() for text in left.texts] == ["80", "40", "20", "10"]
    assert [text.get_text() for text in right.texts] == ["320", "160"]
    files, notes = write_figures([FIGURE], [study], tmp_path)
    assert [path.name for path in files] == [
        "budgets.csv",
        "budgets.png",
        "budgets.pdf",
    ] and notes == []


def test_bounds_are_hollow_and_told(tmp_path):
    stops = {b: [trial(Cell(b), 0, [0.5, 0.1], steps=20)] for b in (4, 16)}
    study = analysis_of({Cell(b): trials for b, trials in stops.items()}, goal=GOAL)
    assert not FIGURE.by_default(study)
    assert write_figures([FIGURE], [study], tmp_path) == ([], [])
    files, notes = write_figures([FIGURE], [study], tmp_path, ["budgets"])
    assert len(files) == 3 and [numbers_in(note)[:2] for note in notes] == [[6, 12]]
    hollow = [
        line for line in drawn(FIGURE, study).axes[0].lines if line.get_markerfacecolor() == "white"
    ]
    assert [list(line.get_ydata()) for line in hollow if len(line.get_ydata())] == [
        [0.1, 0.1],
        [0.1, 0.1],
    ]


def test_a_notebook_reads_them():
    budgets = Study(ran_on().record).budgets
    assert list(budgets.columns[:8]) == [
        *("sparsity", "batch_size", "budget", "size", "step", "best", "exact", "ended_early")
    ]
    last = budgets[(budgets["budget"] == "steps") & (budgets["size"] == 80)]
    assert list(last["best"]) == [0.12, 0.07]


def test_no_row_is_beyond_a_budget_of_examples():
    goal = replace(GOAL, max_examples=160)
    rows = table(trial(A, 0, FALLS[:4]), steps=(10, 40, 80), examples=(80, 160, 320), goal=goal)
    assert values(rows, "budget", "size", "exact") == [
        (STEPS, 10, 1),
        (STEPS, 40, 1),
        (EXAMPLES, 80, 1),
        (EXAMPLES, 160, 1),
    ]
