"""The figures: the rows they draw, and that what is drawn is those rows."""

import csv
import math
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import optuna
import pytest

from lit_dps.analysis import figures
from lit_dps.analysis.figure_data import metaparameter_rows, scaling_rows
from lit_dps.analysis.report import render
from lit_dps.analysis.results import read_study
from lit_dps.analysis.scaling import scaling_of
from lit_dps.space import Range
from lit_dps.trial import Cell
from tests.unit.fake_study import SPACE, law_study, result, write_study

FILES = ["table.txt", "table.csv", "fits.csv", "scaling.csv", "metaparameters.csv", "scaling.png", "metaparameters.png"]


def read(results=None, **kw):
    storage = optuna.storages.InMemoryStorage()
    law_study(storage, **kw) if results is None else write_study(storage, results, **kw)
    return read_study(storage, "fake")


def exact(missing=()):
    """K* = 1e5 / B + 100 (dense) and twice that (sparse) at three batch sizes, one trial a cell."""
    cells = {Cell(b, s): (1 + (s > 0)) * (1e5 / b + 100) for s in (0.0, 0.9) for b in (8, 80, 2000)}
    params = {key: box.at(0.5) for key, box in SPACE.items()}
    return {c: [] if c in missing else [result(c, 0, int(k), params=params)] for c, k in cells.items()}


def columns(rows, *names):
    return [tuple(row[name] for name in names) for row in rows]


def lines_of(ax):
    """(x, y) of the lines of axes that hold anything."""
    return [tuple(map(list, line.get_data())) for line in ax.lines if len(line.get_xdata())]


def test_the_scaling_figure_draws_its_rows():
    record = read(exact())
    scalings = scaling_of(record)
    rows = scaling_rows(record, scalings)
    figure = figures.draw_scaling(rows, scalings)
    assert [ax.get_title() for ax in figure.axes] == ["sparsity 0", "sparsity 0.9", "all sparsities", "all, normalised"]
    dense, sparse, together, normalised = figure.axes
    assert ([8, 80, 2000], [25200, 2700, 300]) in lines_of(sparse)
    for ax in (dense, together):
        assert ([8, 80, 2000], [12600, 1350, 150]) in lines_of(ax)
    of_dense = [row for row in rows if row["sparsity"] == 0.0]
    batch = [row["batch_size"] for row in of_dense]
    assert (batch, [row["fit"] for row in of_dense]) in lines_of(dense)
    assert (batch, [row["perfect"] for row in of_dense]) in lines_of(dense)
    assert (batch, [row["normalised_fit"] for row in of_dense]) in lines_of(normalised)
    assert [text.get_text() for text in dense.texts] == [scalings[0.0].describe()]
    (vertical,) = [x for x, y in lines_of(dense) if y == [0, 1]]
    assert vertical == pytest.approx([1000, 1000], rel=1e-4)  # B_crit
    for ax in figure.axes:
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        assert list(ax.get_xticks()) == [8, 80, 2000]
    assert dense.get_ylabel() == "steps to result K* [optimizer steps]"
    assert normalised.get_ylabel() == "K* / K*(B = 8)"
    assert together.get_xlabel() == "batch size B [examples]"


def test_sparsities_are_told_apart_by_colour_and_marker():
    record = read(batch_sizes=(8, 64), trials=1, laws={s: (1e4, 10) for s in (0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)})
    scalings = scaling_of(record)
    *_, together, _ = figures.draw_scaling(scaling_rows(record, scalings), scalings).axes
    looks = {(line.get_color(), line.get_marker()) for line in together.get_legend().get_lines()}
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == 7


def offsets(ax):
    """Places of the complete, incomplete, infeasible and K* marks of a panel."""
    return [np.asarray(marks.get_offsets()).tolist() for marks in ax.collections[:4]]


def test_the_metaparameter_figure_draws_every_trial_on_its_scale():
    a, b = Cell(8, 0.0), Cell(16, 0.0)

    def at(rate, momentum):
        return {"model.learning_rate": rate, "model.momentum": momentum}

    done = {
        a: [result(a, 0, 32, params=at(0.1, 0.9)), result(a, 1, 16, params=at(0.2, 0.75))],
        b: [result(b, 0, None, params=at(1.0, 0.5)), result(b, 1, None, "infeasible", params=at(2.0, 0.875))],
    }
    record = read(done)
    figure = figures.draw_metaparameters(record, metaparameter_rows(record))
    left, right = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["B = 8", "B = 16"]
    complete, incomplete, infeasible, best = offsets(left)
    assert complete == [[0.1, pytest.approx(0.1)], [0.2, 0.25]]
    assert (incomplete, infeasible, best) == ([], [], [[0.2, 0.25]])
    assert offsets(right) == [[], [[1.0, 0.5]], [[2.0, 0.125]], []]
    assert (left.get_xscale(), left.get_yscale()) == ("log", "log")
    low, high = left.get_xlim()
    assert low < 1e-3 < 10 < high
    bottom, top = right.get_ylim()
    assert bottom > 0.5 > 0.001 > top  # momentum increases upwards
    assert figure.get_supxlabel() == "learning_rate (log)"
    assert figure.get_supylabel() == "1 - momentum (log, reversed)"


