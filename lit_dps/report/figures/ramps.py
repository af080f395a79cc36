"""Steps against examples to the goal: constant batch sizes, and batches that grow along the run."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import MEDIAN
from lit_dps.analysis.tables import count, numbers, rows_of, where
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "ramps", ""
CAPTION = "optimizer steps against examples to the goal, with constant and with growing batches"


def by_default(study: Analysis) -> bool:
    """Return True if the figure is drawn without a request."""
    return missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `ramps.point_rows`."""
    return study.ramp_points


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    table = study.ramp_points
    if len(set(table["constant"])) < 2:
        return "no K* of a growing batch and of a constant one (an axis batch.schedule)"
    return look.too_many_series(study, NAME)


def notes(study: Analysis) -> list[str]:
    """Return what the points are, and how many are bounds."""
    table = study.ramp_points
    lines = []
    medians = count(table["steps_of"] == MEDIAN)
    if medians:
        lines.append(f"{medians} of {len(table)} points of steps and examples are medians of K.")
    bounds = count(table["floor"] == 1)
    if bounds:
        lines.append(
            f"{bounds} of {len(table)} points of steps and examples are upper bounds, drawn hollow."
        )
    return lines


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return a panel with a curve per series; each point has its batch size.

    A point below the curve of the constant batch needs fewer steps with the same examples.
    """
    figure = new_figure(4.8, 3.4)
    ax = figure.subplots()
    drawn = look.series_with_rows(study, rows)
    for i, series in enumerate(study.record.series):
        if series not in drawn:
            continue
        part = rows_of(series, rows).sort_values("batch_size")
        style = look.curve_style(i)
        examples = numbers(part["examples"])
        steps = numbers(part["steps"])
        line = "-"
        if 0 in set(part["constant"]):
            line = "--"
        ax.plot(examples, steps, linestyle=line, linewidth=0.9, **style)
        bounds = where(part, floor=1)
        ax.plot(
            numbers(bounds["examples"]),
            numbers(bounds["steps"]),
            linestyle="none",
            markerfacecolor="white",
            **style,
        )
        text_style = {"xytext": (4, 3), "fontsize": 6, "color": style["color"]}
        look.write_beside(ax, examples, steps, part["batch_size"], **text_style)
    look.log_values_axis(ax, numbers(rows["steps"]), 1.3, 1.3)
    # The room at the right is for the batch size beside the last point.
    look.log_values_axis(ax, numbers(rows["examples"]), 1.15, 1.3, axis="x")
    ax.set_xlabel("examples to the goal")
    ax.set_ylabel("optimizer steps to the goal")
    look.legend_above(figure, look.series_handles(study.record.series, drawn))
    return figure
