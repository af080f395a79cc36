"""The best value of the metric at the whole budget against the batch size (Shallue et al. 2019,
"solution quality")."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.budgets import TOP, goes_on
from lit_dps.analysis.tables import numbers, rows_of
from lit_dps.report.figures.budgets import metric_axis, metric_label

NAME, PAPER = "quality", ""
CAPTION = "best validation error within max_steps against batch size"


def by_default(study: Analysis) -> bool:
    """Only of trials that go on after their goal is it more than a bound."""
    return goes_on(study.record) and missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """The rows of `quality.quality_rows`."""
    return study.quality


def missing(study: Analysis) -> str | None:
    """Why there is nothing to draw, if so."""
    if len(study.record.batch_sizes) == 1:
        return "one batch size only"
    return (
        None
        if study.quality["batch_size"].nunique() > 1
        else "the metric is known at one batch size only"
    )


def notes(study: Analysis) -> list[str]:
    """Which of its points are bounds, and which might fall further."""
    table, told = study.quality, []
    if bounds := int((table["exact"] == 0).sum()):
        told.append(
            f"The best value within max_steps is a bound in {bounds} of {len(table)} cells, drawn "
            "hollow: trials stopped earlier. Set study.train_past_goal to train to max_steps."
        )
    if late := int(((table["late"] == 1) & (table["exact"] == 1)).sum()):
        told.append(
            f"The best value is in the last tenth of max_steps in {late} of {len(table)} cells. "
            "Longer trials may improve it."
        )
    return told


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Left the best of all checks, right the best at the last one; a curve a series.

    Bars reach to the worst of the `TOP` best trials, bounds are hollow with an arrow, and the goal
    is dashed.
    """
    record = study.record
    figure = Figure(figsize=(6.4, 2.6))
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    for i, series in enumerate(record.series):
        part, style = rows_of(series, rows), look.curve_style(i)
        exact, bounds = part[part["exact"] == 1], part[part["exact"] == 0]
        x, y = numbers(exact["batch_size"]), numbers(exact["best"])
        left.vlines(
            x, y, numbers(exact["top_worst"]), color=style["color"], linewidth=0.8, alpha=0.6
        )
        left.plot(x, y, **style)
        look.bounds(
            left,
            numbers(bounds["batch_size"]),
            numbers(bounds["best"]),
            **style,
            up=record.goal.at_least,
        )
        right.plot(numbers(exact["batch_size"]), numbers(exact["final"]), **style)
    look.batch_size_axis(left, record.batch_sizes)
    values = numbers(pd.concat([rows["best"], rows["final"].dropna(), rows["top_worst"].dropna()]))
    goal = metric_axis(left, record, values)
    look.goal_line(right, record.goal.value)
    left.set_ylabel(metric_label(record))
    left.set_title(f"best validation; bar: the best {TOP} trials")
    right.set_title("last validation")
    for ax in (left, right):
        ax.set_xlabel(look.BATCH_SIZE)
    handles = look.series_handles(
        (s, i) for i, s in enumerate(record.series) if len(record.series) > 1
    )
    look.legend_above(
        figure, [*handles, goal, *look.bound_handles(bool((rows["exact"] == 0).any()), "bound")]
    )
    return figure
