"""The style that all figures share: colours, axes, legends and the caption."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import matplotlib.ticker as ticker
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import BboxBase

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import legend, numbers, rows_of, where
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import wrap
from lit_dps.core.trial import Series
from lit_dps.report.figures.page_size import current_page_size

# Okabe and Ito (2008), "Color Universal Design": for any colour vision; without yellow, too pale
# for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
GREY = "#666666"
# Markers of values that are bounds.
HOLLOW: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 0.8}
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    # Without a fixed place each drawing searches for a place above the ticks.
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
    "pdf.fonttype": 42,  # TrueType, which journals ask for: its text can be selected
}
# With a layout engine each file is drawn twice.
LAID_OUT = {**STYLE, "figure.constrained_layout.use": False}
BATCH_SIZE = "batch size B [examples]"
STEPS = "optimizer step"
MOST_SERIES = 12  # more lines in a panel cannot be distinguished
MOST_TICKS = 7  # batch sizes with a tick
LEGEND_LINE_INCHES = 0.15  # height of a line of a legend
LEGEND_CHARACTER_INCHES = 0.06  # width of a character in a legend
LEGEND_MARKER_CHARACTERS = 6  # width of the marker of an entry and its gaps, in characters
CAPTION_CHARACTER_INCHES = 0.048
SMALLEST_DECIMAL = 1e-3  # smaller ticks have an exponent
BAR_ALPHA = 0.6  # opacity of a bar behind its marker
PANEL_SHARE = 0.75  # of the height of a figure with one panel
MAX_TEXT_LUMINANCE = 0.6  # of a text on white, from 0 for black to 1
LABEL_POINTS = 8.5  # from the name of a curve to the next one
TICK_SPAN = 30  # an axis over a smaller factor also has ticks between powers of ten


def too_many(count: int, most: int, noun: str, name: str) -> str | None:
    """Return why a figure of many parts is drawn on request only; None for few parts."""
    if count <= most:
        return None
    return f"{count} {noun}, above {most} (lit-dps figures --only {name} draws it)"


def too_many_series(study: Analysis, name: str) -> str | None:
    """Return why a figure with a panel or line per series is drawn on request only, or None."""
    return too_many(len(study.record.series), MOST_SERIES, "series", name)


def without_math(figure: Figure) -> None:
    """Draw each $ of a figure literally: names of metrics, studies and values may have some.

    The labels of this package have no formulas. Numbers on logarithmic axes do, so their formatters
    keep them.
    """
    for text in figure.findobj(Text):
        if "$" in text.get_text():
            text.set_parse_math(False)
    has_names = (ticker.FixedFormatter, ticker.FuncFormatter, StrCategoryFormatter)
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if isinstance(axis.get_major_formatter(), has_names):
                for label in axis.get_ticklabels():
                    label.set_parse_math(False)


def curve_style(i: int) -> dict[str, Any]:
    """Return colour and marker of the i-th curve; the first 49 differ from each other."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)],
    }


def shades(count: int) -> list[dict[str, Any]]:
    """Return colours and markers of curves that have an order, from light to dark."""
    colours = matplotlib.colormaps["viridis_r"](np.linspace(0.1, 1, count))
    return [curve_style(i) | {"color": to_hex(colours[i])} for i in range(count)]


