"""The best metric within the budget by batch size (Shallue et al. 2019, "solution quality")."""

from __future__ import annotations

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.budgets import TOP, has_trained_past_goal
from lit_dps.analysis.tables import count, numbers, rows_of, where
from lit_dps.report.figures.budgets import metric_axis, metric_label, why_no_metric
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "quality", ""
CAPTION = "best validation error within the budget of a trial against batch size"


def by_default(study: Analysis) -> bool:
    """Return True if trials continue after the goal; else the best value is only a bound."""
    return has_trained_past_goal(study.record) and missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `budgets.quality_rows`."""
    return study.quality


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    return why_no_metric(study.record, study.quality)


def notes(study: Analysis) -> list[str]:
    """Return how many points are bounds, and how many might improve in longer trials."""
    table = study.quality
    bounds = count(table["exact"] == 0)
    late = len(where(table, late=1, exact=1))
    lines = []
    if bounds:
        lines.append(
            f"The best value within the budget is a bound in {bounds} of {len(table)} cells, drawn "
            "hollow: trials stopped earlier. Set study.train_past_goal to spend the entire "
            "budget."
        )
    if late:
        lines.append(
            f"The best value is in the last tenth of the budget in {late} of {len(table)} cells. "
            "Longer trials may improve it."
        )
    return lines


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return two panels with a curve per series: the best validation, and the last one.

    Bars reach to the worst of the `TOP` best trials. Bounds are hollow, with an arrow.
    """
    record = study.record
    figure = new_figure(6.4, 2.6)
    best_panel, last_panel = figure.subplots(1, 2, sharex=True, sharey=True)
    for i, series in enumerate(record.series):
        part = rows_of(series, rows)
        style = look.curve_style(i)
        exact = where(part, exact=1)
        look.bars(best_panel, exact, ("best", "top_worst"), style)
        look.draw_metric(best_panel, part, style, record.goal.at_least)
        last_panel.plot(numbers(exact["batch_size"]), numbers(exact["final"]), **style)
    look.batch_size_axis(best_panel, record.batch_sizes)
    columns = [rows["best"], rows["final"].dropna(), rows["top_worst"].dropna()]
    goal = metric_axis(best_panel, record, numbers(pd.concat(columns)))
    look.goal_line(last_panel, record.goal.value)
    best_panel.set_ylabel(metric_label(record))
    best_panel.set_title(f"best validation; bar: the best {TOP} trials")
    last_panel.set_title("last validation")
    for ax in (best_panel, last_panel):
        ax.set_xlabel(look.BATCH_SIZE)
    handles = []
    if len(record.series) > 1:
        handles += look.series_handles(record.series, record.series)
    bounds = look.bound_handles(len(where(rows, exact=0)) > 0, "bound")
    look.legend_above(figure, [*handles, goal, *bounds])
    return figure
