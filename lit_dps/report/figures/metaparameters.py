"""How trials ended over the search space (Lee et al. 2021, Figures 3, 5 and 13 to 18)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rates import equal_rate_lines, rate_source
from lit_dps.analysis.tables import cell_of, legend, numbers, rows_of, where
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Box, Range
from lit_dps.core.trial import Cell
from lit_dps.report.figures.box_axes import axis_label, axis_values, draw_box, range_axis
from lit_dps.report.no_result import COUNT_HEADS

NAME, PAPER = "metaparameters", "3, 5, 13-18"
CAPTION = "how the trials ended over the search space (Figure 3)"
LABELLED_SIZES = 5  # with more batch sizes there is no room for labels of effective rates
MOST_CELLS = 100  # more panels are several pages, and take longer than the rest of a report
MOST_COLUMNS = 7  # panels side by side that are legible on a page

# How a trial is drawn, by how it ended. The star of K* is drawn on top of its trial.
K_STAR_MARK = "K*"
STEPS_TO_RESULT = "steps to result [optimizer steps]"
HOLLOW = {"facecolors": "none"}
MARKS: dict[str, dict[str, Any]] = {
    "complete": {"marker": "o", "color": look.COLOURS[0], "s": 11, "linewidths": 0},
    "incomplete": {"marker": "x", "color": look.COLOURS[5], "s": 11, "linewidths": 0.9},
    "infeasible": HOLLOW | {"marker": "^", "edgecolors": look.GREY, "s": 10, "linewidths": 0.6},
    "outraced": HOLLOW | {"marker": "o", "edgecolors": look.COLOURS[4], "s": 11, "linewidths": 0.7},
    "stopped": HOLLOW | {"marker": "s", "edgecolors": look.COLOURS[3], "s": 9, "linewidths": 0.7},
    "failed": {"marker": "+", "color": look.COLOURS[6], "s": 14, "linewidths": 0.7},
    K_STAR_MARK: {
        "marker": "*",
        "color": look.COLOURS[1],
        "s": 70,
        "edgecolors": "white",
        "linewidths": 0.5,
        "zorder": 3,
    },
}
RARE = {"outraced", "stopped", "failed"}  # the legend has them only if there are such trials
# Colours of steps to result, logarithmic.
SHADES = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, 256)))
DOTTED: dict[str, Any] = {"color": look.GREY, "linestyle": ":"}
# Where steps are an axis, trials without a result are on bands: heights in multiples of max_steps.
BANDS: dict[str, float] = {"incomplete": 1.5, "infeasible": 3}

# Sizes in inches.
SECOND_LINE = 0.16  # from the first line of the legend to the second
CHARACTER = 0.075  # width of one
TEXT_WIDTH = 6.2
MARGIN_LEFT = 0.7
MARGIN_BOTTOM = 0.45
MARGIN_TOP = 0.45 + SECOND_LINE
GAP = 0.12  # between panels
BLOCK_GAP = 0.4  # between blocks of rows

# Where the label of a line of equal effective rates is, beside its end with the lowest rate: by
# whether the rate is the x axis, and whether that end is on the edge of the lowest rate.
LABEL_PLACES: dict[tuple[bool, bool], dict[str, Any]] = {
    (True, True): {"xytext": (-1.5, 0), "ha": "right", "va": "top", "rotation": 90},
    (True, False): {"xytext": (0, 1), "ha": "left", "va": "bottom"},
    (False, True): {"xytext": (0, -1.5), "ha": "right", "va": "top"},
    (False, False): {"xytext": (1.5, 0), "ha": "left", "va": "bottom", "rotation": 90},
}


def rows(study: Analysis) -> pd.DataFrame:
    """Return every finished trial (`summary.trial_rows`)."""
    return study.trials


def axes_of(record: StudyRecord) -> list[dict[str, Box]]:
    """Return the axes of each figure, by short name: every pair of metaparameters.

    A search of one metaparameter has that one alone, a search of none the numbers of its samples.
    """
    space = record.named_space
    if not space:
        return [{"point": Range(0, max(record.trials - 1, 1))}]
    axes = []
    for names in combinations(space, min(len(space), 2)):
        axes.append({name: space[name] for name in names})
    return axes


def missing(study: Analysis) -> str | None:
    """Return why there is no trial to draw; None if there is one."""
    if any(study.record.results.values()):
        return None
    return "no finished trial yet"


def too_large(study: Analysis) -> str | None:
    """Return why the figure is drawn on request only; None if it is not."""
    return look.too_many(len(study.record.cells), MOST_CELLS, "cells", NAME)


def notes(study: Analysis) -> list[str]:
    """Return no notes."""
    return []


def figures(tables: Mapping[str, pd.DataFrame], study: Analysis) -> Iterator[tuple[str, Figure]]:
    """Yield a figure for each pair of metaparameters, with its name."""
    for i, axes in enumerate(axes_of(study.record)):
        name = NAME
        if i > 0:
            name = "-".join([NAME, *axes])
        yield name, draw(tables[NAME], study, axes)


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis, axes: Mapping[str, Box]) -> Figure:
    """Return how the trials of each cell ended over two metaparameters.

    If these are the learning rate and the momentum, dotted lines join equal effective rates
    eta / (1 - m), one for each decade. With one metaparameter the y axis is steps to result:
    incomplete and infeasible trials are on bands above max_steps, all others where they ended, but
    at the first validation at least.

    Args:
        rows: `summary.trial_rows`.
        study: The study.
        axes: One of `axes_of`.
    """
    record = study.record
    marks = {}
    for name, mark in MARKS.items():
        if name not in RARE or len(where(rows, status=name)):
            marks[name] = mark
    figure, panels = _panels(record, len(marks))
    first = next(iter(panels.values()))  # all panels share its axes
    _set_axes(first, record, rows, list(axes.values()))
    shading = None
    if len(axes) > 1:
        shading = _shading(rows)
    drawing = _Drawing(record, axes, marks, shading)
    for cell, ax in panels.items():
        of_batch_size = where(rows, batch_size=cell.batch_size)
        drawing.draw_panel(ax, cell, rows_of(cell.series, of_batch_size))
    labels = [*map(axis_label, axes, axes.values()), STEPS_TO_RESULT]
    figure.supxlabel(labels[0], fontsize=8)
    # Beside the ticks, however wide the figure is.
    figure.supylabel(labels[1], x=0.05 / figure.get_figwidth(), fontsize=8)
    drawing.draw_legends(figure, first)
    return figure


class _Shading(NamedTuple):
    """Colours of trials that reached the goal, by their steps.

    Attributes:
        norm: From steps to a share of the colours.
        steps: Steps that the legend shows.
    """

    norm: LogNorm
    steps: Sequence[float]


def _shading(rows: pd.DataFrame) -> _Shading | None:
    """Return the colours of trials that reached the goal; None without any."""
    steps = numbers(rows["steps"].dropna())
    if not len(steps):
        return None
    low, high = steps.min(), steps.max()
    norm = LogNorm(low, max(high, 1.001 * low))
    return _Shading(norm, sorted({low, np.median(steps), high}))


def _set_axes(ax: Axes, record: StudyRecord, rows: pd.DataFrame, boxes: Sequence[Box]) -> None:
    """Set the axes of a panel, which all panels share."""
    range_axis(ax.xaxis, boxes[0])
    if len(boxes) > 1:
        range_axis(ax.yaxis, boxes[1])
        return
    ax.set_yscale("log")
    look.plain_ticks(ax.yaxis)
    heights = _heights(record, rows.loc[~rows["status"].isin(list(BANDS))])
    lowest = min(heights, default=record.goal.check_interval)
    ax.set_ylim(lowest / 2, 5 * record.goal.max_steps)


def _heights(record: StudyRecord, rows: pd.DataFrame) -> np.ndarray:
    """Return where trials are on an axis of steps: their result, their end, or a band."""
    goal = record.goal
    steps = numbers(rows["steps"])
    ends = np.maximum(numbers(rows["steps_run"]), goal.check_interval)
    bands = numbers(rows["status"].map(BANDS.get)) * goal.max_steps
    heights = np.where(np.isnan(steps), ends, steps)
    return np.where(np.isnan(bands), heights, bands)


@dataclass(frozen=True)
class _Drawing:
    """What the panels of a figure have in common.

    Attributes:
        record: The study.
        axes: One or two metaparameters.
        marks: How trials are drawn, by how they ended.
        shading: Colours of trials that reached the goal; None if they have one colour.
    """

    record: StudyRecord
    axes: Mapping[str, Box]
    marks: Mapping[str, Mapping[str, Any]]
    shading: _Shading | None

    def draw_panel(self, ax: Axes, cell: Cell, rows: pd.DataFrame) -> None:
        """Draw the trials of a cell, the search space and lines of equal effective rates."""
        for name, mark in self.marks.items():
            part = where(rows, status=name)
            if name == K_STAR_MARK:
                part = where(rows, k_star=True)
            places = []
            for column, box in self.axes.items():
                places.append(axis_values(part[column], box))
            if len(self.axes) == 1:
                places.append(_heights(self.record, part))
            style = dict(mark)
            if name == "complete" and self.shading is not None:
                del style["color"]
                style |= {"c": numbers(part["steps"]), "norm": self.shading.norm, "cmap": SHADES}
            ax.scatter(*places, **style)
        draw_box(ax, list(self.axes.values()))
        names = self._rate_and_momentum(cell)
        if names is not None:
            self._draw_equal_rates(ax, *names)
        if len(self.axes) == 1:
            ax.axhline(self.record.goal.max_steps, linewidth=0.8, **DOTTED)

    def _rate_and_momentum(self, cell: Cell) -> tuple[str, str] | None:
        """Return the names of learning rate and momentum if they are the axes; else None.

        None also for an update rule that does not sum gradients by its momentum.
        """
        source = rate_source(self.record, cell.series)
        if source is None or source.momentum_key is None:
            return None
        for box in self.axes.values():
            if not isinstance(box, Range) or box.scale == "linear":
                return None
        names = self.record.short_names
        rate, momentum = names[source.rate_key], names[source.momentum_key]
        if {rate, momentum} != set(self.axes):
            return None
        return rate, momentum

    def _draw_equal_rates(self, ax: Axes, rate: str, momentum: str) -> None:
        """Draw lines of equal effective rates within the search space, one a decade.

        Their labels are outside of it, where no line crosses them.
        """
        rate_range, momentum_range = self.axes[rate], self.axes[momentum]
        assert isinstance(rate_range, Range) and isinstance(momentum_range, Range)
        rates = sorted(axis_values([rate_range.low, rate_range.high], rate_range))
        rests = sorted(axis_values([momentum_range.low, momentum_range.high], momentum_range))
        rate_is_x = next(iter(self.axes)) == rate
        has_labels = len(self.record.batch_sizes) <= LABELLED_SIZES
        for line in equal_rate_lines((rates[0], rates[1]), (rests[0], rests[1])):
            x, y = line.rates, line.rests
            if not rate_is_x:
                x, y = y, x
            ax.plot(x, y, linewidth=0.5, zorder=1, **DOTTED)
            if has_labels:
                place = LABEL_PLACES[rate_is_x, line.rates[0] == rates[0]]
                ax.annotate(
                    f"{line.effective_rate:g}",
                    (x[0], y[0]),
                    textcoords="offset points",
                    fontsize=5,
                    color=look.GREY,
                    **place,
                )

    def draw_legends(self, figure: Figure, first: Axes) -> None:
        """Draw a legend of the ends of trials, and below it one of lines and shades."""
        handles: list[Artist] = []
        for name, mark in self.marks.items():
            if name != "complete" or self.shading is None:
                label = COUNT_HEADS.get(name, name)
                handles.append(first.scatter([], [], label=label, **mark))
        common = {"loc": "upper center", "columnspacing": 1}
        figure.legend(handles=handles, ncols=len(handles), handletextpad=0.1, **common)
        handles = self._second_line()
        figure.legend(
            handles=handles,
            ncols=len(handles),
            handlelength=1.2,
            handletextpad=0.4,
            bbox_to_anchor=(0.5, 1 - SECOND_LINE / figure.get_figheight()),
            **common,
        )

    def _second_line(self) -> list[Artist]:
        """Return the entries of the second line of the legend."""
        handles: list[Artist] = [
            Patch(fill=False, edgecolor=look.GREY, linewidth=0.6, label="search space")
        ]
        if len(self.axes) == 1:
            handles.append(look.entry("max steps", linewidth=0.8, **DOTTED))
        elif any(self._rate_and_momentum(cell) for cell in self.record.cells):
            handles.append(look.entry("equal eta / (1 - m)", linewidth=0.5, **DOTTED))
        if self.shading is not None:
            for i, steps in enumerate(self.shading.steps):
                label = f"K = {look.tick(float(f'{steps:.2g}'))}"
                if i == 0:
                    label = f"{COUNT_HEADS['complete']}, {label}"
                dot = {"marker": "o", "linestyle": "none", "markersize": 3.5}
                colour = SHADES(self.shading.norm(steps))
                handles.append(look.entry(label, color=colour, **dot))
        return handles


def _panels(record: StudyRecord, entries: int) -> tuple[Figure, dict[Cell, Axes]]:
    """Return a figure with a panel for each cell: a row per series, a column per batch size.

    All panels share their axes. Many batch sizes are in blocks of rows below each other, so that
    the figure is legible on a page. Placed by hand: with this number of panels a layout engine
    takes seconds and makes wide gaps.

    Args:
        record: The study.
        entries: Entries of the legend, which need a width.
    """
    blocks = _blocks(record.batch_sizes)
    columns = len(blocks[0])
    lines = len(record.series)
    panel_height = min(max(TEXT_WIDTH / columns, 0.85), 1.7)
    legend_width = max(3.5, 0.65 * entries - 0.6)
    panel_width = max(panel_height, legend_width / columns)
    names = {}
    for series in record.series:
        names[series] = look.wrapped(legend(series), int(panel_height / CHARACTER))
    margin_right = 0.2 + 0.14 * max(name.count("\n") for name in names.values())
    width = MARGIN_LEFT + columns * (panel_width + GAP) + margin_right
    block_height = lines * (panel_height + GAP)
    blocks_height = len(blocks) * block_height + (len(blocks) - 1) * BLOCK_GAP
    height = MARGIN_TOP + blocks_height + MARGIN_BOTTOM
    figure = Figure(figsize=(width, height), layout="none")  # pyright: ignore[reportArgumentType]
    panels: dict[Cell, Axes] = {}
    first = None
    for i, block in enumerate(blocks):
        for j, series in enumerate(record.series):
            top = height - MARGIN_TOP - i * (block_height + BLOCK_GAP) - j * (panel_height + GAP)
            for k, batch_size in enumerate(block):
                place = (
                    (MARGIN_LEFT + k * (panel_width + GAP)) / width,
                    (top - panel_height) / height,
                    panel_width / width,
                    panel_height / height,
                )
                ax = figure.add_axes(place, sharex=first, sharey=first)
                first = first or ax
                panels[cell_of(series, batch_size)] = ax
                _set_edges(ax, is_first=k == 0, is_last=j == lines - 1)
                if j == 0:
                    ax.set_title(f"B = {batch_size}", pad=3)
            # Beside the last panel of the row.
            ax.annotate(
                names[series], (1.06, 0.5), xycoords="axes fraction", rotation=270, va="center"
            )
    return figure, panels


def _blocks(batch_sizes: Sequence[int]) -> list[Sequence[int]]:
    """Return batch sizes in blocks of equal length, of at most `MOST_COLUMNS`."""
    count = math.ceil(len(batch_sizes) / MOST_COLUMNS)
    columns = math.ceil(len(batch_sizes) / count)
    return [batch_sizes[i : i + columns] for i in range(0, len(batch_sizes), columns)]


def _set_edges(ax: Axes, is_first: bool, is_last: bool) -> None:
    """Show ticks only at the left edge and at the bottom edge of a block of panels."""
    ax.tick_params(left=is_first, labelleft=is_first, bottom=is_last, labelbottom=is_last)
