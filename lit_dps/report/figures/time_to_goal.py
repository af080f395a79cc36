"""Time and examples to the goal against batch size, on the machine that ran the trials."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import numbers, rows_of
from lit_dps.report.answer import LIMITS

NAME, PAPER = "time-to-goal", ""
CAPTION = "time and examples to the goal against batch size, on the machine that ran the trials"
STAR = {
    "marker": "*",
    "markersize": 9,
    "markeredgecolor": "black",
    "markeredgewidth": 0.5,
    "linestyle": "none",
}


def by_default(study: Analysis) -> bool:
    return missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """The rows of `answer.answer_rows`."""
    return study.answer


def missing(study: Analysis) -> str | None:
    """Why there is nothing to draw, if so."""
    if not len(study.answer):
        return "no trial has met the goal yet"
    if study.answer["seconds"].isna().all():
        return "no trial measured the time of a step"
    return None if study.answer["batch_size"].nunique() > 1 else "K* at one batch size only"


def notes(study: Analysis) -> list[str]:
    """None: what to know of the times stands below the answer (`answer.timing_notes`)."""
    return []


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Left the time to the goal with its limits, a star the fastest; right K* B. A curve a series.

    Upper bounds are hollow, with an arrow: of the time, only where the law does not tell more than
    K*.
    """
    record = study.record
    figure = Figure(figsize=(6.4, 2.9))
    left, right = figure.subplots(1, 2, sharex=True)
    drawn = []
    for i, series in enumerate(record.series):
        part = rows_of(series, rows)
        if not len(part):
            continue
        drawn.append((series, i))
        x, seconds, low, high = (
            numbers(part[name]) for name in ("batch_size", "seconds", "seconds_low", "seconds_high")
        )
        left.vlines(x, low, high, color=look.curve_style(i)["color"], linewidth=0.8, alpha=0.6)
        bound = numbers(part["floor"]) == 1
        _draw(left, x, seconds, bound & np.isnan(low), i)
        _draw(right, x, numbers(part["examples"]), bound, i)
        best = numbers(part["fastest"].astype(float)) == 1
        left.plot(x[best], seconds[best], color=look.curve_style(i)["color"], zorder=4, **STAR)
    look.batch_size_axis(left, record.batch_sizes)
    known = pd.concat(
        [rows[name].dropna().astype(float) for name in ("seconds", "seconds_low", "seconds_high")]
    )
    look.log_values_axis(left, known, 1.2, 1.2)
    look.log_values_axis(right, rows["examples"], 1.4, 1.4)
    left.set_ylabel("time to the goal [s]")
    right.set_ylabel("examples to the goal")
    for ax in (left, right):
        ax.set_xlabel(look.BATCH_SIZE)
    handles = [*look.series_handles(drawn), Line2D([], [], color="white", label="fastest", **STAR)]
    if rows["seconds_low"].notna().any():
        handles.append(Line2D([], [], label=LIMITS, color=look.GREY, linewidth=0.8))
    look.legend_above(figure, handles + look.bound_handles(bool(rows["floor"].any())))
    return figure


def _draw(ax: Axes, x: np.ndarray, values: np.ndarray, bound: np.ndarray, i: int) -> None:
    style = look.curve_style(i)
    ax.plot(x, values, color=style["color"], linewidth=0.9)
    ax.plot(x[~bound], values[~bound], linestyle="none", **style)
    look.bounds(ax, x[bound], values[bound], **style)
