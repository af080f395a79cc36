"""Draws a study: the scaling curves and the metaparameter searches, as PNG, each with its data as CSV beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from lit_dps.analysis.figure_data import (
    Row,
    axis_label,
    metaparameter_columns,
    metaparameter_rows,
    scaling_rows,
    shown,
)
from lit_dps.analysis.files import replacing
from lit_dps.analysis.report import fit_rows, render, table_rows, write_csv
from lit_dps.analysis.results import StudyRecord
from lit_dps.analysis.scaling import Scaling, scaling_of
from lit_dps.space import Range, short_names

# Okabe and Ito (2008), "Color Universal Design": for any colour vision; without yellow, too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
GREY = "#666666"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
# How a trial is drawn, by how it ended: marker, colour, name. K* is drawn on top of its trial.
STATUS_MARKS = {
    "complete": {"marker": "o", "color": COLOURS[0], "s": 11, "linewidths": 0},
    "incomplete": {"marker": "x", "color": COLOURS[5], "s": 11, "linewidths": 0.9},
    "infeasible": {"marker": "^", "facecolors": "none", "edgecolors": GREY, "s": 10, "linewidths": 0.6},
    "K*": {"marker": "*", "color": COLOURS[1], "s": 70, "edgecolors": "white", "linewidths": 0.5, "zorder": 3},
}


def write_all(record: StudyRecord, folder: Path | str, scalings: Mapping[float, Scaling] | None = None) -> list[Path]:
    """Writes table.txt, table.csv, fits.csv and scaling and metaparameters, each as .png and .csv, into a folder.

    Works on unfinished studies too; `report.notes` says what is missing. Each file is replaced in one go.

    Args:
        record: The study.
        folder: Made if it is not there.
        scalings: The study's scaling laws if they are known already.

    Returns:
        The files' paths.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    scalings = scaling_of(record) if scalings is None else scalings
    curves, searched = scaling_rows(record, scalings), metaparameter_rows(record)
    write_csv(table_rows(record), folder / "table.csv")
    write_csv(fit_rows(scalings), folder / "fits.csv")
    write_csv(curves, folder / "scaling.csv")
    write_csv(searched, folder / "metaparameters.csv", metaparameter_columns(record))
    with replacing(folder / "table.txt") as temporary:
        temporary.write_text(render(record, scalings), encoding="utf-8")
    figures = {
        "scaling.png": draw_scaling(curves, scalings),
        "metaparameters.png": draw_metaparameters(record, searched),
    }
    for name, figure in figures.items():
        # Ticks are made as they are drawn, so the style must hold here too.
        with replacing(folder / name) as temporary, matplotlib.rc_context(STYLE):
            figure.savefig(temporary, format="png", dpi=200)
    return [folder / n for n in ("table.txt", "table.csv", "fits.csv", "scaling.csv", "metaparameters.csv", *figures)]


@matplotlib.rc_context(STYLE)
def draw_scaling(rows: Sequence[Row], scalings: Mapping[float, Scaling]) -> Figure:
    """The panels of Lee et al. 2021, Figure 1: each sparsity with fit, band and perfect scaling; all; all normalised.

    Args:
        rows: From `figure_data.scaling_rows`.
        scalings: The scaling law of each sparsity, for the words in its panel.
    """
    parts = [(s, [row for row in rows if row["sparsity"] == s]) for s in sorted(scalings)]
    count = len(parts) + 2
    columns = count if count <= 3 else min(3, math.ceil(count / 2))
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(2.5 * columns, 2.2 * lines))
    axes = [figure.add_subplot(lines, columns, i + 1) for i in range(count)]
    *each, together, normalised = axes
    for i, (sparsity, part) in enumerate(parts):
        _draw_words(each[i], scalings[sparsity])
        _draw_band(each[i], part, i)
        each[i].set_title(f"sparsity {sparsity:g}")
        for ax, prefix in ((each[i], ""), (together, ""), (normalised, "normalised_")):
            _draw_curve(ax, part, i, prefix, f"S = {sparsity:g}")
            if ax is not together:
                ax.plot(*_known(part, f"{prefix}perfect"), "--", color=GREY, linewidth=0.8, zorder=1)
    together.set_title("all sparsities")
    together.legend(loc="upper right", handlelength=1.5)
    normalised.set_title("all, normalised")
    perfect = Line2D([], [], color=GREY, linestyle="--", linewidth=0.8, label="perfect scaling")
    normalised.legend(handles=[perfect], loc="upper right", handlelength=2)
    sizes = sorted({row["batch_size"] for row in rows if isinstance(row["batch_size"], int)})
    for i, ax in enumerate(axes):
        column = "normalised_k_star" if ax is normalised else "k_star"
        _log_axes(ax, sizes, [row[column] for row in rows if row[column] is not None])
        if i % columns == 0:
            ax.set_ylabel("steps to result K* [optimizer steps]")
        if i + columns >= count:
            ax.set_xlabel("batch size B [examples]")
    normalised.set_ylabel(f"K* / K*(B = {rows[0]['normalised_by'] or '?'})")
    return figure


def _draw_words(ax: Axes, scaling: Scaling) -> None:
    """B_crit in words and, where the data show it, as a line."""
    words = scaling.describe().replace(": ", ":\n").replace("; ", ";\n").replace(", below", ",\nbelow")
    ax.text(0.04, 0.04, words, transform=ax.transAxes, fontsize=7, va="bottom", zorder=4)
    if scaling.identifiable:
        ax.axvline(scaling.fit.critical_batch_size, color=GREY, linestyle=":", linewidth=0.8, zorder=1)


def _known(rows: Sequence[Row], column: str) -> tuple[list, list]:
    known = [row for row in rows if row[column] is not None]
    return [row["batch_size"] for row in known], [row[column] for row in known]


