"""The figure of rates and prices, lines of equal effective rates over the search space, and what a
notebook reads."""

import pytest

from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell
from lit_dps.report.figures import FIGURES, drawn, write_figures
from lit_dps.report.notebook import Study
from tests.support.texts import numbers_in
from tests.unit.analysis.test_rate_law import FIGURE, SPACE, bowl, study, trial

pytestmark = pytest.mark.pictures

METAPARAMETERS = next(figure for figure in FIGURES if figure.NAME == "metaparameters")


def test_the_figure_draws_rates_rules_and_prices(tmp_path):
    analysis = study(bowl(0.5))
    left, right, *_ = drawn(FIGURE, analysis).axes
    lines = [(list(line.get_xdata()), pytest.approx(list(line.get_ydata()))) for line in left.lines]
    assert (
        ([4, 16, 64], [0.5, 1, 2]) in lines
        and ([4, 64], [0.5, 8]) in lines
        and ([4, 64], [0.5, 2]) in lines
    )
    prices = [list(line.get_ydata()) for line in right.lines if len(line.get_xdata()) == 2]
    assert [1.0, 1.0] in prices
    assert [text.get_text() for text in right.texts] == ["2"] * 4
    files, notes = write_figures([FIGURE], [analysis], tmp_path)
    assert [path.name for path in files] == [
        "rates.csv",
        "rates-prices.csv",
        "rates.png",
        "rates.pdf",
    ] and notes == []


def test_a_notebook_reads_them():
    read = Study(study(bowl(1.0)).record)
    assert list(read.rates["effective_rate"]) == pytest.approx([0.5, 2, 8])
    assert len(read.prices) == 8


@pytest.mark.parametrize(
    ("optimizer", "drawn_at"), [("momentum", [0.01, 0.1, 1.0, 10.0, 100.0]), ("sgd", [])]
)
def test_the_search_space_shows_equal_effective_rates(optimizer, drawn_at):
    """Lines of eta / (1 - m): on that of 10, eta is 10 (1 - m)."""
    analysis = study(bowl(0.5), config={"model": {"init_args": {"optimizer": optimizer}}})
    panel = drawn(METAPARAMETERS, analysis).axes[0]
    lines = [line.get_xydata() for line in panel.lines if line.get_linestyle() == ":"]
    assert [(ends[:, 0] / ends[:, 1]).tolist() for ends in lines] == [
        pytest.approx([rate] * 2) for rate in drawn_at
    ]
    assert [text.get_text() for text in panel.texts if text.get_fontsize() == 5] == [
        f"{rate:g}" for rate in drawn_at
    ]
    for ends in lines:  # from edge to edge of the box
        eta, rest = ends.T
        assert eta[0] == pytest.approx(1e-3) or rest[0] == pytest.approx(0.01)
        assert eta[1] == pytest.approx(10) or rest[1] == pytest.approx(0.5)


def test_an_equal_rate_through_a_corner_of_the_box_is_no_line():
    """10 / (1 - 0.9999) is 100,000 but for rounding."""
    space = SPACE | {"model.momentum": Range(0.5, 0.9999, "reverse_log")}
    panel = drawn(METAPARAMETERS, study(bowl(0.5), space=space)).axes[0]
    labels = [text.get_text() for text in panel.texts if text.get_fontsize() == 5]
    assert labels == ["0.01", "0.1", "1", "10", "100", "1000", "10000"]


@pytest.mark.parametrize(("series", "is_drawn"), [(6, True), (15, True), (16, False)])
def test_only_very_many_series_are_drawn_on_request_alone(series, is_drawn):
    """Each series has two kinds of rate, and each kind a line of panels."""
    cells = [Cell(4, number / 20) for number in range(series)]
    analysis = study(
        {cell: [trial(4, 0, 0.5, 0.9, 32, cell={"sparsity": cell.sparsity})] for cell in cells}
    )
    assert (FIGURE.too_large(analysis) is None) == is_drawn


@pytest.mark.parametrize(
    ("slack", "ended", "lines"), [(1.0, "outraced", 2), (None, "incomplete", 1)]
)
def test_a_price_of_at_least_1_is_not_drawn_but_counted(slack, ended, lines):
    """At B = 16 the square-root rule has the rate of K* itself; a trial at the linear rule's was
    stopped at K*."""
    best = [trial(4, 0, 0.5, 0.9, 400), trial(16, 0, 1.0, 0.9, 100)]
    curve = {"step": [100], "val_error": [0.5], "train_loss": [1.0]}
    stopped = trial(16, 1, 2.0, 0.9, None, ended, curve=curve)
    analysis = study({Cell(4): best[:1], Cell(16): [best[1], stopped]}, race_factor=slack)
    assert FIGURE.is_empty_bound(analysis.prices).sum() == 2
    notes = FIGURE.early_stopping_notes(analysis)
    assert len(notes) == lines and numbers_in(notes[-1])[:2] == [2, 4]
    right = drawn(FIGURE, analysis).axes[1]
    hollow = [line for line in right.lines if line.get_markerfacecolor() == "white"]
    assert not any(len(line.get_xdata()) for line in hollow)
    assert [1, 2] in [numbers_in(text.get_text())[:2] for text in right.texts]


def test_a_raced_study_whose_prices_are_all_measured_has_no_such_words():
    analysis = study(bowl(0.5), race_factor=4.0)
    assert FIGURE.early_stopping_notes(analysis) == []
    assert not any(
        "not drawn" in text.get_text() for ax in drawn(FIGURE, analysis).axes for text in ax.texts
    )
