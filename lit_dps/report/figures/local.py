"""K* against the length of a round of local SGD, and against the communications that it takes."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.local_sgd import KEY, curve_rows
from lit_dps.analysis.tables import legend, rows_of

NAME, PAPER, AXIS = "local", "", KEY
NONE = 0.5  # where no communication at all is drawn
CAPTION = "K* against the local steps of a round, and against communications"


def missing(study: Analysis) -> str | None:
    """Why there is nothing to draw, if so."""
    return None if any(curve.points for curve in study.local_curves) else "no K* of local SGD yet"


def notes(study: Analysis) -> list[str]:
    """Cells that the figure lacks."""
    lacking = [f"B={c.batch_size} {c.series} H={h}" for c in study.local_curves for h in c.unmet]
    return (
        [f"The local figure lacks cells in which no trial met the goal: {', '.join(lacking)}."]
        if lacking
        else []
    )


def rows(study: Analysis) -> pd.DataFrame:
    """A row a cell with a K* (`local.curve_rows`)."""
    return curve_rows(study.local_curves)


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Two panels a series: K* against H, and K* against communications, each with a curve a batch
    size.

    Points at the first check, which are upper bounds, are hollow. No communication at all is drawn
    at a half.
    """
    every = list(dict.fromkeys(curve.series for curve in study.local_curves if curve.points))
    figure = Figure(figsize=(6.2, 2.4 * len(every)))
    axes = figure.subplots(len(every), 2, squeeze=False)
    for (left, right), series in zip(axes, every, strict=True):
        for i, (batch_size, cells) in enumerate(rows_of(series, rows).groupby("batch_size")):
            style = {**look.curve_style(i), "label": f"B = {batch_size}"}
            bounds = cells[cells["floor"] == 1]
            for ax, x in (
                (left, cells["local_steps"]),
                (right, cells["communications"].astype(float).clip(lower=NONE)),
            ):
                ax.plot(x, cells["k_star"], **style)
                look.bounds(ax, x[bounds.index], bounds["k_star"], style["color"], style["marker"])
        for ax in (left, right):
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(lambda x, _: "none" if x == NONE else look.tick(x))
            ax.set_title(legend(series))
            look.log_values_axis(ax, rows["k_star"])
        left.legend()
        left.set_xlabel("local steps of a round: H")
        left.set_ylabel(look.K_STAR)
        right.set_xlabel("communications until the goal")
    return figure
