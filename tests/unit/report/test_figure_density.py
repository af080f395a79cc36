"""The figure of K* against the average density: its rows, and studies without moving masks."""

from __future__ import annotations

import dataclasses

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.trial import DENSITY_STEP, DENSITY_SUM, Cell
from lit_dps.report.figures import density, drawn
from tests.support.fake_study import result
from tests.support.texts import figure_texts
from tests.unit.report.test_figures import read

METHODS = ("gradual", "rigl")


def study(moves: bool = True) -> Analysis:
    """Two methods at S = 0.9: after step 10 rigl keeps 10 % as before, gradual 40 % of all."""
    cells = {}
    for method in METHODS:
        axes = (("pruning.method", method),)
        for batch_size, steps in ((8, 40), (32, 20)):
            dense = Cell(batch_size, 0.0, axes)
            cells[dense] = [result(dense, 0, 20)]
            cell = Cell(batch_size, 0.9, axes)
            pruned = result(cell, 0, steps)
            first, then = (10.0, 40) if method == "gradual" else (1.0, 10)
            flags = {DENSITY_SUM: first, DENSITY_STEP: 10} if moves else {}
            kept = {"w": (then, 100)}
            cells[cell] = [dataclasses.replace(pruned, flags=flags, kept=kept)]
    return Analysis(
        dataclasses.replace(read(cells, space={}, axes={"pruning.method": METHODS}), results=cells)
    )


def test_a_row_has_the_ratio_and_the_mean_share_over_the_steps():
    rows = density.rows(study()).sort_values(["method", "batch_size"])
    assert rows["method"].tolist() == ["gradual", "gradual", "rigl", "rigl"]
    assert rows["ratio"].tolist() == [2, 1, 2, 1]
    # gradual: (10 * 1 + 30 * 0.4) / 40 and (10 * 1 + 10 * 0.4) / 20.
    assert rows["average_density"].tolist() == pytest.approx([0.55, 0.7, 0.1, 0.1])


def test_a_colour_for_each_method():
    texts = figure_texts(drawn(density, study()))
    assert all(method in texts for method in METHODS)


def test_studies_whose_masks_stay_have_no_such_figure():
    assert "no mask" in density.missing(study(moves=False))
    assert not density.by_default(study(moves=False)) and density.by_default(study())