def test_rows_are_sparsities_and_columns_batch_sizes():
    record = read(batch_sizes=(4, 16, 64), laws={0.0: (4e4, 60), 0.9: (1e5, 100)}, trials=2)
    figure = figures.draw_metaparameters(record, metaparameter_rows(record))
    assert [ax.get_title() for ax in figure.axes] == ["B = 4", "B = 16", "B = 64", "", "", ""]
    assert [ax.texts[0].get_text() for ax in (figure.axes[2], figure.axes[5])] == ["S = 0", "S = 0.9"]
    by_cell = {cell: sum(map(len, offsets(ax)[:3])) for cell, ax in zip(record.cells, figure.axes, strict=True)}
    assert set(by_cell.values()) == {2}
    last = record.results[Cell(64, 0.9)]
    rates = sorted(x for marks in offsets(figure.axes[5])[:3] for x, _ in marks)
    assert rates == sorted(r.trial.params["model.learning_rate"] for r in last)


def test_one_metaparameter_is_drawn_against_steps():
    a = Cell(8, 0.0)
    done = [
        result(a, 0, 320, params={"model.width": 4}),
        result(a, 1, None, params={"model.width": 2}),
        result(a, 2, None, "infeasible", params={"model.width": 9}),
    ]
    record = read({a: done}, space={"model.width": Range(1, 9, integer=True)})
    figure = figures.draw_metaparameters(record, metaparameter_rows(record))
    (ax,) = figure.axes
    complete, ((x1, y1),), ((x2, y2),), best = offsets(ax)
    assert complete == best == [[4, 320]]
    assert (x1, x2) == (2, 9)
    assert 320 < record.goal.max_steps < y1 < y2 < ax.get_ylim()[1]
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("width", "steps to result [optimizer steps]")


def test_write_all_writes_everything_once(tmp_path):
    record = read(trials=6, batch_sizes=(4, 64))
    paths = figures.write_all(record, tmp_path / "new" / "figures")
    assert [path.name for path in paths] == FILES
    assert sorted(path.name for path in (tmp_path / "new" / "figures").iterdir()) == sorted(FILES)
    by_name = {path.name: path for path in paths}
    for name in ("scaling.png", "metaparameters.png"):
        assert by_name[name].read_bytes().startswith(b"\x89PNG")
    assert by_name["table.txt"].read_text() == render(record)
    drawn = {
        "scaling.csv": scaling_rows(record, scaling_of(record)),
        "metaparameters.csv": metaparameter_rows(record),
    }
    for name, rows in drawn.items():
        with by_name[name].open(newline="") as file:
            written = list(csv.DictReader(file))
        assert written == [{key: "" if x is None else str(x) for key, x in row.items()} for row in rows]
    before = {path: path.read_bytes() for path in paths}
    figures.write_all(record, tmp_path / "new" / "figures")
    assert {path: path.read_bytes() for path in paths} == before


@pytest.mark.parametrize(
    "results",
    [
        {Cell(8, 0.0): [], Cell(16, 0.0): []},
        {Cell(8, 0.0): [result(Cell(8, 0.0), 0, None, params={k: b.at(0.5) for k, b in SPACE.items()})]},
        exact(missing=[Cell(8, 0.0), Cell(80, 0.0), Cell(80, 0.9)]),
    ],
    ids=["nothing", "one incomplete", "half"],
)
def test_an_unfinished_study_is_drawn(results, tmp_path):
    record = read(results, trials=5)
    assert [path.name for path in figures.write_all(record, tmp_path)] == FILES
    header, *rows = (tmp_path / "metaparameters.csv").read_text().splitlines()
    assert header == "sparsity,batch_size,point,status,steps,k_star,learning_rate,momentum"
    assert len(rows) == sum(map(len, results.values()))


def test_a_figure_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    record = read(exact(), trials=1)
    figures.write_all(record, tmp_path)
    before = (tmp_path / "scaling.png").read_bytes()

    def fail(self, path, **kw):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fail)
    with pytest.raises(OSError, match="no space left"):
        figures.write_all(record, tmp_path)
    assert (tmp_path / "scaling.png").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_ticks_get_the_style_too(tmp_path, monkeypatch):
    sizes = []

    def look(self, path, **kw):
        path.write_bytes(b"")
        sizes.append(matplotlib.rcParams["xtick.labelsize"])

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", look)
    figures.write_all(read(exact()), tmp_path)
    assert sizes == [figures.STYLE["xtick.labelsize"]] * 2 != [matplotlib.rcParams["xtick.labelsize"]] * 2


def test_known_scalings_are_used(tmp_path):
    record = read(trials=4, batch_sizes=(4, 64))
    few = scaling_of(record, replicates=5)
    figures.write_all(record, tmp_path, few)
    assert (tmp_path / "table.txt").read_text() == render(record, few) != render(record)


def test_drawing_leaves_global_state_alone(tmp_path):
    code = """
import sys
import matplotlib
before = matplotlib.rcParams.copy()  # dict() would look the backend up, and so import pyplot
sys.path.insert(0, sys.argv[1])
from tests.unit.test_figures import exact, figures, read
figures.write_all(read(exact()), sys.argv[2])
print("matplotlib.pyplot" in sys.modules, matplotlib.rcParams.copy() == before)
"""
    arguments = [sys.executable, "-c", code, str(Path(__file__).parents[2]), str(tmp_path)]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout == "False True\n"


def test_ticks_are_measured_batch_sizes_and_never_too_many():
    record = read(batch_sizes=tuple(2**i for i in range(1, 14)), trials=1)
    scalings = scaling_of(record)
    (ax, *_) = figures.draw_scaling(scaling_rows(record, scalings), scalings).axes
    assert list(ax.get_xticks()) == [2, 8, 32, 128, 512, 2048, 8192]
    assert math.prod(ax.get_xlim()) == pytest.approx(2 * 8192)
