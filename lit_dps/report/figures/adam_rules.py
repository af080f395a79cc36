"""What it costs not to tune Adam again at another batch size, and the best beta2 by batch size."""

from __future__ import annotations

from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.adam_rules import BETA2, FIXED, RULE_NAMES, RULES, SQUARE_ROOT
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rate_rules import LOWER_BOUND, UPPER_BOUND
from lit_dps.analysis.tables import count, legend, numbers, rows_of, where
from lit_dps.report.figures.page_size import new_figure
from lit_dps.report.figures.rates import draw_prices, highest_price

NAME, PAPER = "adam-rules", ""
CAPTION = "K at the values of rules for Adam over K tuned, against batch size"
# Factor by which the prices of a rule are beside the prices of the rule before.
DODGE = 1.07


def by_default(study: Analysis) -> bool:
    """Return True if the figure is drawn without a request."""
    return missing(study) is None


def rows(study: Analysis) -> pd.DataFrame:
    """Return the rows of `adam_rules.adam_rule_rows`."""
    return study.adam_rules


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    if not count(study.adam_rules["best_beta2"].notna()):
        return "no study of Adam or AdamW with beta2 in the search space at two batch sizes"
    return None


def notes(study: Analysis) -> list[str]:
    """Return what the rules leave as it is, and how many prices are unknown."""
    table = study.adam_rules
    lines = ["No rule changes epsilon."]
    if not count(table["best_beta1"].notna()):
        lines = ["No rule changes epsilon, nor beta1, which is not searched."]
    known = count(table["price"].notna())
    if known < len(table):
        lines.append(
            f"{known} of {len(table)} prices of rules for Adam are known. For the others no trial "
            "has the values of the rule, or at least half of these trials missed the goal."
        )
    return lines


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, study: Analysis) -> Figure:
    """Return a line of two panels for each series: prices of rules, and 1 - beta2.

    Bars are 95 % intervals. Bounds are hollow, with an arrow.
    """
    drawn = look.series_with_rows(study, rows)
    figure = new_figure(6.4, 2.3 * len(drawn) + 0.5)
    panels = figure.subplots(len(drawn), 2, sharex=True, squeeze=False)
    for series, (price_panel, beta_panel) in zip(drawn, panels, strict=True):
        part = rows_of(series, rows)
        _draw_prices(price_panel, part)
        _draw_beta2(beta_panel, part)
        price_panel.set_ylabel("K at the rule's values / K tuned")
        beta_panel.set_ylabel("1 - beta2")
        if len(drawn) > 1:
            price_panel.set_title(legend(series))
            beta_panel.set_title(legend(series))
    look.batch_size_axis(panels[0, 0], study.record.batch_sizes)
    for ax in panels[-1]:
        ax.set_xlabel(look.BATCH_SIZE)
    handles = look.curve_handles(RULE_NAMES.values(), linestyle="none")
    handles.append(look.entry("tuned", color=look.GREY, marker="x", linestyle="none"))
    has_bounds = bool(set(rows["verdict"]) & {LOWER_BOUND, UPPER_BOUND})
    handles += look.bound_handles(has_bounds, "bound")
    look.legend_above(figure, handles)
    return figure


def _style(rule: str) -> dict[str, Any]:
    """Return colour and marker of a rule."""
    return look.curve_style(list(RULES).index(rule))


def _draw_prices(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw the prices of all rules beside each other."""
    ax.axhline(1, color=look.GREY, linestyle=":", linewidth=0.8, zorder=1)
    ax.set_yscale("log")
    top = 1.3 * highest_price(rows)
    for i, rule in enumerate(RULES):
        shift = DODGE ** (i - (len(RULES) - 1) / 2)
        draw_prices(ax, where(rows, rule=rule), shift, top, _style(rule))
    look.log_values_axis(ax, [1, top], 1.15, 1.0)


def _draw_beta2(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw the best 1 - beta2 and what the rules make of that of the smallest batch size."""
    ax.set_yscale("log")
    values: list[float] = []
    for rule in (FIXED, SQUARE_ROOT, BETA2):
        part = where(rows, rule=rule)
        rest = 1 - numbers(part["rule_beta2"])
        ax.plot(numbers(part["batch_size"]), rest, linestyle="--", **_style(rule))
        values += list(rest)
    tuned = where(rows, rule=FIXED)
    rest = 1 - numbers(tuned["best_beta2"])
    ax.plot(numbers(tuned["batch_size"]), rest, color=look.GREY, marker="x", linestyle="none")
    values += list(rest)
    look.log_values_axis(ax, values, 1.5, 1.5)
