"""K* and the fitted law against batch size (Lee et al. 2021, Figures 1 and 7 to 11)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lit_dps.analysis.figures.curves as curves
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.figures.style import BATCH_SIZE, GREY, K_STAR, STYLE, batch_size_axis, log_values_axis
from lit_dps.analysis.scaling import Scaling
from lit_dps.analysis.tables import columns_of, legend, listed, rows_of, title

NAME, PAPER = "scaling", "1, 7-11"
CAPTION = "K* against batch size by sparsity (the paper's Figure 1)"


def rows(study: Analysis) -> pd.DataFrame:
    """The rows of `curve_rows` for each series of a study, with its columns first.

    They are normalised at the smallest batch size that has a K* in every series that has any (`common_batch_size`).
    """
    common, sizes = curves.common_batch_size(study.scalings.values()), study.record.batch_sizes
    found = ((series, curves.curve_rows(scaling, sizes, common)) for series, scaling in study.scalings.items())
    return pd.concat([pd.DataFrame({**columns_of(series), **curve}) for series, curve in found], ignore_index=True)


def missing(study: Analysis) -> str | None:
    """Why there is no scaling curve to draw, if so."""
    sizes = set().union(*(scaling.k_star for scaling in study.scalings.values()))
    if not sizes:
        return "no complete trial yet"
    if len(study.record.batch_sizes) == 1:
        return "one batch size only"
    return "complete trials at one batch size only" if len(sizes) == 1 else None


def notes(study: Analysis) -> list[str]:
    """Series that have no curve, and how upper bounds are drawn."""
    bare = [series for series, scaling in study.scalings.items() if not scaling.k_star]
    told = [f"no complete trial at {listed(bare)}: no curve there"] if bare else []
    return told + curves.bound_notes(study.scalings.values())


@matplotlib.rc_context(STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Each series with fit, band and perfect scaling; where there are several, all of them, and all normalised.

    Series without any K* are left out.
    """
    parts = [(i, series, rows_of(series, rows)) for i, series in enumerate(study.scalings)]
    parts = [(i, series, part) for i, series, part in parts if study.scalings[series].k_star]
    count = len(parts) + (2 if len(parts) > 1 else 0)
    columns = count if count <= 3 else min(3, math.ceil(count / 2))
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(max(2.5 * columns, 3.3), 2.2 * lines + (0.3 if count == 1 else 0)))
    axes = [figure.add_subplot(lines, columns, i + 1) for i in range(count)]
    for i, ax in enumerate(axes):
        batch_size_axis(ax, curves.grid_sizes(rows))
        if i % columns == 0:
            ax.set_ylabel(K_STAR)
        if i + columns >= count:
            ax.set_xlabel(BATCH_SIZE)
    for ax, (i, series, part) in zip(axes, parts, strict=False):
        _draw_words(ax, study.scalings[series])
        curves.draw_band(ax, part, i)
        curves.draw_curve(ax, part, i)
        curves.draw_perfect(ax, part)
        if bounds := curves.bound_handles(part):
            ax.legend(handles=bounds, loc="upper right", handlelength=1.5)
        ax.set_title(title(series))
        log_values_axis(ax, rows["k_star"].dropna())
    if len(parts) > 1:
        _draw_together(*axes[-2:], rows, parts)
    return figure


def _draw_together(together: Axes, normalised: Axes, rows: pd.DataFrame, parts: Sequence[tuple]) -> None:
    for i, series, part in parts:
        curves.draw_curve(together, part, i, "", legend(series))
        curves.draw_curve(normalised, part, i, "normalised_")
    curves.draw_perfect(
        normalised, parts[0][2], "normalised_", "perfect scaling"
    )  # one line for all, as they are normalised
    together.set_title("all series" if any(series.others for _, series, _ in parts) else "all sparsities")
    handles = [*together.get_legend_handles_labels()[0], *curves.bound_handles(rows)]
    together.legend(handles=handles, loc="upper right", handlelength=1.5)
    normalised.set_title("all, normalised")
    normalised.legend(loc="upper right", handlelength=2)
    normalised.set_ylabel(curves.normalised_label(rows))
    log_values_axis(together, rows["k_star"].dropna())
    log_values_axis(normalised, rows["normalised_k_star"].dropna())


def _draw_words(ax: Axes, scaling: Scaling) -> None:
    """B_crit in words and, where the data show it, as a line."""
    words = scaling.describe().replace(": ", ":\n").replace("; ", ";\n").replace(", below", ",\nbelow")
    back = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    ax.text(0.04, 0.04, words, transform=ax.transAxes, fontsize=7, va="bottom", zorder=4, bbox=back)
    if scaling.identifiable:
        ax.axvline(scaling.fit.critical_batch_size, color=GREY, linestyle=":", linewidth=0.8, zorder=1)
