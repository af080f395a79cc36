"""The figure of the local Lipschitz constant: its rows, and that it draws them."""

import math

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.trial import Cell
from lit_dps.report.figures import lipschitz
from tests.support.fake_study import result
from tests.support.texts import figure_texts, numbers_in
from tests.unit.report.test_figures import columns, read

pytestmark = pytest.mark.pictures

DENSE, SPARSE, LARGE = Cell(8, 0.0), Cell(8, 0.9), Cell(64, 0.0)


def trial(cell, point, *constants, status="complete", steps=400):
    """A trial with Lipschitz constants at steps 100, 200, ..."""
    at = [100 * (i + 1) for i in range(len(constants))]
    found = {"step": at, "lipschitz": list(constants), "squared_gradient": [1.0] * len(at)}
    return result(
        cell, point, steps if status == "complete" else None, status, readings={"lipschitz": found}
    )


def study(results, **kw):
    return Analysis(read(results, space={}, **kw))


@pytest.fixture(scope="module")
def one():
    return study(
        {
            DENSE: [trial(DENSE, 0, 2.0, 8.0), trial(DENSE, 1, 8.0), trial(DENSE, 2, 100.0)],
            SPARSE: [trial(SPARSE, 0, 20.0, 80.0), trial(SPARSE, 1, 5.0), result(SPARSE, 2, None)],
            LARGE: [trial(LARGE, 2, 3.0, math.inf), trial(LARGE, 3, 7.0, status="infeasible")],
            Cell(64, 0.9): [],
        }
    )


def test_rows_are_all_measurements_and_say_which_are_drawn(one):
    assert columns(
        lipschitz.rows(one),
        "sparsity",
        "batch_size",
        "point",
        "status",
        "step",
        "lipschitz",
        "drawn",
    ) == [
        (0.0, 8, 0, "complete", 100, 2.0, True),
        (0.0, 8, 0, "complete", 200, 8.0, True),
        (0.0, 8, 1, "complete", 100, 8.0, True),
        (0.0, 8, 2, "complete", 100, 100.0, False),  # not measured at every sparsity
        (0.0, 64, 2, "complete", 100, 3.0, True),
        (0.0, 64, 2, "complete", 200, math.inf, False),
        (0.0, 64, 3, "infeasible", 100, 7.0, False),
        (0.9, 8, 0, "complete", 100, 20.0, True),
        (0.9, 8, 0, "complete", 200, 80.0, True),
        (0.9, 8, 1, "complete", 100, 5.0, True),
    ]


def test_lines_are_geometric_means_over_the_trials_measured_at_a_step(one):
    rows = records(one.lipschitz_means)
    assert columns(rows, "sparsity", "batch_size", "step", "low", "high", "trials") == [
        (0.0, 8, 100, 2.0, 8.0, 2),
        (0.0, 8, 200, 8.0, 8.0, 1),
        (0.0, 64, 100, 3.0, 3.0, 1),
        (0.9, 8, 100, 5.0, 20.0, 2),
        (0.9, 8, 200, 80.0, 80.0, 1),
    ]
    assert [row["mean"] for row in rows] == pytest.approx([4, 8, 3, 10, 80])
    # Of each trial the arithmetic mean, (2 + 8) / 2 and 8, (20 + 80) / 2 and 5; over the trials the
    # geometric.
    dense, sparse = math.sqrt(5 * 8), math.sqrt(50 * 5)
    assert [row["run_mean"] for row in rows] == pytest.approx([dense, dense, 3, sparse, sparse])


def test_without_common_points_all_are_drawn_and_that_is_said(one):
    apart = study({DENSE: [trial(DENSE, 0, 2.0)], SPARSE: [trial(SPARSE, 1, 5.0)]})
    assert list(lipschitz.rows(apart)["drawn"]) == [True, True]
    (note,) = lipschitz.notes(apart)
    assert numbers_in(note)[-1:] == [8]
    assert lipschitz.notes(one) == []  # a sparsity without any measurement does not count


@pytest.mark.parametrize(
    ("smoothness", "why"),
    [
        (None, "smoothness.interval"),
        ({"interval": None}, "smoothness.interval"),
        ({"interval": 100}, "smoothness.interval is 100"),
    ],
)
def test_missing_measurements_have_a_reason(smoothness, why):
    bare = study({DENSE: [result(DENSE, 0, 32)]}, config={"smoothness": smoothness})
    assert why in lipschitz.missing(bare)
    diverged = study(
        {DENSE: [trial(DENSE, 0, 5.0, status="infeasible")]}, config={"smoothness": smoothness}
    )
    assert why in lipschitz.missing(diverged)


def test_the_figure_draws_its_rows(one, golden):
    assert lipschitz.missing(one) is None
    figure = lipschitz.draw(one.lipschitz_means, one)
    small, large = figure.axes
    golden.check("figures/lipschitz.txt", figure_texts(figure))
    assert [tuple(map(list, line.get_data())) for line in small.lines] == [
        ([100, 200], pytest.approx([4, 8])),
        ([100, 200], pytest.approx([10, 80])),
    ]
    bands = [np.asarray(band.get_paths()[0].vertices) for band in small.collections]
    assert [(band[:, 1].min(), band[:, 1].max()) for band in bands] == [(2, 8), (5, 80)]
    assert small.get_yscale() == "log"
    assert small.get_xlim()[0] == 0
    assert [text.get_text() for text in small.get_legend().get_texts()] == ["6.32", "15.8"]
    assert [text.get_text() for text in large.get_legend().get_texts()] == ["3.00"]
    colours = [line.get_color() for line in small.lines]
    assert len(set(colours)) == 2 and large.lines[0].get_color() == colours[0]


def test_a_network_that_died_does_not_flatten_the_others():
    dead = study({DENSE: [trial(DENSE, 0, 4.0, 1e-19)]})
    (ax,) = lipschitz.draw(dead.lipschitz_means, dead).axes
    low, high = ax.get_ylim()
    assert low == pytest.approx(4 / lipschitz.MAX_SPAN / 2) and high > 4
