"""K* and the fitted law against batch size (Lee et al. 2021, Figures 1 and 7 to 11)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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
from lit_dps.analysis.law_bootstrap import Scaling, medians_outside
from lit_dps.analysis.tables import columns_of, legend, listed, numbers, rows_of, title
from lit_dps.core.trial import Series
from lit_dps.report.repeats import outside_text

NAME, PAPER = "scaling", "1, 7-11"
CAPTION = "K* against batch size by sparsity (the paper's Figure 1)"
WORDS = 38  # characters that have room above a panel
WORD_LINE = 0.12  # height of a line of them, in inches
PER_OCTAVE = 8  # points of a fitted curve in each doubling of the batch size
HOLLOW = {"markerfacecolor": "white", "markeredgewidth": 0.8}  # K* that are upper bounds
MEDIAN = {"marker": "x", "color": look.GREY, "markersize": 4, "linestyle": "none", "zorder": 3}
BAR = {"elinewidth": 0.8, "capsize": 2, "linestyle": "none"}  # 95 % limits of a K*
HIGHEST = 1e12  # where bars without an upper limit end: beyond any panel
FEW = 5  # entries of a legend that have room in a panel, above falling curves,
SHORT = 18  # if none is longer, in characters
ARROW = 0.35  # length of their arrows, as a share of K*


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `curve_rows` for each series of a study, with its columns first.

    They are normalised at the smallest batch size that has a K* in every series that has any
    (`common_batch_size`). `median` [steps] is that of the best sample over seeds, missing if it
    was not repeated.
    """
    common = common_batch_size(study.scalings.values())
    parts = []
    for series, scaling in study.scalings.items():
        curve = curve_rows(scaling, study.record.batch_sizes, common)
        medians: Mapping[int, int | float] = {}
        if series in study.median_scalings:
            medians = study.median_scalings[series].k_star
        of_rows = [medians.get(batch_size) for batch_size in curve["batch_size"]]
        curve["median"] = pd.array(of_rows, "Float64")
        parts.append(pd.DataFrame({**columns_of(series), **curve}))
    return pd.concat(parts, ignore_index=True)


def missing(study: Analysis) -> str | None:
    """Return why there is no scaling curve to draw; None if there is one."""
    sizes = set().union(*(scaling.k_star for scaling in study.scalings.values()))
    if not sizes:
        return "no trial has met the goal yet"
    if len(study.record.batch_sizes) == 1:
        return "one batch size only"
    return "K* at one batch size only" if len(sizes) == 1 else None


def too_large(study: Analysis) -> str | None:
    """Return why the figure is drawn on request only; None if it is not."""
    return look.too_many_series(study, NAME)


def notes(study: Analysis) -> list[str]:
    """Return which series have no curve, and how intervals and bounds of K* are drawn."""
    bare = [series for series, scaling in study.scalings.items() if not scaling.k_star]
    told = [f"No trial met the goal at {listed(bare)}: no curve there."] if bare else []
    return told + limit_notes(study.scalings.values()) + bound_notes(study.scalings.values())


class _Part(NamedTuple):
    """A series that has a K*: its number, which gives its look, and its rows."""

    number: int
    series: Series
    rows: pd.DataFrame


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return a panel per series with K*, law, band and perfect scaling.

    Several series have two more panels: all of them, and all normalised.
    """
    parts = []
    for i, (series, scaling) in enumerate(study.scalings.items()):
        if scaling.k_star:
            parts.append(_Part(i, series, rows_of(series, rows)))
    words = {part.series: _words(study, part.series) for part in parts}
    figure, axes = _panels(len(parts), max(text.count("\n") for text in words.values()))
    for ax in axes:
        look.batch_size_axis(ax, grid_sizes(rows))
    for ax, part in zip(axes, parts, strict=False):
        scaling = study.scalings[part.series]
        _draw_words(ax, title(part.series), words[part.series], scaling)
        _draw_series(ax, part)
        look.log_values_axis(ax, drawn_values(rows))
    if len(parts) > 1:
        _draw_together(*axes[-2:], rows, parts)
    handles = line_handles([study.scalings[part.series] for part in parts])
    if rows["k_star_low"].notna().any():
        bar = {"color": look.GREY, "marker": "|", "linestyle": "none"}
        handles.append(Line2D([], [], label="K*, 95 % interval", **bar))
    if rows["median"].notna().any():
        handles.append(Line2D([], [], label="median over seeds", **MEDIAN))
    columns = min(max(1, int(figure.get_figwidth() / 1.1)), len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2)
    return figure


def _panels(series: int, breaks: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel per series, and two more of several, with labels.

    Args:
        series: Number of series.
        breaks: Line breaks in the longest text above a panel.
    """
    count = series if series == 1 else series + 2
    columns = count if count <= 3 else min(3, math.ceil(count / 2))
    lines = math.ceil(count / columns)
    height = 2.4 * lines + WORD_LINE * lines * breaks + (0.5 if count == 1 else 0.2)
    figure = Figure(figsize=(max(2.5 * columns, 3.3), height))
    axes = [figure.add_subplot(lines, columns, i + 1) for i in range(count)]
    for ax in axes[::columns]:
        ax.set_ylabel(look.K_STAR)
    for ax in axes[-columns:]:
        ax.set_xlabel(look.BATCH_SIZE)
    return figure, axes


