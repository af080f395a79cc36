"""What pruning leaves of layers, the Jacobian of repaired networks, ranks of terms and K*, and
their figures."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.layers import collapse_rows, jacobian_rows, kept_of, layer_rows
from lit_dps.analysis.term_comparisons import correlation_rows, rank_rows
from lit_dps.core.goal import Goal
from lit_dps.core.trial import DENSITY_STEP, DENSITY_SUM, Cell, Series
from lit_dps.report.figures import FIGURES, drawn, write_figures
from lit_dps.report.pruning_notes import layers_without_weights
from lit_dps.report.text import render
from lit_dps.storage.schema import AXES
from tests.support.fake_study import analysis_of, result, theory_terms
from tests.support.texts import numbers_in

pytestmark = pytest.mark.pictures

GOAL = Goal(0.1, check_interval=4, max_steps=400)
METHODS = {"grasp": 1.0, "magnitude": 2.0, "random": 3.0, "snip": 4.0}
AXIS = {AXES: {"pruning.init": ["isometry", "original"], "pruning.method": list(METHODS)}}
BY_NAME = {figure.NAME: figure for figure in FIGURES}


def cell(batch_size: int, sparsity: float, method: str, init: str = "original") -> Cell:
    return Cell(batch_size, sparsity, (("pruning.init", init), ("pruning.method", method)))


def trials(of: Cell) -> list:
    """Three points: L in proportion to K*, beta against it; magnitude prunes the second layer whole
    at S = 0.99."""
    method, share = dict(of.axes)["pruning.method"], 1 - of.sparsity
    found = []
    for point in range(3):
        steps = int(400 / of.batch_size * METHODS[method]) * 4 + 4 * point
        second = (
            0
            if method == "magnitude" and of.sparsity == 0.99 and point == 1
            else round(200 * share) + point
        )
        kept = {
            "a.weight": (round(1000 * share), 1000),
            "b.weight": (second, 200),
            "a.bias": (0, 10),
        }
        given = theory_terms(steps, lipschitz=(METHODS[method],) * 2, beta=1 / METHODS[method])
        if ("pruning.init", "isometry") in of.axes:
            names = [(n, w) for n in ("mean", "spread", "condition") for w in ("before", "after")]
            seen = {f"jacobian_{n}_{w}": 2.0 if w == "after" else 1.0 + point for n, w in names}
            seen |= {"isometry_distance_before": 3.0, "isometry_distance_after": 0.5}
            seen["jacobian_condition_before"] = math.inf
            given["flags"] |= seen
        found.append(result(of, point, steps, kept=kept, **given))
    return found


@pytest.fixture(scope="module")
def study():
    inits = AXIS[AXES]["pruning.init"]
    cells = [
        cell(b, s, m, i) for b in (4, 8, 16) for s in (0.9, 0.99) for m in METHODS for i in inits
    ]
    found = analysis_of({c: trials(c) for c in cells}, goal=GOAL, **AXIS)
    return Analysis(found.record, replicates=50)


def test_kept_shares_are_means_over_points_that_count_once(study):
    rows = layer_rows(kept_of(study.record))
    assert (
        list(rows.columns[:3]) == ["sparsity", "method", "layer"]
        and len(rows) == 2 * len(METHODS) * 2
    )
    row = rows[
        (rows["sparsity"] == 0.99) & (rows["method"] == "magnitude") & (rows["layer"] == "b.weight")
    ].iloc[0]
    assert (row["samples"], row["total"], row["empty"]) == (3, 200, 1)
    assert (row["kept"], row["low"], row["high"]) == (pytest.approx((2 + 0 + 4) / 3), 0, 4 / 200)


def test_shares_of_networks_of_different_sizes_are_of_the_layers_of_each():
    small = {"a.weight": (64, 640), "b.weight": (2, 10)}
    large = {"a.weight": (512, 2560), "b.weight": (6, 10), "c.weight": (0, 10)}
    rows = layer_rows([(Series(0.9), 0, small), (Series(0.9), 1, large)])
    a, b, c = rows.to_dict("records")
    assert (a["total"], a["kept"], a["share"]) == (1600, 288, pytest.approx(0.15))
    assert (a["low"], a["high"]) == (pytest.approx(0.1), pytest.approx(0.2))
    assert (b["total"], b["kept"], b["share"]) == (10, 4, pytest.approx(0.4))
    assert (c["layer"], c["samples"], c["empty"]) == ("c.weight", 1, 1)
    equal = layer_rows([(Series(0.9), i, {"a.weight": (3, 100)}) for i in range(9)])
    assert equal[["low", "share", "high"]].to_numpy().tolist() == [[0.03, 0.03, 0.03]]
    (row,) = collapse_rows(rows).to_dict("records")
    assert row["kept"] == pytest.approx((66 + 518) / (650 + 2580))


def test_the_mean_of_equal_shares_is_between_the_least_and_the_largest_one():
    """A mean that is rounded below both has a bar of negative length, which cannot be drawn."""
    for kept in (7, 1):
        samples = [(Series(0.9), point, {"a.weight": (kept, 10)}) for point in range(3)]
        (row,) = layer_rows(samples).to_dict("records")
        assert row["low"] == row["share"] == row["high"] == kept / 10


def test_the_first_sparsity_with_an_empty_layer_is_told(study):
    rows = collapse_rows(layer_rows(kept_of(study.record)))
    first = dict(zip(rows["method"], rows["collapses"], strict=True))
    assert first["magnitude"] == 0.99 and np.isnan(first["snip"])
    here = rows[(rows["method"] == "magnitude") & (rows["sparsity"] == 0.99)].iloc[0]
    assert (here["least"], here["layer"], here["empty"]) == (0, "b.weight", 1)
    assert here["kept"] == pytest.approx(
        (10 + 2) / 1200
    )  # of the weights, whatever the sparsity counts
    (empty,) = layers_without_weights(study)
    assert empty["places"].startswith("S=0.99 method=magnitude: b.weight ")
    assert numbers_in(empty["places"]) == [1, 3]
    assert empty["places"] in render(study)
    (line,) = BY_NAME["layers"].notes(study)
    assert "method=magnitude" in line and "S=0.99" in line and "b.weight" in line
    assert numbers_in(line) == [1, 3]


def test_masks_that_change_are_counted_at_the_end_of_each_trial():
    """Of rigl, each trial keeps something else, and the second layer of one is empty at its end."""
    moving = {"pruning.method": ["rigl", "snip"]}
    results = {}
    for batch_size in (4, 8):
        for method in moving["pruning.method"]:
            of = Cell(batch_size, 0.9, (("pruning.method", method),))
            results[of] = []
            for point in range(3):
                flags = {}
                second = 20
                if method == "rigl" and (batch_size, point) != (4, 0):  # it ended before a change
                    flags = {DENSITY_SUM: 0.1, DENSITY_STEP: 4}
                    second = 0 if (batch_size, point) == (8, 2) else 10 * batch_size
                kept = {"a.weight": (100, 1000), "b.weight": (second, 200), "a.bias": (0, 10)}
                results[of].append(result(of, point, 40, kept=kept, flags=flags))
    found = analysis_of(results, goal=GOAL, **{AXES: moving})
    rows = layer_rows(kept_of(found.record))
    assert list(zip(rows["method"], rows["layer"], rows["kept"], strict=True)) == [
        ("snip", "a.weight", 100),
        ("snip", "b.weight", 20),
    ]
    (empty,) = layers_without_weights(found)
    assert empty["places"] == "S=0.9 method=rigl: b.weight at the end of 1 of 6 trials"
    (line,) = BY_NAME["layers"].notes(found)
    assert numbers_in(line) == [6]
    of_rigl = {cell: trials for cell, trials in results.items() if "rigl" in str(cell)}
    alone = analysis_of(of_rigl, goal=GOAL, **{AXES: {"pruning.method": ["rigl"]}})
    assert list(layers_without_weights(alone)) == [empty]
    assert BY_NAME["layers"].missing(alone) is not None


def test_of_many_methods_each_has_a_panel_and_the_legend_fits():
    names = [f"method_{i}" for i in range(8)]
    counts = {"a.weight": (5, 10), "b.weight": (0, 10)}
    kept = [
        (Series(s, (("pruning.method", name),)), 0, counts) for name in names for s in (0.8, 0.9)
    ]
    figures = dict(BY_NAME["layers"].figures(BY_NAME["layers"].tables_of(layer_rows(kept))))
    assert [ax.get_title() for ax in figures["layers"].axes] == names
    (legend,) = figures["layers"].legends
    # The other figure has the names beside the ends of its curves.
    (panel,) = figures["collapse"].axes
    labels = [text for text in panel.texts if text.get_text() in names]
    assert sorted(label.get_text() for label in labels) == names
    for figure, parts in ((figures["layers"], [legend]), (figures["collapse"], labels)):
        figure.draw_without_rendering()
        for part in parts:
            box = part.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_the_jacobian_of_repaired_networks_is_in_a_table(study):
    rows = jacobian_rows(study.record)
    assert len(rows) == 3 * 2 * len(METHODS) * 3 and set(rows["init"]) == {"isometry"}
    assert rows["mean_before"].mean() == 2.0 and rows["distance_after"].eq(0.5).all()


def test_a_term_in_proportion_to_the_steps_has_rank_correlation_1(study):
    rows, found = rank_rows(study.record), correlation_rows(study.record, 50)
    snip = rows[
        (rows["method"] == "snip") & (rows["batch_size"] == 8) & (rows["sparsity"] == 0.9)
    ].iloc[0]
    assert (snip["k_star"], snip["lipschitz"], snip["beta"]) == (800, 4.0, 0.25)
    assert snip["c1"] == pytest.approx(4.0 * 0.25 * 4.0) and snip["samples"] == 3
    by_term = found[found["batch_size"] == 8].set_index("term")
    assert by_term.loc["lipschitz", ["rho", "low", "high", "series"]].tolist() == [1, 1, 1, 16]
    assert by_term.loc["beta", "rho"] == -1 and 0.4 < by_term.loc["beta", "chance"] < 0.6
    assert math.isnan(by_term.loc["delta", "rho"])  # it is the same in all series


def test_a_series_that_shows_the_trials_of_an_equal_one_counts_once(study):
    one, other = list(METHODS)[:2]
    shared = {cell(8, 0.9, other): cell(8, 0.9, one)}
    found = correlation_rows(dataclasses.replace(study.record, shared=shared), 50)
    by_size = found[found["term"] == "lipschitz"].set_index("batch_size")["series"]
    assert by_size[8] == 15 and set(by_size.drop(8)) == {16}


def test_points_that_one_series_lacks_are_left_out_of_all():
    cells = {cell(4, 0.9, m): trials(cell(4, 0.9, m)) for m in METHODS}
    del cells[cell(4, 0.9, "snip")][0]
    rows = rank_rows(
        analysis_of(cells, goal=GOAL, **{AXES: {**AXIS[AXES], "pruning.init": ["original"]}}).record
    )
    assert rows["samples"].eq(2).all() and rows["k_star"].min() == 404


@pytest.mark.long
def test_figures_are_drawn_where_pruning_is_an_axis(study, tmp_path):
    new = [BY_NAME[name] for name in ("pruners", "layers", "terms")]
    assert all(figure.by_default(study) for figure in new)
    files, _ = write_figures(new, [study], tmp_path)
    names = {path.name for path in files}
    assert {f"{n}.png" for n in ("pruners", "layers", "collapse", "terms")} <= names
    assert {"layers.csv", "collapse.csv", "terms.csv", "terms-correlations.csv"} <= names
    axes = drawn(BY_NAME["pruners"], study).axes
    assert [ax.get_title() for ax in axes] == ["sparsity 0.9", "sparsity 0.99"]
    assert len(drawn(BY_NAME["terms"], study).axes) == 3 * 5
    assert [ax.get_title() for ax in drawn(BY_NAME["layers"], study).axes] == [
        "sparsity 0.9",
        "sparsity 0.99",
    ]
    plain = analysis_of(
        {Cell(b, 0.9): [result(Cell(b, 0.9), 0, 40, kept={"w": (1, 10)})] for b in (4, 8)},
        goal=GOAL,
    )
    assert not any(BY_NAME[name].by_default(plain) for name in ("pruners", "layers", "terms"))
    assert "smoothness.interval" in BY_NAME["terms"].missing(plain)
