"""The scaling and metaparameter figures: what is drawn is their rows."""

import math

import numpy as np
import optuna
import pandas as pd
import pytest
from matplotlib.figure import Figure

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Series
from lit_dps.report.figures import metaparameters, scaling
from lit_dps.report.figures.box_axes import range_axis
from lit_dps.report.no_result import COUNT_HEADS
from lit_dps.report.warnings import study_notes
from lit_dps.storage.read import read_study
from tests.support.fake_study import SPACE, law_study, result, write_study
from tests.support.texts import figure_texts, numbers_in
from tests.unit.replication.test_claims_repeats import with_repeats

pytestmark = pytest.mark.pictures


def read(results=None, **kw):
    storage = optuna.storages.InMemoryStorage()
    law_study(storage, **kw) if results is None else write_study(storage, results, **kw)
    return read_study(storage, "fake")


def exact(missing=()):
    """K* = 1e5 / B + 100 (dense) and twice that (sparse) at three batch sizes, one trial a cell."""
    cells = {Cell(b, s): (1 + (s > 0)) * (1e5 / b + 100) for s in (0.0, 0.9) for b in (8, 80, 2000)}
    params = {key: box.at(0.5) for key, box in SPACE.items()}
    return {
        c: [] if c in missing else [result(c, 0, int(k), params=params)] for c, k in cells.items()
    }


def columns(rows, *names):
    rows = records(rows) if isinstance(rows, pd.DataFrame) else rows
    return [tuple(row[name] for name in names) for row in rows]


def lines_of(ax):
    """(x, y) of the lines of axes that hold anything."""
    return [tuple(map(list, line.get_data())) for line in ax.lines if len(line.get_xdata())]


def test_the_scaling_figure_draws_its_rows(golden):
    study = Analysis(read(exact()))
    laws, drawn = study.laws, scaling.rows(study)
    rows, figure = records(drawn), scaling.draw(drawn, study)
    assert [ax.get_title() for ax in figure.axes] == [
        "sparsity 0",
        "sparsity 0.9",
        "all sparsities",
        "all, normalised",
    ]
    dense, sparse, together, normalised = figure.axes
    assert ([8, 80, 2000], [25200, 2700, 300]) in lines_of(sparse)
    for ax in (dense, together):
        assert ([8, 80, 2000], [12600, 1350, 150]) in lines_of(ax)
    of_dense = [row for row in rows if row["sparsity"] == 0.0]
    batch = [row["batch_size"] for row in of_dense]
    assert (batch, [row["fit"] for row in of_dense]) in lines_of(dense)
    assert (batch, [row["perfect"] for row in of_dense]) in lines_of(dense)
    assert (batch, [row["normalised_fit"] for row in of_dense]) in lines_of(normalised)
    assert [text.get_text() for text in dense.texts] == [laws[Series(0.0)].describe()]
    (vertical,) = [x for x, y in lines_of(dense) if y == [0, 1]]
    assert vertical == pytest.approx([1000, 1000], rel=1e-4)  # B_crit
    for ax in figure.axes:
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        assert list(ax.get_xticks()) == [8, 80, 2000]
    golden.check("figures/scaling.txt", figure_texts(figure))


def test_medians_over_seeds_are_drawn_beside_k_star(golden):
    bare = Analysis(read(exact()))
    study = with_repeats(bare, [1.0, 1.2, 1.5])
    figure = scaling.draw(scaling.rows(study), study)
    medians = [line for ax in figure.axes for line in ax.lines if line.get_marker() == "x"]
    assert [list(line.get_ydata()) for line in medians] == [[15120, 1620, 180], [30240, 3240, 360]]
    golden.check("figures/scaling-medians.txt", figure_texts(figure))
    axes = scaling.draw(scaling.rows(bare), bare).axes
    assert not any(
        len(line.get_xdata()) for ax in axes for line in ax.lines if line.get_marker() == "x"
    )


def noisy():
    """Return the cells of `exact`, each with further trials that are 2 to 6 % longer."""
    cells = {}
    for cell, (best,) in exact().items():
        steps = [round(best.steps * factor) for factor in (1.0, 1.02, 1.04, 1.06)]
        cells[cell] = [result(cell, i, k) for i, k in enumerate(steps)]
    return read(cells, space={})


def test_k_star_has_bars_and_a_panel_names_medians_that_leave_the_law(golden):
    study = with_repeats(Analysis(noisy()), [1.45, 1.5, 1.5, 1.5, 1.65])
    drawn = scaling.rows(study)
    known = [row for row in records(drawn) if row["k_star"] is not None]
    for row in known:
        assert 1.01 < row["k_star_high"] / row["k_star"] < 1.2
    figure = scaling.draw(drawn, study)
    dense = figure.axes[0]
    bars = [
        segment for part in dense.collections for segment in getattr(part, "get_segments", list)()
    ]
    assert [bar[:, 0].tolist() for bar in bars] == [[8, 8], [80, 80], [2000, 2000]]
    assert [bar[1, 1] for bar in bars] == pytest.approx([row["k_star_high"] for row in known[:3]])
    (words,) = [text.get_text() for text in dense.texts]
    assert numbers_in(words)[-3:] == [8, 80, 2000]
    golden.check("figures/scaling-bars.txt", figure_texts(figure))
    # Both series leave the law.
    sizes = "B = 8, 80, 2000"
    assert any(note.count(sizes) == 2 for note in study_notes(study))
    assert scaling.notes(study) == []


