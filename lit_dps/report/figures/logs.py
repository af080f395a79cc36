"""How the K* trials trained (Lee et al. 2021, Figure 6)."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.readings import metric_column
from lit_dps.analysis.tables import cell_columns, count, legend, numbers, rows_of, where
from lit_dps.core.goal import VALIDATION_ERROR
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "logs", "6"
CAPTION = "training loss and validation error of the K* trials (Figure 6)"
MOST_PANELS = 6  # columns that are legible on a page
LABELS = {"train_loss": "training loss of the batch", VALIDATION_ERROR: "validation error"}


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `training_curves.best_trial_curves`."""
    return study.best_trial_curves


def spread(batch_sizes: Sequence[int], count: int = MOST_PANELS) -> list[int]:
    """Return at most `count` of some ascending batch sizes, evenly spread, with both ends."""
    if len(batch_sizes) <= count:
        return list(batch_sizes)
    step = (len(batch_sizes) - 1) / (count - 1)
    return [batch_sizes[round(i * step)] for i in range(count)]


def missing(study: Analysis) -> str | None:
    """Return why there is no training to draw; None if there is some."""
    best = [summary.best for summary in study.cells if summary.best is not None]
    if not best:
        return f"{study.record.statistic.too_few_have} met the goal yet"
    if not any(len(trial.curve.get("step", ())) > 1 for trial in best):
        return "K* of each cell is its first validation"
    return None


def too_large(study: Analysis) -> str | None:
    """Return why the figure is drawn on request only; None if it is not."""
    return look.too_many_series(study, NAME)


def notes(study: Analysis) -> list[str]:
    """Return how many validations stopped early and have no error, if any."""
    errors = study.best_trial_curves[metric_column(study.record.goal.metric)]
    bounds = count(errors.isna())
    if not bounds:
        return []
    return [
        f"{bounds} of {len(errors)} validations of the logs stopped early (goal.early_reject) and "
        "have no validation error."
    ]


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return panels of the training loss, and below of the metric; a column per batch size.

    A line per series. The training loss is alone if the only known errors are those that met the
    goal. Of many batch sizes a few are drawn (`spread`).
    """
    goal = study.record.goal
    sizes = spread(sorted(set(rows["batch_size"])))
    columns = ["train_loss"]
    if _errors_are_known(rows, metric_column(goal.metric)):
        columns.append(metric_column(goal.metric))
    figure = new_figure(max(1.2 * len(sizes), 2.6) + 0.7, 0.6 + 1.5 * len(columns))
    panels = figure.subplots(len(columns), len(sizes), sharex="col", sharey="row", squeeze=False)
    for batch_size, panels_of_size in zip(sizes, panels.T, strict=True):
        panels_of_size[0].set_title(f"B = {batch_size}")
        for ax, column in zip(panels_of_size, columns, strict=True):
            _draw_lines(ax, where(rows, batch_size=batch_size), column, study)
        panels_of_size[0].set_xlim(left=0)
        look.few_ticks(panels_of_size[0].xaxis)
    drawn = rows[rows["batch_size"].isin(sizes)]
    for line, column in zip(panels, columns, strict=True):
        line[0].set_ylabel(LABELS.get(column, column))
        look.log_values_axis(line[0], drawn[column], 1.3, 1.3)
        if column == metric_column(goal.metric):
            label = "goal error" if column == VALIDATION_ERROR else "goal"
            for ax in line:
                look.goal_line(ax, goal.value, label)
    figure.supxlabel(look.STEPS, fontsize=8)
    look.legend_above(figure, panels[-1, 0].get_legend_handles_labels()[0])
    return figure


def _draw_lines(ax: Axes, rows: pd.DataFrame, column: str, study: Analysis) -> None:
    """Draw a column along training, a line per series with a marker at its end."""
    for i, series in enumerate(study.record.series):
        line = rows_of(series, rows)
        values = numbers(line[column])
        known = ~np.isnan(values)
        ax.plot(
            numbers(line["step"])[known],
            values[known],
            markevery=[-1],
            linewidth=0.9,
            label=legend(series),
            **look.curve_style(i),
        )


def _errors_are_known(rows: pd.DataFrame, metric: str) -> bool:
    """Return False if the only known errors are those that met the goal."""
    known = count(rows[metric].notna())
    cells = rows.groupby(cell_columns(rows)).ngroups
    return known == len(rows) or known > cells
