"""K* against the number of trials: the best of n of the trials of each cell (`best_of_n`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.best_of_n import last_doubling, why_no_draws
from lit_dps.analysis.repeats import RepeatSummary
from lit_dps.analysis.tables import numbers, rows_of, title, where
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Series
from lit_dps.core.unit import STEPS, Unit
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "draws", ""
CAPTION = "steps of the best of n trials against n, by batch size"
DASH: dict[str, Any] = {"marker": "_", "markersize": 7}  # of a median over seeds


def caption_in(unit: Unit) -> str:
    """Return the caption in a unit of K*; `CAPTION` is in steps."""
    return CAPTION.replace(STEPS.name, unit.name, 1)


def by_default(study: Analysis) -> bool:
    """Return True if repeats were asked for: both show how much of K* is luck."""
    return study.record.plan.count > 0 and missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `best_of_n.draw_rows`."""
    return study.best_of_n_table


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    reason = why_no_draws(study.record)
    if reason is not None:
        return reason
    known = _finite(study.best_of_n_table)
    if max(known["draws"], default=0) <= 1:
        return "no cell with trials that met the goal"
    if study.record.race_factor is not None and not last_doubling(
        study.cells, study.record.statistic
    ):
        return (
            f"trials were stopped early (study.race_factor = {study.record.race_factor:g}), so too "
            "few met the goal; study.race_factor: null lets all trials finish"
        )
    return None


def _finite(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose best of n is finite in most choices."""
    return rows.loc[np.isfinite(numbers(rows["median"]))]


def notes(study: Analysis) -> list[str]:
    """Return where curves begin, what racing changes, and what is beside their ends."""
    lines = [
        "A curve of draws begins where at least half of all choices of n trials include one that "
        "met the goal."
    ]
    if study.record.statistic.needed_trials > 1:
        lines = ["A curve of draws begins where at least half of all choices of n have a K*."]
    if study.record.race_factor is not None:
        lines.append(
            f"Trials were stopped early (study.race_factor = {study.record.race_factor:g}). Curves "
            "of draws lack their first part, and a flat end does not mean that there are enough "
            "trials."
        )
    if study.repeats:
        lines.append(
            "A dash beside the end of a curve is the median of its best sample over seeds."
        )
    if any(each.is_upper_bound(0.5) for each in study.repeats_of_k_star.values()):
        lines.append("A dash with an arrow is an upper bound.")
    return lines


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return a panel per series: the median best of n by n, a curve per batch size.

    A dash at its end is the median over seeds.
    """
    known = _finite(rows)
    every = look.series_with_rows(study, known)
    sizes = sorted(study.record.batch_sizes)
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(sizes)))
    colours = {size: to_hex(shade) for size, shade in zip(sizes, shades, strict=True)}
    repeats = _repeats_with_median(study)
    values = known["median"].tolist()
    columns = min(len(every), 3)
    lines = math.ceil(len(every) / columns)
    figure = new_figure(max(2.5 * columns, 3.3) + 0.9, 2.3 * lines + 0.2)
    ax = None
    for i, series in enumerate(every):
        ax = figure.add_subplot(lines, columns, i + 1, sharey=ax, xscale="log", yscale="log")
        of_series = repeats.get(series, {})
        _draw_series(ax, rows_of(series, known), of_series, colours)
        values += [each.finite_median for each in of_series.values()]
        ax.set_title(title(series))
        _draws_axis(ax, rows["draws"].tolist())
        if i % columns == 0:
            ax.set_ylabel(_label(study.record))
        if i + columns >= len(every):
            ax.set_xlabel("trials n")
    look.log_values_axis(figure.axes[0], values, 1.1, 1.1)
    _draw_legend(figure, known, colours, bool(repeats))
    return figure


def _label(record: StudyRecord) -> str:
    unit = record.goal.unit
    if record.statistic.is_minimum:
        return f"{unit} to result of the best of n"
    return f"K* of n trials [{unit}]: {record.statistic.label}"


def _repeats_with_median(study: Analysis) -> dict[Series, dict[int, RepeatSummary]]:
    """Return the repeats of best samples with a finite median, by series and batch size."""
    by_series = {}
    for series, repeats in study.repeats_with_median.items():
        by_series[series] = {each.cell.batch_size: each for each in repeats}
    return by_series


def _draw_series(
    ax: Axes, rows: pd.DataFrame, repeats: Mapping[int, RepeatSummary], colours: Mapping[int, str]
) -> None:
    """Draw the curves of a series; repeats and colours are by batch size."""
    for size, colour in colours.items():
        line = where(rows, batch_size=size)
        if not len(line):
            continue
        n = numbers(line["draws"])
        steps = numbers(line["median"])
        ax.plot(n, steps, color=colour, linewidth=1, drawstyle="steps-post")
        ax.plot(n[-1:], steps[-1:], color=colour, marker="o", markersize=3)
        if size in repeats:
            x = n[-1:] * 1.25
            median = np.array([repeats[size].finite_median], float)
            ax.plot(x, median, color=colour, **DASH)
            if repeats[size].is_upper_bound(0.5):
                look.bounds(ax, x, median, color=colour, marker=DASH["marker"])


def _draws_axis(ax: Axes, draws: Sequence[int]) -> None:
    """Set the x axis over numbers of trials, with ticks at powers of 2."""
    ticks = [2**i for i in range(int(np.log2(max(draws))) + 1)]
    ax.set_xticks(ticks, list(map(str, ticks)))
    ax.minorticks_off()
    ax.set_xlim(0.85 * min(draws), 1.5 * max(draws))


def _draw_legend(
    figure: Figure, known: pd.DataFrame, colours: Mapping[int, str], has_medians: bool
) -> None:
    """Draw a legend of the batch sizes that have a curve, beside the panels."""
    drawn: Sequence[int] = known["batch_size"].unique().tolist()
    handles = []
    for size, colour in colours.items():
        if size in drawn:
            handles.append(look.entry(f"B = {size}", color=colour))
    if has_medians:
        median = "median\nover seeds"
        handles.append(look.entry(median, color=look.GREY, linestyle="none", **DASH))
    figure.legend(handles=handles, loc="outside right center")
