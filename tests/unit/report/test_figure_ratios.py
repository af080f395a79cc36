"""K* of sparse over dense networks: the numbers, and the figure that draws them."""

import dataclasses
import math

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.sparse_ratios import Ratio
from lit_dps.analysis.tables import records
from lit_dps.core.trial import Cell
from lit_dps.report.figures import ratios
from tests.support.fake_study import result
from tests.support.texts import figure_texts, numbers_in
from tests.unit.report.test_figures import columns, read


def study(steps, name="fake"):
    """A study by the steps of the trials of its cells, (batch size, sparsity) -> steps, None for an
    incomplete one."""
    cells = {
        Cell(*cell): [result(Cell(*cell), i, k) for i, k in enumerate(ks)]
        for cell, ks in steps.items()
    }
    return Analysis(dataclasses.replace(read(cells, space={}), name=name))


GRID = {
    **{(8, 0.0): [400, 200], (8, 0.5): [300, 600], (8, 0.9): [900, None]},
    **{(64, 0.0): [100, None], (64, 0.5): [None, None], (64, 0.9): [350, None]},
    **{(512, 0.0): [None], (512, 0.5): [20, None], (512, 0.9): [20, None]},
}


def test_ratios_are_of_the_best_trials_at_the_same_batch_size():
    found = study(GRID).ratios
    assert [(str(ratio.cell), ratio.base, ratio.value) for ratio in found] == [
        ("B=8 S=0.5", 0.0, 1.5),
        ("B=8 S=0.9", 0.0, 4.5),
        ("B=64 S=0.9", 0.0, 3.5),
    ]
    assert found[-1] == Ratio(Cell(64, 0.9), 0.0, 3.5, None)  # one trial each: no noise


def test_intervals_are_of_the_noise_of_both_k_star():
    # The second trial is 1.2 times as long, of 2: the noise is log(1.2) / 2 in both cells.
    (ratio,) = study({(8, 0.0): [100, 120], (8, 0.5): [200, 240]}).ratios
    half_width = 1.96 * math.sqrt(2) * math.log(1.2) / 2
    low, high = ratio.interval
    assert ratio.value == 2
    assert math.log(high / low) == pytest.approx(2 * half_width, rel=0.25)
    (wider,) = study({(8, 0.0): [100, 120], (8, 0.5): [200, 400]}).ratios
    assert wider.interval.high > high and wider.interval.low < low


def test_a_ratio_has_no_interval_where_the_noise_of_one_is_not_known():
    (ratio,) = study({(8, 0.0): [100, 110], (8, 0.5): [200, None]}).ratios
    assert (ratio.value, ratio.interval) == (2, None)


def test_the_figure_draws_its_rows(golden):
    one = study(GRID)
    drawn = ratios.rows(one)
    rows = records(drawn)
    assert columns(rows, "study", "sparsity", "base_sparsity", "batch_size", "ratio") == [
        ("fake", 0.5, 0.0, 8, 1.5),
        ("fake", 0.9, 0.0, 8, 4.5),
        ("fake", 0.9, 0.0, 64, 3.5),
    ]
    low, high = rows[0]["ratio_low"], rows[0]["ratio_high"]
    assert 0.4 <= low <= 1.5 <= high <= 5
    assert (rows[2]["ratio_low"], rows[2]["ratio_high"]) == (None, None)
    figure = ratios.draw(drawn, one)
    (ax,) = figure.axes
    base, half, most = ax.lines
    assert list(base.get_ydata()) == [1, 1]
    assert list(half.get_ydata()) == [1.5]
    assert list(most.get_ydata()) == [4.5, 3.5]
    # Beside each other, around their batch size.
    assert half.get_xdata()[0] * most.get_xdata()[0] == pytest.approx(8 * 8)
    assert most.get_xdata()[0] / half.get_xdata()[0] == pytest.approx(ratios.DODGE)
    (whisker,) = ax.collections[0].get_segments()
    assert np.asarray(whisker).tolist() == [[half.get_xdata()[0], low], [half.get_xdata()[0], high]]
    golden.check("figures/ratios.txt", figure_texts(figure))
    bottom, top = ax.get_ylim()
    assert bottom < min(1, low) and top > 4.5
    assert ax.get_title() == ""


def test_several_studies_have_a_panel_each(golden):
    one, bare = study(GRID, "one"), study({(8, 0.0): [10], (8, 0.9): [None]}, "bare")
    other = study({(8, 0.5): [100], (8, 0.9): [200]}, "other")
    studies = [one, bare, other]
    figure = ratios.draw(ratios.rows(*studies), *studies)
    assert [ax.get_title() for ax in figure.axes] == ["one", "other"]
    golden.check("figures/ratios-of-studies.txt", figure_texts(figure))
    first, second = figure.axes
    assert list(second.lines[1].get_ydata()) == [2]
    assert first.lines[2].get_color() == second.lines[1].get_color()  # S = 0.9 in both
    (note,) = ratios.notes(*studies)
    assert note.startswith("other ") and numbers_in(note) == [0.5]


def test_what_is_missing(golden):
    reasons = [
        ratios.missing(study({(8, 0.0): [10], (64, 0.0): [10]})),
        ratios.missing(study({(8, 0.0): [None], (8, 0.9): [10]})),
    ]
    golden.check("figures/ratios-missing.txt", "\n".join(reasons) + "\n")
    assert ratios.missing(study(GRID)) is None


def test_k_star_of_few_trials_is_not_said_to_be_at_the_first_validation():
    exact = study({(8, 0.0): [400, 200], (8, 0.9): [900, 800], (64, 0.0): [80, 90]})
    record = dataclasses.replace(exact.record, trials=5)
    unfinished = Analysis(record)  # two of five trials of each cell
    assert not any(cell.is_at_first_check for cell in unfinished.cells)
    assert [str(cell) for cell in unfinished.ratio_bounds] == ["B=8 S=0.9"]
    assert not unfinished.ratios and len(exact.ratios) == 1
    (note,) = ratios.notes(unfinished)
    assert numbers_in(note)[:2] == [1, 1]
    reason = ratios.missing(unfinished)
    assert "first validation" not in note and "first validation" not in reason
