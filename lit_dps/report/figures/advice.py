"""The figure of advice: steps to goal and time by batch size, and what a faster training costs."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from lit_dps.analysis.law_fit import AT_LEAST, AT_MOST
from lit_dps.analysis.observations import Observation
from lit_dps.report.figures.style import (
    BATCH_SIZE,
    GREY,
    STYLE,
    batch_size_axis,
    curve_style,
    legend_above,
)

SHAPES = {0: ("o", "measured"), AT_LEAST: ("^", "not reached by then"), AT_MOST: ("v", "at most")}
UNITS = (
    ("s", 3600.0, 2 / 60),
    ("min", 60.0, 2.0),
    ("h", 1.0, 48.0),
    ("days", 1 / 24, float("inf")),
)
SURE = (
    "fitted",
    "law",
    "measured",
    "branched",
)  # of steps and step times: what is neither extrapolated nor predicted


@matplotlib.rc_context(STYLE)
def draw_advice(
    table: pd.DataFrame,
    observations: Sequence[Observation] = (),
    best: dict[str, object] | None = None,
    price: float | None = None,
    limits: str = "95 % limits",
) -> Figure:
    """Draws the table of `lit_dps.advice.answer`: with its limits, hollow where it is extrapolated
    or predicted.

    Args:
        table: As there.
        observations: What its steps were fitted to.
        best: The recommended row, which gets a star.
        price: Of a device-hour; without one the cost is in device-hours.
        limits: What its limits are.
    """
    figure = Figure(figsize=(10, 3.3))
    left, middle, right = figure.subplots(1, 3)
    unit, factor = _unit(table)
    _steps(left, table, observations)
    colours = {}
    for i, (devices, part) in enumerate(table.groupby("devices")):
        colours[devices] = style = curve_style(i)
        x, y = part["batch_size"], factor * part["hours"]
        middle.plot(x, y, color=style["color"])
        _points(middle, part, x, y, style)
        ends = factor * part["hours_low"], factor * part["hours_high"]
        middle.fill_between(x, *ends, color=style["color"], alpha=0.15, linewidth=0)
    _front(right, table, colours, unit, factor, price)
    sizes = sorted({*table["batch_size"], *(int(o.batch_size) for o in observations)}) or [1]
    for axes, text in ((left, "steps to goal"), (middle, f"time to goal [{unit}]")):
        batch_size_axis(axes, sizes)
        axes.set(yscale="log", xlabel=BATCH_SIZE, ylabel=text)
        _few_ticks(axes.yaxis)
    if best is not None:
        cost = best["device_hours"] if price is None else best["cost"]
        for axes, place in (
            (middle, (best["batch_size"], factor * best["hours"])),
            (right, (factor * best["hours"], cost)),
        ):
            axes.plot(*place, "*", color="black", markersize=11, markeredgecolor="white", zorder=5)
    legend_above(figure, _handles(colours, observations, table, best, limits))
    return figure


def _steps(axes: Axes, table: pd.DataFrame, observations: Sequence[Observation]) -> None:
    for bound, (marker, _) in SHAPES.items():
        shown = [o for o in observations if o.bound == bound]
        axes.plot(
            [o.batch_size for o in shown], [o.steps for o in shown], marker, color="black", zorder=3
        )
    steps = table.drop_duplicates("batch_size")
    axes.plot(steps["batch_size"], steps["steps"], color=GREY)
    if _luck(table):
        axes.plot(steps["batch_size"], steps["k_star"], color=GREY, linestyle=":")
    axes.fill_between(
        steps["batch_size"],
        steps["steps_low"],
        steps["steps_high"],
        color=GREY,
        alpha=0.2,
        linewidth=0,
    )


def _luck(table: pd.DataFrame) -> bool:
    """Whether steps are those of one run, and K, the least of a probe's trials, another number."""
    return "k_star" in table and bool((table["k_star"] != table["steps"]).any())


def _front(
    axes: Axes, table: pd.DataFrame, colours: dict, unit: str, factor: float, price: float | None
) -> None:
    """Time against cost: every row, and the Pareto front with its limits."""
    name = "device_hours" if price is None else "cost"
    for devices, part in table.groupby("devices"):
        style = colours[devices]
        other, front = part[~part["pareto"]], part[part["pareto"]]
        _points(axes, other, factor * other["hours"], other[name], style, alpha=0.3)
        x, y = factor * front["hours"], front[name]
        for values, ends in (
            (x, (f"hours{end}" for end in ("_low", "_high"))),
            (y, (f"{name}{end}" for end in ("_low", "_high"))),
        ):
            scale = factor if values is x else 1.0
            low, high = (scale * front[end] for end in ends)
            error = {"xerr" if values is x else "yerr": [values - low, high - values]}
            axes.errorbar(
                x, y, **error, fmt="none", ecolor=style["color"], elinewidth=0.7, alpha=0.6
            )
        _points(axes, front, x, y, style)
        for size, *place in zip(front["batch_size"], x, y, strict=True):
            # on this side of a front there are neither points nor its own line
            axes.annotate(
                f"{size}",
                place,
                xytext=(-4, -4),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=6,
            )
    line = table[table["pareto"]].sort_values("hours")
    axes.plot(
        factor * line["hours"], line[name], color=GREY, linestyle="--", linewidth=0.8, zorder=1
    )
    cost = "cost [device-hours]" if price is None else f"cost [at {price:g} a device-hour]"
    axes.set(xscale="log", yscale="log", xlabel=f"time to goal [{unit}]", ylabel=cost)
    _few_ticks(axes.xaxis)
    _few_ticks(axes.yaxis)


def _few_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5, fewer of them over several decades, written out."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _points(
    axes: Axes, part: pd.DataFrame, x: pd.Series, y: pd.Series, style: dict, alpha: float = 1.0
) -> None:
    """Markers, hollow where steps or step times are extrapolated or predicted."""
    sure = part["steps_known"].isin(SURE) & part["step_known"].isin(SURE)
    for rows, face in ((sure, style["color"]), (~sure, "white")):
        axes.plot(x[rows], y[rows], linestyle="none", **style, markerfacecolor=face, alpha=alpha)


def _handles(
    colours: dict, observations: Sequence[Observation], table: pd.DataFrame, best, limits: str
) -> list[Line2D]:
    seen = {o.bound for o in observations}
    handles = [
        Line2D([], [], linestyle="none", marker=marker, color="black", label=label)
        for bound, (marker, label) in SHAPES.items()
        if bound in seen
    ]
    handles.append(Line2D([], [], color=GREY, label=f"expected, with {limits}"))
    if _luck(table):
        handles.append(Line2D([], [], color=GREY, linestyle=":", label="K, the best of a probe"))
    handles += [
        Line2D([], [], **style, label=f"{devices} device{'s' * (devices > 1)}")
        for devices, style in colours.items()
    ]
    if not (table["steps_known"].isin(SURE) & table["step_known"].isin(SURE)).all():
        hollow = {"color": GREY, "markerfacecolor": "white", "linestyle": "none", "marker": "o"}
        handles.append(Line2D([], [], **hollow, label="extrapolated or predicted"))
    handles.append(Line2D([], [], color=GREY, linestyle="--", label="Pareto front"))
    if best is not None:
        handles.append(
            Line2D([], [], color="black", marker="*", linestyle="none", label="recommended")
        )
    return handles


def _unit(table: pd.DataFrame) -> tuple[str, float]:
    """The unit of time that suits the fastest row, and how many of it an hour has."""
    least = float(table["hours"].min()) if len(table) else 0.0
    return next((name, factor) for name, factor, most in UNITS if least < most)