def test_sparsities_are_told_apart_by_colour_and_marker():
    record = read(batch_sizes=(8, 64), trials=1, laws={s / 10: (1e4, 10) for s in range(10)})
    study = Analysis(record)
    figure = scaling.draw(scaling.rows(study), study)
    *_, together, normalised = figure.axes
    assert together.get_legend() is None  # it would lie on the curves
    assert [text.get_text() for text in normalised.get_legend().get_texts()] == ["perfect scaling"]
    lines = figure.legends[0].get_lines()
    assert [line.get_label() for line in lines] == [f"S = {s / 10:g}" for s in range(10)]
    assert (
        len({line.get_color() for line in lines[:7]})
        == len({line.get_marker() for line in lines[:7]})
        == 7
    )
    assert [line.get_linestyle() for line in lines] == ["-"] * 7 + ["--"] * 3
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 10


def test_few_series_are_told_within_their_panel():
    for missing, first in (
        ((), "law"),
        ([Cell(8, 0.0), Cell(80, 0.9)], "perfect scaling"),
    ):  # two tell of no law
        study = Analysis(read(exact(missing)))
        figure = scaling.draw(scaling.rows(study), study)
        (lines,) = figure.legends  # of what lines are, whatever their colour
        assert lines.get_texts()[0].get_text() == first
        assert len(figure.axes[-2].get_legend().get_lines()) == 2


def drawn(record, figure=0):
    """One of the metaparameter figures."""
    study = Analysis(record)
    return metaparameters.draw(
        metaparameters.rows(study), study, metaparameters.axes_of(record)[figure]
    )


def offsets(ax):
    """Places of the complete, incomplete, infeasible and K* marks of a panel."""
    return [np.asarray(marks.get_offsets()).tolist() for marks in ax.collections[:4]]


def test_the_metaparameter_figure_draws_every_trial_on_its_scale(golden):
    a, b = Cell(8, 0.0), Cell(16, 0.0)

    def at(rate, momentum):
        return {"model.learning_rate": rate, "model.momentum": momentum}

    done = {
        a: [result(a, 0, 32, params=at(0.1, 0.9)), result(a, 1, 16, params=at(0.2, 0.75))],
        b: [
            result(b, 0, None, params=at(1.0, 0.5)),
            result(b, 1, None, "infeasible", params=at(2.0, 0.875)),
        ],
    }
    record = read(done)
    figure = drawn(record)
    left, right = figure.axes
    assert [numbers_in(ax.get_title()) for ax in figure.axes] == [[8], [16]]
    complete, incomplete, infeasible, best = offsets(left)
    assert complete == [[0.1, pytest.approx(0.1)], [0.2, 0.25]]
    assert (incomplete, infeasible, best) == ([], [], [[0.2, 0.25]])
    assert offsets(right) == [[], [[1.0, 0.5]], [[2.0, 0.125]], []]
    assert (left.get_xscale(), left.get_yscale()) == ("log", "log")
    low, high = left.get_xlim()
    assert low < 1e-3 < 10 < high
    bottom, top = right.get_ylim()
    assert bottom > 0.5 > 0.001 > top  # momentum increases upwards
    golden.check("figures/metaparameters.txt", figure_texts(figure))


def test_rows_are_sparsities_and_columns_batch_sizes():
    record = read(batch_sizes=(4, 16, 64), laws={0.0: (4e4, 60), 0.9: (1e5, 100)}, trials=2)
    figure = drawn(record)
    titles = [numbers_in(ax.get_title()) for ax in figure.axes]
    assert titles == [[4], [16], [64], [], [], []]
    rows = [numbers_in(ax.texts[0].get_text()) for ax in (figure.axes[2], figure.axes[5])]
    assert rows == [[0], [0.9]]
    by_cell = {
        cell: sum(map(len, offsets(ax)[:3]))
        for cell, ax in zip(record.cells, figure.axes, strict=True)
    }
    assert set(by_cell.values()) == {2}
    last = record.results[Cell(64, 0.9)]
    rates = sorted(x for marks in offsets(figure.axes[5])[:3] for x, _ in marks)
    assert rates == sorted(r.trial.params["model.learning_rate"] for r in last)


def test_one_metaparameter_is_drawn_against_steps(golden):
    a = Cell(8, 0.0)
    done = [
        result(a, 0, 320, params={"model.width": 4}),
        result(a, 1, None, params={"model.width": 2}),
        result(a, 2, None, "infeasible", params={"model.width": 9}),
    ]
    record = read({a: done}, space={"model.width": Range(1, 9, integer=True)})
    figure = drawn(record)
    (ax,) = figure.axes
    complete, ((x1, y1),), ((x2, y2),), best = offsets(ax)
    assert complete == best == [[4, 320]]
    assert (x1, x2) == (2, 9)
    assert 320 < record.goal.max_steps < y1 < y2 < ax.get_ylim()[1]
    assert figure.get_supxlabel() == "width"
    golden.check("figures/metaparameters-one.txt", figure_texts(figure))


