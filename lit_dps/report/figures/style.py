"""The look that all figures share."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import (
    EngFormatter,
    FixedFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import legend
from lit_dps.core.trial import Series

# Okabe and Ito (2008), "Color Universal Design": for any colour vision; without yellow, too pale
# for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
GREY = "#666666"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    # else each drawing lays the vertical axis out anew, to place the title above it
    "axes.titley": 1.0,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
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
    "pdf.fonttype": 42,  # TrueType: what journals ask for, and text that can be selected
}
LAID_OUT = {
    **STYLE,
    "figure.constrained_layout.use": False,
}  # with a layout engine each file is drawn twice
BATCH_SIZE = "batch size B [examples]"
STEPS = "optimizer step"
K_STAR = "steps to result K* [optimizer steps]"
ON_REQUEST = "lit-dps figures --only {name} draws it"
MOST_SERIES = 12  # more lines of a panel cannot be told apart
LINE = 0.15  # height of a legend's line, in inches


def too_many_series(study: Analysis, name: str) -> str | None:
    """Return why a figure with a panel or a line for each series is drawn on request only; None if
    it is not."""
    count = len(study.record.series)
    if count <= MOST_SERIES:
        return None
    return f"{count} series, above {MOST_SERIES} ({ON_REQUEST.format(name=name)})"


def without_math(figure: Figure) -> None:
    """Draw each $ of a figure as it stands: names of metrics, studies and values may have some.

    Our own labels hold no formulas. Numbers on logarithmic axes do, so that their formatters keep
    them.
    """
    for text in figure.findobj(Text):
        if "$" in text.get_text():
            text.set_parse_math(False)
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if isinstance(
                axis.get_major_formatter(), (FixedFormatter, FuncFormatter, StrCategoryFormatter)
            ):
                for label in axis.get_ticklabels():
                    label.set_parse_math(False)


def curve_style(i: int) -> dict[str, str]:
    """Colour and marker of the i-th curve; no two alike among the first 49."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)],
    }


def line_of(i: int) -> dict[str, object]:
    """Colour and dashes of the i-th curve's line: where the colours begin anew the dashes
    change."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
    }


def batch_size_axis(ax: Axes, batch_sizes: Sequence[int]) -> None:
    """A logarithmic horizontal axis over some ascending batch sizes, with ticks at up to 7 of
    them."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(batch_sizes[:: math.ceil(len(batch_sizes) / 7)]))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(batch_sizes[0] / 1.4, batch_sizes[-1] * 1.4)


def log_values_axis(
    ax: Axes, values: Sequence[float] | pd.Series, below: float = 2.0, above: float = 1.6
) -> None:
    """A logarithmic vertical axis over some values, with room by these factors; without ticks if
    there are none."""
    values = np.asarray(values, float)
    if not len(values):
        ax.set_yticks([])
        return
    ax.set_yscale("log")
    ax.set_ylim(values.min() / below, values.max() * above)
    span = values.max() / values.min() * max(1, below / 2, above / 2)
    low, high = np.log10(ax.get_ylim())
    if (
        span < 30 or math.floor(high) - math.ceil(low) < 1
    ):  # powers of ten alone would be one tick or none
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span > 8 else (1, 1.5, 2, 3, 5, 7)))
    plain_ticks(ax.yaxis)


def tick(x: float, position: int | None = None) -> str:
    """A tick of a logarithmic axis: 0.001, 0.5, 300, 7000, 30k, 2M."""
    return EngFormatter(sep="")(x) if x >= 10_000 else f"{x:g}"


def plain_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as numbers (`tick`), not as powers; none between them."""
    axis.set_major_formatter(tick)
    axis.set_minor_formatter(NullFormatter())
    # Each drawing measures also empty labels.
    axis.set_tick_params(which="minor", label1On=False)


def caption(figure: Figure, studies: Sequence[Analysis]) -> None:
    """A line at the foot of a figure that says of which study it is: name, workload and goal.

    The figure grows by it. Of several studies the names, and what else they have in common.
    """
    records = [study.record for study in studies]
    told = [
        sorted(set(texts))
        for texts in zip(*((r.name, r.workload, str(r.goal)) for r in records), strict=True)
    ]
    shown = [", ".join(texts) for i, texts in enumerate(told) if i == 0 or len(texts) == 1]
    wide, high = figure.get_size_inches()
    lines = textwrap.wrap(
        ": ".join([shown[0], "; ".join(shown[1:])]) if shown[1:] else shown[0], int(wide / 0.048)
    )
    foot = 0.04 + 0.1 * len(lines)
    share = high / (high + foot)
    without_math(figure)  # before the first drawing, which parses formulas
    separate_axes(figure)
    place_empty_labels(figure)
    lay_out(figure)
    figure.set_size_inches(wide, high + foot)
    _lift(figure, share)
    foot_line = figure.text(
        0.006, 0.02 / (high + foot), "\n".join(lines), fontsize=6, color=GREY, va="bottom"
    )
    foot_line.set_parse_math(False)


def separate_axes(figure: Figure) -> None:
    """End the sharing of axes in a finished figure; the limits of each panel stay as they are.

    matplotlib looks at all panels of a group each time it asks one for its limits. With 300 panels
    these looks take most of the time of a drawing.
    """
    for ax in figure.axes:
        # Autoscales the whole group, if that is still due.
        ax.get_xlim()
        ax.get_ylim()
    for ax in figure.axes:
        for group in ax._shared_axes.values():
            group.remove(ax)


def place_empty_labels(figure: Figure) -> None:
    """Give each empty axis label a fixed place; else each drawing measures the ticks to find
    one."""
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if not axis.get_label_text():
                axis.set_label_coords(0.5, 0.5)


def lay_out(figure: Figure) -> None:
    """Lay a figure out for good: `savefig` in the style `LAID_OUT` draws once and moves nothing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    with matplotlib.rc_context(LAID_OUT):
        figure.set_layout_engine(None)


