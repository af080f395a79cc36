"""K* and the fitted law against batch size (Lee et al. 2021, Figures 1 and 7 to 11)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_tables import medians_outside
from lit_dps.analysis.tables import (
    has_values,
    k_star_axis,
    legend,
    listed,
    numbers,
    rows_of,
    title,
    where,
)
from lit_dps.core.trial import Series
from lit_dps.report.figures.page_size import new_figure
from lit_dps.report.repeats import outside_text

NAME, PAPER = "scaling", "1, 7-11"
CAPTION = "K* against batch size by sparsity (the paper's Figure 1)"
TEXT_CHARACTERS = 38  # width of the text above a panel
TEXT_LINE_INCHES = 0.12  # height of a line of that text
MEDIAN: dict[str, Any] = {
    "marker": "x",
    "color": look.GREY,
    "markersize": 4,
    "linestyle": "none",
    "zorder": 3,
}
BAR: dict[str, Any] = {"elinewidth": 0.8, "capsize": 2, "linestyle": "none"}  # 95 % limits of a K*
DOTTED: dict[str, Any] = {"color": look.GREY, "linestyle": ":", "linewidth": 0.8}
DASHED: dict[str, Any] = {"color": look.GREY, "linestyle": "--", "linewidth": 0.8}
# A legend inside a panel, above falling curves, has room for this many entries and characters.
MOST_ENTRIES = 5
MOST_CHARACTERS = 18
# Columns of steps that the panel of a series shows.
DRAWN_VALUES = ["k_star", "median", "k_star_low", "k_star_high"]
ARROW = 0.35  # length of the arrow of an upper bound, as a share of K*
ARROW_DOWN: dict[str, Any] = {"uplims": True, "elinewidth": 0.8, "capsize": 2}


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `law_tables.series_curves`."""
    return study.law_curves


def missing(study: Analysis) -> str | None:
    """Return why there is no scaling curve to draw; None if there is one."""
    sizes = set().union(*(law.k_star for law in study.laws.values()))
    if not sizes:
        return f"{study.record.statistic.too_few_have} met the goal yet"
    if len(study.record.batch_sizes) == 1:
        return "one batch size only"
    if len(sizes) == 1:
        return "K* at one batch size only"
    return None


def too_large(study: Analysis) -> str | None:
    """Return why the figure is drawn on request only; None if it is not."""
    return look.too_many_series(study, NAME)


def notes(study: Analysis) -> list[str]:
    """Return which series have no curve, and how intervals and bounds of K* are drawn."""
    lines = []
    without_k_star = [series for series, law in study.laws.items() if not law.k_star]
    if without_k_star:
        too_few = study.record.statistic.too_few.capitalize()
        lines.append(f"{too_few} met the goal at {listed(without_k_star)}: no curve there.")
    laws = study.laws.values()
    lines += limit_notes(laws) + bound_notes(laws)
    if any(law.upper_bounds for law in study.median_laws.values()):
        lines.append("A median over seeds with an arrow is an upper bound.")
    return lines


def limit_notes(laws: Iterable[Law]) -> list[str]:
    """Return a note on K* without a bar; nothing if no K* has one, or all have."""
    with_bar = 0
    total = 0
    for law in laws:
        with_bar += len(law.limits)
        total += len(law.exact_k)
    if not with_bar or with_bar == total:
        return []
    return [
        f"{total - with_bar} of {total} K* have no bar: too few trials of the cell met the goal."
    ]


def bound_notes(laws: Iterable[Law]) -> list[str]:
    """Return how upper bounds are drawn; nothing if there are none."""
    if not any(law.upper_bounds for law in laws):
        return []
    return [
        "K* at the first validation, or of fewer than half of the trials, are upper bounds. They "
        "are drawn hollow, with an arrow, and not normalised."
    ]


