"""The figure of the training logs: its rows, and that it draws them."""

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import records
from lit_dps.core.trial import Cell
from lit_dps.report.figures import logs
from tests.support.fake_study import result
from tests.support.texts import figure_texts, numbers_in
from tests.unit.report.test_figures import columns, lines_of, read

pytestmark = pytest.mark.pictures

DENSE, SPARSE, LARGE = Cell(8, 0.0), Cell(8, 0.9), Cell(64, 0.0)


def curve(*errors, **more):
    steps = [16 * (i + 1) for i in range(len(errors))]
    return {
        "step": steps,
        "val_error": list(errors),
        "train_loss": [10 * error for error in errors],
        **more,
    }


RESULTS = {
    DENSE: [
        result(DENSE, 0, 48, curve=curve(0.6, 0.2, 0.1)),
        result(DENSE, 1, 32, curve=curve(0.5, 0.1)),
        result(DENSE, 2, 32, curve=curve(0.3, 0.05)),
    ],
    SPARSE: [result(SPARSE, 0, 48, curve=curve(0.8, 0.4, 0.1))],
    LARGE: [result(LARGE, 0, None, curve=curve(0.9, 0.8))],
    Cell(64, 0.9): [],
}


@pytest.fixture(scope="module")
def one():
    return Analysis(read(RESULTS, space={}))


def test_rows_are_the_curves_of_the_trials_that_gave_k_star(one):
    assert columns(
        logs.rows(one), "sparsity", "batch_size", "point", "step", "train_loss", "val_error"
    ) == [
        (0.0, 8, 1, 16, 5.0, 0.5),
        (0.0, 8, 1, 32, 1.0, 0.1),
        (0.9, 8, 0, 16, 8.0, 0.8),
        (0.9, 8, 0, 32, 4.0, 0.4),
        (0.9, 8, 0, 48, 1.0, 0.1),
    ]


def test_the_figure_draws_its_rows(one, golden):
    figure = logs.draw(logs.rows(one), one)
    loss, error = figure.axes
    golden.check("figures/logs.txt", figure_texts(figure))
    assert lines_of(loss) == [([16, 32], [5.0, 1.0]), ([16, 32, 48], [8.0, 4.0, 1.0])]
    assert lines_of(error) == [
        ([16, 32], [0.5, 0.1]),
        ([16, 32, 48], [0.8, 0.4, 0.1]),
        ([0, 1], [0.1, 0.1]),
    ]
    assert (loss.get_yscale(), error.get_yscale(), loss.get_xlim()[0]) == ("log", "log", 0)
    assert len({line.get_color() for line in error.lines}) == 3


def test_of_many_batch_sizes_a_few_are_drawn():
    sizes = [2**i for i in range(1, 15)]
    assert logs.spread(sizes) == [2, 16, 64, 512, 2048, 16384]
    assert logs.spread(sizes[:6]) == sizes[:6]
    assert logs.spread(sizes, 2) == [2, 16384]
    results = {Cell(b, 0.0): [result(Cell(b, 0.0), 0, 32, curve=curve(0.5, 0.1))] for b in sizes}
    study = Analysis(read(results, space={}))
    titles = [ax.get_title() for ax in logs.draw(logs.rows(study), study).axes]
    assert [numbers_in(title) for title in titles] == [
        *([b] for b in logs.spread(sizes)),
        *[[]] * 6,
    ]


def test_lower_bounds_of_the_error_are_not_drawn_as_errors():
    early = curve(0.5, 0.15, 0.12, 0.1, exact=[1, 0, 0, 1])
    study = Analysis(read({DENSE: [result(DENSE, 0, 64, curve=early)]}, space={}))
    rows = logs.rows(study)
    assert [row["val_error"] for row in records(rows)] == [0.5, None, None, 0.1]
    loss, error = logs.draw(rows, study).axes
    assert lines_of(loss) == [([16, 32, 48, 64], [5.0, 1.5, 1.2, 1.0])]
    assert lines_of(error)[0] == ([16, 64], [0.5, 0.1])
    (note,) = logs.notes(study)
    assert numbers_in(note)[:2] == [2, 4]
    bounds_alone = Analysis(
        read({DENSE: [result(DENSE, 0, 32, curve=curve(0.3, 0.1, exact=[0, 1]))]}, space={})
    )
    (loss,) = logs.draw(logs.rows(bounds_alone), bounds_alone).axes
    # The panel of the error is left out.
    assert len(lines_of(loss)) == 1


def test_what_is_missing(golden):
    def missing(*trials):
        return logs.missing(Analysis(read({DENSE: list(trials)}, space={})))

    reasons = [
        missing(result(DENSE, 0, None, curve=curve(0.5, 0.4))),
        missing(result(DENSE, 0, 16, curve=curve(0.1))),
    ]
    golden.check("figures/logs-missing.txt", "\n".join(reasons) + "\n")
    assert missing(result(DENSE, 0, 32, curve=curve(0.2, 0.1))) is None
    assert logs.notes(Analysis(read(RESULTS, space={}))) == []
