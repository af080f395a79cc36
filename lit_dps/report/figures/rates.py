"""Best learning rates against batch size, and the cost of scaling rules (Shallue et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rate_rules import DIVERGED, LOWER_BOUND, MEASURED, UPPER_BOUND, WINDOW
from lit_dps.analysis.rates import EFFECTIVE, NEAR, PLAIN, RULE_NAMES, RULES, RateCurve, rule_line
from lit_dps.analysis.tables import count, legend, listed, numbers, rows_of, where
from lit_dps.core.batch_schedule import GROWING
from lit_dps.report.figures.page_size import new_figure

NAME, PAPER = "rates", ""
CAPTION = "best learning rate against batch size, and the price of scaling rules for it"
PRICES = "rates-prices"  # the name of its second table
NO_PRICE = (
    "no price is known: no trial near\na rule's rate ran to the goal\n(study.race_factor: null "
    "lets all trials finish)"
)
MOST_LINES = 30  # of panels; more take over half a minute
LABELS = {EFFECTIVE: "effective rate eta / (1 - m)", PLAIN: "learning rate eta"}
DODGE = 1.06  # factor by which prices of a rule are beside their batch size


def by_default(study: Analysis) -> bool:
    """Return True if the figure is drawn without a request."""
    return missing(study) is None


def tables(study: Analysis) -> dict[str, pd.DataFrame]:
    """Return the rows of `rates.rate_rows` and of `rate_rules.price_rows`."""
    return {NAME: study.rates, PRICES: study.prices}


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    if not study.rate_curves:
        return "no learning rate in the search space, or no trial that met the goal"
    if not any(len(curve.cells) > 1 for curve in study.rate_curves):
        return "a best rate at one batch size only"
    return None


def too_large(study: Analysis) -> str | None:
    """Return why the figure is drawn on request only; None if it is not."""
    return look.too_many(len(_lines(study)), MOST_LINES, "lines of panels", NAME)


def notes(study: Analysis) -> list[str]:
    """Return what the rate of a series is, and prices that are bounds or rest on little."""
    lines = []
    for condition, sentence in NOTES_ON_CURVES:
        series = [curve.series for curve in study.rate_curves if condition(curve)]
        if series:
            lines.append(sentence.format(listed(series)))
    prices = study.prices
    known = count(prices["price"].notna())
    if known < len(prices):
        lines.append(
            f"{known} of {len(prices)} prices of scaling rules are known. For the others too few "
            f"trials within {WINDOW:g} times the rate met the goal."
        )
    return lines + early_stopping_notes(study)


def _starts_at_edge(curve: RateCurve) -> bool:
    """Return True if the rules start from a best rate at an end of its range."""
    return curve.first is not None and curve.source.rate_key in curve.cells[curve.first].boundary


# Each with the sentence on the series of the curves for which it holds.
NOTES_ON_CURVES: tuple[tuple[Callable[[RateCurve], bool], str], ...] = (
    (lambda curve: not curve.has_constant_batch, f"No rule scales the rate at {{}}: {GROWING}."),
    (
        lambda curve: curve.source.averages,
        "Only the rate is scaled at {}: Adam, Lion and Muon average gradients. Beta2 and weight "
        "decay stay as they were searched.",
    ),
    (
        lambda curve: curve.source.assumes_heavy_ball,
        "Effective rates eta / (1 - m) at {} assume heavy-ball momentum.",
    ),
    (
        _starts_at_edge,
        "Scaling rules at {} start from a best rate at the end of its range. Widen the range.",
    ),
)


def early_stopping_notes(study: Analysis) -> list[str]:
    """Return what the figure lacks: trials that were stopped early, and prices of no content."""
    race_factor = study.record.race_factor
    lines = []
    if race_factor is not None and race_factor < NEAR:
        lines.append(
            f"Trials were stopped early (study.race_factor = {race_factor:g}). Bars of the rates "
            f"within {NEAR:g} K* lack stopped trials and may be too short."
        )
    empty = int(is_empty_bound(study.prices).sum())
    if empty:
        line = (
            f"{empty} of {len(study.prices)} prices of scaling rules are not drawn. They are only "
            "known to be at least 1, as every price is."
        )
        if race_factor is not None:
            line += (
                f" study.race_factor = {race_factor:g} stopped trials early; null lets all trials "
                "finish."
            )
        lines.append(line)
    return lines


def is_empty_bound(prices: pd.DataFrame) -> np.ndarray:
    """Return whether each price (n,) is only known to be at least 1, which holds for every rule."""
    if not len(prices):
        return np.zeros(0, bool)
    return (prices["verdict"] == LOWER_BOUND).to_numpy() & (numbers(prices["price"]) <= 1)


def figures(tables: Mapping[str, pd.DataFrame], study: Analysis) -> Iterator[tuple[str, Figure]]:
    """Yield the figure with its name."""
    yield NAME, draw(tables[NAME], tables[PRICES], study)


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, prices: pd.DataFrame, study: Analysis) -> Figure:
    """Return a line of two panels for each series and kind of rate: best rates, prices of rules.

    Bars of rates span the trials that need at most `NEAR` times K*. Bars of prices are 95 %
    intervals; the small numbers beside the points count the trials that they rest on. Bounds are
    hollow, with an arrow; a cross at the top is a rate near which all trials diverged.
    """
    lines = _lines(study)
    figure = new_figure(6.4, 2.1 * len(lines) + 0.5)
    panels = figure.subplots(len(lines), 2, sharex=True, squeeze=False)
    for (curve, kind), (rate_panel, price_panel) in zip(lines, panels, strict=True):
        _draw_rates(rate_panel, rows_of(curve.series, rows), kind)
        of_kind = where(prices, rate=kind)
        if len(of_kind):
            of_kind = rows_of(curve.series, of_kind)
        _draw_prices(price_panel, of_kind)
        rate_panel.set_ylabel(LABELS[kind if curve.source.has_momentum else PLAIN])
        price_panel.set_ylabel("K at the rule's rate / K*")
        if len(study.record.series) > 1:
            rate_panel.set_title(legend(curve.series))
            price_panel.set_title(legend(curve.series))
    look.batch_size_axis(panels[0, 0], study.record.batch_sizes)
    for ax in panels[-1]:
        ax.set_xlabel(look.BATCH_SIZE)
    look.legend_above(figure, _handles(rows, prices))
    return figure


def _lines(study: Analysis) -> list[tuple[RateCurve, str]]:
    """Return the series and the kind of rate of each line of panels."""
    lines = []
    for curve in study.rate_curves:
        for kind in curve.source.kinds:
            lines.append((curve, kind))
    return lines


def _handles(rows: pd.DataFrame, prices: pd.DataFrame) -> list[Line2D]:
    """Return the entries of the legend."""
    best = f"best trial; bar: within {NEAR:g} K*"
    handles = [look.entry(best, linestyle="none", **look.curve_style(0))]
    for rule in RULES:
        handles.append(look.entry(RULE_NAMES[rule], linestyle="--", **_style(rule)))
    intervals = "right: 95 % interval; number: trials nearby"
    handles.append(look.entry(intervals, color=look.GREY, linewidth=0.8))
    verdicts = set()
    if len(prices):
        verdicts = set(prices["verdict"][~is_empty_bound(prices)])
    has_bounds = bool(verdicts & {LOWER_BOUND, UPPER_BOUND}) or len(where(rows, floor=1)) > 0
    handles += look.bound_handles(has_bounds, "bound")
    if DIVERGED in verdicts:
        handles.append(look.entry("all diverged", color=look.GREY, marker="x", linestyle="none"))
    return handles


def _style(rule: str) -> dict[str, Any]:
    """Return colour and marker of a rule; the best rates have the first style."""
    return look.curve_style(1 + list(RULES).index(rule))


def _draw_rates(ax: Axes, rows: pd.DataFrame, kind: str) -> None:
    """Draw the best rates of a series with the rates of trials nearby, and both rules."""
    batch = numbers(rows["batch_size"])
    rate = numbers(rows[kind])
    is_bound = numbers(rows["floor"]) == 1
    style = look.curve_style(0)
    look.bars(ax, rows, (f"{kind}_low", f"{kind}_high"), style)
    ax.plot(batch[~is_bound], rate[~is_bound], linestyle="none", **style)
    ax.plot(batch[is_bound], rate[is_bound], linestyle="none", markerfacecolor="white", **style)
    drawn = [numbers(rows[f"{kind}_low"]), numbers(rows[f"{kind}_high"])]
    for rule in RULES:
        line = rule_line(rows, kind, rule)
        if len(line):
            colour = _style(rule)["color"]
            ax.plot(
                line["batch_size"],
                line["rate"],
                linestyle="--",
                color=colour,
                linewidth=0.9,
                zorder=1,
            )
            drawn.append(numbers(line["rate"]))
    look.log_values_axis(ax, np.concatenate(drawn), 1.3, 1.3)


def _draw_prices(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw the prices of both rules in a series."""
    ax.axhline(1, color=look.GREY, linestyle=":", linewidth=0.8, zorder=1)
    ax.set_yscale("log")
    is_empty = is_empty_bound(rows)
    centred = {"transform": ax.transAxes, "ha": "center", "color": look.GREY}
    if is_empty.any():
        text = f"{is_empty.sum()} of {len(rows)} prices not drawn:\nonly known to be at least 1"
        ax.text(0.5, 0.92, text, va="top", fontsize=6, **centred)
        rows = rows.loc[~is_empty]
    if not count(rows["price"].notna()) and not len(where(rows, verdict=DIVERGED)):
        ax.text(0.5, 0.5, NO_PRICE, va="center", **centred)
    top = 2 * highest_price(rows)
    for i, rule in enumerate(RULES):
        _draw_rule(ax, where(rows, rule=rule), rule, is_first=i == 0, top=top)
    look.log_values_axis(ax, [1, top], 1.15, 1.0)