class _Part(NamedTuple):
    """A series that has a K*: the number of its style, law, text above its panel, and rows."""

    number: int
    series: Series
    law: Law
    text: str
    rows: pd.DataFrame


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return a panel per series with K*, law, band and perfect scaling.

    With several series two more panels show all of them together, and all normalised.
    """
    parts = []
    line_breaks = 0
    for i, (series, law) in enumerate(study.laws.items()):
        if law.k_star:
            text = _text_above(study, series)
            parts.append(_Part(i, series, law, text, rows_of(series, rows)))
            line_breaks = max(line_breaks, text.count("\n"))
    figure, axes = _panels(
        len(parts), line_breaks, k_star_axis(study.record.statistic, study.record.goal.cost_unit)
    )
    for ax in axes:
        look.batch_size_axis(ax, grid_sizes(rows))
    for ax, part in zip(axes, parts, strict=False):
        _draw_text(ax, title(part.series), part.text)
        _draw_series(ax, part)
        look.log_values_axis(ax, rows.loc[:, DRAWN_VALUES])
    if len(parts) > 1:
        _draw_together(axes[-2], axes[-1], rows, parts)
    handles = line_handles([part.law for part in parts])
    if has_values(rows, "k_star_low"):
        bar = {"color": look.GREY, "marker": "|", "linestyle": "none"}
        handles.append(look.entry("K*, 95 % interval", **bar))
    if has_values(rows, "median"):
        handles.append(look.entry("median over seeds", **MEDIAN))
    columns = min(max(1, int(figure.get_figwidth() / 1.1)), len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2)
    return figure


def _panels(series: int, line_breaks: int, label: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel per series, and two more for several, with labels.

    Args:
        series: Number of series.
        line_breaks: Line breaks in the longest text above a panel.
        label: Of the axes of K*.
    """
    count = 1
    legend_height = 0.5
    if series > 1:
        count = series + 2
        legend_height = 0.2
    columns = count
    if count > 3:
        columns = min(3, math.ceil(count / 2))
    lines = math.ceil(count / columns)
    height = (2.4 + TEXT_LINE_INCHES * line_breaks) * lines + legend_height
    figure = new_figure(max(2.5 * columns, 3.3), height)
    axes = [figure.add_subplot(lines, columns, i + 1) for i in range(count)]
    for ax in axes[::columns]:
        ax.set_ylabel(label)
    for ax in axes[-columns:]:
        ax.set_xlabel(look.BATCH_SIZE)
    return figure, axes


def _text_above(study: Analysis, series: Series) -> str:
    """Return the text above a panel: B_crit, and medians over seeds outside the band."""
    law = study.laws[series]
    medians = study.median_laws.get(series)
    lines = [textwrap.fill(law.describe(), TEXT_CHARACTERS)]
    if medians is not None:
        outside = outside_text(medians_outside(law, medians, study.record.goal.check_interval))
        if outside:
            lines.append(textwrap.fill(f"medians outside the band: {outside}", TEXT_CHARACTERS))
    return "\n".join(lines)


def _draw_text(ax: Axes, name: str, text: str) -> None:
    """Write the title of a panel and a text below it."""
    ax.text(0.5, 1.02, text, transform=ax.transAxes, fontsize=7, va="bottom", ha="center")
    text_points = 8.5 * (1 + text.count("\n"))
    ax.set_title(look.wrapped(name, TEXT_CHARACTERS - 8), pad=5 + text_points)


def _draw_series(ax: Axes, part: _Part) -> None:
    """Draw a series into its panel."""
    fit = part.law.fit
    if fit is not None and part.law.is_b_crit_known:
        ax.axvline(fit.critical_batch_size, zorder=1, **DOTTED)
    draw_band(ax, part.rows, part.number)
    _draw_limits(ax, part.rows, part.number)
    draw_curve(ax, part.rows, part.number)
    ax.plot(*_known(part.rows, "median"), **MEDIAN)
    batch, medians = _known(where(part.rows, median_floor=1), "median")
    if len(batch):
        ax.errorbar(batch, medians, yerr=ARROW * medians, **ARROW_DOWN, **MEDIAN)
    draw_perfect(ax, part.rows)
    handles = bound_handles(part.rows)
    if handles:
        ax.legend(handles=handles, loc="upper right", handlelength=1.5)


def _draw_limits(ax: Axes, rows: pd.DataFrame, i: int) -> None:
    """Draw the 95 % interval of K* as bars."""
    known = rows.dropna(subset=["k_star_low"])
    if not len(known):
        return
    k_star = numbers(known["k_star"])
    down = k_star - numbers(known["k_star_low"])
    up = numbers(known["k_star_high"]) - k_star
    color = look.curve_style(i)["color"]
    ax.errorbar(numbers(known["batch_size"]), k_star, yerr=[down, up], color=color, **BAR)


