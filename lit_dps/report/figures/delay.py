"""K* against the delay of the gradients, and batch size and delay on one axis."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.delay import KEY, stable_share
from lit_dps.analysis.tables import columns_of, frame, legend, rows_of

NAME, PAPER, AXIS = "delay", "", KEY
CAPTION = "K* against the delay of the gradients by batch size, and all on one axis"
POINTS = 64  # of a curve


def missing(study: Analysis) -> str | None:
    """Why there is nothing to draw, if so."""
    return (
        None if any(law.fit for law in study.delay_laws) else "no law of batch size and delay yet"
    )


def notes(study: Analysis) -> list[str]:
    """How far the law misses the data where it does."""
    return [
        f"{law.series}: the joint law of batch size and delay misses K* by "
        f"{100 * law.misfit:.0f} % (root mean square)."
        for law in study.delay_laws
        if law.fit and law.misfit > 0.1
    ]


def rows(study: Analysis) -> pd.DataFrame:
    """K* of each cell beyond its first check.

    Columns: sparsity and further axes, batch_size [examples], delay [steps], k_star [steps], law
    [steps]; in_flight [examples], B / s with s = sin(pi / (2 (2 tau + 1))), and scaled [steps], s
    K*, in which the law is one curve.
    """
    found = []
    for law in study.delay_laws:
        for (batch_size, delay), k_star in law.k_star.items():
            share = stable_share(delay)
            found.append(
                {
                    **columns_of(law.series),
                    "batch_size": batch_size,
                    "delay": delay,
                    "k_star": k_star,
                    "law": law.steps(batch_size, delay) if law.fit else None,
                    "in_flight": batch_size / share,
                    "scaled": k_star * share,
                }
            )
    return frame(found)


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Two panels a series: K* against tau + 1 by batch size, with the law; and s K* against B / s,
    where it is one."""
    laws = [law for law in study.delay_laws if law.fit]
    figure = Figure(figsize=(6.2, 2.4 * len(laws)))
    axes = figure.subplots(len(laws), 2, squeeze=False)
    for (left, right), law in zip(axes, laws, strict=True):
        part = rows_of(law.series, rows)
        ends = np.geomspace(1, max(law.delays) + 1, POINTS)
        for i, (batch_size, cells) in enumerate(part.groupby("batch_size")):
            style = look.curve_style(i)
            left.plot(
                cells["delay"] + 1,
                cells["k_star"],
                linestyle="none",
                label=f"B = {batch_size}",
                **style,
            )
            left.plot(ends, [law.steps(batch_size, end - 1) for end in ends], color=style["color"])
        for i, (delay, cells) in enumerate(part.groupby("delay")):
            style = {**look.curve_style(i), "linestyle": "none", "label": f"delay {delay}"}
            right.plot(cells["in_flight"], cells["scaled"], **style)
        batch = np.geomspace(part["in_flight"].min(), part["in_flight"].max(), POINTS)
        left.plot([], [], color=look.GREY, label="law")
        right.plot(batch, law.fit.steps(batch), color=look.GREY, zorder=1, label="law")
        for ax in (left, right):
            ax.set_xscale("log", base=2)
            look.plain_ticks(ax.xaxis)
            ax.legend()
            ax.set_title(legend(law.series))
        look.log_values_axis(left, part["k_star"])
        look.log_values_axis(right, part["scaled"])
        left.set_xlabel("gradients in flight: delay + 1 [steps]")
        left.set_ylabel(look.K_STAR)
        right.set_xlabel("B / s(delay) [examples]")
        right.set_ylabel("s(delay) K* [steps]")
    return figure
