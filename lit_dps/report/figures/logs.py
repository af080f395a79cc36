"""How the trials that gave K* trained (Lee et al. 2021, Figure 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import cell_columns, columns_of, frame, legend, numbers, rows_of
from lit_dps.core.goal import VALIDATION_ERROR
from lit_dps.core.racing import to_goal

NAME, PAPER = "logs", "6"
CAPTION = "training loss and validation error of the K* trials (Figure 6)"
PANELS = 6  # as many columns as stay legible on a page
LABELS = {"train_loss": "training loss of the batch", VALIDATION_ERROR: "validation error"}


def rows(study: Analysis) -> pd.DataFrame:
    """The curve of the K* trial of each cell up to its goal, by series, batch size, then step.

    None of a cell without K*.

    Columns: sparsity and further axes, batch_size [examples], point, step, train_loss (of that
    step's batch, before its update) and the goal's metric, val_error (share of the entire
    validation split) mostly, missing where the check stopped early and left a lower bound.
    """
    found, metric = [], study.record.goal.metric
    for best in (summary.best for summary in study.cells if summary.best is not None):
        cell, curve = best.trial.cell, to_goal(best).curve
        names = {
            **columns_of(cell.series),
            "batch_size": cell.batch_size,
            "point": best.trial.point,
        }
        steps, losses, errors = (curve.get(column, ()) for column in ("step", "train_loss", metric))
        entire = curve.get("exact") or [1] * len(
            steps
        )  # whether a check looked at the entire split
        for step, loss, error, exact in zip(steps, losses, errors, entire, strict=True):
            found.append(
                {**names, "step": step, "train_loss": loss, metric: error if exact else None}
            )
    return frame(found)


def spread(batch_sizes: Sequence[int], count: int = PANELS) -> list[int]:
    """At most `count` of some ascending batch sizes, evenly spread, both ends among them."""
    if len(batch_sizes) <= count:
        return list(batch_sizes)
    return [batch_sizes[round(i * (len(batch_sizes) - 1) / (count - 1))] for i in range(count)]


def missing(study: Analysis) -> str | None:
    """Why there is no training to draw, if so."""
    best = [summary.best for summary in study.cells if summary.best is not None]
    if not best:
        return "no trial has met the goal yet"
    return (
        None
        if any(len(trial.curve.get("step", ())) > 1 for trial in best)
        else "K* of each cell is its first validation"
    )


def too_large(study: Analysis) -> str | None:
    """Why the figure is drawn on request only, if so."""
    return look.too_many_series(study, NAME)


def notes(study: Analysis) -> list[str]:
    """That the curves of the error have gaps, where they have."""
    errors = rows(study)[study.record.goal.metric]
    if not (bounds := errors.isna().sum()):
        return []
    return [
        f"{bounds} of {len(errors)} validations of the logs stopped early (goal.early_reject) and "
        "have no validation error."
    ]


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Training loss above, validation error with the goal below; a column per batch size, a line
    per series.

    Without validation errors but those that met the goal, the training loss alone. Of many batch
    sizes a few are drawn (`spread`).
    """
    sizes = spread(sorted(rows["batch_size"].unique()))
    goal = study.record.goal
    columns = ["train_loss", *([goal.metric] if _errors_are_known(rows, goal.metric) else [])]
    figure = Figure(figsize=(max(1.2 * len(sizes), 2.6) + 0.7, 0.6 + 1.5 * len(columns)))
    panels = figure.subplots(len(columns), len(sizes), sharex="col", sharey="row", squeeze=False)
    for batch_size, panels_of_size in zip(sizes, panels.T, strict=True):
        panels_of_size[0].set_title(f"B = {batch_size}")
        lines = rows[rows["batch_size"] == batch_size]
        for i, series in enumerate(study.record.series):
            line = rows_of(series, lines)
            style = look.curve_style(i) | {
                "markevery": [-1],
                "linewidth": 0.9,
                "label": legend(series),
            }
            for ax, name in zip(panels_of_size, columns, strict=True):
                values = numbers(line[name])
                known = ~np.isnan(values)
                ax.plot(numbers(line["step"])[known], values[known], **style)
        panels_of_size[0].set_xlim(left=0)
        look.few_ticks(panels_of_size[0].xaxis)
    for line, name in zip(panels, columns, strict=True):
        line[0].set_ylabel(LABELS.get(name, name))
        shown = rows[name][
            rows["batch_size"].isin(sizes) & (rows[name] > 0) & (rows[name] < math.inf)
        ]
        look.log_values_axis(line[0], shown, 1.3, 1.3)
        for ax in line if name == goal.metric else ():
            label = "goal error" if name == VALIDATION_ERROR else "goal"
            look.goal_line(ax, goal.value, label)
    figure.supxlabel(look.STEPS, fontsize=8)
    look.legend_above(figure, panels[-1, 0].get_legend_handles_labels()[0])
    return figure


def _errors_are_known(rows: pd.DataFrame, metric: str) -> bool:
    """Not where checks that stopped early leave those alone that met the goal."""
    known = rows[metric].notna().sum()
    return known == len(rows) or known > rows.groupby(cell_columns(rows)).ngroups
