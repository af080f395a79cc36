"""Where in the search space the trials ended how (Lee et al. 2021, Figures 3, 5 and 13 to 18)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations, product

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rates import rate_of
from lit_dps.analysis.tables import cell_of, legend, numbers, rows_of
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Box, Range, short_names
from lit_dps.core.trial import Cell
from lit_dps.report.figures.box_axes import axis_label, axis_values, draw_box, range_axis
from lit_dps.report.no_result import COUNT_HEADS

NAME, PAPER = "metaparameters", "3, 5, 13-18"
CAPTION = "how the trials ended over the search space (Figure 3)"
LABELLED = 5  # batch sizes beside which there is room to say what effective rate a line is
MOST_CELLS = 100  # more panels are several pages, and take longer than all else of a report
MOST_COLUMNS = 7  # panels side by side that are legible on a page
# How a trial is drawn, by how it ended: marker, colour, name. K* is drawn on top of its trial, and
# ends that hardly any study has are told of only where there are such trials.
SELDOM = {"outraced", "stopped", "failed"}
STATUS_MARKS = {
    "complete": {"marker": "o", "color": look.COLOURS[0], "s": 11, "linewidths": 0},
    "incomplete": {"marker": "x", "color": look.COLOURS[5], "s": 11, "linewidths": 0.9},
    "infeasible": {
        "marker": "^",
        "facecolors": "none",
        "edgecolors": look.GREY,
        "s": 10,
        "linewidths": 0.6,
    },
    "outraced": {
        "marker": "o",
        "facecolors": "none",
        "edgecolors": look.COLOURS[4],
        "s": 11,
        "linewidths": 0.7,
    },
    "stopped": {
        "marker": "s",
        "facecolors": "none",
        "edgecolors": look.COLOURS[3],
        "s": 9,
        "linewidths": 0.7,
    },
    "failed": {"marker": "+", "color": look.COLOURS[6], "s": 14, "linewidths": 0.7},
    "K*": {
        "marker": "*",
        "color": look.COLOURS[1],
        "s": 70,
        "edgecolors": "white",
        "linewidths": 0.5,
        "zorder": 3,
    },
}

SHADES = ListedColormap(
    matplotlib.colormaps["viridis"](np.linspace(0, 0.9, 256))
)  # steps to result, logarithmic
SECOND = 0.16  # inches from the first line of the legend to the second
CHARACTER = 0.075  # width of one, in inches

# Where the label of a line stands, beside its end of the least rate: by whether the rate is the
# horizontal axis, and whether that end is on the edge of the least rate
OUTSIDE = {
    (True, True): {"xytext": (-1.5, 0), "ha": "right", "va": "top", "rotation": 90},
    (True, False): {"xytext": (0, 1), "ha": "left", "va": "bottom"},
    (False, True): {"xytext": (0, -1.5), "ha": "right", "va": "top"},
    (False, False): {"xytext": (1.5, 0), "ha": "left", "va": "bottom", "rotation": 90},
}
BANDS = {
    "incomplete": 1.5,
    "infeasible": 3,
}  # where steps are an axis, how many budgets high these trials lie


def rows(study: Analysis) -> pd.DataFrame:
    """Every finished trial (`summary.trial_rows`)."""
    return study.trials


def axes_of(record: StudyRecord) -> list[dict[str, Box]]:
    """The axes of each figure, by short name: every pair of metaparameters, or the one that there
    is.

    A search of none has the points of its trials as an axis.
    """
    space = {name: record.space[key] for key, name in short_names(list(record.space)).items()}
    if not space:
        return [{"point": Range(0, max(record.trials - 1, 1))}]
    return [
        {name: space[name] for name in names} for names in combinations(space, min(len(space), 2))
    ]


def missing(study: Analysis) -> str | None:
    """Why there is no trial to draw, if so."""
    return None if any(study.record.results.values()) else "no finished trial yet"


def too_large(study: Analysis) -> str | None:
    """Why the figure is drawn on request only, if so."""
    count = len(study.record.cells)
    if count <= MOST_CELLS:
        return None
    return f"{count} cells, above {MOST_CELLS} ({look.ON_REQUEST.format(name=NAME)})"


def notes(study: Analysis) -> list[str]:
    return []


def figures(tables: Mapping[str, pd.DataFrame], study: Analysis) -> Iterator[tuple[str, Figure]]:
    """A figure for each pair of metaparameters."""
    for i, axes in enumerate(axes_of(study.record)):
        yield "-".join([NAME, *(axes if i else ())]), draw(tables[NAME], study, axes)


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis, axes: Mapping[str, Box]) -> Figure:
    """How the trials of each cell ended over two metaparameters.

    Where they are the learning rate and the momentum, dotted lines join equal effective rates eta /
    (1 - m), a decade apart. With one metaparameter in `axes` (one of `axes_of`) the other axis is
    steps to result; incomplete and infeasible trials lie on bands of their own above the budget,
    all others where they ended, at the first check at least.
    """
    record, boxes = study.record, list(axes.values())
    absent = SELDOM - {*rows["status"]}
    marks = {name: mark for name, mark in STATUS_MARKS.items() if name not in absent}
    figure, panels = _panels(record, len(marks))
    first, *_ = panels.values()  # all panels share its axes
    range_axis(first.xaxis, boxes[0])
    if len(boxes) > 1:
        range_axis(first.yaxis, boxes[1])
    else:
        first.set_yscale("log")
        look.plain_ticks(first.yaxis)
        ends = _ends(record, rows[~rows["status"].isin(BANDS)])
        first.set_ylim(min(ends, default=record.goal.check_interval) / 2, 5 * record.goal.max_steps)
    steps = numbers(rows["steps"].dropna()) if len(axes) > 1 else np.array([])
    shades = LogNorm(steps.min(), max(steps.max(), 1.001 * steps.min())) if len(steps) else None
    for cell, ax in panels.items():
        of_cell = rows_of(cell.series, rows[rows["batch_size"] == cell.batch_size])
        for name, mark in marks.items():
            part = of_cell[of_cell["k_star"] if name == "K*" else of_cell["status"] == name]
            places = [axis_values(part[column], box) for column, box in axes.items()]
            if name == "complete" and shades:
                mark = {key: value for key, value in mark.items() if key != "color"}
                mark |= {"c": numbers(part["steps"]), "norm": shades, "cmap": SHADES}
            ax.scatter(*places, *([_ends(record, part)] if len(axes) == 1 else []), **mark)
        draw_box(ax, boxes)
        if source := _rate_of(axes, study, cell):
            _draw_effective(ax, axes, *source, label=len(record.batch_sizes) <= LABELLED)
        if len(axes) == 1:
            ax.axhline(record.goal.max_steps, color=look.GREY, linestyle=":", linewidth=0.8)
    labels = [axis_label(name, box) for name, box in axes.items()] + [
        look.K_STAR.replace(" K*", "")
    ]
    figure.supxlabel(labels[0], fontsize=8)
    figure.supylabel(
        labels[1], x=0.05 / figure.get_figwidth(), fontsize=8
    )  # left of the ticks, however wide it is
    plain = [(name, mark) for name, mark in marks.items() if name != "complete" or not shades]
    handles = []
    for name, mark in plain:
        handles.append(first.scatter([], [], label=COUNT_HEADS.get(name, name), **mark))
    common = {"loc": "upper center", "columnspacing": 1}
    figure.legend(handles=handles, ncols=len(handles), handletextpad=0.1, **common)
    handles = [Patch(fill=False, edgecolor=look.GREY, linewidth=0.6, label="search space")]
    dotted = {"color": look.GREY, "linestyle": ":"}
    if len(axes) == 1:
        handles.append(Line2D([], [], label="max steps", linewidth=0.8, **dotted))
    elif any(_rate_of(axes, study, cell) for cell in panels):
        handles.append(Line2D([], [], label="equal eta / (1 - m)", linewidth=0.5, **dotted))
    if shades:
        for i, each in enumerate(sorted({steps.min(), np.median(steps), steps.max()})):
            dot = {
                "marker": "o",
                "linestyle": "none",
                "markersize": 3.5,
                "color": SHADES(shades(each)),
            }
            label = f"K = {look.tick(float(f'{each:.2g}'))}"
            if i == 0:
                label = f"{COUNT_HEADS['complete']}, {label}"
            handles.append(Line2D([], [], label=label, **dot))
    second = 1 - SECOND / figure.get_figheight()
    figure.legend(
        handles=handles,
        ncols=len(handles),
        handlelength=1.2,
        handletextpad=0.4,
        bbox_to_anchor=(0.5, second),
        **common,
    )
    return figure


def _rate_of(axes: Mapping[str, Box], study: Analysis, cell: Cell) -> tuple[str, str] | None:
    """The names of learning rate and momentum, where these are the axes and the rule sums gradients
    by its momentum."""
    source, names = rate_of(study.record, cell.series), short_names(list(study.record.space))
    if source is None or not isinstance(source.momentum, str):
        return None
    found = names[source.rate], names[source.momentum]
    logarithmic = all(isinstance(box, Range) and box.scale != "linear" for box in axes.values())
    return found if {*found} == {*axes} and logarithmic else None


def _draw_effective(
    ax: Axes, axes: Mapping[str, Range], rate: str, momentum: str, label: bool
) -> None:
    """Lines of equal effective rate eta / (1 - m), one a decade (Shallue et al. 2019,
    batch_science), within the box.

    Their labels stand outside of it, where nothing crosses them.
    """
    eta, rest = (
        sorted(axis_values([axes[name].low, axes[name].high], axes[name]))
        for name in (rate, momentum)
    )
    across = [*axes][0] == rate  # else the rate is the vertical axis
    for power in range(
        math.ceil(math.log10(eta[0] / rest[1])), math.floor(math.log10(eta[1] / rest[0])) + 1
    ):
        low, high = max(eta[0], 10.0**power * rest[0]), min(eta[1], 10.0**power * rest[1])
        if low >= high or math.isclose(
            low, high
        ):  # one that touches a corner has no length, but for rounding
            continue
        rates, others = np.array([low, high]), np.array([low, high]) / 10.0**power
        x, y = (rates, others) if across else (others, rates)
        ax.plot(x, y, color=look.GREY, linewidth=0.5, linestyle=":", zorder=1)
        if label:
            side = OUTSIDE[across, low == eta[0]]
            ax.annotate(
                f"{10.0**power:g}",
                (x[0], y[0]),
                textcoords="offset points",
                fontsize=5,
                color=look.GREY,
                **side,
            )


def _panels(record: StudyRecord, entries: int) -> tuple[Figure, dict[Cell, Axes]]:
    """A panel for each cell, sharing axes, and room for a legend: a row per series, a column per
    batch size.

    Many batch sizes go into blocks of rows below each other, so that a page holds the figure in
    legible size. Placed by hand: a layout engine takes seconds for as many panels, and leaves wide
    gaps between them.
    """
    count = math.ceil(len(record.batch_sizes) / MOST_COLUMNS)
    columns, lines = math.ceil(len(record.batch_sizes) / count), len(record.series)
    blocks = [
        record.batch_sizes[i : i + columns] for i in range(0, len(record.batch_sizes), columns)
    ]
    high = min(max(6.2 / columns, 0.85), 1.7)  # inches, as all below: text width for all columns
    wide = max(high, max(3.5, 0.65 * entries - 0.6) / columns)  # room for both lines of the legend
    left, top, bottom, gap, between = 0.7, 0.45 + SECOND, 0.45, 0.12, 0.4
    names = {
        series: look.wrapped(legend(series), int(high / CHARACTER)) for series in record.series
    }
    right = 0.2 + 0.14 * max(name.count("\n") for name in names.values())
    width = left + columns * (wide + gap) + right
    height = top + count * lines * (high + gap) + (count - 1) * between + bottom
    figure, panels = Figure(figsize=(width, height), layout="none"), {}
    first = None
    for (i, block), (j, series) in product(enumerate(blocks), enumerate(record.series)):
        y = height - top - i * between - (i * lines + j + 1) * (high + gap) + gap
        for k, batch_size in enumerate(block):
            place = (left + k * (wide + gap)) / width, y / height, wide / width, high / height
            ax = panels[cell_of(series, batch_size)] = figure.add_axes(
                place, sharex=first, sharey=first
            )
            first = first or ax
            ax.tick_params(
                left=k == 0, labelleft=k == 0, bottom=j == lines - 1, labelbottom=j == lines - 1
            )
            if j == 0:
                ax.set_title(f"B = {batch_size}", pad=3)
        ax.annotate(names[series], (1.06, 0.5), xycoords="axes fraction", rotation=270, va="center")
    return figure, panels


def _ends(record: StudyRecord, rows: pd.DataFrame) -> np.ndarray:
    """Where trials go on an axis of steps."""
    steps, band = numbers(rows["steps"]), numbers(rows["status"].map(BANDS)) * record.goal.max_steps
    ended = np.where(
        np.isnan(steps), np.maximum(numbers(rows["steps_run"]), record.goal.check_interval), steps
    )
    return np.where(np.isnan(band), ended, band)