def highest_price(rows: pd.DataFrame) -> float:
    """Return the highest price that a panel shows, or finite limit of one; at least 2."""
    values = numbers(rows.loc[:, ["price", "price_high"]])
    return max([2.0, *values[np.isfinite(values)]])


def draw_prices(
    ax: Axes, rows: pd.DataFrame, shift: float, top: float, style: dict[str, Any]
) -> None:
    """Draw the prices of one rule with their limits; bounds are hollow, with an arrow.

    Args:
        ax: The panel.
        rows: The prices.
        shift: Factor between the batch sizes and their places, beside other rules.
        top: The top of the panel.
        style: Colour and marker.
    """
    for verdict in (MEASURED, LOWER_BOUND, UPPER_BOUND):
        part = where(rows, verdict=verdict)
        batch = shift * numbers(part["batch_size"])
        price = numbers(part["price"])
        if verdict == MEASURED:
            within = part.assign(price_high=numbers(part["price_high"]).clip(max=top))
            look.bars(ax, within, ("price_low", "price_high"), style, shift)
            ax.plot(batch, price, linestyle="none", **style)
        else:
            look.bounds(ax, batch, price, **style, up=verdict == LOWER_BOUND)


def _draw_rule(ax: Axes, rows: pd.DataFrame, rule: str, is_first: bool, top: float) -> None:
    """Draw the prices of one rule, beside the prices of the other."""
    style = _style(rule)
    shift = DODGE
    text_place = {"xytext": (4, 2), "ha": "left"}
    if is_first:
        shift = 1 / DODGE
        text_place = {"xytext": (-4, 2), "ha": "right"}
    draw_prices(ax, rows, shift, top, style)
    known = rows.loc[rows["price"].notna()]
    places = shift * numbers(known["batch_size"]), numbers(known["price"])
    look.write_beside(ax, *places, known["near"], fontsize=5, color=style["color"], **text_place)
    diverged = shift * numbers(where(rows, verdict=DIVERGED)["batch_size"])
    heights = [top / 1.2] * len(diverged)
    ax.plot(diverged, heights, linestyle="none", marker="x", color=style["color"])
