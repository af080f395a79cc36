"""The best of n of the N trials of a cell, by the formula and by all choices."""

from __future__ import annotations

import math
import re
from itertools import combinations
from statistics import fmean, median_low

import numpy as np
import pytest

from lit_dps.analysis.best_of_n import best_of, last_doubling, why_no_draws
from lit_dps.core.statistic import MINIMUM
from lit_dps.core.trial import Cell
from lit_dps.report.figures import FIGURES, drawn
from lit_dps.report.repeats import draws_text
from tests.support.errors import raises_about
from tests.support.fake_study import analysis_of, result

pytestmark = pytest.mark.pictures

FIGURE = next(figure for figure in FIGURES if figure.NAME == "draws")
STEPS = [160, None, 96, 96, None, 480, 16, None, 320]


@pytest.mark.parametrize("steps", [STEPS, [None, 32], [32, 16, 64, 128], [None, None]])
def test_the_formula_is_that_of_all_choices(steps):
    for n in range(1, len(steps) + 1):
        every = [
            min((k for k in chosen if k is not None), default=math.inf)
            for chosen in combinations(steps, n)
        ]
        found = best_of(steps, [n])[0]
        assert found.median == median_low(every)
        assert found.none == pytest.approx(sum(map(math.isinf, every)) / len(every))
        complete = [math.log(k) for k in every if math.isfinite(k)]
        assert found.mean == (pytest.approx(math.exp(fmean(complete))) if complete else None)
    whole = best_of(steps, [len(steps)])[0]
    assert whole.median == min((k for k in steps if k is not None), default=math.inf)


@pytest.mark.parametrize("n", [0, 3])
def test_no_more_than_there_are(n):
    with raises_about(ValueError, n, 2):
        best_of([1, 2], [n])


def study(config=None, steps=STEPS):
    results = {
        Cell(b, s): [result(Cell(b, s), i, k) for i, k in enumerate(steps)]
        for b in (4, 8)
        for s in (0.0, 0.5)
    }
    return analysis_of(results, **({"config": config} if config else {}))


def test_the_table_and_the_last_doubling(golden):
    found = study(steps=[160, None, 96, 480])
    rows = found.best_of_n_table[
        (found.best_of_n_table["batch_size"] == 4) & (found.best_of_n_table["sparsity"] == 0)
    ]
    assert rows["draws"].tolist() == [1, 2, 3, 4]
    # of pairs: {160, -}, {160, 96}, {160, 480}, {-, 96}, {-, 480}, {96, 480}
    assert rows["median"].tolist() == [160, 96, 96, 96]
    assert np.isnan(rows["mean"].tolist()[0]) and rows["none"].tolist() == [0.25, 0, 0, 0]
    assert rows["mean"].tolist()[1] == pytest.approx(
        math.exp(fmean(map(math.log, [160, 96, 160, 96, 480, 96])))
    )
    half = math.exp(fmean(map(math.log, [160, 96, 160, 96, 480, 96]))) / 96
    assert last_doubling(found.cells, MINIMUM) == pytest.approx([half] * 4)
    said = " ".join(draws_text(found.record, found.cells).split())
    assert re.findall(r"x([\d.]+)", said) == [f"{half:.3g}"] * 3
    golden.check("analysis/draws.txt", draws_text(found.record, found.cells))


def test_halves_without_a_complete_trial_say_nothing(golden):
    """Of (6 over 3) = 20 halves 10 lack the best trial; where only it is complete they count for
    nothing."""
    whole, raced = [96, 160, 160, 160, 160, 160], [96, None, None, None, None, None]
    ratio = (160 / 96) ** 0.5
    assert last_doubling(study(steps=whole).cells, MINIMUM) == pytest.approx([ratio] * 4)
    found = study(steps=raced)
    assert last_doubling(found.cells, MINIMUM) == []
    unknown = draws_text(found.record, found.cells)
    results = {
        Cell(b): [result(Cell(b), i, k) for i, k in enumerate(steps)]
        for b, steps in ((4, whole), (8, raced))
    }
    some = analysis_of(results)
    some_text = draws_text(some.record, some.cells)
    assert f"x{ratio:.3g} " in some_text
    golden.check("analysis/draws-of-few.txt", unknown + some_text)


def test_bounds_are_marked_and_count_for_nothing():
    found = study(steps=[16, 16, 160])
    assert found.best_of_n_table["floor"].tolist()[:3] == [1, 1, 1]
    assert last_doubling(found.cells, MINIMUM) == [] and draws_text(found.record, found.cells) == ""


def test_trials_of_an_adaptive_sampler_are_not_drawn_from():
    found = study({"study": {"sampler": "tpe"}})
    assert "tpe" in why_no_draws(found.record) and not len(found.best_of_n_table)
    assert FIGURE.missing(found) == why_no_draws(found.record)


def test_the_figure_has_a_curve_a_batch_size():
    found = study()
    assert FIGURE.missing(found) is None and not FIGURE.by_default(found)
    figure = drawn(FIGURE, found)
    assert [ax.get_title() for ax in figure.axes] == ["sparsity 0", "sparsity 0.5"]
    line = figure.axes[0].get_lines()[0]
    assert list(line.get_xdata()) == list(range(1, 10))
    assert list(line.get_ydata()) == [best_of(STEPS, [n])[0].median for n in range(1, 10)]