def _draw_together(
    together: Axes, normalised: Axes, rows: pd.DataFrame, parts: Sequence[_Part]
) -> None:
    """Draw all series into one panel, and all normalised into another."""
    together.set_title("all sparsities")
    for part in parts:
        draw_curve(together, part.rows, part.number, "", legend(part.series))
        draw_curve(normalised, part.rows, part.number, "normalised_")
        if part.series.axes:
            together.set_title("all series")
    # Normalised series share one line of perfect scaling.
    draw_perfect(normalised, parts[0].rows, "normalised_", "perfect scaling")
    handles = [*together.get_legend_handles_labels()[0], *bound_handles(rows)]
    longest = max(map(len, look.labels_of(handles)))
    if len(handles) > MOST_ENTRIES or longest > MOST_CHARACTERS:
        figure = together.get_figure()
        assert isinstance(figure, Figure)
        look.legend_above(figure, handles)
    else:
        together.legend(handles=handles, loc="upper right", handlelength=1.5)
    normalised.set_title("all, normalised")
    normalised.legend(loc="upper right", handlelength=2)
    label_normalised(normalised, rows)
    look.log_values_axis(together, rows["k_star"])
    look.log_values_axis(normalised, rows["normalised_k_star"])


# Parts of panels, also of other figures


def draw_curve(
    ax: Axes, rows: pd.DataFrame, i: int, prefix: str = "", label: str | None = None
) -> None:
    """Draw K* as markers and the law as a line, in the i-th style.

    Upper bounds are hollow, with an arrow down.

    Args:
        ax: The panel.
        rows: The rows of one curve (`law_curve`).
        i: The number of the style.
        prefix: Of the columns: "" or "normalised_".
        label: The entry of the legend.
    """
    style = look.curve_style(i)
    ax.plot(*_known(rows, f"{prefix}fit"), **look.line_of(i))
    batch, k_star = _known(where(rows, floor=0), f"{prefix}k_star")
    ax.plot(batch, k_star, linestyle="none", markeredgecolor="white", markeredgewidth=0.4, **style)
    batch, k_star = _known(where(rows, floor=1), f"{prefix}k_star")
    if len(batch):
        arrows = {"yerr": ARROW * k_star, **ARROW_DOWN}
        ax.errorbar(batch, k_star, linestyle="none", **arrows, **style, **look.HOLLOW)
    if label is not None:
        ax.plot([], [], label=label, **style | look.line_of(i))


def draw_band(ax: Axes, rows: pd.DataFrame, i: int) -> None:
    """Draw the 95 % band of the law, if there is one."""
    batch, low = _known(rows, "fit_low")
    _, high = _known(rows, "fit_high")
    ax.fill_between(batch, low, high, color=look.curve_style(i)["color"], alpha=0.2, linewidth=0)


def draw_perfect(ax: Axes, rows: pd.DataFrame, prefix: str = "", label: str | None = None) -> None:
    """Draw the line on which steps halve when the batch size doubles."""
    ax.plot(*_known(rows, f"{prefix}perfect"), label=label, zorder=1, **DASHED)


def line_handles(laws: Sequence[Law]) -> list[Artist]:
    """Return the entries of a legend for the lines of panels, whatever their colour."""
    handles: list[Artist] = []
    if any(law.fit for law in laws):
        handles.append(look.entry("law", color=look.GREY))
        handles.append(Patch(color=look.GREY, alpha=0.2, linewidth=0, label="95 % band"))
    handles.append(look.entry("perfect scaling", **DASHED))
    if any(law.is_b_crit_known for law in laws):
        handles.append(look.entry("B_crit", **DOTTED))
    return handles


def bound_handles(rows: pd.DataFrame) -> list[Line2D]:
    """Return the entry of a legend for upper bounds; nothing if the rows have none."""
    return look.bound_handles(len(where(rows, floor=1)) > 0)


def label_normalised(ax: Axes, rows: pd.DataFrame) -> None:
    """Write what normalised K* are divided by, or in the empty panel why there are none."""
    divisors = rows["normalised_by"].dropna()
    if len(divisors):
        ax.set_ylabel(f"K* / K*(B = {divisors.iloc[0]})")
        return
    ax.set_ylabel("K*, normalised")
    reason = "no batch size has\nan exact K* in every curve"
    ax.text(0.5, 0.5, reason, transform=ax.transAxes, ha="center", va="center", fontsize=7)


def grid_sizes(rows: pd.DataFrame) -> list[int]:
    """Return the batch sizes of the curves that are in the grid; laws have others between them."""
    sizes = set()
    for batch_size in rows["batch_size"]:
        if isinstance(batch_size, int):
            sizes.add(batch_size)
    return sorted(sizes)


def _known(rows: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return batch sizes and values of a column, where it has values."""
    values = numbers(rows[column])
    known = ~np.isnan(values)
    return numbers(rows["batch_size"])[known], values[known]
