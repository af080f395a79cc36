"""How many times the steps of a dense network a sparse one needs (Lee et al. 2021, Figure 12), as rows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_dps.analysis.figures.entry import Entry
from lit_dps.analysis.figures.style import BATCH_SIZE, GREY, STYLE, batch_size_axis, curve_style, log_values_axis
from lit_dps.analysis.ratios import bounds, ratios
from lit_dps.analysis.scaling import FittedStudy
from lit_dps.analysis.text import Row


def ratio_rows(studies: Sequence[FittedStudy]) -> list[Row]:
    """K* over K* of the smallest sparsity at the same batch size, by study, sparsity, then batch size.

    Without those in which a K* is at the first check: they are only bounds.

    Columns: study, sparsity, base_sparsity, batch_size [examples], ratio, and its 95 % limits ratio_low and ratio_high,
    None where there are no trials to resample.
    """
    rows: list[Row] = []
    for study in studies:
        for ratio in ratios(study.record):
            low, high = (None, None) if ratio.interval is None else ratio.interval
            row: Row = {"study": study.record.name, "sparsity": ratio.cell.sparsity, "base_sparsity": ratio.base}
            row |= {"batch_size": ratio.cell.batch_size, "ratio": ratio.value, "ratio_low": low, "ratio_high": high}
            rows.append(row)
    return rows


def ratios_missing(studies: Sequence[FittedStudy]) -> str | None:
    """Why there is no ratio to draw, if so."""
    if any(ratios(study.record, replicates=1) for study in studies):
        return None
    if all(len(study.record.sparsities) == 1 for study in studies):
        return "one sparsity only"
    if any(bounds(study.record) for study in studies):
        return "no batch size has a K* beyond the first check both at the smallest sparsity and above it"
    return "no batch size has a K* both at the smallest sparsity and above it"


def ratios_notes(studies: Sequence[FittedStudy]) -> list[str]:
    """Studies that have no dense cells to compare with, and ratios left out since they are only bounds."""
    sparse = [(study.record.name, min(study.record.sparsities)) for study in studies]
    notes = [f"no dense cells in {name}: its ratios are to S = {base:g}" for name, base in sparse if base > 0]
    if left := sum(len(bounds(study.record)) for study in studies):
        known = sum(len(ratios(study.record, replicates=1)) for study in studies)
        notes.append(f"K* at the first check in {left} of {known + left} ratios: only bounds, not drawn")
    return notes


DODGE = 2**0.18  # factor between the batch sizes that neighbouring intervals are drawn at, so that none hides another


@matplotlib.rc_context(STYLE)
def draw_ratios(studies: Sequence[FittedStudy], rows: Sequence[Row]) -> Figure:
    """A panel per study that has a ratio, in it a line per sparsity, with 95 % intervals.

    Args:
        studies: For their grids.
        rows: From `figure_data.ratio_rows`.
    """
    drawn = [study.record for study in studies if any(row["study"] == study.record.name for row in rows)]
    every = sorted({sparsity for record in drawn for sparsity in record.sparsities})  # a look means one sparsity
    columns = min(len(drawn), 3)
    lines = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(max(2.5 * columns, 3.3) + 0.2, 2.2 * lines + 0.4))
    shared = None
    for panel, record in enumerate(drawn):
        shared = ax = figure.add_subplot(lines, columns, panel + 1, sharey=shared)
        part = [row for row in rows if row["study"] == record.name]
        ax.axhline(1, color=GREY, linestyle="--", linewidth=0.8)
        above = sorted({row["sparsity"] for row in part})
        for i, sparsity in enumerate(above):
            line = [row for row in part if row["sparsity"] == sparsity]
            _draw_line(ax, line, DODGE ** (i - (len(above) - 1) / 2), curve_style(every.index(sparsity)))
        batch_size_axis(ax, record.batch_sizes)
        ax.set_ylabel(f"K*(S) / K*(S = {min(record.sparsities):g})")
        if panel + columns >= len(drawn):
            ax.set_xlabel(BATCH_SIZE)
        if len(studies) > 1:
            ax.set_title(textwrap.fill(record.name, 36))
    shown = [row[key] for row in rows for key in ("ratio", "ratio_low", "ratio_high") if row[key] is not None]
    log_values_axis(figure.axes[0], [1, *shown], 1.15, 1.15)
    sparsities = sorted({row["sparsity"] for row in rows})
    handles = [Line2D([], [], label=f"S = {s:g}", linewidth=1, **curve_style(every.index(s))) for s in sparsities]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), columnspacing=1.2, handlelength=1.5)
    return figure


def _draw_line(ax, rows: Sequence[Row], dodge: float, style: dict[str, str]) -> None:
    batch, ratio = [row["batch_size"] * dodge for row in rows], [row["ratio"] for row in rows]
    ax.plot(batch, ratio, linewidth=1, **style)
    known = [(b, row) for b, row in zip(batch, rows, strict=True) if row["ratio_low"] is not None]
    limits = ([row[key] for _, row in known] for key in ("ratio_low", "ratio_high"))
    ax.vlines([b for b, _ in known], *limits, color=style["color"], linewidth=0.8)


RATIOS = Entry(
    name="ratios",
    paper="12",
    tables=lambda studies: {"ratios": ratio_rows(studies)},
    draw=lambda studies, tables: [("ratios", draw_ratios(studies, tables["ratios"]))],
    missing=ratios_missing,
    notes=ratios_notes,
)
