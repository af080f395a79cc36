"""How many times the steps of a dense network a sparse one needs (Lee et al. 2021, Figure 12)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.sparse_ratios import ratio_rows
from lit_dps.analysis.tables import has_values, numbers, rows_of, where
from lit_dps.core.trial import Series
from lit_dps.report.figures.optimizers import ONE_UNIT
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "ratios", "12"
CAPTION = "K* of sparse over dense networks (Figure 12)"
EQUAL: dict[str, Any] = {"color": look.GREY, "linestyle": "--", "linewidth": 0.8}
DODGE = 2**0.18  # factor between the places of neighbouring intervals at one batch size


def rows(*studies: Analysis) -> pd.DataFrame:
    """Return the rows of `sparse_ratios.ratio_rows` of all studies."""
    ratios = []
    for study in studies:
        ratios += [(study.record.name, ratio) for ratio in study.ratios]
    return ratio_rows(ratios)


def missing(*studies: Analysis) -> str | None:
    """Return why there is no ratio to draw; None if there is one."""
    if len({study.record.goal.unit for study in studies}) > 1:
        return ONE_UNIT
    if any(study.ratios for study in studies):
        return None
    if all(len(study.record.sparsities) == 1 for study in studies):
        return "one sparsity only"
    if any(study.ratio_bounds for study in studies):
        return "no batch size has an exact K* both at the smallest sparsity and above it"
    return "no batch size has a K* both at the smallest sparsity and above it"


def notes(*studies: Analysis) -> list[str]:
    """Return which studies have no dense cells, and how many ratios are only bounds."""
    lines = []
    bounds = 0
    total = 0
    for study in studies:
        base = min(study.record.sparsities)
        if base > 0:
            lines.append(f"{study.record.name} has no dense cells: its ratios are to S = {base:g}.")
        bounds += len(study.ratio_bounds)
        total += len(study.ratio_bounds) + len(study.ratios)
    if bounds:
        lines.append(
            f"{bounds} of {total} ratios are bounds and not drawn: one of their two K* is an upper "
            "bound."
        )
    return lines


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, *studies: Analysis) -> Figure:
    """Return a panel per study that has a ratio, with a line per series and 95 % intervals."""
    drawn = [study for study in studies if study.ratios]
    series: set[Series] = set()
    sparse: set[Series] = set()
    for study in drawn:
        series.update(study.record.series)
        sparse.update(_sparse_series(study))
    every = sorted(series)
    columns = min(len(drawn), 3)
    lines = math.ceil(len(drawn) / columns)
    figure = new_figure(max(2.5 * columns, 3.3) + 0.2, 2.2 * lines + 0.4)
    shared = None
    for i, study in enumerate(drawn):
        shared = figure.add_subplot(lines, columns, i + 1, sharey=shared)
        _draw_panel(shared, where(rows, study=study.record.name), study, every)
        if i + columns >= len(drawn):
            shared.set_xlabel(look.BATCH_SIZE)
        if len(studies) > 1:
            shared.set_title(textwrap.fill(study.record.name, 36))
    values = numbers(rows[["ratio", "ratio_low", "ratio_high"]]).ravel()
    look.log_values_axis(figure.axes[0], [1, *values], 1.15, 1.15)
    handles = look.series_handles(every, sorted(sparse))
    handles.append(look.entry("equal steps", **EQUAL))
    if has_values(rows, "ratio_low"):
        handles.append(look.entry("95 % interval", color=look.GREY, linewidth=0.8))
    look.legend_above(figure, handles)
    return figure


def _sparse_series(study: Analysis) -> set[Series]:
    """Return the series that have a ratio to dense networks."""
    return {ratio.cell.series for ratio in study.ratios}


def _draw_panel(ax: Axes, rows: pd.DataFrame, study: Analysis, every: Sequence[Series]) -> None:
    """Draw the ratios of a study; the place of a series in `every` gives its style."""
    ax.axhline(1, **EQUAL)
    sparse = sorted(_sparse_series(study))
    for i, series in enumerate(sparse):
        # Intervals at one batch size are side by side, so that none hides another.
        dodge = DODGE ** (i - (len(sparse) - 1) / 2)
        style = look.curve_style(every.index(series))
        of_series = rows_of(series, rows)
        batch = numbers(of_series["batch_size"]) * dodge
        ax.plot(batch, numbers(of_series["ratio"]), linewidth=1, **style)
        look.bars(ax, of_series, ("ratio_low", "ratio_high"), style, dodge, alpha=None)
    look.batch_size_axis(ax, study.record.batch_sizes)
    ax.set_ylabel(f"K*(S) / K*(S = {min(study.record.sparsities):g})")
