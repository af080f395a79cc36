"""K* against the delay of the gradients, and batch size and delay on one axis."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.delay import KEY, DelayLaw, scaled_law, steps_by_delay
from lit_dps.analysis.tables import k_star_axis, legend, rows_of
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "delay", ""
CAPTION = "K* against the delay of the gradients by batch size, and all on one axis"
NOTED_MISFIT = 0.1  # a note has larger misfits


def by_default(study: Analysis) -> bool:
    """Return True if the delay is an axis of the grid."""
    return KEY in study.record.axes


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    if _fitted_laws(study):
        return None
    return "no law of batch size and delay yet"


def _fitted_laws(study: Analysis) -> list[DelayLaw]:
    """Return the laws of the series that have enough K*."""
    return [law for law in study.delay_laws if law.fit]


def notes(study: Analysis) -> list[str]:
    """Return how far the law misses the data, if it does."""
    lines = []
    for law in _fitted_laws(study):
        if law.misfit > NOTED_MISFIT:
            lines.append(
                f"{law.series}: the joint law of batch size and delay misses K* by "
                f"{100 * law.misfit:.0f} % (root mean square)."
            )
    return lines


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `delay.delay_points`."""
    return study.delay_points


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return two panels per series: K* against tau + 1 by batch size, and s K* against B / s.

    In the second panel the law is one curve.
    """
    laws = _fitted_laws(study)
    delays = sorted(set(rows["delay"]))
    figure = new_figure(6.2, 2.4 * len(laws) + 0.2)
    panels = figure.subplots(len(laws), 2, squeeze=False)
    for (by_delay, scaled), law in zip(panels, laws, strict=True):
        part = rows_of(law.series, rows)
        _draw_by_delay(by_delay, part, law)
        by_delay.set_ylabel(look.in_two_lines(k_star_axis(study.record.statistic)))
        _draw_scaled(scaled, part, law, delays)
        for ax in (by_delay, scaled):
            ax.set_xscale("log", base=2)
            look.plain_ticks(ax.xaxis)
            ax.set_title(legend(law.series))
        look.log_values_axis(by_delay, part["k_star"])
        look.log_values_axis(scaled, part["scaled"])
        look.label_ends(by_delay, _last_values(part, law), figure.get_figheight() / len(laws))
    handles = look.curve_handles(map("delay {}".format, delays), linestyle="none")
    look.legend_above(figure, [*handles, look.entry("law", color=look.GREY)])
    return figure


def _draw_by_delay(ax: Axes, rows: pd.DataFrame, law: DelayLaw) -> None:
    """Draw K* against the gradients in flight, a curve and a law for each batch size."""
    for i, (batch_size, cells) in enumerate(rows.groupby("batch_size")):
        style = look.curve_style(i)
        label = f"B = {batch_size}"
        ax.plot(cells["delay"] + 1, cells["k_star"], linestyle="none", label=label, **style)
        curve = steps_by_delay(law, batch_size)
        ax.plot(curve["gradients"], curve["k_star"], color=style["color"])
    ax.set_xlabel("gradients in flight: delay + 1 [steps]")


def _last_values(rows: pd.DataFrame, law: DelayLaw) -> list[tuple[float, str, str]]:
    """Return the law at the longest delay, name and colour of each batch size."""
    ends = []
    for i, batch_size in enumerate(sorted(set(rows["batch_size"]))):
        value = float(steps_by_delay(law, batch_size)["k_star"].iloc[-1])
        ends.append((value, f"B = {batch_size}", look.curve_style(i)["color"]))
    return ends


def _draw_scaled(ax: Axes, rows: pd.DataFrame, law: DelayLaw, delays: list[int]) -> None:
    """Draw all cells and the law on the axis on which they are one curve."""
    for delay, cells in rows.groupby("delay"):
        style = look.curve_style(delays.index(int(str(delay))))
        ax.plot(cells["in_flight"], cells["scaled"], linestyle="none", **style)
    curve = scaled_law(law, rows["in_flight"])
    ax.plot(curve["in_flight"], curve["scaled"], color=look.GREY, zorder=1)
    ax.set_xlabel("B / s(delay) [examples]")
    ax.set_ylabel("s(delay) K* [steps]")
