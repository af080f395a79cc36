"""Long names of series and long legends: nothing of a figure lies on something else."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from matplotlib.figure import Figure

from lit_dps.core.trial import Cell, Status
from lit_dps.report.figures import metaparameters, scaling, style
from tests.support.fake_study import SPACE, analysis_of, result

pytestmark = pytest.mark.pictures


def test_long_names_overlap_nothing():
    axes = {"local.outer_momentum": (0.0, 0.9), "local.steps": (4, 16, 64)}
    params = {key: box.at(0.5) for key, box in SPACE.items()}
    cells = [
        Cell(b, 0.0, tuple(zip(axes, way, strict=True)))
        for b in (8, 64)
        for way in product(*axes.values())
    ]
    study = analysis_of(
        {cell: [result(cell, 0, 3200 // cell.batch_size, params=params)] for cell in cells},
        axes=axes,
    )
    figure = scaling.draw(scaling.rows(study), study)
    figure.draw_without_rendering()
    titles = [ax.title.get_window_extent() for ax in figure.axes]
    assert not any(a.overlaps(b) for a, b in combinations(titles, 2))
    assert figure.get_figheight() > 2.4 * 3 + 0.2, (
        "the legend of six series takes no room from the panels"
    )
    box = metaparameters.axes_of(study.record)[0]
    figure, names = metaparameters.draw(metaparameters.rows(study), study, box), []
    figure.draw_without_rendering()
    for ax in figure.axes:
        names += [text.get_window_extent() for text in ax.texts]
    assert names and not any(a.overlaps(b) for a, b in combinations(names, 2))
    assert max(name.x1 for name in names) <= figure.bbox.x1


@pytest.mark.parametrize(
    ("sizes", "status"),
    [((2,), Status.COMPLETE), ((2,), Status.FAILED), ((8, 16, 32, 64, 128, 256), None)],
)
def test_what_is_searched_has_its_legend_and_its_label_beside_the_panels(sizes, status):
    ends = [status, Status.OUTRACED] if status else [Status.COMPLETE]
    params = {key: box.at(0.5) for key, box in SPACE.items()}
    steps = (64, 64, 190, 290, 380)  # three shades where two trials ended otherwise
    study = analysis_of(
        {
            Cell(b): [result(Cell(b), i, k, params=params) for i, k in enumerate(steps)]
            for b in sizes
        }
    )
    rows, box = metaparameters.rows(study), metaparameters.axes_of(study.record)[0]
    rows.loc[rows.index[: len(ends)], "status"] = [str(end.value) for end in ends]
    figure = metaparameters.draw(rows, study, box)
    figure.draw_without_rendering()
    for each in figure.legends:
        extent = each.get_window_extent()
        assert extent.x0 >= figure.bbox.x0 and extent.x1 <= figure.bbox.x1
    ticks = [
        text.get_window_extent() for text in figure.axes[0].get_yticklabels() if text.get_text()
    ]
    label = figure._supylabel.get_window_extent()
    assert ticks and not any(label.overlaps(tick) for tick in ticks) and label.x0 >= figure.bbox.x0


@pytest.mark.parametrize("width", [10, 30])
def test_a_key_stays_beside_its_value(width):
    lines = style.wrapped("S = 0, outer_momentum = 0.9, steps = 4", width).splitlines()
    assert lines == (
        ["S = 0, outer_momentum = 0.9,", "steps = 4"]
        if width == 30
        else ["S = 0,", "outer_momentum = 0.9,", "steps = 4"]
    )


@pytest.mark.parametrize(
    ("low", "high"), [(0.15, 4.6), (0.15, 6.5), (3, 60), (12, 800), (1, 1e5), (8, 9)]
)
@pytest.mark.parametrize(("below", "above"), [(1.3, 1.3), (2, 1.6), (2, 100)])
def test_a_logarithmic_axis_has_two_ticks_at_least_and_few_enough(low, high, below, above):
    ax = Figure().add_subplot()
    style.log_values_axis(ax, [low, high], below, above)
    shown = [y for y in ax.get_yticks() if ax.get_ylim()[0] <= y <= ax.get_ylim()[1]]
    assert 2 <= len(shown) <= 8
