"""K* against batch size by pruning method and by the weights under the mask, a panel for each
sparsity."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.scaling as curves
import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.layers import INIT
from lit_dps.analysis.tables import columns_of, rows_of, title
from lit_dps.core.trial import Series
from lit_dps.report.figures.scaling import bound_handles, curve_rows, draw_curve, grid_sizes

NAME, PAPER = "pruners", ""
CAPTION = "K* against batch size by pruning method, a panel for each sparsity"
KEYS = ("pruning.method", INIT)
FEW = 5  # methods and starts that a legend above has room for
missing, notes = curves.missing, curves.notes  # its curves are those of that figure


def by_default(study: Analysis) -> bool:
    """Where the method or the start is an axis."""
    return any(key in study.record.axes for key in KEYS)


def rows(study: Analysis) -> pd.DataFrame:
    """The rows of `scaling.curve_rows` for each series, with its columns first; not normalised."""
    sizes = study.record.batch_sizes
    found = (
        (series, curve_rows(scaling, sizes, None)) for series, scaling in study.scalings.items()
    )
    rows = pd.concat(
        [pd.DataFrame({**columns_of(series), **curve}) for series, curve in found],
        ignore_index=True,
    )
    return rows[[name for name in rows.columns if not name.startswith("normalised")]]


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """A panel for each sparsity and value of other axes; in it a curve and a law for each method
    and start."""
    panels: dict[Series, list[Series]] = {}
    for series, scaling in study.scalings.items():
        if scaling.k_star:
            panels.setdefault(_without(series), []).append(series)
    ways = sorted({_way(series) for every in panels.values() for series in every})
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    aside = len(ways) > FEW
    figure = Figure(
        figsize=(max(2.6 * columns, 3.6) + 0.2 + 1.4 * aside, 2.6 * lines + 0.5 * (not aside))
    )
    for i, (panel, every) in enumerate(panels.items()):
        ax = figure.add_subplot(lines, columns, i + 1, title=title(panel))
        for series in every:
            draw_curve(ax, rows_of(series, rows), ways.index(_way(series)))
        look.batch_size_axis(ax, grid_sizes(rows))
        look.log_values_axis(ax, rows["k_star"].dropna())
        ax.set_xlabel(look.BATCH_SIZE)
        if i % columns == 0:
            ax.set_ylabel(look.K_STAR)
    handles = [
        look.Line2D([], [], label=", ".join(way), **look.curve_style(i) | look.line_of(i))
        for i, way in enumerate(ways)
    ]
    handles += bound_handles(rows)
    if aside:
        figure.legend(handles=handles, loc="outside right upper", handlelength=3)
    else:
        look.legend_above(figure, handles)
    return figure


def _without(series: Series) -> Series:
    return replace(series, axes=tuple(pair for pair in series.axes if pair[0] not in KEYS))


def _way(series: Series) -> tuple[str, ...]:
    found = dict(series.axes)
    return tuple(str(found[key]).rpartition(".")[2] for key in KEYS if key in found)
