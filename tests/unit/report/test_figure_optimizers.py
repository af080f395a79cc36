"""Several studies against each other: rows, labels, notes, and the figure that draws them."""

import dataclasses

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.trial import Cell
from lit_dps.report.figures import optimizers, scaling, write_comparison
from tests.support.fake_study import SPACE, Goal, result
from tests.support.texts import figure_texts
from tests.unit.report.test_figure_files import files_of
from tests.unit.report.test_figures import columns, exact, lines_of, read

pytestmark = pytest.mark.pictures


def study(name, results=None, optimizer=None, schedule="constant", data="MNIST", **kw):
    record = read(results or exact(), **kw)
    args = {"schedule": schedule} | ({} if optimizer is None else {"optimizer": optimizer})
    config = {"model": {"init_args": args}, "data": {"class_path": f"lit_dps.data.{data}"}}
    record = dataclasses.replace(record, name=name, config=config)
    return Analysis(record, replicates=50)


def scaled(factor, sizes=(8, 80, 2000), sparsities=(0.0, 0.9)):
    """K* = factor (1e5 / B + 100) at each sparsity."""
    params = {key: box.at(0.5) for key, box in SPACE.items()}
    cells = [Cell(b, s) for b in sizes for s in sparsities]
    return {
        c: [result(c, 0, round(factor * (1e5 / c.batch_size + 100)), params=params)] for c in cells
    }


@pytest.fixture(scope="module")
def rules():
    return [
        study("a", scaled(3), "sgd"),
        study("b", scaled(1), "momentum"),
        study("c", scaled(2), "nesterov", "linear"),
    ]


def test_labels_are_update_rules_where_these_tell_studies_apart(rules):
    labels = optimizers.study_labels([s.record for s in rules])
    assert (labels["a"], labels["b"]) == ("sgd", "momentum")
    assert labels["c"].startswith("nesterov, linear")
    decays = [study("x", None, "sgd"), study("y", None, "sgd", "linear")]
    labels = optimizers.study_labels([s.record for s in decays])
    assert labels["x"] == "sgd" and labels["y"].startswith("sgd, linear")
    same = [study("x", None, "sgd"), study("y", None, "sgd"), rules[1]]
    assert optimizers.study_labels([s.record for s in same]) == {
        "x": "sgd (x)",
        "y": "sgd (y)",
        "b": "momentum",
    }
    unknown = [study("x"), rules[0]]  # a module of the user's own
    assert optimizers.study_labels([s.record for s in unknown]) == {"x": "x", "a": "sgd"}


def test_rows_are_the_curves_of_the_studies_by_sparsity(rules):
    rows = records(optimizers.rows(*rules))
    measured = [row for row in rows if row["k_star"] is not None]
    assert columns(
        measured[:6], "sparsity", "study", "label", "batch_size", "k_star", "normalised_by"
    ) == [
        *((0.0, "a", "sgd", b, 3 * k, 8) for b, k in ((8, 12600), (80, 1350), (2000, 150))),
        *((0.0, "b", "momentum", b, k, 8) for b, k in ((8, 12600), (80, 1350), (2000, 150))),
    ]
    assert {row["sparsity"] for row in rows} == {0.0, 0.9}
    assert [row["normalised_k_star"] for row in measured[:3]] == pytest.approx(
        [1, 1350 / 12600, 150 / 12600]
    )
    of_a = [row for row in rows if (row["study"], row["sparsity"]) == ("a", 0.9)]
    alone = [row for row in records(scaling.rows(rules[0])) if row["sparsity"] == 0.9]
    assert [row["fit"] for row in of_a] == [row["fit"] for row in alone]


def test_studies_are_compared_where_two_have_a_k_star(golden):
    wide = study("wide", scaled(1, (8, 80), (0.0, 0.5, 0.9)))
    narrow = study("narrow", scaled(2, (80, 2000), (0.0, 0.7)))
    rows = records(optimizers.rows(wide, narrow))
    assert {(row["sparsity"], row["study"]) for row in rows} == {(0.0, "wide"), (0.0, "narrow")}
    assert {row["normalised_by"] for row in rows} == {80}
    apart = study("apart", scaled(1, (8, 80), (0.3,)))
    one = [study(name, scaled(1, (8,))) for name in "xy"]
    assert optimizers.missing(wide, narrow) is None
    reasons = [optimizers.missing(wide, apart), optimizers.missing(*one)]
    golden.check("figures/optimizers-missing.txt", "\n".join(reasons) + "\n")


