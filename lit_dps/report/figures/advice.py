"""The figure of advice: steps and time to the goal by batch size, and what less time costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

import lit_dps.report.figures.style as look
from lit_dps.analysis.observations import AT_LEAST, AT_MOST, Observation
from lit_dps.analysis.tables import numbers, where
from lit_dps.core.text import counted, duration_unit

# Marker and meaning of an observation, by its bound.
MARKERS = {0: ("o", "measured"), AT_LEAST: ("^", "not reached by then"), AT_MOST: ("v", "at most")}
# How steps and step times are known if they are neither extrapolated nor predicted.
CERTAIN = ("fitted", "law", "measured", "branched")
STAR: dict[str, Any] = {"color": "black", "marker": "*"}
FRONT: dict[str, Any] = {"color": look.GREY, "linestyle": "--"}


class _Unit(NamedTuple):
    """A unit of time: its name on an axis, and its number in an hour."""

    name: str
    per_hour: float


@matplotlib.rc_context(look.STYLE)
def draw_advice(
    table: pd.DataFrame,
    observations: Sequence[Observation] = (),
    best: dict[str, Any] | None = None,
    price: float | None = None,
    limits: str = "95 % limits",
) -> Figure:
    """Return three panels of the table of `lit_dps.advice.answer`, with its limits.

    Points are hollow where they are extrapolated or predicted.

    Args:
        table: The table.
        observations: What its steps were fitted to.
        best: The recommended row, which gets a star.
        price: Of a device-hour; without one the cost is in device-hours.
        limits: What its limits are.
    """
    figure = Figure(figsize=(10, 3.3))
    steps_panel = figure.add_subplot(1, 3, 1)
    time_panel = figure.add_subplot(1, 3, 2)
    cost_panel = figure.add_subplot(1, 3, 3)
    drawing = _Drawing(table, _unit(table), price)
    _draw_steps(steps_panel, table, observations)
    drawing.draw_times(time_panel)
    drawing.draw_costs(cost_panel)
    sizes = set(table["batch_size"])
    for each in observations:
        sizes.add(int(each.batch_size))
    for ax, label in ((steps_panel, "steps to goal"), (time_panel, drawing.time_label)):
        look.batch_size_axis(ax, sorted(sizes) or [1])
        ax.set(yscale="log", xlabel=look.BATCH_SIZE, ylabel=label)
        _few_ticks(ax.yaxis)
    if best is not None:
        hours = drawing.unit.per_hour * best["hours"]
        star = {"markersize": 11, "markeredgecolor": "white", "zorder": 5, **STAR}
        time_panel.plot(best["batch_size"], hours, **star)
        cost_panel.plot(hours, best[drawing.cost], **star)
    look.legend_above(figure, _handles(drawing, observations, best is not None, limits))
    return figure


def _unit(table: pd.DataFrame) -> _Unit:
    """Return the unit of time that suits the fastest row."""
    seconds = 3600 * min(table["hours"], default=0.0)
    # The axis has no unit below a second.
    name, size = duration_unit(max(seconds, 1.0))
    return _Unit(name, 3600 / size)


def _draw_steps(ax: Axes, table: pd.DataFrame, observations: Sequence[Observation]) -> None:
    """Draw the steps to the goal with their limits, and the observations."""
    for each in observations:
        marker, _ = MARKERS[each.bound]
        ax.plot(each.batch_size, each.k, marker, color="black", zorder=3)
    rows = table.drop_duplicates("batch_size")
    batch = rows["batch_size"]
    ax.plot(batch, rows["steps"], color=look.GREY)
    ends = rows["steps_low"], rows["steps_high"]
    ax.fill_between(batch, *ends, color=look.GREY, alpha=0.2, linewidth=0)


def _is_certain(rows: pd.DataFrame) -> np.ndarray:
    """Return whether each row (n,) is neither extrapolated nor predicted."""
    certain = list(CERTAIN)
    return (
        rows["steps_known"].isin(certain).to_numpy() & rows["step_known"].isin(certain).to_numpy()
    )


@dataclass(frozen=True)
class _Drawing:
    """What the panels of time and cost have in common.

    Attributes:
        table: The table of the answer.
        unit: The unit of time.
        price: Of a device-hour; None for costs in device-hours.
    """

    table: pd.DataFrame
    unit: _Unit
    price: float | None

    @property
    def cost(self) -> str:
        """The column of costs."""
        return "device_hours" if self.price is None else "cost"

    @property
    def time_label(self) -> str:
        """The label of an axis of times."""
        return f"time to goal [{self.unit.name}]"

    @property
    def styles(self) -> dict[int, dict[str, Any]]:
        """Colour and marker of each number of devices."""
        devices = sorted(set(self.table["devices"]))
        return {number: look.curve_style(i) for i, number in enumerate(devices)}

    def times(self, rows: pd.DataFrame, end: str = "") -> np.ndarray:
        """Return the times of some rows (n,), or an end of their limits."""
        return self.unit.per_hour * numbers(rows[f"hours{end}"])

    def draw_times(self, ax: Axes) -> None:
        """Draw the time to the goal against batch size, a curve for each number of devices."""
        for devices, style in self.styles.items():
            rows = where(self.table, devices=devices)
            batch = numbers(rows["batch_size"])
            ax.plot(batch, self.times(rows), color=style["color"])
            _draw_points(ax, batch, self.times(rows), _is_certain(rows), style)
            low, high = self.times(rows, "_low"), self.times(rows, "_high")
            ax.fill_between(batch, low, high, color=style["color"], alpha=0.15, linewidth=0)

    def draw_costs(self, ax: Axes) -> None:
        """Draw cost against time: every row, and the Pareto front with its limits."""
        for devices, style in self.styles.items():
            rows = where(self.table, devices=devices)
            others = where(rows, pareto=False)
            cost = numbers(others[self.cost])
            _draw_points(ax, self.times(others), cost, _is_certain(others), style, alpha=0.3)
            self._draw_front(ax, where(rows, pareto=True), style)
        front = where(self.table, pareto=True).sort_values(by="hours")
        ax.plot(self.times(front), front[self.cost], linewidth=0.8, zorder=1, **FRONT)
        label = "cost [device-hours]"
        if self.price is not None:
            label = f"cost [at {self.price:g} a device-hour]"
        ax.set(xscale="log", yscale="log", xlabel=self.time_label, ylabel=label)
        _few_ticks(ax.xaxis)
        _few_ticks(ax.yaxis)

    def _draw_front(self, ax: Axes, front: pd.DataFrame, style: Mapping[str, Any]) -> None:
        """Draw the rows of the Pareto front of one number of devices, with their batch sizes."""
        time = self.times(front)
        cost = numbers(front[self.cost])
        bar = {"fmt": "none", "ecolor": style["color"], "elinewidth": 0.7, "alpha": 0.6}
        time_error = [time - self.times(front, "_low"), self.times(front, "_high") - time]
        ax.errorbar(time, cost, xerr=time_error, **bar)
        low, high = numbers(front[f"{self.cost}_low"]), numbers(front[f"{self.cost}_high"])
        ax.errorbar(time, cost, yerr=[cost - low, high - cost], **bar)
        _draw_points(ax, time, cost, _is_certain(front), style)
        # On this side of the front there are neither points nor its line.
        text_style = {"xytext": (-4, -4), "ha": "right", "va": "top", "fontsize": 6}
        look.write_beside(ax, time, cost, front["batch_size"], **text_style)


def _draw_points(
    ax: Axes,
    x: np.ndarray,
    y: np.ndarray,
    is_certain: np.ndarray,
    style: Mapping[str, Any],
    alpha: float = 1.0,
) -> None:
    """Draw markers, hollow where they are not certain."""
    for shown, face in ((is_certain, style["color"]), (~is_certain, "white")):
        ax.plot(x[shown], y[shown], linestyle="none", markerfacecolor=face, alpha=alpha, **style)


def _few_ticks(axis: Axis) -> None:
    """Put ticks at 1, 2 and 5, over several decades at 1, written out."""
    low, high = axis.get_view_interval()
    subs = (1,)
    if high < 100 * low:
        subs = (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=subs))
    look.plain_ticks(axis)


def _handles(
    drawing: _Drawing, observations: Sequence[Observation], has_best: bool, limits: str
) -> list[Line2D]:
    """Return the entries of the legend."""
    bounds = {each.bound for each in observations}
    handles = []
    for bound, (marker, label) in MARKERS.items():
        if bound in bounds:
            handles.append(look.entry(label, linestyle="none", marker=marker, color="black"))
    handles.append(look.entry(f"expected, with {limits}", color=look.GREY))
    for devices, style in drawing.styles.items():
        handles.append(look.entry(counted(devices, "device"), **style))
    if not _is_certain(drawing.table).all():
        hollow = {"color": look.GREY, "markerfacecolor": "white", "linestyle": "none"}
        handles.append(look.entry("extrapolated or predicted", marker="o", **hollow))
    handles.append(look.entry("Pareto front", **FRONT))
    if has_best:
        handles.append(look.entry("recommended", linestyle="none", **STAR))
    return handles
