"""The size of figures in a report, in a paper and on slides."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from lit_dps.analysis.analysis import Analysis
from lit_dps.report.figures import FIGURES, write_figures
from lit_dps.report.figures.page_size import PageSize, new_figure, page_size
from lit_dps.report.figures.style import label_ends
from lit_dps.storage.read import read_study
from tests.support.errors import refuses
from tests.support.fake_study import law_study


@pytest.mark.parametrize(
    ("size", "narrow", "wide"),
    [
        (PageSize(), (4.8, 3.0), (6.4, 3.2)),
        (PageSize("paper"), (3.25, 2.03125), (6.75, 3.375)),
        (PageSize("slides"), (5.0, 3.125), (5.0, 2.5)),
        (PageSize("paper", width=2.4), (2.4, 1.5), (2.4, 1.2)),
    ],
)
def test_a_style_sets_the_width_and_keeps_the_shape(size, narrow, wide):
    with page_size(size):
        assert new_figure(4.8, 3.0).get_size_inches() == pytest.approx(narrow)
        assert new_figure(6.4, 3.2).get_size_inches() == pytest.approx(wide)
    assert new_figure(4.8, 3.0).get_size_inches() == pytest.approx((4.8, 3.0))


def test_unknown_styles_widths_and_formats_are_refused():
    with refuses("--style", "poster"):
        PageSize("poster")
    with refuses("--width", 0.5):
        PageSize(width=0.5)
    with refuses("--format", "gif"):
        PageSize(formats=("png", "gif"))


@pytest.mark.pictures
def test_figures_of_a_paper_are_written_in_its_formats_without_a_caption(tmp_path):
    law_study(f"sqlite:///{tmp_path}/study.db", "drawn")
    study = Analysis(read_study(f"sqlite:///{tmp_path}/study.db", "drawn"))
    texts = {}
    for style in ("report", "paper"):
        with page_size(PageSize(style, formats=("svg",))):
            files, _ = write_figures(FIGURES, [study], tmp_path / style, only=["scaling"])
        assert [file.name for file in files] == ["scaling.csv", "scaling.svg"]
        texts[style] = files[1].read_text()
    assert study.record.name in texts["report"]
    assert study.record.name not in texts["paper"]


def test_names_at_the_ends_of_curves_do_not_overlap():
    figure = Figure(figsize=(4.0, 3.0))
    ax = figure.add_subplot(yscale="log")
    ax.set_xlim(0, 1)
    ax.set_ylim(1e-4, 1)
    values = [1.0, 0.9, 0.8, 1e-2, 1.01e-2, 1e-4]
    label_ends(ax, [(value, str(value), "black") for value in values], 3.0)
    places = {text.get_text(): text.xyann[1] for text in ax.texts}
    heights = [places[str(value)] for value in sorted(values)]
    gaps = [high - low for low, high in zip(heights, heights[1:], strict=False)]
    assert min(gaps) >= 8.5 / (3.0 * 72 * 0.75) - 1e-9
    assert max(heights) <= 1.0 and places["0.01"] == pytest.approx(0.5)