SHORT = [
    Range(1e-4, 1, "log"),
    Range(0.01, 0.5, "log"),
    Range(0.02, 0.1, "log"),
    Range(0.1, 0.15, "log"),
]


@pytest.mark.parametrize(
    "box", [*SHORT, Range(0.8, 0.95, "reverse_log"), Range(0.9, 0.9999, "reverse_log")]
)
def test_an_axis_has_two_to_five_ticks_however_short_its_range(box):
    axis = Figure().subplots().xaxis
    range_axis(axis, box)
    low, high = sorted(axis.get_view_interval())
    assert 2 <= sum(low <= tick <= high for tick in axis.get_majorticklocs()) <= 5


def test_ticks_are_measured_batch_sizes_and_never_too_many():
    record = read(batch_sizes=tuple(2**i for i in range(1, 14)), trials=1)
    study = Analysis(record)
    (ax, *_) = scaling.draw(scaling.rows(study), study).axes
    assert list(ax.get_xticks()) == [2, 8, 32, 128, 512, 2048, 8192]
    assert math.prod(ax.get_xlim()) == pytest.approx(2 * 8192)


def test_sparsities_without_any_k_star_are_left_out_and_others_keep_their_look():
    record = read(exact(missing=[Cell(b, 0.0) for b in (8, 80, 2000)]))
    study = Analysis(record)
    (ax,) = scaling.draw(scaling.rows(study), study).axes  # nothing to lay over, so one panel
    assert ax.get_title() == "sparsity 0.9"
    assert {line.get_color() for line in ax.lines} == {"#D55E00", "#666666"}


def test_many_batch_sizes_are_laid_out_in_blocks():
    record = read(
        batch_sizes=tuple(2**i for i in range(1, 10)),
        laws={0.0: (4e4, 60), 0.9: (1e5, 100)},
        trials=2,
    )
    figure = drawn(record)
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == [
        f"B = {2**i}" for i in range(1, 10)
    ]
    boxes = [ax.get_position() for ax in figure.axes]
    assert (
        len({round(box.y0, 6) for box in boxes}) == 4
    )  # two sparsities of five batch sizes, two of four
    assert [
        sum(round(box.x0, 6) == x for box in boxes)
        for x in sorted({round(box.x0, 6) for box in boxes})
    ] == [*(4, 4, 4, 4, 2)]
    for i, one in enumerate(boxes):
        assert 0 < one.x0 < one.x1 < 1 and 0 < one.y0 < one.y1 < 1
        assert not any(one.overlaps(other) for other in boxes[:i])
    assert {tuple(ax.get_xlim()) for ax in figure.axes} == {tuple(figure.axes[0].get_xlim())}


def test_every_pair_of_metaparameters_has_a_figure():
    a = Cell(8, 0.0)
    space = SPACE | {"model.decay_steps": Range(30_000, 60_000, integer=True)}
    params = {"model.learning_rate": 0.1, "model.momentum": 0.9, "model.decay_steps": 45_000}
    record = read({a: [result(a, 0, 32, params=params)]}, space=space)
    labels, places = [], []
    for i in range(3):
        figure = drawn(record, i)
        labels.append((figure.get_supxlabel(), figure.get_supylabel()))
        places += offsets(figure.axes[0])[0]
    rate, momentum, steps = (
        metaparameters.axis_label(key.removeprefix("model."), space[key]) for key in space
    )
    assert labels == [(rate, momentum), (rate, steps), (momentum, steps)]
    assert places == [[0.1, pytest.approx(0.1)], [0.1, 45_000], [pytest.approx(0.1), 45_000]]


def test_outraced_trials_have_a_mark_of_their_own():
    a = Cell(8, 0.0)
    curve = {"step": [160, 320], "val_error": [0.5, 0.4], "train_loss": [1.0, 1.0]}
    done = [
        result(a, 0, 160, params={"model.width": 4}),
        result(a, 1, None, "outraced", params={"model.width": 2}, curve=curve),
    ]
    space = {"model.width": Range(1, 9, integer=True)}
    figure = drawn(read({a: done}, space=space, race_factor=2.0))
    (ax,) = figure.axes
    marks = dict(
        zip(
            [text.get_text() for text in figure.legends[0].get_texts()],
            ax.collections,
            strict=False,
        )
    )
    counted = ["complete", "incomplete", "infeasible", "outraced"]
    assert list(marks) == [*(COUNT_HEADS[status] for status in counted), "K*"]
    assert np.asarray(marks[COUNT_HEADS["outraced"]].get_offsets()).tolist() == [
        [2, 320]
    ]  # where it was stopped
    without = drawn(read({a: done[:1]}, space=space)).legends[0]
    assert COUNT_HEADS["outraced"] not in [text.get_text() for text in without.get_texts()]