def test_notes_list_what_else_differs(rules, golden):
    assert optimizers.notes(*rules) == []
    other = study("d", scaled(1), "sgd", data="CIFAR10", goal=Goal(0.2), trials=9)
    notes = optimizers.notes(rules[0], other)
    # One of nine trials is done, so that K* are upper bounds: the fourth note.
    values = [note.rpartition(": ")[2] for note in notes[:3]]
    assert values == ["0.1, 0.2", "1, 9", "MNIST, CIFAR10"]
    golden.check("figures/optimizers-notes.txt", "\n".join(notes) + "\n")


def test_the_figure_draws_its_rows(rules, golden):
    drawn = optimizers.rows(*rules)
    rows, figure = records(drawn), optimizers.draw(drawn, *rules)
    dense, sparse, dense_normalised, sparse_normalised = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["sparsity 0", "sparsity 0.9", "", ""]
    for factor in (1, 2, 3):
        assert ([8, 80, 2000], [factor * 12600, factor * 1350, factor * 150]) in lines_of(dense)
    of_b = [row for row in rows if (row["study"], row["sparsity"]) == ("b", 0.9)]
    batch = [row["batch_size"] for row in of_b]
    assert (batch, [row["fit"] for row in of_b]) in lines_of(sparse)
    assert (batch, [row["normalised_fit"] for row in of_b]) in lines_of(sparse_normalised)
    assert (batch, [row["normalised_perfect"] for row in of_b]) in lines_of(sparse_normalised)
    golden.check("figures/optimizers.txt", figure_texts(figure))
    looks = [(line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()]
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == 3
    (sgd,) = [line for line in dense.lines if list(line.get_ydata()) == [37800, 4050, 450]]
    assert (sgd.get_color(), sgd.get_marker()) == looks[0]
    assert (
        {ax.get_xscale() for ax in figure.axes}
        == {ax.get_yscale() for ax in figure.axes}
        == {"log"}
    )


def test_curves_without_a_common_batch_size_are_not_normalised_and_the_panel_says_so(golden):
    apart = [
        study("a", scaled(1, (8, 80), (0.0,)), "sgd"),
        study("b", scaled(2, (16, 160), (0.0,)), "momentum"),
    ]
    drawn = optimizers.rows(*apart)
    assert drawn["normalised_k_star"].isna().all()
    figure = optimizers.draw(drawn, *apart)
    steps, normalised = figure.axes
    assert ([8, 80], [12600, 1350]) in lines_of(steps)
    assert lines_of(normalised) == [] and len(normalised.texts) == 1
    golden.check("figures/optimizers-apart.txt", figure_texts(figure))


def test_bands_are_drawn_where_trials_can_be_resampled():
    record = read(trials=8, batch_sizes=(4, 16, 64))
    studies = [Analysis(dataclasses.replace(record, name=name), replicates=50) for name in "ab"]
    drawn = optimizers.rows(*studies)
    rows = records(drawn)
    steps, _ = optimizers.draw(drawn, *studies).axes
    lows = [row["fit_low"] for row in rows if row["study"] == "a"]
    vertices = np.asarray(steps.collections[0].get_paths()[0].vertices)
    assert vertices[:, 1].min() == min(lows)


def test_a_comparison_is_written_with_notes_on_what_is_missing(rules, tmp_path):
    files, notes = write_comparison(rules, tmp_path / "compare")
    assert [path.name for path in files] == [
        f"{n}.{s}" for n in ("optimizers", "ratios") for s in ("csv", "png", "pdf")
    ]
    assert all(path.is_file() for path in files)
    assert notes == []
    files, notes = write_comparison(rules[:2], tmp_path / "some", only=["ratios", "scaling"])
    assert [path.name for path in files] == files_of("ratios")
    dense = [
        study(name, scaled(1, (8, 80), sparsities))
        for name, sparsities in (("x", (0.0,)), ("y", (0.5,)))
    ]
    files, notes = write_comparison(dense, tmp_path / "none")
    assert files == []
    names = ["optimizers", "ratios"]
    assert [name in note for name, note in zip(names, notes, strict=True)] == [True, True]