def line_of(i: int) -> dict[str, Any]:
    """Return colour and dashes of the i-th curve; the dashes change when the colours repeat."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
    }


def batch_size_axis(ax: Axes, batch_sizes: Sequence[int]) -> None:
    """Make the x axis logarithmic over ascending batch sizes, with ticks at up to 7 of them."""
    ax.set_xscale("log", base=2)
    step = math.ceil(len(batch_sizes) / MOST_TICKS)
    ax.xaxis.set_major_locator(ticker.FixedLocator(batch_sizes[::step]))
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.xaxis.set_minor_locator(ticker.NullLocator())
    ax.set_xlim(batch_sizes[0] / 1.4, batch_sizes[-1] * 1.4)


def log_values_axis(
    ax: Axes, values: Any, below: float = 2.0, above: float = 1.6, axis: str = "y"
) -> None:
    """Make an axis logarithmic over some values; without values it has no ticks.

    Args:
        ax: The panel.
        values: The values that the axis shows, (n,) or a table. Only positive and finite ones
            count.
        below, above: Room below and above the values, factors.
        axis: "x" or "y".
    """
    values = numbers(pd.DataFrame(values)).ravel()
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        ax.set(**{f"{axis}ticks": []})
        return
    limits = (values.min() / below, values.max() * above)
    ax.set(**{f"{axis}scale": "log", f"{axis}lim": limits})
    shown = {"x": ax.xaxis, "y": ax.yaxis}[axis]
    span = values.max() / values.min() * max(1, below / 2, above / 2)
    low, high = np.log10(limits)
    powers_of_ten = math.floor(high) - math.ceil(low) + 1
    if span < TICK_SPAN or powers_of_ten < 2:
        # Powers of ten alone would be one tick or none.
        subs = (1, 1.5, 2, 3, 5, 7)
        if span > 8:
            subs = (1, 2, 5)
        shown.set_major_locator(ticker.LogLocator(subs=subs))
    plain_ticks(shown)


def tick(x: float, position: float = 0) -> str:
    """Return a tick of a logarithmic axis: 1e-4, 0.001, 0.5, 300, 7000, 30k, 2M, 16384."""
    if x >= 10_000 and x % 1000:
        # A power of two: 16.384k has more characters.
        return f"{x:.0f}"
    if x >= 10_000:
        return ticker.EngFormatter(sep="")(x)
    if 0 < x < SMALLEST_DECIMAL:
        exponent = math.floor(math.log10(x * (1 + 1e-12)))
        return f"{x / 10**exponent:.3g}e{exponent}"
    return f"{x:g}"


def plain_ticks(axis: Axis) -> None:
    """Write ticks of a logarithmic axis as numbers (`tick`), not as powers of ten."""
    axis.set_major_formatter(tick)
    axis.set_minor_formatter(ticker.NullFormatter())
    # Each drawing measures empty labels too.
    axis.set_tick_params(which="minor", label1On=False)


def few_ticks(axis: Axis, integer: bool = True) -> None:
    """Put at most 4 ticks on a linear axis of a small panel, thousands written as 30k."""
    axis.set_major_locator(ticker.MaxNLocator(3, integer=integer))
    if max(map(abs, axis.get_view_interval())) >= 10_000:
        axis.set_major_formatter(ticker.EngFormatter(sep=""))


def in_two_lines(label: str) -> str:
    """Return the label of an axis with its unit on a second line; one line would be longer than
    a small panel."""
    return label.replace(" [", "\n[")


def goal_line(ax: Axes, value: float, label: str = "goal") -> Line2D:
    """Draw the goal as a dashed line across a panel of the metric, and return the line."""
    return ax.axhline(value, color=GREY, linestyle="--", linewidth=0.8, zorder=1, label=label)


def bounds(ax: Axes, x: Any, y: Any, color: str, marker: str, up: bool = False) -> None:
    """Draw values that are only bounds: hollow, with an arrow towards the true value."""
    ax.plot(x, y, linestyle="none", color=color, marker=marker, **HOLLOW)
    shift = (0, -9)
    if up:
        shift = (0, 9)
    arrow = {"arrowstyle": "<-", "color": color, "linewidth": 0.7}
    for place in zip(x, y, strict=True):
        ax.annotate("", place, xytext=shift, textcoords="offset points", arrowprops=arrow)


def bars(
    ax: Axes,
    rows: pd.DataFrame,
    ends: tuple[str, str],
    style: dict[str, Any],
    shift: float = 1.0,
    alpha: float | None = BAR_ALPHA,
) -> None:
    """Draw a bar at each batch size, such as a 95 % interval.

    Args:
        ax: The panel.
        rows: The values, with a column batch_size. A missing end has no bar.
        ends: The columns of both ends.
        style: Its colour.
        shift: Factor between the batch sizes and their places, beside other bars.
        alpha: Opacity.
    """
    batch = shift * numbers(rows["batch_size"])
    low, high = (numbers(rows[end]) for end in ends)
    ax.vlines(batch, low, high, color=style["color"], linewidth=0.8, alpha=alpha)


def write_beside(ax: Axes, x: Any, y: Any, texts: Iterable[object], **style: Any) -> None:
    """Write a text beside each point, with arguments of `Axes.annotate`."""
    for place_x, place_y, text in zip(x, y, texts, strict=True):
        ax.annotate(str(text), (place_x, place_y), textcoords="offset points", **style)


def draw_metric(ax: Axes, rows: pd.DataFrame, style: dict[str, Any], at_least: bool) -> None:
    """Draw the best metric against batch size: exact values joined by a line, bounds hollow.

    Args:
        ax: The panel.
        rows: One curve, with the columns batch_size, best and exact.
        style: Colour and marker.
        at_least: Whether the goal is met from below, so that the metric may still rise.
    """
    exact = where(rows, exact=1)
    ax.plot(numbers(exact["batch_size"]), numbers(exact["best"]), **style)
    bound = where(rows, exact=0)
    bounds(ax, numbers(bound["batch_size"]), numbers(bound["best"]), **style, up=at_least)


# Legends


def entry(label: str, **style: Any) -> Line2D:
    """Return an entry of a legend."""
    return Line2D([], [], label=label, **style)


def text_colour(colour: str) -> str:
    """Return a colour, darker if text in it would be too pale on white."""
    red, green, blue = to_rgb(colour)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue  # ITU-R BT.709
    if luminance <= MAX_TEXT_LUMINANCE:
        return colour
    share = MAX_TEXT_LUMINANCE / luminance
    return to_hex((share * red, share * green, share * blue))


def label_ends(ax: Axes, ends: Sequence[tuple[float, str, str]], height: float) -> None:
    """Write the names of curves to the right of a panel, beside their last values.

    Names of close values move apart, and a thin line leads to the value. The limits of the y axis
    must be final.

    Args:
        ax: The panel.
        ends: The last value of each curve, its name and its colour.
        height: Of the figure, inches.
    """
    if not ends:
        return
    gap = LABEL_POINTS / (height * 72 * PANEL_SHARE)
    to_axes = ax.transData + ax.transAxes.inverted()
    places = []
    for value, name, color in ends:
        places.append((to_axes.transform((ax.get_xlim()[1], value))[1], name, color))
    places.sort()
    heights = [y for y, _, _ in places]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    # From the top of the panel downwards, if the names need more room than there is above.
    heights[-1] = min(heights[-1], 1.0)
    for i in reversed(range(len(heights) - 1)):
        heights[i] = min(heights[i], heights[i + 1] - gap)
    for (y, name, color), label_y in zip(places, heights, strict=True):
        ax.annotate(
            name,
            (1.0, y),
            xytext=(1.05, label_y),
            xycoords="axes fraction",
            fontsize=7,
            va="center",
            color=text_colour(color),
            annotation_clip=False,
            # relpos: the line ends at the left edge of the name, not at its middle.
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkB": 0,
            },
        )


def bound_handles(is_drawn: bool, label: str = "upper bound") -> list[Line2D]:
    """Return the entry of a legend for hollow points; nothing if none is drawn."""
    if not is_drawn:
        return []
    return [entry(label, color=GREY, marker="o", linestyle="none", **HOLLOW)]


def series_handles(every: Sequence[Series], drawn: Iterable[Series]) -> list[Line2D]:
    """Return the entries of a legend for drawn series; the place in `every` gives the style."""
    handles = []
    for series in drawn:
        style = curve_style(every.index(series))
        handles.append(entry(legend(series), linewidth=1, **style))
    return handles


def curve_handles(names: Iterable[str], **style: Any) -> list[Line2D]:
    """Return the entries of a legend for curves in the order of their styles."""
    return [entry(name, **curve_style(i), **style) for i, name in enumerate(names)]


def series_with_rows(study: Analysis, rows: pd.DataFrame) -> list[Series]:
    """Return the series of a study that have a row in a table."""
    return [series for series in study.record.series if len(rows_of(series, rows))]


def labels_of(handles: Iterable[Artist]) -> list[str]:
    """Return the texts of the entries of a legend."""
    return [str(handle.get_label()) for handle in handles]


def legend_above(figure: Figure, handles: Sequence[Artist]) -> None:
    """Put a legend above all panels; the figure grows by the lines that it needs."""
    labels = labels_of(handles)
    characters = np.array(list(map(len, labels))) + LEGEND_MARKER_CHARACTERS
    widths = LEGEND_CHARACTER_INCHES * characters
    # On average a character is narrower than that, so a line may be somewhat longer.
    fits_one_line = widths.sum() <= 1.1 * figure.get_figwidth()
    if fits_one_line and "," not in "".join(labels):
        columns = len(labels)
    else:
        columns = max(1, int(figure.get_figwidth() / widths.max()))
    lines = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE_INCHES * (lines - 1))
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=columns,
        columnspacing=1.2,
        handlelength=1.5,
    )


def wrapped(text: str, width: int) -> str:
    """Return the name of a series on several lines; a key stays beside its value."""
    return "\n".join(wrap(text, width, indent=""))


# Caption and layout


def caption(figure: Figure, studies: Sequence[Analysis]) -> None:
    """Write below a figure which study it shows: name, workload and goal. The figure grows by it.

    The layout of the figure is final after it. A figure of a paper or of slides has no caption.
    """
    without_math(figure)  # before the first drawing, which parses formulas
    separate_axes(figure)
    place_empty_labels(figure)
    lay_out(figure)
    if not current_page_size().has_caption:
        return
    wide, high = figure.get_size_inches()
    text = _caption_text([study.record for study in studies])
    lines = textwrap.wrap(text, int(wide / CAPTION_CHARACTER_INCHES))
    foot = 0.04 + 0.1 * len(lines)
    figure.set_size_inches(wide, high + foot)
    _lift(figure, high / (high + foot))
    foot_line = figure.text(
        0.006, 0.02 / (high + foot), "\n".join(lines), fontsize=6, color=GREY, va="bottom"
    )
    foot_line.set_parse_math(False)


def _caption_text(records: Sequence[StudyRecord]) -> str:
    """Return the names of studies, then the workload and the goal if they have them in common."""
    names = set()
    workloads = set()
    goals = set()
    for record in records:
        names.add(record.name)
        workloads.add(record.workload)
        goals.add(str(record.goal))
    common = []
    if len(workloads) == 1:
        common += workloads
    if len(goals) == 1:
        common += goals
    text = ", ".join(sorted(names))
    if common:
        text += f": {'; '.join(common)}"
    return text


def separate_axes(figure: Figure) -> None:
    """End the sharing of axes in a finished figure; the limits of each panel do not change.

    matplotlib visits all panels of a group whenever it needs the limits of one. With 300 panels
    these visits take most of the time of a drawing.
    """
    for ax in figure.axes:
        # Autoscales the entire group, if that is still due.
        ax.get_xlim()
        ax.get_ylim()
    for ax in figure.axes:
        for group in ax._shared_axes.values():  # pyright: ignore[reportAttributeAccessIssue]
            group.remove(ax)


def place_empty_labels(figure: Figure) -> None:
    """Give each empty axis label a fixed place; else each drawing measures ticks to find one."""
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if not axis.get_label_text():
                axis.set_label_coords(0.5, 0.5)


def lay_out(figure: Figure) -> None:
    """Compute the final layout; `savefig` in the style `LAID_OUT` draws once and moves nothing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    with matplotlib.rc_context(LAID_OUT):
        figure.set_layout_engine(None)


def _lifted(place: BboxBase, share: float) -> tuple[float, float, float, float]:
    """Return a place in the upper part of a figure, this share of its height."""
    y = 1 - share + share * place.y0
    return (place.x0, y, place.width, share * place.height)


def _lift(figure: Figure, share: float) -> None:
    """Move all of a figure into the upper part of it, this share of its height."""
    for ax in figure.axes:
        ax.set_position(_lifted(ax.get_position(), share))
    to_figure = figure.transFigure.inverted()
    for each in figure.legends:
        place = each.get_bbox_to_anchor().transformed(to_figure)
        each.set_bbox_to_anchor(_lifted(place, share))
    for name in ("_supxlabel", "_supylabel"):
        text = getattr(figure, name)
        if text is not None:
            text.set_y(1 - share + share * text.get_position()[1])
