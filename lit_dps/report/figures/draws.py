"""K* against the number of trials: the best of n of the N trials of each cell
(`lit_dps.analysis.best_of_n`)."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.best_of_n import last_doubling, why_no_draws
from lit_dps.analysis.tables import numbers, rows_of, title

NAME, PAPER = "draws", ""
CAPTION = "steps of the best of n trials against n, by batch size"


def by_default(study: Analysis) -> bool:
    """Where repeats were asked for: both tell how much of K* is luck."""
    return study.record.plan.count > 0 and missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """The rows of `draws.draw_rows`."""
    return study.draws


def missing(study: Analysis) -> str | None:
    """Why there is nothing to draw, if so."""
    if (why := why_no_draws(study.record)) is not None:
        return why
    known = study.draws[np.isfinite(numbers(study.draws["median"]))]
    if not len(known) or known["draws"].max() <= 1:
        return "no cell with trials that met the goal"
    if study.record.race_factor is not None and not last_doubling(study.cells):
        return (
            f"trials were stopped early (study.race_factor = {study.record.race_factor:g}), so too "
            "few met the goal; study.race_factor: null lets all trials finish"
        )
    return None


def notes(study: Analysis) -> list[str]:
    """Where curves begin, and what stands beside their ends."""
    told = [
        "A curve of draws begins where at least half of all choices of n trials include one that "
        "met the goal."
    ]
    if study.record.race_factor is not None:
        told.append(
            f"Trials were stopped early (study.race_factor = {study.record.race_factor:g}). Curves "
            "of draws lack their left part, and a flat end does not mean that there are enough "
            "trials."
        )
    dash = "A dash beside the end of a curve is the median of its best sample over seeds."
    return [*told, *([dash] if study.repeats else [])]


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """A panel a series: the median best of n by n, a curve a batch size; a dash at its end is the
    median over seeds."""
    series = [
        s for s in study.record.series if np.isfinite(numbers(rows_of(s, rows)["median"])).any()
    ]
    columns = min(len(series), 3)
    lines = math.ceil(len(series) / columns)
    figure = Figure(figsize=(max(2.5 * columns, 3.3) + 0.9, 2.3 * lines + 0.2))
    sizes, shared = sorted(study.record.batch_sizes), None
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(sizes)))
    known = {
        (each.cell, each.median)
        for each in study.repeats
        if each.rank == 1 and each.median is not None
    }
    medians = {
        (cell.series, cell.batch_size): median for cell, median in known if math.isfinite(median)
    }
    for panel, each in enumerate(series):
        shared = ax = figure.add_subplot(
            lines, columns, panel + 1, sharey=shared, xscale="log", yscale="log"
        )
        part = rows_of(each, rows)
        for size, colour in zip(sizes, map(to_hex, colours), strict=True):
            line = part[(part["batch_size"] == size) & np.isfinite(numbers(part["median"]))]
            if not len(line):
                continue
            n, steps = numbers(line["draws"]), numbers(line["median"])
            ax.plot(n, steps, color=colour, linewidth=1, drawstyle="steps-post")
            ax.plot(n[-1:], steps[-1:], color=colour, marker="o", markersize=3)
            if (each, size) in medians:
                ax.plot(
                    n[-1:] * 1.25, [medians[each, size]], color=colour, marker="_", markersize=7
                )
        ax.set_title(title(each))
        ticks = [2**i for i in range(int(np.log2(rows["draws"].max())) + 1)]
        ax.set_xticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
        if panel % columns == 0:
            ax.set_ylabel("steps to result of the best of n")
        if panel + columns >= len(series):
            ax.set_xlabel("trials n")
    finite = numbers(rows["median"])
    values = [*finite[np.isfinite(finite)], *medians.values()]
    look.log_values_axis(figure.axes[0], values, 1.1, 1.1)
    for ax in figure.axes:
        ax.set_xlim(0.85 * min(rows["draws"]), 1.5 * max(rows["draws"]))
    drawn = {
        size for size in sizes if any(math.isfinite(x) for x in finite[rows["batch_size"] == size])
    }
    lines_of = zip(sizes, colours, strict=True)
    handles = [
        Line2D([], [], color=to_hex(c), label=f"B = {size}")
        for size, c in lines_of
        if size in drawn
    ]
    if medians:
        dash = {"marker": "_", "markersize": 7, "linestyle": "none", "color": look.GREY}
        handles.append(Line2D([], [], label="median\nover seeds", **dash))
    figure.legend(handles=handles, loc="outside right center")
    return figure
