"""K* against batch size by pruning method and start weights, a panel for each sparsity."""

from __future__ import annotations

import math

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.scaling as scaling
import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.layers import INIT
from lit_dps.analysis.tables import k_star_axis, rows_of, title
from lit_dps.core.trial import Series
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "pruners", ""
CAPTION = "K* against batch size by pruning method, a panel for each sparsity"
KEYS = ("pruning.method", INIT)
MOST_ENTRIES = 5  # of a legend above the panels
# It draws the curves of that figure.
missing, notes = scaling.missing, scaling.notes


def by_default(study: Analysis) -> bool:
    """Return True if the method or the start is an axis of the grid."""
    return not study.record.axes.keys().isdisjoint(KEYS)


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `law_tables.series_curves` without normalised values and medians."""
    columns = study.law_curves.columns
    return study.law_curves.loc[:, ~columns.str.startswith("normalised")].drop(
        columns=["median", "median_floor"]
    )


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return a panel for each sparsity and value of other axes.

    It has a curve and a law for each method and start.
    """
    panels: dict[Series, list[Series]] = {}
    distinct = set()
    for series, law in study.laws.items():
        if law.k_star:
            panels.setdefault(series.without(*KEYS), []).append(series)
            distinct.add(_method(series))
    methods = sorted(distinct)
    is_aside = len(methods) > MOST_ENTRIES
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    width = max(2.6 * columns, 3.6) + 0.2
    height = 2.6 * lines
    if is_aside:
        width += 1.4
    else:
        height += 0.5
    figure = new_figure(width, height)
    for i, (panel, of_panel) in enumerate(panels.items()):
        ax = figure.add_subplot(lines, columns, i + 1, title=title(panel))
        for series in of_panel:
            scaling.draw_curve(ax, rows_of(series, rows), methods.index(_method(series)))
        look.batch_size_axis(ax, scaling.grid_sizes(rows))
        look.log_values_axis(ax, rows["k_star"].dropna())
        ax.set_xlabel(look.BATCH_SIZE)
        if i % columns == 0:
            ax.set_ylabel(k_star_axis(study.record.statistic, study.record.goal.cost_unit))
    handles = []
    for i, method in enumerate(methods):
        style = look.curve_style(i) | look.line_of(i)
        handles.append(look.entry(", ".join(method), **style))
    handles += scaling.bound_handles(rows)
    if is_aside:
        figure.legend(handles=handles, loc="outside right upper", handlelength=3)
    else:
        look.legend_above(figure, handles)
    return figure


def _method(series: Series) -> tuple[str, ...]:
    """Return the names of the method and the start of a series."""
    axes = dict(series.axes)
    names = []
    for key in KEYS:
        if key in axes:
            names.append(str(axes[key]).rpartition(".")[2])
    return tuple(names)