def _draw_series(ax: Axes, part: _Part) -> None:
    """Draw a series into its panel."""
    draw_band(ax, part.rows, part.number)
    draw_limits(ax, part.rows, part.number)
    draw_curve(ax, part.rows, part.number)
    ax.plot(*_known(part.rows, "median"), **MEDIAN)
    draw_perfect(ax, part.rows)
    bounds = bound_handles(part.rows)
    if bounds:
        ax.legend(handles=bounds, loc="upper right", handlelength=1.5)


def line_handles(scalings: Iterable[Scaling]) -> list[Artist]:
    """Return the entries of a legend for the lines of panels, whatever their colour."""
    scalings = list(scalings)
    line = {"color": look.GREY, "linewidth": 0.8}
    handles: list[Artist] = []
    if any(scaling.fit for scaling in scalings):
        handles.append(Line2D([], [], label="law", color=look.GREY))
        handles.append(Patch(color=look.GREY, alpha=0.2, linewidth=0, label="95 % band"))
    handles.append(Line2D([], [], label="perfect scaling", linestyle="--", **line))
    if any(scaling.identifiable for scaling in scalings):
        handles.append(Line2D([], [], label="B_crit", linestyle=":", **line))
    return handles


def _draw_together(
    together: Axes, normalised: Axes, rows: pd.DataFrame, parts: Sequence[_Part]
) -> None:
    """Draw all series into one panel, and all normalised into another."""
    for part in parts:
        draw_curve(together, part.rows, part.number, "", legend(part.series))
        draw_curve(normalised, part.rows, part.number, "normalised_")
    # Normalised series share one line of perfect scaling.
    draw_perfect(normalised, parts[0].rows, "normalised_", "perfect scaling")
    has_axes = any(part.series.axes for part in parts)
    together.set_title("all series" if has_axes else "all sparsities")
    handles = [*together.get_legend_handles_labels()[0], *bound_handles(rows)]
    longest = max(len(str(handle.get_label())) for handle in handles)
    if len(handles) > FEW or longest > SHORT:
        look.legend_above(together.get_figure(), handles)
    else:
        together.legend(handles=handles, loc="upper right", handlelength=1.5)
    normalised.set_title("all, normalised")
    normalised.legend(loc="upper right", handlelength=2)
    label_normalised(normalised, rows)
    look.log_values_axis(together, rows["k_star"].dropna())
    look.log_values_axis(normalised, rows["normalised_k_star"].dropna())


def _words(study: Analysis, series: Series) -> str:
    """Return the text above a panel: B_crit, and medians over seeds outside the band."""
    law, medians = study.scalings[series], study.median_scalings.get(series)
    lines = [textwrap.fill(law.describe(), WORDS)]
    if medians is not None:
        outside = outside_text(medians_outside(law, medians, study.record.goal.check_interval))
        if outside:
            lines.append(textwrap.fill(f"medians outside the band: {outside}", WORDS))
    return "\n".join(lines)


