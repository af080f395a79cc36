"""Draws several update rules against each other (Lee et al. 2021, Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_dps.analysis.figure_data.optimizers import optimizer_rows, optimizers_missing, optimizers_notes
from lit_dps.analysis.figures.entry import Entry
from lit_dps.analysis.figures.scaling import bound_handles, draw_band, draw_curve, draw_perfect, values_of
from lit_dps.analysis.figures.style import BATCH_SIZE, K_STAR, STYLE, batch_size_axis, log_values_axis, look
from lit_dps.analysis.text import Row


@matplotlib.rc_context(STYLE)
def draw_optimizers(rows: Sequence[Row]) -> Figure:
    """K* of the studies with fit and band above, normalised below; a column per sparsity.

    Args:
        rows: From `figure_data.optimizer_rows`.
    """
    sparsities = list(dict.fromkeys(row["sparsity"] for row in rows))
    labels = list(dict.fromkeys(row["label"] for row in rows))
    sizes = sorted({row["batch_size"] for row in rows if isinstance(row["batch_size"], int)})
    figure = Figure(figsize=(max(2.1 * len(sparsities), 3.3) + 0.3, 4.6))
    panels = figure.subplots(2, len(sparsities), sharex=True, sharey="row", squeeze=False)
    for sparsity, (steps, normalised) in zip(sparsities, panels.T, strict=True):
        part = [row for row in rows if row["sparsity"] == sparsity]
        curves = [[row for row in part if row["label"] == label] for label in labels]
        for i, curve in enumerate(curves):
            draw_band(steps, curve, i)
            draw_curve(steps, curve, i)
            draw_curve(normalised, curve, i, "normalised_")
        draw_perfect(normalised, next(filter(None, curves)), "normalised_", "perfect scaling")
        steps.set_title(f"sparsity {sparsity:g}")
        normalised.set_xlabel(BATCH_SIZE)
        normalised.set_ylabel(f"K* / K*(B = {part[0]['normalised_by'] or '?'})")
    batch_size_axis(panels[0, 0], sizes)
    log_values_axis(panels[0, 0], values_of(rows, "k_star"))
    log_values_axis(panels[1, 0], values_of(rows, "normalised_k_star"))
    panels[0, 0].set_ylabel(K_STAR)
    if bounds := bound_handles(rows):
        panels[0, -1].legend(handles=bounds, loc="upper right", handlelength=1.5)
    panels[1, -1].legend(loc="upper right", handlelength=2)
    handles = [Line2D([], [], label=label, **look(i)) for i, label in enumerate(labels)]
    fit = sum(len(label) + 6 for label in labels) * 0.06 < figure.get_figwidth()  # inches of a character
    figure.legend(handles=handles, loc="outside upper center", ncols=len(labels) if fit else 1, handlelength=1.5)
    return figure


OPTIMIZERS = Entry(
    name="optimizers",
    paper="2",
    tables=lambda studies: {"optimizers": optimizer_rows(studies)},
    draw=lambda studies, tables: [("optimizers", draw_optimizers(tables["optimizers"]))],
    missing=optimizers_missing,
    notes=optimizers_notes,
)
