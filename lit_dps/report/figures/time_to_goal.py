"""Time and examples to the goal against batch size, on the machine that ran the trials."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import is_upper_bound
from lit_dps.analysis.tables import has_values, numbers, records, rows_of, where
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "time-to-goal", ""
CAPTION = "time and examples to the goal against batch size, on the machine that ran the trials"
STAR: dict[str, Any] = {
    "marker": "*",
    "markersize": 9,
    "markeredgecolor": "black",
    "markeredgewidth": 0.5,
    "linestyle": "none",
}
LIMITS = "95 % interval of the time"
TIMES = ["total_seconds", "total_low", "total_high"]


def by_default(study: Analysis) -> bool:
    """Return True if the figure is drawn without a request."""
    return missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `answer.answer_rows`."""
    return study.answer


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    if not len(study.answer):
        return f"{study.record.statistic.too_few_have} met the goal yet"
    if not has_values(study.answer, "seconds"):
        return "no trial measured the time of a step"
    if len(set(study.answer["batch_size"])) == 1:
        return "K* at one batch size only"
    return None


def notes(study: Analysis) -> list[str]:
    """Return no notes: those on times are below the answer (`answer.timing_notes`)."""
    return []


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return two panels with a curve per series: the time to the goal, and the examples.

    Bars are limits of the time, a star is the fastest. Upper bounds are hollow, with an arrow.
    """
    record = study.record
    figure = new_figure(6.4, 2.9)
    time_panel, examples_panel = figure.subplots(1, 2, sharex=True)
    drawn = look.series_with_rows(study, rows)
    are_bounds = []
    for series in drawn:
        part = rows_of(series, rows)
        style = look.curve_style(record.series.index(series))
        is_bound = np.array(list(map(is_upper_bound, records(part))))
        are_bounds += is_bound.tolist()
        look.bars(time_panel, part, ("total_low", "total_high"), style)
        _draw_curve(time_panel, part, "total_seconds", style, is_bound)
        star = where(part, fastest=True)
        place = numbers(star["batch_size"]), numbers(star["total_seconds"])
        time_panel.plot(*place, color=style["color"], zorder=4, **STAR)
        _draw_curve(examples_panel, part, "examples", style, is_bound)
    look.batch_size_axis(time_panel, record.batch_sizes)
    look.log_values_axis(time_panel, rows.loc[:, TIMES], 1.2, 1.2)
    look.log_values_axis(examples_panel, rows["examples"], 1.4, 1.4)
    time_panel.set_ylabel("time to the goal [s]")
    examples_panel.set_ylabel("examples to the goal")
    for ax in (time_panel, examples_panel):
        ax.set_xlabel(look.BATCH_SIZE)
    handles = look.series_handles(record.series, drawn)
    handles.append(look.entry("fastest", color="white", **STAR))
    if has_values(rows, "total_low"):
        handles.append(look.entry(LIMITS, color=look.GREY, linewidth=0.8))
    look.legend_above(figure, handles + look.bound_handles(any(are_bounds)))
    return figure


def _draw_curve(
    ax: Axes, rows: pd.DataFrame, column: str, style: dict[str, Any], is_bound: np.ndarray
) -> None:
    """Draw a column against batch size; bounds (n,) are hollow, with an arrow."""
    batch = numbers(rows["batch_size"])
    values = numbers(rows[column])
    ax.plot(batch, values, color=style["color"], linewidth=0.9)
    ax.plot(batch[~is_bound], values[~is_bound], linestyle="none", **style)
    look.bounds(ax, batch[is_bound], values[is_bound], **style)