def _lift(figure: Figure, share: float) -> None:
    """Moves all of a figure that is laid out into this share of its height, at the top."""
    for ax in figure.axes:
        x, y, width, height = ax.get_position().bounds
        ax.set_position((x, 1 - share + share * y, width, share * height))
    for each in figure.legends:
        x, y, width, height = (
            each.get_bbox_to_anchor().transformed(figure.transFigure.inverted()).bounds
        )
        each.set_bbox_to_anchor((x, 1 - share + share * y, width, share * height))
    for text in (figure._supxlabel, figure._supylabel):
        if text is not None:
            text.set_y(1 - share + share * text.get_position()[1])


def bound_handles(any_drawn: bool, label: str = "upper bound") -> list[Line2D]:
    """The entry of a legend that explains hollow points; none where there are none."""
    hollow = {
        "marker": "o",
        "linestyle": "none",
        "markerfacecolor": "white",
        "markeredgewidth": 0.8,
    }
    return [Line2D([], [], label=label, color=GREY, **hollow)] if any_drawn else []


def bounds(
    ax: Axes, x: np.ndarray, y: np.ndarray, color: str, marker: str, up: bool = False
) -> None:
    """Values that are only bounds: hollow, without a line, with an arrow to where the truth may
    lie."""
    ax.plot(
        x,
        y,
        linestyle="none",
        color=color,
        marker=marker,
        markerfacecolor="white",
        markeredgewidth=0.8,
    )
    for place in zip(x, y, strict=True):
        shift = {"xytext": (0, 9 if up else -9), "textcoords": "offset points"}
        ax.annotate(
            "", place, **shift, arrowprops={"arrowstyle": "<-", "color": color, "linewidth": 0.7}
        )


def wrapped(text: str, width: int) -> str:
    """The name of a series on as many lines as it takes; a key stays beside its value."""
    whole = text.replace(" = ", "\xa0=\xa0")
    return textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False).replace(
        "\xa0", " "
    )


def goal_line(ax: Axes, value: float, label: str = "goal") -> Line2D:
    """The goal's value as a dashed line across an axis of the metric."""
    return ax.axhline(value, color=GREY, linestyle="--", linewidth=0.8, zorder=1, label=label)


def few_ticks(axis: Axis, integer: bool = True) -> None:
    """At most 4 ticks on a linear axis of a small panel, thousands written as 30k."""
    axis.set_major_locator(MaxNLocator(3, integer=integer))
    if max(map(abs, axis.get_view_interval())) >= 10_000:
        axis.set_major_formatter(EngFormatter(sep=""))


def legend_above(figure: Figure, handles: Sequence[Artist]) -> None:
    """A legend above all panels: on as many lines as long or many labels take, by which the figure
    grows."""
    labels, width = [str(handle.get_label()) for handle in handles], figure.get_figwidth()
    wide = 0.06 * (
        max(map(len, labels)) + 6
    )  # inches: of a character, and of what stands before them
    one_line = (
        0.06 * sum(len(label) + 6 for label in labels) <= 1.1 * width
    )  # no character is that wide on average
    columns = (
        len(labels)
        if one_line and not any("," in label for label in labels)
        else max(1, int(width / wide))
    )
    figure.set_figheight(figure.get_figheight() + LINE * (math.ceil(len(labels) / columns) - 1))
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=columns,
        columnspacing=1.2,
        handlelength=1.5,
    )


def series_handles(looks: Iterable[tuple[Series, int]]) -> list[Line2D]:
    """What a legend says of some series, each drawn in the look of its number."""
    return [
        Line2D([], [], label=legend(series), linewidth=1, **curve_style(i)) for series, i in looks
    ]
