"""The best metric under budgets of steps and of examples against the batch size (Shallue et al.
2019)."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.budgets import EXAMPLES, STEPS, goes_on
from lit_dps.analysis.tables import legend, numbers, rows_of
from lit_dps.core.goal import VALIDATION_ERROR
from lit_dps.core.record import StudyRecord

NAME, PAPER = "budgets", ""
CAPTION = "best validation error within a number of steps, and of examples, against batch size"
TITLES = {STEPS: "within a number of steps", EXAMPLES: "within a number of examples"}


def by_default(study: Analysis) -> bool:
    """Where trials stop at the goal, most of it are bounds: it is drawn where it is asked for."""
    return goes_on(study.record) and missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """The rows of `budgets.budget_rows`."""
    return study.budgets


def missing(study: Analysis) -> str | None:
    """Why there is nothing to draw, if so."""
    if len(study.record.batch_sizes) == 1:
        return "one batch size only"
    return (
        None
        if study.budgets["batch_size"].nunique() > 1
        else "the metric is known at one batch size only"
    )


def notes(study: Analysis) -> list[str]:
    """How many of its points are bounds."""
    table = study.budgets
    if not (bounds := int((table["exact"] == 0).sum())):
        return []
    return [
        f"{bounds} of {len(table)} points of the budgets figure are bounds, drawn hollow: their "
        "trials stopped earlier and might have improved."
    ]


def metric_label(record: StudyRecord) -> str:
    """The label of an axis of the best value of the goal's metric."""
    metric = record.goal.metric
    name = "validation error" if metric == VALIDATION_ERROR else metric
    return f"best {name}"


def metric_axis(ax: Axes, record: StudyRecord, values: np.ndarray) -> Line2D:
    """A vertical axis over values of the goal's metric, with the goal: logarithmic where they are
    positive errors.

    Returns the line of the goal, for a legend.
    """
    goal = record.goal
    line = look.goal_line(ax, goal.value, str(goal))
    if goal.metric == VALIDATION_ERROR and len(values) and min(values) > 0:
        look.log_values_axis(ax, [*values, goal.value], 1.3, 1.3)
    return line


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """A row of panels a series: budgets of steps left, of examples right, a line each; bounds
    hollow, with an arrow.

    Lines join exact points alone. The goal is dashed.
    """
    record = study.record
    every = [series for series in record.series if len(rows_of(series, rows))]
    kinds = [kind for kind in TITLES if (rows["budget"] == kind).any()]
    figure = Figure(figsize=(3.1 * len(kinds) + 0.4, 2.3 * len(every) + 0.3))
    panels = figure.subplots(len(every), len(kinds), sharex=True, sharey=True, squeeze=False)
    for series, line in zip(every, panels, strict=True):
        of_series = rows_of(series, rows)
        for kind, ax in zip(kinds, line, strict=True):
            part = of_series[of_series["budget"] == kind]
            sizes = sorted(rows["size"][rows["budget"] == kind].unique())
            shades = list(
                map(to_hex, matplotlib.colormaps["viridis_r"](np.linspace(0.1, 1, len(sizes))))
            )
            for i, (size, colour) in enumerate(zip(sizes, shades, strict=True)):
                _line(
                    ax,
                    part[part["size"] == size],
                    colour,
                    look.curve_style(i)["marker"],
                    record.goal.at_least,
                )
            ax.set_title(f"{legend(series)}: {TITLES[kind]}" if len(every) > 1 else TITLES[kind])
            handles = [
                Line2D(
                    [], [], color=colour, marker=look.curve_style(i)["marker"], label=f"{size:,}"
                )
                for i, (size, colour) in enumerate(zip(sizes, shades, strict=True))
            ]
            ax.legend(
                handles=handles[::-1],
                title=kind,
                loc="center left",
                bbox_to_anchor=(1, 0.5),
                handlelength=1.5,
            )
        line[0].set_ylabel(metric_label(record))
    look.batch_size_axis(panels[0, 0], record.batch_sizes)
    handles = [metric_axis(panels[0, 0], record, numbers(rows["best"]))]
    for ax in panels.flat[1:]:
        look.goal_line(ax, record.goal.value)
    for ax in panels[-1]:
        ax.set_xlabel(look.BATCH_SIZE)
    look.legend_above(
        figure, handles + look.bound_handles(bool((rows["exact"] == 0).any()), "bound")
    )
    return figure


def _line(ax: Axes, rows: pd.DataFrame, colour: str, marker: str, at_least: bool) -> None:
    exact, bounds = rows[rows["exact"] == 1], rows[rows["exact"] == 0]
    ax.plot(numbers(exact["batch_size"]), numbers(exact["best"]), color=colour, marker=marker)
    look.bounds(
        ax,
        numbers(bounds["batch_size"]),
        numbers(bounds["best"]),
        color=colour,
        marker=marker,
        up=at_least,
    )
