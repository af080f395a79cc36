"""Terms of the theory against K* over the series of a study: does smoothness order them as the
steps do?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import three_digits
from lit_dps.analysis.term_comparisons import FEWEST, TERMS, correlation_rows, rank_rows
from lit_dps.core.trial import text_of
from lit_dps.report.figures.pruners import by_default as by_default

NAME, PAPER = "terms", ""
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
    """Why there is nothing to draw, if so."""
    rows = rank_rows(study.record)
    known = rows.dropna(subset=["k_star", "lipschitz"]) if len(rows) else rows
    if not len(known):
        return "no measured terms of the theory (smoothness.interval)"
    most = known.groupby("batch_size").size().max()
    return (
        None if most >= FEWEST else f"terms and K* of fewer than {FEWEST} series at one batch size"
    )


def notes(study: Analysis) -> list[str]:
    """What the correlations rest on."""
    return [
        "Rank correlations of terms and K* have intervals over samples of the search. The few "
        "series are not a random sample."
    ]


def tables(study: Analysis) -> dict[str, pd.DataFrame]:
    """The rows of `ranks.rank_rows` and of `ranks.correlation_rows`."""
    return {
        "terms": rank_rows(study.record),
        "terms-correlations": correlation_rows(study.record, study.replicates),
    }


def figures(tables: Mapping[str, pd.DataFrame], study: Analysis) -> Iterator[tuple[str, Figure]]:
    """The one figure."""
    yield "terms", draw(tables["terms"], tables["terms-correlations"])


@matplotlib.rc_context(look.STYLE)
def draw(rows: pd.DataFrame, correlations: pd.DataFrame) -> Figure:
    """A line of panels for each batch size, a panel for each term: a point for each series.

    Colours are those of the last axis of the grid, the marker and its filling those of the others.
    """
    known = rows.dropna(subset=["k_star", "lipschitz"])
    sizes, shown = sorted(known["batch_size"].unique()), list(TERMS)
    names = list(rows.columns[1 : rows.columns.get_loc("points")])
    names = [name for name in names if rows[name].nunique() > 1] or names[:1]
    looks = {
        way: _look(way, known[names]) for way in known[names].itertuples(index=False, name=None)
    }
    figure = Figure(figsize=(1.75 * len(shown) + 0.4, 1.75 * len(sizes) + 0.9))
    axes = figure.subplots(len(sizes), len(shown), squeeze=False)
    for line, size in zip(axes, sizes, strict=True):
        part = known[known["batch_size"] == size]
        for ax, term in zip(line, shown, strict=True):
            for row in part.to_dict("records"):
                ax.plot(
                    row[term],
                    row["k_star"],
                    linestyle="none",
                    **looks[tuple(row[name] for name in names)],
                )
            _values_axis(ax, part[term])
            look.log_values_axis(ax, part["k_star"], 1.2, 1.2)
            found = correlations[
                (correlations["batch_size"] == size) & (correlations["term"] == term)
            ]
            if len(found):
                row = found.iloc[0]
                ax.set_title(
                    f"rho {row['rho']:.2f} [{row['low']:.2f}, {row['high']:.2f}]", fontsize=7
                )
            if size == sizes[-1]:
                ax.set_xlabel(LABELS[term])
        line[0].set_ylabel(f"B = {size}: K* [steps]")
    handles = [
        look.Line2D([], [], label=", ".join(map(text_of, way)), linestyle="none", **looks[way])
        for way in looks
    ]
    look.legend_above(figure, handles)
    return figure


def _look(way: tuple, every: pd.DataFrame) -> dict[str, object]:
    *others, last = way
    style: dict[str, object] = dict(look.curve_style(list(every.iloc[:, -1].unique()).index(last)))
    place = list(dict.fromkeys(every.iloc[:, :-1].itertuples(index=False, name=None))).index(
        tuple(others)
    )
    if place:
        style |= {"markerfacecolor": "white", "marker": look.MARKERS[place % len(look.MARKERS)]}
    return style | ({} if place else {"marker": "o"})


def _values_axis(ax: Axes, values: pd.Series) -> None:
    """A logarithmic horizontal axis with a tick at either end of some values."""
    low, high = float(values.min()), float(values.max())
    ax.set_xscale("log")
    room = 1.1 * (high / low) ** 0.05
    ax.set_xlim(low / room, high * room)
    ax.set_xticks([low, high], [three_digits(low), three_digits(high)])
    ax.xaxis.set_minor_locator(look.NullLocator())