def _draw_words(ax: Axes, name: str, words: str, scaling: Scaling) -> None:
    """Write the title of a panel and a text below it; draw an identifiable B_crit as a line."""
    ax.text(0.5, 1.02, words, transform=ax.transAxes, fontsize=7, va="bottom", ha="center")
    ax.set_title(look.wrapped(name, WORDS - 8), pad=5 + 8.5 * (1 + words.count("\n")))
    if scaling.identifiable:
        ax.axvline(
            scaling.fit.critical_batch_size, color=look.GREY, linestyle=":", linewidth=0.8, zorder=1
        )


def common_batch_size(scalings: Iterable[Scaling]) -> int | None:
    """Return the smallest batch size at which curves can be normalised; None without one.

    Every curve that has a K* beyond the first validation has one there.
    """
    measured = [set(scaling.resolved) for scaling in scalings if scaling.resolved]
    return min(set.intersection(*measured), default=None) if measured else None


def curve_rows(scaling: Scaling, batch_sizes: Sequence[int], common: int | None) -> pd.DataFrame:
    """Return K* and the fitted law of one curve, by batch size.

    The batch sizes of the grid are among the rows, those between them draw the curve. Columns,
    missing where unknown: batch_size [examples]; k_star [steps]; k_star_low and k_star_high
    [steps], its 95 % limits (`k_star_limits`), of which the upper one may be infinite; floor, 1
    where it is at the first check and so an upper bound, else 0; fit, fit_low, fit_high [steps],
    the law and its 95 % limits; perfect [steps], K*(b) b / B from the smallest b with a K*;
    normalised_by, the batch size `common`; k_star, fit and perfect over the K* there as
    normalised_k_star, _fit and _perfect. Upper bounds are neither normalised nor is perfect drawn
    from one.
    """
    batch, resolved = _curve_points(batch_sizes), scaling.resolved
    unknown = np.full(len(batch), np.nan)
    fit = unknown if scaling.fit is None else scaling.fit.steps(batch)
    low, high = scaling.band(batch) or (unknown, unknown)
    limits = np.array([scaling.limits.get(b, (np.nan, np.nan)) for b in batch])
    first, unit = min(resolved, default=0), resolved.get(common, np.nan)
    return pd.DataFrame(
        {
            "batch_size": pd.Series(
                [int(b) if b in batch_sizes else b for b in batch.tolist()], dtype=object
            ),
            "k_star": pd.array([scaling.k_star.get(b) for b in batch], "Int64"),
            "k_star_low": limits[:, 0],
            "k_star_high": limits[:, 1],
            "floor": [int(b in scaling.at_first_check) for b in batch],
            "fit": fit,
            "fit_low": low,
            "fit_high": high,
            "perfect": resolved.get(first, np.nan) * first / batch,
            "normalised_by": pd.array([common] * len(batch), "Int64"),
            "normalised_k_star": np.array([resolved.get(b, np.nan) for b in batch]) / unit,
            "normalised_fit": fit / unit,
            "normalised_perfect": unknown
            if common is None or not scaling.k_star
            else common / batch,
        }
    )


def _curve_points(batch_sizes: Sequence[int]) -> np.ndarray:
    low, high = min(batch_sizes), max(batch_sizes)
    between = np.geomspace(low, high, 1 + round(PER_OCTAVE * float(np.log2(high / low))))
    # Points that rounding puts next to a measured batch size would double it.
    far = np.abs(np.log(between[:, None] / np.array(batch_sizes))).min(axis=1) > 1e-6
    return np.sort(np.concatenate([between[far], batch_sizes]))


def bound_notes(scalings: Iterable[Scaling]) -> list[str]:
    """Return how upper bounds are drawn; nothing if there are none."""
    if not any(scaling.at_first_check for scaling in scalings):
        return []
    return [
        "K* at the first validation are upper bounds. They are drawn hollow, with an arrow, and "
        "not normalised."
    ]


