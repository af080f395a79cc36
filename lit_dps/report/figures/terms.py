"""Terms of the theory against K* over the series of a study, with rank correlations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import numbers, three_digits, where
from lit_dps.analysis.term_comparisons import MIN_SERIES, TERMS, correlation_rows, rank_rows
from lit_dps.core.trial import text_of
from lit_dps.report.figures.page_size import new_figure
from lit_dps.report.figures.pruners import by_default as by_default

NAME, PAPER = "terms", ""
CORRELATIONS = "terms-correlations"  # the name of its second table
CAPTION = (
    "L, beta and the predicted c1 against K* over the series of a study, with rank correlations"
)
LABELS = {
    "lipschitz": "L [nats / w²]",
    "beta": "β [(nats / w)² examples]",
    "delta": "Δ [nats]",
    "c1_equal_epsilon": "Δβ L",
    "c1": "Δβ L / ε² [examples]",
}


def missing(study: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    rows = rank_rows(study.record)
    if not len(rows) or not len(_known(rows)):
        return "no measured terms of the theory (smoothness.interval)"
    if max(Counter(_known(rows)["batch_size"]).values()) < MIN_SERIES:
        return f"terms and K* of fewer than {MIN_SERIES} series at one batch size"
    return None


def _known(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `rank_rows` that have K* and terms."""
    return rows.dropna(subset=["k_star", "lipschitz"])


def notes(study: Analysis) -> list[str]:
    """Return what the correlations rest on."""
    return [
        "Rank correlations of terms and K* have intervals over samples of the search. The few "
        "series are not a random sample."
    ]


def tables(study: Analysis) -> dict[str, pd.DataFrame]:
    """Return `term_comparisons.rank_rows` and `term_comparisons.correlation_rows`."""
    return {
        NAME: rank_rows(study.record),
        CORRELATIONS: correlation_rows(study.record, study.replicates),
    }


def figures(tables: Mapping[str, pd.DataFrame], study: Analysis) -> Iterator[tuple[str, Figure]]:
    """Yield the figure with its name."""
    yield NAME, draw(tables[NAME], tables[CORRELATIONS])


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, correlations: pd.DataFrame) -> Figure:
    """Return a line of panels for each batch size, a panel for each term, a point for each series.

    The colour of a point is the value of the last axis of the grid, its marker and filling are the
    values of the others.
    """
    known = _known(rows)
    sizes = sorted(set(known["batch_size"]))
    names = _axes(rows)
    styles = _styles(known.loc[:, names])
    figure = new_figure(1.75 * len(TERMS) + 0.4, 1.75 * len(sizes) + 0.9)
    panels = figure.subplots(len(sizes), len(TERMS), squeeze=False)
    for line, batch_size in zip(panels, sizes, strict=True):
        part = where(known, batch_size=batch_size)
        for ax, term in zip(line, TERMS, strict=True):
            groups: Any = part.groupby(names, sort=False)
            for values, of_series in groups:
                style = styles[values]
                ax.plot(of_series[term], of_series["k_star"], linestyle="none", **style)
            _values_axis(ax, numbers(part[term]))
            look.log_values_axis(ax, part["k_star"], 1.2, 1.2)
            of_panel = where(correlations, batch_size=batch_size, term=term)
            for row in of_panel.to_dict(orient="records"):
                text = f"rho {row['rho']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
                ax.set_title(text, fontsize=7)
            if batch_size == sizes[-1]:
                ax.set_xlabel(LABELS[term])
        line[0].set_ylabel(f"B = {batch_size}: K* [steps]")
    handles = []
    for values, style in styles.items():
        handles.append(look.entry(", ".join(map(text_of, values)), linestyle="none", **style))
    look.legend_above(figure, handles)
    return figure


def _axes(rows: pd.DataFrame) -> list[str]:
    """Return the further axes of the grid that have several values, or the first one."""
    names = list(rows.columns[1 : rows.columns.get_loc("samples")])
    varied = [name for name in names if len(set(rows[name])) > 1]
    return varied or names[:1]


def _styles(series: pd.DataFrame) -> dict[tuple, dict[str, Any]]:
    """Return how each series is drawn, by its values of the axes.

    Args:
        series: A column for each axis.
    """
    last_values = list(series.iloc[:, -1].unique())
    other_values = list(dict.fromkeys(series.iloc[:, :-1].itertuples(index=False, name=None)))
    styles = {}
    for values in series.itertuples(index=False, name=None):
        style = look.curve_style(last_values.index(values[-1]))
        i = other_values.index(values[:-1])
        if i == 0:
            style["marker"] = "o"
        else:
            style["marker"] = look.MARKERS[i % len(look.MARKERS)]
            style["markerfacecolor"] = "white"
        styles[values] = style
    return styles


def _values_axis(ax: Axes, values: np.ndarray) -> None:
    """Make the x axis logarithmic, with a tick at each end of some values."""
    low, high = float(values.min()), float(values.max())
    ax.set_xscale("log")
    room = 1.1 * (high / low) ** 0.05
    ax.set_xlim(low / room, high * room)
    ax.set_xticks([low, high], [three_digits(low), three_digits(high)])
    ax.xaxis.set_minor_locator(NullLocator())
