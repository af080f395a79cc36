"""K* of local SGD against the length of a round, and against communications."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.local_sgd import KEY
from lit_dps.analysis.tables import k_star_axis, legend, rows_of
from lit_dps.core.trial import Series
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "local", ""
CAPTION = "K* against the local steps of a round, and against communications"
NO_COMMUNICATION = 0.5  # where no communication at all is on the logarithmic axis


def by_default(study: Analysis) -> bool:
    """Return True if the length of a round is an axis of the grid."""
    return KEY in study.record.axes


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    if _series_with_points(study):
        return None
    return "no K* of local SGD yet"


def _series_with_points(study: Analysis) -> list[Series]:
    """Return the series that have a K*, each once."""
    every = {}
    for curve in study.local_curves:
        if curve.points:
            every[curve.series] = None
    return list(every)


def notes(study: Analysis) -> list[str]:
    """Return which cells the figure lacks."""
    cells = []
    for curve in study.local_curves:
        cells += [
            f"B={curve.batch_size} {curve.series} H={steps}" for steps in curve.without_k_star
        ]
    if not cells:
        return []
    too_few = study.record.statistic.too_few
    return [f"The local figure lacks cells in which {too_few} met the goal: {', '.join(cells)}."]


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `local_sgd.local_rows`."""
    return study.local_points


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return two panels per series: K* against H, and against communications.

    They have a curve per batch size. Upper bounds are hollow.
    """
    every = _series_with_points(study)
    figure = new_figure(6.2, 2.4 * len(every))
    panels = figure.subplots(len(every), 2, squeeze=False)
    for (by_length, by_communications), series in zip(panels, every, strict=True):
        for i, (batch_size, cells) in enumerate(rows_of(series, rows).groupby("batch_size")):
            style = look.curve_style(i)
            is_bound = cells["floor"] == 1
            communications = cells["communications"].astype(float).clip(lower=NO_COMMUNICATION)
            for ax, x in ((by_length, cells["local_steps"]), (by_communications, communications)):
                ax.plot(x, cells["k_star"], label=f"B = {batch_size}", **style)
                look.bounds(ax, x[is_bound], cells["k_star"][is_bound], **style)
        for ax in (by_length, by_communications):
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(_tick)
            ax.set_title(legend(series))
            look.log_values_axis(ax, rows["k_star"])
        look.label_ends(
            by_length, _last_values(rows_of(series, rows)), figure.get_figheight() / len(every)
        )
        by_length.set_xlabel("local steps of a round: H")
        by_length.set_ylabel(look.in_two_lines(k_star_axis(study.record.statistic)))
        by_communications.set_xlabel("communications until the goal")
    return figure


def _last_values(rows: pd.DataFrame) -> list[tuple[float, str, str]]:
    """Return K* at the longest rounds, name and colour of each batch size."""
    ends = []
    for i, (batch_size, cells) in enumerate(rows.groupby("batch_size")):
        longest = cells.loc[cells["local_steps"].idxmax()]
        ends.append((longest["k_star"], f"B = {batch_size}", look.curve_style(i)["color"]))
    return ends


def _tick(x: float, position: float = 0) -> str:
    """Return a tick of an axis of communications."""
    if x == NO_COMMUNICATION:
        return "none"
    return look.tick(x)
