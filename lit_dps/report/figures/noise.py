"""The noise of the gradient along training against the squared gradient, with the line through
it."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.gradient_noise import noise_law, readings_of
from lit_dps.analysis.tables import columns_of, frame, legend, rows_of, significant
from lit_dps.core.record import setting
from lit_dps.core.trial import Series

NAME, PAPER = "noise", ""
CAPTION = "noise of the gradient along training against its squared norm"
POINTS = 64  # of a line


def by_default(study: Analysis) -> bool:
    """Whether it was asked for."""
    return bool(setting(study.record.config, "smoothness.noise"))


def missing(study: Analysis) -> str | None:
    """Why there is nothing to draw, if so."""
    if any(readings_of(result) for results in study.record.results.values() for result in results):
        return None
    if setting(study.record.config, "smoothness.noise"):
        return "no noise along training (no trial without divergence was measured)"
    return "no noise along training (smoothness.noise is not set)"


def notes(study: Analysis) -> list[str]:
    return []


def rows(study: Analysis) -> pd.DataFrame:
    """Every measurement, by series, batch size, point, then step.

    Columns: sparsity and further axes, batch_size [examples], point, squared_gradient, noise.
    """
    found = []
    for cell in study.record.cells:
        for result in study.record.results[cell]:
            names = {
                **columns_of(cell.series),
                "batch_size": cell.batch_size,
                "point": result.trial.point,
            }
            for x, y in zip(*(readings_of(result) or ((), ())), strict=True):
                found.append({**names, "squared_gradient": x, "noise": y})
    return frame(found)


def tables(study: Analysis) -> Mapping[str, pd.DataFrame]:
    return {NAME: rows(study), "noise-laws": study.noise_laws}


def figures(tables: Mapping[str, pd.DataFrame], study: Analysis):
    yield NAME, draw(tables[NAME], study)


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """A panel a series: each measurement by batch size, and the line through those of all its
    trials."""
    every = [series for series in study.record.series if len(rows_of(series, rows))]
    figure = Figure(figsize=(2.8 * len(every) + 0.4, 2.8))
    axes = figure.subplots(1, len(every), squeeze=False, sharey=True)[0]
    for ax, series in zip(axes, every, strict=True):
        part = rows_of(series, rows)
        for i, (batch_size, measured) in enumerate(part.groupby("batch_size")):
            style = look.curve_style(i) | {"markersize": 2.5, "linestyle": "none", "alpha": 0.6}
            ax.plot(
                measured["squared_gradient"], measured["noise"], label=f"B = {batch_size}", **style
            )
        _line(ax, part, study, series)
        ax.set_xscale("log")
        ax.set_yscale("log")
        look.plain_ticks(ax.xaxis)
        look.plain_ticks(ax.yaxis)
        ax.set_title(legend(series))
        ax.set_xlabel("squared norm of the gradient")
        ax.legend(fontsize=6)
    axes[0].set_ylabel("noise: trace of the covariance\nof the gradient of an example")
    return figure


def _line(ax, part: pd.DataFrame, study: Analysis, series: Series) -> None:
    trials = [
        r for c, results in study.record.results.items() if c.series == series for r in results
    ]
    law = noise_law([found for result in trials if (found := readings_of(result)) is not None])
    if law is None:
        return
    x = np.geomspace(part["squared_gradient"].min(), part["squared_gradient"].max(), POINTS)
    fit = law.at(x)
    variance = significant(law.variance) if law.variance_resolved else "not resolved"
    factor = significant(law.factor) if law.factor_resolved else "not resolved"
    label = f"σ² {variance}, M {factor}"
    ax.plot(x[fit > 0], fit[fit > 0], color=look.GREY, zorder=1, label=label)
