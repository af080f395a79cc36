"""K* of sparse over dense networks against the average density along the run, of moving masks."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.ratios as ratios
import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.readings import AVERAGE_DENSITY, has_moving_masks
from lit_dps.analysis.tables import columns_of, numbers, rows_of
from lit_dps.core.trial import Series, short_name, text_of
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "density", ""
CAPTION = "K* of sparse over dense networks against the average density along the run"
notes = ratios.notes


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    if not has_moving_masks(study.record):
        return "no mask that changes during training"
    return ratios.missing(study)


def by_default(study: Analysis) -> bool:
    """Return True if a mask of the study changes during training."""
    return has_moving_masks(study.record)


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `ratios.rows` with the average density of the K* trial of each cell."""
    table = ratios.rows(study)
    keys = [*columns_of(study.record.series[0]), "batch_size"]
    return table.merge(study.table[[*keys, AVERAGE_DENSITY]], on=keys, how="left")


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return one panel: a colour for each series without its sparsity, a point for each cell."""
    drawn = sorted({ratio.cell.series for ratio in study.ratios})
    names = sorted({_name(series) for series in drawn})
    figure = new_figure(4.4, 3.2)
    ax = figure.add_subplot()
    ax.axhline(1, **ratios.EQUAL)
    for series in drawn:
        of_series = rows_of(series, rows)
        style = look.curve_style(names.index(_name(series)))
        density = numbers(of_series[AVERAGE_DENSITY])
        ax.plot(density, numbers(of_series["ratio"]), linestyle="none", **style)
    look.log_values_axis(ax, [1, *rows["ratio"].dropna()], 1.15, 1.15)
    look.log_values_axis(ax, rows[AVERAGE_DENSITY].dropna(), 1.2, 1.2, axis="x")
    ax.set_xlabel("average density up to the goal\n[share of the masked weights]")
    ax.set_ylabel(f"K*(S) / K*(S = {min(study.record.sparsities):g})")
    handles = look.curve_handles(names, linestyle="none")
    handles.append(look.entry("equal steps", **ratios.EQUAL))
    look.legend_above(figure, handles)
    return figure


def _name(series: Series) -> str:
    """Return a series without its sparsity, as a legend names it."""
    parts = []
    for key, value in series.axes:
        if key == "pruning.method":
            parts.append(text_of(value))
        else:
            parts.append(f"{short_name(key)} = {text_of(value)}")
    return ", ".join(parts) or "all cells"
