"""The figure of advice: steps to goal with the law's interval, and the time of a run by number of devices."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from lit_dps.analysis.figures.style import BATCH_SIZE, STYLE, batch_size_axis, curve_style
from lit_dps.analysis.fit import AT_LEAST, AT_MOST
from lit_dps.analysis.law import Law

SHAPES = {0: ("o", "measured"), AT_LEAST: ("^", "not reached by then"), AT_MOST: ("v", "at most")}


@matplotlib.rc_context(STYLE)
def draw_advice(table: pd.DataFrame, law: Law) -> Figure:
    """Draws the table of `lit_dps.advice.answer`, and what its law was fitted to.

    Args:
        table: With the columns batch_size, devices, steps, hours, each of the last two with _low and _high.
        law: Whose observations are shown.
    """
    figure = Figure(figsize=(7, 3))
    left, right = figure.subplots(1, 2)
    for bound, (marker, label) in SHAPES.items():
        shown = [o for o in law.observations if o.bound == bound]
        if shown:
            sizes, steps = [o.batch_size for o in shown], [o.steps for o in shown]
            left.plot(sizes, steps, marker, color="black", linestyle="none", label=label, zorder=3)
    steps = table.drop_duplicates("batch_size")
    if len(steps):
        left.plot(
            steps["batch_size"], steps["steps"], color=curve_style(0)["color"], label="expected, with 95 % limits"
        )
        limits = steps["steps_low"], steps["steps_high"]
        left.fill_between(steps["batch_size"], *limits, color=curve_style(0)["color"], alpha=0.2, linewidth=0)
    for i, (devices, part) in enumerate(table.groupby("devices")):
        style = curve_style(i)
        right.plot(part["batch_size"], part["hours"], **style, label=f"{devices} device{'s' * (devices > 1)}")
        limits = part["hours_low"], part["hours_high"]
        right.fill_between(part["batch_size"], *limits, color=style["color"], alpha=0.15, linewidth=0)
    sizes = sorted({*table["batch_size"], *(int(o.batch_size) for o in law.observations)}) or [1]
    for axes, text in ((left, "steps to goal"), (right, "hours to goal")):
        batch_size_axis(axes, sizes)
        axes.set(yscale="log", xlabel=BATCH_SIZE, ylabel=text)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    return figure
