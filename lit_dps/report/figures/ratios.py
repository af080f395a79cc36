"""How many times the steps of a dense network a sparse one needs (Lee et al. 2021, Figure 12)."""

from __future__ import annotations

import math
import textwrap

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import columns_of, frame, numbers, rows_of

NAME, PAPER = "ratios", "12"
CAPTION = "K* of sparse over dense networks (Figure 12)"
EQUAL = {"color": look.GREY, "linestyle": "--", "linewidth": 0.8}
DODGE = (
    2**0.18
    # factor between the batch sizes that neighbouring intervals are drawn at, so that none hides
    # another
)


def rows(*studies: Analysis) -> pd.DataFrame:
    """K* over K* of the smallest sparsity at the same batch size, by study, series, then batch
    size.

    Without those in which a K* is at the first check: they are only bounds.

    Columns: study, sparsity and further axes, base_sparsity, batch_size [examples], ratio, and its
    95 % limits ratio_low and ratio_high, missing where they are not known (`Ratio`).
    """
    found = []
    for study in studies:
        for ratio in study.ratios:
            row = {
                "study": study.record.name,
                **columns_of(ratio.cell.series),
                "base_sparsity": ratio.base,
            }
            row |= {"batch_size": ratio.cell.batch_size, "ratio": ratio.value}
            row["ratio_low"], row["ratio_high"] = ratio.interval or (None, None)
            found.append(row)
    return frame(found)


def missing(*studies: Analysis) -> str | None:
    """Why there is no ratio to draw, if so."""
    if any(study.ratios for study in studies):
        return None
    if all(len(study.record.sparsities) == 1 for study in studies):
        return "one sparsity only"
    if any(study.ratio_bounds for study in studies):
        return (
            "no batch size has a K* beyond the first validation both at the smallest sparsity and "
            "above it"
        )
    return "no batch size has a K* both at the smallest sparsity and above it"


def notes(*studies: Analysis) -> list[str]:
    """Studies that have no dense cells to compare with, and ratios left out since they are only
    bounds."""
    sparse = [(study.record.name, min(study.record.sparsities)) for study in studies]
    told = [
        f"{name} has no dense cells: its ratios are to S = {base:g}."
        for name, base in sparse
        if base > 0
    ]
    if left := sum(len(study.ratio_bounds) for study in studies):
        known = sum(len(study.ratios) for study in studies)
        told.append(
            f"{left} of {known + left} ratios are bounds and not drawn: K* is at the first "
            "validation."
        )
    return told


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, *studies: Analysis) -> Figure:
    """A panel per study that has a ratio, in it a line per series, with 95 % intervals."""
    drawn = [study for study in studies if study.ratios]
    looks = {
        s: i for i, s in enumerate(sorted({s for study in drawn for s in study.record.series}))
    }  # of a series
    columns = min(len(drawn), 3)
    lines = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(max(2.5 * columns, 3.3) + 0.2, 2.2 * lines + 0.4))
    shared, shown = None, set()
    for panel, study in enumerate(drawn):
        shared = ax = figure.add_subplot(lines, columns, panel + 1, sharey=shared)
        part = rows[rows["study"] == study.record.name]
        ax.axhline(1, **EQUAL)
        above = sorted({ratio.cell.series for ratio in study.ratios})
        for i, series in enumerate(above):
            dodge = DODGE ** (i - (len(above) - 1) / 2)
            _draw_line(ax, rows_of(series, part), dodge, look.curve_style(looks[series]))
        look.batch_size_axis(ax, study.record.batch_sizes)
        ax.set_ylabel(f"K*(S) / K*(S = {min(study.record.sparsities):g})")
        if panel + columns >= len(drawn):
            ax.set_xlabel(look.BATCH_SIZE)
        if len(studies) > 1:
            ax.set_title(textwrap.fill(study.record.name, 36))
        shown.update(above)
    look.log_values_axis(
        figure.axes[0],
        [1, *rows[["ratio", "ratio_low", "ratio_high"]].stack().dropna()],
        1.15,
        1.15,
    )
    handles = look.series_handles((series, looks[series]) for series in sorted(shown))
    handles.append(Line2D([], [], label="equal steps", **EQUAL))
    if rows["ratio_low"].notna().any():
        handles.append(Line2D([], [], label="95 % interval", color=look.GREY, linewidth=0.8))
    look.legend_above(figure, handles)
    return figure


def _draw_line(ax: Axes, rows: pd.DataFrame, dodge: float, style: dict[str, str]) -> None:
    ax.plot(numbers(rows["batch_size"]) * dodge, numbers(rows["ratio"]), linewidth=1, **style)
    known = rows.dropna(subset=["ratio_low"])
    limits = numbers(known["ratio_low"]), numbers(known["ratio_high"])
    ax.vlines(numbers(known["batch_size"]) * dodge, *limits, color=style["color"], linewidth=0.8)
