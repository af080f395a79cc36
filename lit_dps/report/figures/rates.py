"""The best learning rate against the batch size, and what scaling rules for it cost (Shallue et al.
2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rate_rules import AT_LEAST, AT_MOST, DIVERGED, MEASURED, WINDOW
from lit_dps.analysis.rates import AVERAGING, EFFECTIVE, NEAR, PLAIN, RULE_NAMES, RULES
from lit_dps.analysis.tables import legend, listed, numbers, rows_of

NAME, PAPER = "rates", ""
CAPTION = "best learning rate against batch size, and the price of scaling rules for it"
PRICES = "rates-prices"  # the name of its second table
NO_PRICE = (
    "no price is known: no trial near\na rule's rate ran to the goal\n(study.race_factor: null "
    "lets all trials finish)"
)
MOST_LINES = 30  # of panels, two a line: half a minute of drawing
LABELS = {EFFECTIVE: "effective rate eta / (1 - m)", PLAIN: "learning rate eta"}


def by_default(study: Analysis) -> bool:
    return missing(study) is None


def tables(study: Analysis) -> dict[str, pd.DataFrame]:
    """The rows of `best_rates.rate_rows` and of `prices.price_rows`."""
    return {NAME: study.rates, PRICES: study.prices}


def missing(study: Analysis) -> str | None:
    """Why there is nothing to draw, if so."""
    if not study.rate_curves:
        return "no learning rate in the search space, or no trial that met the goal"
    return (
        None
        if any(len(curve.cells) > 1 for curve in study.rate_curves)
        else "a best rate at one batch size only"
    )


def too_large(study: Analysis) -> str | None:
    """Why the figure is drawn on request only, if so."""
    count = sum(len(curve.source.kinds) for curve in study.rate_curves)
    if count <= MOST_LINES:
        return None
    return f"{count} lines of panels, above {MOST_LINES} ({look.ON_REQUEST.format(name=NAME)})"


def notes(study: Analysis) -> list[str]:
    """What a rate is where that is not plain, and prices that are bounds or rest on little."""
    told, prices = [], study.prices
    if adam := [curve.series for curve in study.rate_curves if curve.source.optimizer in AVERAGING]:
        told.append(
            f"Only the rate is scaled at {listed(adam)}: Adam averages gradients. Its beta2 and "
            "weight decay are those of the search."
        )
    if assumed := [curve.series for curve in study.rate_curves if curve.source.assumed]:
        told.append(
            f"Effective rates eta / (1 - m) at {listed(assumed)} assume heavy-ball momentum."
        )
    begun = [curve for curve in study.rate_curves if curve.first is not None]
    if edge := [c.series for c in begun if c.source.rate in c.cells[c.first].boundary]:
        told.append(
            f"Scaling rules at {listed(edge)} start from a best rate at the end of its range. "
            "Widen the range."
        )
    if len(prices) and (unknown := int(prices["price"].isna().sum())):
        told.append(
            f"{len(prices) - unknown} of {len(prices)} prices of scaling rules are known. For the "
            f"others no trial within {WINDOW:g} times the rate met the goal."
        )
    return told + raced_notes(study)


def raced_notes(study: Analysis) -> list[str]:
    """What the figure leaves out: trials that were stopped early, and prices that say nothing."""
    slack, prices = study.record.race_factor, study.prices
    lines = []
    if slack is not None and slack < NEAR:
        lines.append(
            f"Trials were stopped early (study.race_factor = {slack:g}). Bars of the rates within "
            f"{NEAR:g} K* lack stopped trials and may be too short."
        )
    empty = int(is_empty_bound(prices).sum())
    if empty:
        line = (
            f"{empty} of {len(prices)} prices of scaling rules are not drawn. They are only known "
            "to be at least 1, as every price is."
        )
        if slack is not None:
            line += (
                f" study.race_factor = {slack:g} stopped trials early; null lets all trials finish."
            )
        lines.append(line)
    return lines


def is_empty_bound(prices: pd.DataFrame) -> np.ndarray:
    """Whether each price is only known to be at least 1, which holds for every rule."""
    if not len(prices):
        return np.zeros(0, bool)
    return (prices["verdict"] == AT_LEAST).to_numpy() & (numbers(prices["price"]) <= 1)


def figures(tables: Mapping[str, pd.DataFrame], study: Analysis) -> Iterator[tuple[str, Figure]]:
    yield NAME, draw(tables[NAME], tables[PRICES], study)


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, prices: pd.DataFrame, study: Analysis) -> Figure:
    """A row of panels for each series and kind of rate: the best rate with both rules left, their
    prices right.

    Bars left span the rates of trials that need at most `NEAR` times K*; bars right are 95 %
    limits, and the small numbers beside the points count the trials that they rest on. Bounds are
    hollow, with an arrow; a cross above is a rate near which all trials diverged.
    """
    lines = [(c, kind) for c in study.rate_curves for kind in c.source.kinds]
    figure = Figure(figsize=(6.4, 2.1 * len(lines) + 0.5))
    panels = figure.subplots(len(lines), 2, sharex=True, squeeze=False)
    for (curve, kind), (left, right) in zip(lines, panels, strict=True):
        _draw_rates(left, rows_of(curve.series, rows), kind)
        of_series = rows_of(curve.series, prices) if len(prices) else prices
        _draw_prices(right, of_series[of_series["rate"] == kind])
        left.set_ylabel(LABELS[kind] if curve.source.momentum != 0 else LABELS[PLAIN])
        right.set_ylabel("K at the rule's rate / K*")
        for ax in (left, right):
            ax.set_title(legend(curve.series) if len(study.record.series) > 1 else "")
    look.batch_size_axis(panels[0, 0], study.record.batch_sizes)
    for ax in panels[-1]:
        ax.set_xlabel(look.BATCH_SIZE)
    best = Line2D(
        [],
        [],
        label=f"best trial; bar: within {NEAR:g} K*",
        **look.curve_style(0),
        linestyle="none",
    )
    rules = [
        Line2D([], [], label=RULE_NAMES[rule], **_style(i), linestyle="--")
        for i, rule in enumerate(RULES)
    ]
    bars = Line2D(
        [], [], label="right: 95 % interval; number: trials nearby", color=look.GREY, linewidth=0.8
    )
    verdicts = {*prices["verdict"][~is_empty_bound(prices)]} if len(prices) else set()
    known = look.bound_handles(
        bool(verdicts & {AT_LEAST, AT_MOST} or (rows["floor"] == 1).any()), "bound"
    )
    if DIVERGED in verdicts:
        known.append(
            Line2D([], [], label="all diverged", color=look.GREY, marker="x", linestyle="none")
        )
    look.legend_above(figure, [best, *rules, bars, *known])
    return figure


def _style(rule: int) -> dict[str, str]:
    return look.curve_style(rule + 1)


def _draw_rates(ax: Axes, rows: pd.DataFrame, kind: str) -> None:
    x, y = numbers(rows["batch_size"]), numbers(rows[kind])
    low, high = (numbers(rows[f"{kind}_{end}"]) for end in ("low", "high"))
    style, bound = look.curve_style(0), numbers(rows["floor"]) == 1
    ax.vlines(x, low, high, color=style["color"], linewidth=0.8, alpha=0.6)
    ax.plot(x[~bound], y[~bound], linestyle="none", **style)
    ax.plot(x[bound], y[bound], linestyle="none", markerfacecolor="white", **style)
    drawn = [low, high]
    if not bound.all():
        first, largest = x[~bound].min(), x.max()
        for i, power in enumerate(RULES.values()):
            ends = np.array([first, largest])
            ruled = y[x == first] * (ends / first) ** power
            ax.plot(ends, ruled, linestyle="--", color=_style(i)["color"], linewidth=0.9, zorder=1)
            drawn.append(ruled)
    look.log_values_axis(ax, np.concatenate(drawn), 1.3, 1.3)


def _draw_prices(ax: Axes, rows: pd.DataFrame) -> None:
    ax.axhline(1, color=look.GREY, linestyle=":", linewidth=0.8, zorder=1)
    ax.set_yscale("log")
    empty = is_empty_bound(rows)
    if empty.any():
        words = f"{empty.sum()} of {len(rows)} prices not drawn:\nonly known to be at least 1"
        ax.text(
            0.5,
            0.92,
            words,
            transform=ax.transAxes,
            ha="center",
            va="top",
            color=look.GREY,
            fontsize=6,
        )
        rows = rows[~empty]
    known = rows[rows["price"].notna()]
    if not len(known) and not (rows["verdict"] == DIVERGED).any():
        ax.text(
            0.5, 0.5, NO_PRICE, transform=ax.transAxes, ha="center", va="center", color=look.GREY
        )
    highs = numbers(known["price_high"]) if len(known) else np.array([])
    top = 2 * max([2.0, *numbers(known["price"]), *highs[np.isfinite(highs)]])
    for i, rule in enumerate(RULES):
        part, style = rows[rows["rule"] == rule], _style(i)
        shift = 1.06 ** (2 * i - 1)  # beside each other
        for verdict in (MEASURED, AT_LEAST, AT_MOST):
            of = part[part["verdict"] == verdict]
            x, y = shift * numbers(of["batch_size"]), numbers(of["price"])
            if verdict == MEASURED:
                high = np.minimum(numbers(of["price_high"]), top)
                ax.vlines(
                    x,
                    numbers(of["price_low"]),
                    high,
                    color=style["color"],
                    linewidth=0.8,
                    alpha=0.6,
                )
                ax.plot(x, y, linestyle="none", **style)
            else:
                look.bounds(ax, x, y, **style, up=verdict == AT_LEAST)
            for place, count in zip(zip(x, y, strict=True), of["near"], strict=True):
                side = {"xytext": (4 if i else -4, 2), "ha": "left" if i else "right"}
                ax.annotate(
                    str(count),
                    place,
                    **side,
                    textcoords="offset points",
                    fontsize=5,
                    color=style["color"],
                )
        diverged = shift * numbers(part["batch_size"][part["verdict"] == DIVERGED])
        ax.plot(
            diverged,
            [top / 1.2] * len(diverged),
            linestyle="none",
            marker="x",
            color=style["color"],
        )
    look.log_values_axis(ax, [1, top], 1.15, 1.0)
