"""The best metric within budgets of steps and of examples, by batch size (Shallue et al. 2019)."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.budgets import EXAMPLES, STEPS, has_trained_past_goal
from lit_dps.analysis.tables import count, legend, numbers, rows_of, where
from lit_dps.core.goal import VALIDATION_ERROR
from lit_dps.core.record import StudyRecord
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "budgets", ""
CAPTION = "best validation error within a number of steps, and of examples, against batch size"
TITLES = {STEPS: "within a number of steps", EXAMPLES: "within a number of examples"}


def by_default(study: Analysis) -> bool:
    """Return True if trials continue after the goal; else most of its points are bounds."""
    return has_trained_past_goal(study.record) and missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `budgets.budget_rows`."""
    return study.budgets


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    return why_no_metric(study.record, study.budgets)


def why_no_metric(record: StudyRecord, rows: pd.DataFrame) -> str | None:
    """Return why rows of the metric have no curve over batch sizes; None if they have one."""
    if len(record.batch_sizes) == 1:
        return "one batch size only"
    if len(set(rows["batch_size"])) <= 1:
        return "the metric is known at one batch size only"
    return None


def notes(study: Analysis) -> list[str]:
    """Return how many points are bounds."""
    table = study.budgets
    bounds = count(table["exact"] == 0)
    if not bounds:
        return []
    return [
        f"{bounds} of {len(table)} points of the budgets figure are bounds, drawn hollow: their "
        "trials stopped earlier and might have improved."
    ]


def metric_label(record: StudyRecord) -> str:
    """Return the label of an axis of the best value of the goal's metric."""
    if record.goal.metric == VALIDATION_ERROR:
        return "best validation error"
    return f"best {record.goal.metric}"


def metric_axis(ax: Axes, record: StudyRecord, values: np.ndarray) -> Line2D:
    """Make the y axis logarithmic for positive errors, and draw the goal.

    Args:
        ax: The panel.
        record: The study.
        values: (n,), of the goal's metric.

    Returns:
        The line of the goal, for a legend.
    """
    goal = record.goal
    line = look.goal_line(ax, goal.value, str(goal))
    if goal.metric == VALIDATION_ERROR and len(values) and min(values) > 0:
        look.log_values_axis(ax, [*values, goal.value], 1.3, 1.3)
    return line


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return a line of panels per series: budgets of steps, and of examples, a curve each.

    Lines join exact points alone; bounds are hollow, with an arrow.
    """
    record = study.record
    every = look.series_with_rows(study, rows)
    kinds = [kind for kind in TITLES if len(where(rows, budget=kind))]
    figure = new_figure(3.1 * len(kinds) + 0.4, 2.3 * len(every) + 0.3)
    panels = figure.subplots(len(every), len(kinds), sharex=True, sharey=True, squeeze=False)
    for series, line in zip(every, panels, strict=True):
        of_series = rows_of(series, rows)
        for kind, ax in zip(kinds, line, strict=True):
            sizes = sorted(set(where(rows, budget=kind)["size"]))
            part = where(of_series, budget=kind)
            _draw_budgets(ax, part, sizes, record.goal.at_least)
            ax.set_title(TITLES[kind])
            if len(every) > 1:
                ax.set_title(f"{legend(series)}: {TITLES[kind]}")
        line[0].set_ylabel(metric_label(record))
    look.batch_size_axis(panels[0, 0], record.batch_sizes)
    handles = [metric_axis(panels[0, 0], record, numbers(rows["best"]))]
    for ax in panels.flat[1:]:
        look.goal_line(ax, record.goal.value)
    for ax in panels[-1]:
        ax.set_xlabel(look.BATCH_SIZE)
    for series, line in zip(every, panels, strict=True):
        for kind, ax in zip(kinds, line, strict=True):
            sizes = sorted(set(where(rows, budget=kind)["size"]))
            ends = _last_values(where(rows_of(series, rows), budget=kind), sizes)
            look.label_ends(ax, ends, figure.get_figheight() / len(every))
    handles += look.bound_handles(len(where(rows, exact=0)) > 0, "bound")
    look.legend_above(figure, handles)
    return figure


def _draw_budgets(ax: Axes, rows: pd.DataFrame, sizes: list[int], at_least: bool) -> None:
    """Draw a curve for each budget of one kind."""
    for size, style in zip(sizes, look.shades(len(sizes)), strict=True):
        look.draw_metric(ax, where(rows, size=size), style, at_least)


def _last_values(rows: pd.DataFrame, sizes: list[int]) -> list[tuple[float, str, str]]:
    """Return the metric at the largest batch size, name and colour of each budget of one kind."""
    ends = []
    for size, style in zip(sizes, look.shades(len(sizes)), strict=True):
        curve = where(rows, size=size)
        if len(curve):
            best = curve.loc[curve["batch_size"].idxmax(), "best"]
            ends.append((float(best), f"{size:,}", style["color"]))
    return ends
