"""The data behind the figures."""

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell
from lit_dps.report.figures import metaparameters, scaling
from tests.support.fake_study import result
from tests.unit.report.test_figures import columns, exact, read


def test_scaling_rows_are_the_law_and_the_measurements():
    record = read(exact())
    rows = records(scaling.rows(Analysis(record)))
    measured = [row for row in rows if row["k_star"] is not None]
    assert columns(measured, "sparsity", "batch_size", "k_star") == [
        *((0.0, 8, 12600), (0.0, 80, 1350), (0.0, 2000, 150)),
        *((0.9, 8, 25200), (0.9, 80, 2700), (0.9, 2000, 300)),
    ]
    assert [row["fit"] for row in measured] == pytest.approx(
        [12600, 1350, 150, 25200, 2700, 300], rel=1e-6
    )
    assert [row["perfect"] for row in measured[:3]] == pytest.approx([12600, 1260, 50.4])
    # Both sparsities are the same curve once each is over its K* at B = 8.
    for column in ("normalised_k_star", "normalised_fit", "normalised_perfect"):
        dense, sparse = (
            [row[column] for row in measured if row["sparsity"] == s] for s in (0.0, 0.9)
        )
        assert dense == pytest.approx(sparse, rel=1e-6)
    assert [row["normalised_k_star"] for row in measured[:3]] == pytest.approx(
        [1, 1350 / 12600, 150 / 12600]
    )
    assert {row["normalised_by"] for row in rows} == {8}
    # Between the measurements there is a curve: 8 points in each of the 8 doublings, measured batch
    # sizes among them.
    curve = [row["batch_size"] for row in rows if row["sparsity"] == 0.0]
    assert curve == sorted(set(curve))
    assert max(np.diff(np.log2(curve))) < 1 / 7.9
    assert [row["fit"] for row in rows[: len(curve)]] == pytest.approx(
        [1e5 / b + 100 for b in curve], rel=1e-6
    )
    assert all(row["fit_low"] < row["fit"] < row["fit_high"] for row in rows)
    assert {row["k_star_low"] for row in rows} == {None}  # the noise of one trial is not known


def test_curves_are_normalised_where_all_have_a_measurement():
    record = read(exact(missing=[Cell(8, 0.9)]))
    rows = records(scaling.rows(Analysis(record)))
    assert {row["normalised_by"] for row in rows} == {80}
    at = {(row["sparsity"], row["batch_size"]): row for row in rows}
    assert at[0.9, 8]["k_star"] is at[0.9, 8]["normalised_k_star"] is None
    assert at[0.0, 8]["normalised_k_star"] == pytest.approx(12600 / 1350)
    assert at[0.9, 2000]["normalised_k_star"] == pytest.approx(300 / 2700)
    assert at[0.9, 2000]["perfect"] == pytest.approx(
        2700 * 80 / 2000
    )  # from its own first measurement


def test_the_band_holds_the_fit():
    record = read(trials=12)
    rows = records(scaling.rows(Analysis(record)))
    assert all(row["fit_low"] <= row["fit"] <= row["fit_high"] for row in rows)
    assert any(row["fit_low"] < row["fit_high"] for row in rows)


def test_one_batch_size_draws_its_point():
    record = read({Cell(16, 0.0): [result(Cell(16, 0.0), 0, 320)]}, space={})
    (row,) = records(scaling.rows(Analysis(record)))
    assert (row["batch_size"], row["k_star"], row["fit"], row["normalised_k_star"]) == (
        16,
        320,
        None,
        1.0,
    )


def test_metaparameter_rows_are_all_finished_trials():
    a, b = Cell(8, 0.0), Cell(16, 0.0)
    at = {"model.learning_rate": 0.1, "model.momentum": 0.9}
    done = {
        a: [
            result(a, 0, None, params=at),
            result(a, 1, 32, params=at),
            result(a, 2, 16, params=at),
        ],
        b: [result(b, 0, None, "infeasible", params=at)],
    }
    rows = metaparameters.rows(Analysis(read(done, running={b: 1})))
    assert columns(rows, "batch_size", "point", "status", "steps", "k_star") == [
        (8, 0, "incomplete", None, False),
        (8, 1, "complete", 32, False),
        (8, 2, "complete", 16, True),
        (16, 0, "infeasible", None, False),
    ]
    assert set(columns(rows, "learning_rate", "momentum")) == {(0.1, 0.9)}


def test_where_values_lie_on_an_axis():
    at = {
        scale: metaparameters.axis_values([0.9, 0.99], Range(0.5, 0.999, scale))
        for scale in ("reverse_log", "log")
    }
    assert at["reverse_log"] == pytest.approx([0.1, 0.01])
    assert at["log"] == pytest.approx([0.9, 0.99])
    ranges = [Range(0.1, 0.9, scale) for scale in ("linear", "log", "reverse_log")]
    labels = [metaparameters.axis_label("x", box) for box in ranges]
    assert labels[0] == "x" and labels[1].startswith("x ") and labels[2].startswith("1 - x ")


def test_axes_are_every_pair_of_metaparameters():
    ranges = {f"model.{name}": Range(0.1, 0.9) for name in "abcd"}

    def axes(*names):
        a = Cell(8, 0.0)
        record = read(
            {a: [result(a, 0, None)]},
            space={f"model.{name}": ranges[f"model.{name}"] for name in names},
        )
        return ["".join(axes) for axes in metaparameters.axes_of(record)]

    assert axes(*"abcd") == ["ab", "ac", "ad", "bc", "bd", "cd"]
    assert axes(*"ab") == ["ab"]
    assert axes("a") == ["a"]
    assert axes() == ["point"]
