"""The noise of the gradient along training against its squared norm, with a line through it."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.gradient_noise import NoiseLaw, line_rows
from lit_dps.analysis.tables import legend, rows_of, significant
from lit_dps.core.record import setting
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "noise", ""
CAPTION = "noise of the gradient along training against its squared norm"


def by_default(study: Analysis) -> bool:
    """Return True if the study was asked to measure the noise."""
    return bool(setting(study.record.config, "smoothness.noise"))


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    if len(study.noise_readings):
        return None
    if by_default(study):
        return "no noise along training (no trial without divergence was measured)"
    return "no noise along training (smoothness.noise is not set)"


def notes(study: Analysis) -> list[str]:
    """Return no notes."""
    return []


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `gradient_noise.reading_rows`."""
    return study.noise_readings


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return a panel per series: measurements by batch size, and the line through all of them."""
    every = look.series_with_rows(study, rows)
    figure = new_figure(2.8 * len(every) + 0.4, 2.8)
    panels = figure.subplots(1, len(every), squeeze=False, sharey=True)[0]
    for ax, series in zip(panels, every, strict=True):
        _draw_series(ax, rows_of(series, rows), study.noise_law_of_series.get(series))
        ax.set_title(legend(series))
    look.log_values_axis(panels[0], rows["noise"], 1.3, 1.3)
    panels[0].set_ylabel("noise: trace of the covariance\nof the gradient of an example")
    return figure


def _draw_series(ax: Axes, rows: pd.DataFrame, law: NoiseLaw | None) -> None:
    """Draw the measurements of a series, and its line if it has one."""
    for i, (batch_size, measured) in enumerate(rows.groupby("batch_size")):
        ax.plot(
            measured["squared_gradient"],
            measured["noise"],
            label=f"B = {batch_size}",
            linestyle="none",
            markersize=2.5,
            alpha=0.6,
            **look.curve_style(i),
        )
    if law is not None:
        line = line_rows(law, rows["squared_gradient"])
        ax.plot(
            line["squared_gradient"], line["noise"], color=look.GREY, zorder=1, label=_law_text(law)
        )
    look.log_values_axis(ax, rows["squared_gradient"], 1.3, 1.3, axis="x")
    ax.set_xlabel("squared norm of the gradient")
    ax.legend(fontsize=6, loc="upper left")  # the noise rises with the gradient


def _law_text(law: NoiseLaw) -> str:
    """Return the constants of a line, as far as they are resolved."""
    variance = factor = "not resolved"
    if law.is_variance_significant:
        variance = significant(law.variance)
    if law.is_factor_significant:
        factor = significant(law.factor)
    return f"σ² {variance}, M {factor}"