def draw_curve(
    ax: Axes, rows: pd.DataFrame, i: int, prefix: str = "", label: str | None = None
) -> None:
    """Draw K* as markers and the law as a line, in the i-th look.

    Upper bounds are hollow, with an arrow down.

    Args:
        ax: The panel.
        rows: The rows of one curve (`curve_rows`).
        i: The number of the look.
        prefix: Of the columns: "" or "normalised_".
        label: The entry of the legend.
    """
    style = look.curve_style(i)
    ax.plot(*_known(rows, f"{prefix}fit"), **look.line_of(i))
    batch, k_star = _known(rows[rows["floor"] == 0], f"{prefix}k_star")
    ax.plot(batch, k_star, linestyle="none", markeredgecolor="white", markeredgewidth=0.4, **style)
    batch, k_star = _known(rows[rows["floor"] == 1], f"{prefix}k_star")
    if len(batch):
        arrows = {"yerr": ARROW * k_star, "uplims": True, "elinewidth": 0.8, "capsize": 2}
        ax.errorbar(batch, k_star, linestyle="none", **arrows, **style, **HOLLOW)
    if label is not None:
        ax.plot([], [], label=label, **style | look.line_of(i))


def limit_notes(scalings: Iterable[Scaling]) -> list[str]:
    """Return notes on bars without an upper limit, and on K* without a bar."""
    drawn = [scaling for scaling in scalings if scaling.resolved]
    limits = [limit for scaling in drawn for limit in scaling.limits.values()]
    every = sum(len(scaling.resolved) for scaling in drawn)
    lines = []
    if any(np.isinf(limit.high) for limit in limits):
        lines.append(
            "A bar to the top of its panel has no upper limit: repeats of that K* missed the goal."
        )
    if limits and len(limits) < every:
        lines.append(
            f"{every - len(limits)} of {every} K* have no bar: too few trials of the cell met the "
            "goal."
        )
    return lines


def drawn_values(rows: pd.DataFrame) -> np.ndarray:
    """Return all steps that the panel of a series shows: K*, medians and finite limits."""
    columns = [numbers(rows[name]) for name in ("k_star", "median", "k_star_low", "k_star_high")]
    values = np.concatenate(columns)
    return values[np.isfinite(values) & (values > 0)]


def draw_limits(ax: Axes, rows: pd.DataFrame, i: int) -> None:
    """Draw the 95 % interval of K* as bars, to the top of the panel without an upper limit."""
    known = rows.dropna(subset=["k_star_low"])
    if not len(known):
        return
    k_star = numbers(known["k_star"])
    down = k_star - numbers(known["k_star_low"])
    up = np.minimum(numbers(known["k_star_high"]), HIGHEST) - k_star
    color = look.curve_style(i)["color"]
    ax.errorbar(numbers(known["batch_size"]), k_star, yerr=[down, up], color=color, **BAR)


def draw_band(ax: Axes, rows: pd.DataFrame, i: int) -> None:
    """Draw the 95 % band of the law, if there is one."""
    (batch, low), (_, high) = _known(rows, "fit_low"), _known(rows, "fit_high")
    ax.fill_between(batch, low, high, color=look.curve_style(i)["color"], alpha=0.2, linewidth=0)


def draw_perfect(ax: Axes, rows: pd.DataFrame, prefix: str = "", label: str | None = None) -> None:
    """Draw the line on which steps halve when the batch size doubles."""
    ax.plot(
        *_known(rows, f"{prefix}perfect"),
        "--",
        color=look.GREY,
        linewidth=0.8,
        zorder=1,
        label=label,
    )


def bound_handles(rows: pd.DataFrame) -> list[Line2D]:
    """Return the entry of a legend for upper bounds; nothing if the rows have none."""
    return look.bound_handles(bool(rows["floor"].any()))


def label_normalised(ax: Axes, rows: pd.DataFrame) -> None:
    """Write what normalised K* are divided by, or in the empty panel why there are none."""
    by = rows["normalised_by"].dropna()
    ax.set_ylabel(f"K* / K*(B = {by.iloc[0]})" if len(by) else "K*, normalised")
    if not len(by):
        why = "no batch size has a K*\nbeyond the first validation in every curve"
        ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=7)


def grid_sizes(rows: pd.DataFrame) -> list[int]:
    """Return the batch sizes of the grid among those of the curves."""
    return sorted({b for b in rows["batch_size"] if isinstance(b, int)})


def _known(rows: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray]:
    values = numbers(rows[column])
    known = ~np.isnan(values)
    return numbers(rows["batch_size"])[known], values[known]
