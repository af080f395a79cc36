"""A metaparameter on an axis of a figure: its values, label and ticks, and the searched range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullLocator

import lit_dps.report.figures.style as look
from lit_dps.analysis.tables import numbers
from lit_dps.core.search_space import Box, Choices
from lit_dps.core.trial import text_of

MARGIN = 0.08  # beyond the ends of a range, as a share of its length
EDGE: dict[str, Any] = {"linewidth": 0.6, "zorder": 1}
# Multiples of powers of ten that have ticks, by the decades that an axis has at least.
TICKS = ((2.0, (1,)), (1.0, (1, 3)), (0.5, (1, 2, 5)), (0.0, (1, 1.5, 2, 3, 5, 7)))


def axis_values(values: Iterable, box: Box) -> np.ndarray:
    """Return where values of a metaparameter are on its axis; missing values are nan.

    On a reverse_log scale the axis shows 1 - value, of choices the position.
    """
    if isinstance(box, Choices):
        positions = dict(zip(box.choices, range(len(box.choices)), strict=True))
        return numbers(pd.Series(list(values), dtype=object).map(positions))
    as_numbers = numbers(pd.Series(list(values), dtype=object))
    if box.scale == "reverse_log":
        return 1 - as_numbers
    return as_numbers


def axis_label(name: str, box: Box) -> str:
    """Return the label of an axis: the name, whether it shows 1 - value, whether it is log."""
    if isinstance(box, Choices) or box.scale == "linear":
        return name
    if box.scale == "log":
        return f"{name} (log)"
    return f"1 - {name} (log, reversed)"


def draw_box(ax: Axes, boxes: Sequence[Box]) -> None:
    """Draw the ends of the searched ranges: a rectangle, or lines beside an axis of choices."""
    ends = list(map(_ends, boxes))
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        x_low, x_high = ends[0]
        y_low, y_high = ends[1]
        width = x_high - x_low
        height = y_high - y_low
        ax.add_patch(
            Rectangle((x_low, y_low), width, height, fill=False, edgecolor=look.GREY, **EDGE)
        )
        return
    for of_axis, draw_line in zip(ends, (ax.axvline, ax.axhline), strict=False):
        for end in of_axis or ():
            draw_line(end, color=look.GREY, **EDGE)


def _ends(box: Box) -> tuple[float, float] | None:
    """Return both ends of a range on its axis; None for choices, which have none."""
    if isinstance(box, Choices):
        return None
    low, high = axis_values([box.low, box.high], box)
    return float(low), float(high)


def range_axis(axis: Axis, box: Box) -> None:
    """Set an axis to a searched range and a margin, on its scale; choices are side by side.

    An axis of reverse_log is reversed, so that values still increase.
    """
    if isinstance(box, Choices):
        _set_limits(axis, -0.5, len(box.choices) - 0.5)
        axis.set_ticks(range(len(box.choices)), list(map(text_of, box.choices)))
        return
    low, high = axis_values([box.low, box.high], box)
    if box.scale == "linear":
        room = MARGIN * (high - low)
        _set_limits(axis, low - room, high + room)
        look.few_ticks(axis, box.integer)
        return
    set_scale = axis.axes.set_xscale if isinstance(axis, XAxis) else axis.axes.set_yscale
    set_scale("log")
    room = (high / low) ** MARGIN
    _set_limits(axis, low / room, high * room)
    axis.set_minor_locator(NullLocator())
    decades = abs(math.log10(high / low))
    axis.set_major_locator(LogLocator(subs=_multiples(decades), numticks=4))
    axis.set_major_formatter(look.tick)


def _multiples(decades: float) -> Sequence[float]:
    """Return the multiples of powers of ten that have ticks on an axis of some decades."""
    for least, multiples in TICKS:
        if decades >= least:
            return multiples
    raise AssertionError("an axis has at least 0 decades")


def _set_limits(axis: Axis, low: float, high: float) -> None:
    """Set the limits of an axis."""
    set_limits = axis.axes.set_xlim if isinstance(axis, XAxis) else axis.axes.set_ylim
    set_limits(low, high)