def _draw_curve(ax: Axes, rows: Sequence[Row], i: int, prefix: str, label: str) -> None:
    look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
    ax.plot(*_known(rows, f"{prefix}fit"), color=look["color"])
    ax.plot(*_known(rows, f"{prefix}k_star"), linestyle="none", markeredgecolor="white", markeredgewidth=0.4, **look)
    ax.plot([], [], label=label, **look)


def _draw_band(ax: Axes, rows: Sequence[Row], i: int) -> None:
    (batch, low), (_, high) = _known(rows, "fit_low"), _known(rows, "fit_high")
    ax.fill_between(batch, low, high, color=COLOURS[i % len(COLOURS)], alpha=0.2, linewidth=0)


def _log_axes(ax: Axes, batch_sizes: Sequence[int], values: Sequence[float]) -> None:
    """Logarithmic axes over all batch sizes and the given values, with ticks at batch sizes that were measured."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(batch_sizes[:: math.ceil(len(batch_sizes) / 7)]))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(batch_sizes[0] / 1.4, batch_sizes[-1] * 1.4)
    if not values:
        ax.set_yticks([])
        return
    ax.set_yscale("log")
    ax.set_ylim(min(values) / 2, max(values) * 1.6)  # the perfect-scaling line runs out of the axes below
    if max(values) < 30 * min(values):  # hardly a decade: powers of ten alone would be one tick or none
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


@matplotlib.rc_context(STYLE)
def draw_metaparameters(record: StudyRecord, rows: Sequence[Row]) -> Figure:
    """How the trials of each cell ended over the first two metaparameters (Lee et al. 2021, Figure 3).

    With one metaparameter (or none: then over the points) the other axis is steps to result; trials that did not
    complete lie on bands of their own above the budget.

    Args:
        record: For the grid, the ranges and the goal.
        rows: From `figure_data.metaparameter_rows`.
    """
    names = short_names(list(record.space))
    axes_of = [(names[key], record.space[key]) for key in list(record.space)[:2]]
    axes_of = axes_of or [("point", Range(0, max(record.trials - 1, 1)))]
    lines, columns = len(record.sparsities), len(record.batch_sizes)
    size = min(max(6.2 / columns, 0.95), 1.7)  # of a panel, in inches: text width for up to 6 batch sizes
    figure = Figure(figsize=(max(size * columns, 3) + 0.8, size * lines + 0.9))
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    figure.get_layout_engine().set(w_pad=0.035, h_pad=0.03, wspace=0, hspace=0)
    _range_axis(panels[0, 0].xaxis, axes_of[0][1])  # all panels share their axes
    if len(axes_of) > 1:
        _range_axis(panels[0, 0].yaxis, axes_of[1][1])
    else:
        panels[0, 0].set_yscale("log")
        least = min((row["steps"] for row in rows if row["steps"]), default=record.goal.check_interval)
        panels[0, 0].set_ylim(least / 2, 5 * record.goal.max_steps)
    for sparsity, line in zip(record.sparsities, panels, strict=True):
        for batch_size, ax in zip(record.batch_sizes, line, strict=True):
            cell = [row for row in rows if (row["sparsity"], row["batch_size"]) == (sparsity, batch_size)]
            _draw_cell(ax, record, axes_of, cell)
    for batch_size, ax in zip(record.batch_sizes, panels[0], strict=True):
        ax.set_title(f"B = {batch_size}")
    for sparsity, ax in zip(record.sparsities, panels[:, -1], strict=True):
        ax.annotate(f"S = {sparsity:g}", (1.06, 0.5), xycoords="axes fraction", rotation=270, va="center")
    figure.supxlabel(axis_label(*axes_of[0]), fontsize=8)
    figure.supylabel(axis_label(*axes_of[1]) if len(axes_of) > 1 else "steps to result [optimizer steps]", fontsize=8)
    handles = [figure.axes[0].scatter([], [], label=name, **look) for name, look in STATUS_MARKS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), columnspacing=1, handletextpad=0.1)
    return figure


def _draw_cell(ax: Axes, record: StudyRecord, axes_of: Sequence[tuple[str, Range]], rows: Sequence[Row]) -> None:
    budget = record.goal.max_steps
    bands = {"incomplete": 1.5 * budget, "infeasible": 3 * budget}  # only where steps are an axis
    for name, look in STATUS_MARKS.items():
        part = [row for row in rows if (row["k_star"] if name == "K*" else row["status"] == name)]
        places = [shown([row[column] for row in part], box) for column, box in axes_of]
        if len(axes_of) == 1:
            places.append([row["steps"] if row["steps"] is not None else bands[row["status"]] for row in part])
        ax.scatter(*places, **look)
    if len(axes_of) == 1:
        ax.axhline(budget, color=GREY, linestyle=":", linewidth=0.8)


def _range_axis(axis, box: Range) -> None:
    """An axis over a range and a little more, on its scale; reversed for reverse_log, so that values still increase."""
    set_scale, set_limits = (getattr(axis.axes, f"set_{axis.axis_name}{what}") for what in ("scale", "lim"))
    low, high = shown([box.low, box.high], box)
    if box.scale == "linear":
        room = 0.05 * (high - low)
        set_limits(low - room, high + room)
        return
    set_scale("log")
    room = (high / low) ** 0.05
    set_limits(low / room, high * room)
    axis.set_minor_locator(NullLocator())
    if abs(math.log10(high / low)) >= 2:
        axis.set_major_locator(LogLocator(numticks=4))
    else:  # powers of ten alone would be one tick
        axis.set_major_locator(LogLocator(subs=(1, 3), numticks=4))
        axis.set_major_formatter("{x:g}")
