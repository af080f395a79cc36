"""A metaparameter on an axis of a figure: its values, label, ticks, and the ends of the box that is
searched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullLocator

import lit_dps.report.figures.style as look
from lit_dps.analysis.tables import numbers
from lit_dps.core.search_space import Box, Choices
from lit_dps.core.trial import text_of


def axis_values(values: Iterable, box: Box) -> np.ndarray:
    """Where values of a metaparameter go on its axis: on a reverse_log scale it shows 1 - value, of
    choices the place.

    A few missing values are nan.
    """
    if isinstance(box, Choices):
        return np.array(
            [box.choices.index(value) if value in box.choices else math.nan for value in values]
        )
    values = numbers(pd.Series(values, dtype=object))
    return 1 - values if box.scale == "reverse_log" else values


def axis_label(name: str, box: Box) -> str:
    """An axis's label: the name, that it shows 1 - value, and that it is logarithmic."""
    if isinstance(box, Choices):
        return name
    return {"linear": name, "log": f"{name} (log)", "reverse_log": f"1 - {name} (log, reversed)"}[
        box.scale
    ]


def draw_box(ax: Axes, boxes: Sequence[Box]) -> None:
    """The ends of the ranges that were searched; none of choices, which have none."""
    ends = [
        None if isinstance(box, Choices) else axis_values([box.low, box.high], box) for box in boxes
    ]
    line = {"color": look.GREY, "linewidth": 0.6, "zorder": 1}
    if len(ends) == 2 and all(each is not None for each in ends):
        (x, y), (width, height) = (e[0] for e in ends), (e[1] - e[0] for e in ends)
        ax.add_patch(
            Rectangle(
                (x, y), width, height, fill=False, edgecolor=look.GREY, linewidth=0.6, zorder=1
            )
        )
        return
    for each, draw_line in zip(ends, (ax.axvline, ax.axhline), strict=False):
        for end in () if each is None else each:
            draw_line(end, **line)


def range_axis(axis, box: Box) -> None:
    """An axis over a range and a little more, on its scale; reversed for reverse_log, so that
    values still increase.

    Choices stand side by side.
    """
    set_scale, set_limits = (
        getattr(axis.axes, f"set_{axis.axis_name}{what}") for what in ("scale", "lim")
    )
    if isinstance(box, Choices):
        set_limits(-0.5, len(box.choices) - 0.5)
        axis.set_ticks(range(len(box.choices)), list(map(text_of, box.choices)))
        return
    low, high = axis_values([box.low, box.high], box)
    if box.scale == "linear":
        room = 0.08 * (high - low)
        set_limits(low - room, high + room)
        look.few_ticks(axis, box.integer)
        return
    set_scale("log")
    room = (high / low) ** 0.08
    set_limits(low / room, high * room)
    axis.set_minor_locator(NullLocator())
    decades = abs(math.log10(high / low))
    if decades >= 2:
        axis.set_major_locator(LogLocator(numticks=4))
        axis.set_major_formatter(look.tick)
    else:  # powers of ten alone would be one tick or none
        subs = (1, 3) if decades >= 1 else (1, 2, 5) if decades >= 0.5 else (1, 1.5, 2, 3, 5, 7)
        axis.set_major_locator(LogLocator(subs=subs, numticks=4))
        axis.set_major_formatter(look.tick)
