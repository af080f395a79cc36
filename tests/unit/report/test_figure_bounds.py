"""How the figures draw K* at the first validation, which are upper bounds: hollow, with an arrow, never
as a ratio."""

import dataclasses

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.trial import Cell
from lit_dps.report.figures import optimizers, ratios, scaling
from tests.support.fake_study import result
from tests.support.texts import figure_texts, numbers_in
from tests.unit.report.test_figures import lines_of, read

pytestmark = pytest.mark.pictures

SIZES = (8, 80, 2000)


def study_of(dense, sparse=None, name="fake"):
    """One trial a cell, checked every 16 steps, by the K* of the batch sizes 8, 80 and 2000."""
    curves = {0.0: dense} | ({} if sparse is None else {0.9: sparse})
    cells = {
        Cell(b, s): k for s, found in curves.items() for b, k in zip(SIZES, found, strict=True)
    }
    record = dataclasses.replace(
        read({c: [result(c, 0, k)] for c, k in cells.items()}, space={}), name=name
    )
    return Analysis(record)


BOUND = study_of((3200, 320, 16), (6400, 800, 96))
RESOLVED = study_of((3200, 320, 32), (6400, 800, 96))


def legend_of(ax):
    return (
        [] if ax.get_legend() is None else [text.get_text() for text in ax.get_legend().get_texts()]
    )


def test_the_rows_flag_it_and_do_not_normalise_it():
    rows = [row for row in records(scaling.rows(BOUND)) if row["k_star"] is not None]
    assert [(row["k_star"], row["floor"]) for row in rows[:3]] == [(3200, 0), (320, 0), (16, 1)]
    assert [row["normalised_k_star"] for row in rows] == [1, 0.1, None, 1, 0.125, 0.015]
    assert {*scaling.rows(RESOLVED)["floor"]} == {0}


def test_curves_are_normalised_and_scale_perfectly_from_a_resolved_k_star():
    study = study_of((16, 320, 32), (6400, 800, 96))
    rows = records(scaling.rows(study))
    assert {row["normalised_by"] for row in rows} == {80}
    dense = {row["batch_size"]: row for row in rows if row["sparsity"] == 0.0}
    assert (dense[8]["normalised_k_star"], dense[2000]["normalised_k_star"]) == (None, 0.1)
    assert dense[2000]["perfect"] == pytest.approx(320 * 80 / 2000)


def test_a_curve_of_bounds_alone_does_not_keep_others_from_being_normalised():
    rows = records(scaling.rows(study_of((16, 16, 16), (6400, 800, 96))))
    dense, sparse = (
        [row for row in rows if row["sparsity"] == s and row["k_star"]] for s in (0.0, 0.9)
    )
    assert [row["normalised_k_star"] for row in sparse] == [1, 0.125, 0.015]
    assert {row["normalised_k_star"] for row in dense} == {None}
    assert [row["normalised_perfect"] for row in dense] == [1, 0.1, 0.004]


def test_it_is_drawn_hollow_with_an_arrow_down(golden):
    figure = scaling.draw(scaling.rows(BOUND), BOUND)
    dense, sparse, together, normalised = figure.axes
    for ax in (dense, together):
        assert ([8, 80], [3200, 320]) in lines_of(ax)
        (marker,) = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
        assert marker.get_data()[0].tolist() == [2000]
        assert marker.get_data()[1].tolist() == [16]
        (stem,) = [
            segment for part in ax.collections for segment in getattr(part, "get_segments", list)()
        ]
        assert np.asarray(stem) == pytest.approx(
            np.array([[2000, 16 * (1 - scaling.ARROW)], [2000, 16]])
        )
        assert ax.get_ylim()[0] < 16 * (1 - scaling.ARROW)
        assert "upper bound" in legend_of(ax)
    golden.check("figures/scaling-bound.txt", figure_texts(figure))
    assert legend_of(sparse) == []
    assert legend_of(normalised) == ["perfect scaling"]
    assert not [
        line
        for ax in (sparse, normalised)
        for line in ax.lines
        if line.get_markerfacecolor() == "white"
    ]


def test_without_any_nothing_is_hollow_and_no_legend_tells_of_it():
    figure = scaling.draw(scaling.rows(RESOLVED), RESOLVED)
    assert not [
        line for ax in figure.axes for line in ax.lines if line.get_markerfacecolor() == "white"
    ]
    assert not [ax for ax in figure.axes if "upper bound" in legend_of(ax)]


def test_the_notes_say_how_it_is_drawn():
    (note,) = scaling.notes(BOUND)
    assert [note] == scaling.bound_notes(BOUND.laws.values())
    assert scaling.notes(RESOLVED) == []
    pair = [study_of((3200, 320, 16), name="a"), study_of((3200, 320, 64), name="b")]
    assert optimizers.notes(*pair)[-1] == note
    assert note not in optimizers.notes(pair[1], study_of((3200, 320, 48), name="c"))


def test_update_rules_are_compared_in_the_same_way(golden):
    pair = [study_of((3200, 320, 16), name="a"), study_of((6400, 640, 64), name="b")]
    rows = optimizers.rows(*pair)
    measured = [row for row in records(rows) if row["k_star"] is not None]
    assert [(row["floor"], row["normalised_k_star"]) for row in measured] == [
        *((0, 1), (0, 0.1), (1, None)),
        *((0, 1), (0, 0.1), (0, 0.01)),
    ]
    figure = optimizers.draw(rows, *pair)
    assert ([2000], [16]) in lines_of(figure.axes[0])
    rules, lines = ([text.get_text() for text in legend.get_texts()] for legend in figure.legends)
    assert rules == ["a", "b"]
    golden.check("figures/optimizers-bound.txt", figure_texts(figure))
    assert "upper bound" in lines
    other = [pair[1], study_of((3200, 320, 48), name="c")]
    _, lines = optimizers.draw(optimizers.rows(*other), *other).legends
    assert "upper bound" not in [text.get_text() for text in lines.get_texts()]


def test_ratios_leave_it_out_and_say_so():
    assert [(row["batch_size"], row["ratio"]) for row in records(ratios.rows(BOUND))] == [
        (8, 2),
        (80, 2.5),
    ]
    (note,) = ratios.notes(BOUND)
    assert numbers_in(note) == [1, 3]
    assert ratios.notes(RESOLVED) == []
    assert ratios.missing(BOUND) is None
    none = study_of((16, 320, 16), (16, 16, 96))
    assert len(ratios.rows(none)) == 0
    assert ratios.missing(none) is not None
