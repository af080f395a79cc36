"""The local Lipschitz constant of the gradient along training (Lee et al. 2021, Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import count, numbers, rows_of, significant, where
from lit_dps.analysis.training_curves import common_points, measured_points
from lit_dps.core.record import setting
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "lipschitz", "4"
MEANS = "lipschitz-mean"  # the name of its second table
CAPTION = "local Lipschitz constant of the gradient along training (Figure 4)"
MOST_COLUMNS = 4
MARKERS = 8  # of a line
# The axis spans at most this factor: the constant of a network that died is close to 0.
MAX_SPAN = 1e4
COMPACT_LEGEND: dict[str, Any] = {
    "loc": "upper right",
    "ncols": 2,
    "handlelength": 1.2,
    "columnspacing": 0.8,
    "fontsize": 6,
    "title_fontsize": 6,
    "labelspacing": 0.2,
    "borderaxespad": 0.2,
}
LEGEND_LINE = 0.13  # height of a line of the legend, in inches
PANEL_HEIGHT = 1.8  # in inches, with a legend of up to 4 lines


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `training_curves.lipschitz_rows`."""
    return study.lipschitz


def missing(study: Analysis) -> str | None:
    """Return why there is no Lipschitz constant to draw; None if there is one."""
    rows = study.lipschitz
    if len(rows) and count(rows["drawn"]):
        return None
    interval = setting(study.record.config, "smoothness.interval")
    reason = "is not set"
    if interval is not None:
        reason = f"is {interval}: no trial ran as many steps without divergence"
    return f"no Lipschitz measurements (smoothness.interval {reason})"


def notes(study: Analysis) -> list[str]:
    """Return at which batch sizes the lines of the sparsities rest on different samples."""
    record = study.record
    sizes = []
    for batch_size in record.batch_sizes:
        has_several = len(measured_points(record, batch_size)) > 1
        if has_several and not common_points(record, batch_size):
            sizes.append(str(batch_size))
    if not sizes:
        return []
    return [
        f"No sample has Lipschitz measurements at every sparsity at B = {', '.join(sizes)}. The "
        "lines there rest on different samples."
    ]


def tables(study: Analysis) -> dict[str, pd.DataFrame]:
    """Return the measurements, and their means over trials."""
    return {NAME: study.lipschitz, MEANS: study.lipschitz_means}


def figures(tables: Mapping[str, pd.DataFrame], study: Analysis) -> Iterator[tuple[str, Figure]]:
    """Yield the figure with its name."""
    yield NAME, draw(tables[MEANS], study)


@matplotlib.rc_context(look.STYLE)
def draw(means: pd.DataFrame, study: Analysis) -> Figure:
    """Return a panel per batch size with a line per series, and the range of trials as a band.

    Args:
        means: `training_curves.lipschitz_means`.
        study: The study.
    """
    sizes = sorted(set(means["batch_size"]))
    every = study.record.series
    lines = math.ceil(len(sizes) / MOST_COLUMNS)
    columns = math.ceil(len(sizes) / lines)
    legend_lines = 1.5 + math.ceil(len(every) / 2)
    extra_height = 0.12 * max(0.0, legend_lines - 4)
    width = max(1.8 * columns, 2.8) + 0.5
    figure = new_figure(width, (PANEL_HEIGHT + extra_height) * lines + 0.6)
    ax = None
    for i, batch_size in enumerate(sizes):
        ax = figure.add_subplot(lines, columns, i + 1, sharey=ax)
        ax.set_title(f"B = {batch_size}")
        _draw_panel(ax, where(means, batch_size=batch_size), study)
        ax.tick_params(labelleft=i % columns == 0)
        if i + columns >= len(sizes):
            ax.set_xlabel(look.STEPS)
    # The legend needs this share of the height of a panel, above the lines.
    legend_share = LEGEND_LINE * legend_lines / (1.3 + extra_height)
    values = numbers(means["mean"])
    highest = values.max()
    values = values.clip(min=highest / MAX_SPAN)
    above = 2 * (highest / values.min()) ** (legend_share / (1 - legend_share))
    look.log_values_axis(figure.axes[0], values, 2, above)
    label = "local Lipschitz constant\nof the gradient"
    figure.supylabel(label, fontsize=8, multialignment="center")
    handles = look.series_handles(every, look.series_with_rows(study, means))
    band = Patch(color=look.GREY, alpha=0.15, linewidth=0, label="all trials")
    look.legend_above(figure, [*handles, band])
    return figure


def _draw_panel(ax: Axes, means: pd.DataFrame, study: Analysis) -> None:
    """Draw the lines of all series at one batch size; the legend has the means over the run."""
    for i, series in enumerate(study.record.series):
        line = rows_of(series, means)
        if not len(line):
            continue
        steps = numbers(line["step"])
        style = look.curve_style(i)
        ax.plot(
            steps,
            numbers(line["mean"]),
            label=significant(line["run_mean"].iloc[0]),
            linewidth=1,
            markersize=2.5,
            markevery=math.ceil(len(steps) / MARKERS),
            **style,
        )
        low, high = numbers(line["low"]), numbers(line["high"])
        ax.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
    ax.set_xlim(left=0)
    look.few_ticks(ax.xaxis)
    ax.legend(title="mean over the run", **COMPACT_LEGEND)
