"""What each pruning method leaves of each layer, and from which sparsity on a layer is left
empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.layers import collapse_rows, kept_of, layer_rows
from lit_dps.core.trial import text_of
from lit_dps.report.figures.pruners import by_default as by_default

NAME, PAPER = "layers", ""
EVEN = {"color": look.GREY, "linestyle": ":", "linewidth": 0.8, "zorder": 1}
MOST = 6  # methods whose curves are told apart in one panel
CAPTION = "share of each layer that pruning keeps, and the smallest share against the sparsity"


def missing(*studies: Analysis) -> str | None:
    """Why there is nothing to draw, if so."""
    kept = (series for study in studies for series in kept_of(study.record))
    return None if next(kept, None) else "no pruned trials"


def notes(*studies: Analysis) -> list[str]:
    """From which sparsity on layers are empty, of the sparsities of the study."""
    return collapse_notes(layer_rows(kept for study in studies for kept in kept_of(study.record)))


def collapse_notes(layers: pd.DataFrame) -> list[str]:
    """A line for each way of pruning that leaves a layer empty."""
    found = collapse_rows(layers).dropna(subset=["collapses"])
    ways = list(found.columns[: found.columns.get_loc("sparsity")])
    first = found[found["sparsity"] == found["collapses"]]
    return [
        f"{' '.join(f'{name}={text_of(row[name])}' for name in ways) or 'pruning'}: from "
        f"S={row['sparsity']:g} on a "
        f"layer is empty, {row['layer']} at {row['empty']} of {row['points']} points"
        for row in first.to_dict("records")
    ]


def tables(*studies: Analysis) -> dict[str, pd.DataFrame]:
    """The rows of `layers.layer_rows`, and of `layers.collapse_rows` where there are several
    sparsities."""
    return tables_of(layer_rows(kept for study in studies for kept in kept_of(study.record)))


def tables_of(layers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables from the first of them."""
    several = layers["sparsity"].nunique() > 1
    return {"layers": layers, **({"collapse": collapse_rows(layers)} if several else {})}


def figures(tables: Mapping[str, pd.DataFrame], *studies: Analysis) -> Iterator[tuple[str, Figure]]:
    """Each table's figure by its name."""
    yield "layers", draw(tables["layers"])
    if "collapse" in tables:
        yield "collapse", draw_collapse(tables["collapse"])


@matplotlib.rc_context(look.STYLE)
def draw(layers: pd.DataFrame, *studies: Analysis) -> Figure:
    """The share of each layer that is kept, with bars from the least to the greatest of the points;
    the bottom is none.

    A panel a sparsity with a curve a method; of many methods a panel a method with a curve a
    sparsity. Dotted: 1 - S.
    """
    ways = _ways(layers)
    by_sparsity = [(f"{s:g}", part) for s, part in layers.groupby("sparsity")]
    panels, curves = (by_sparsity, ways) if len(ways) <= MOST else (ways, by_sparsity)
    names, columns = (
        list(layers["layer"].unique()),
        min(3 if panels is by_sparsity else 5, len(panels)),
    )
    lines = -(-len(panels) // columns)
    figure = Figure(
        figsize=(max((0.9 + 0.3 * len(names)) * columns, 2.2 * columns, 3.6), 2.1 * lines + 0.8)
    )
    positive = layers.loc[layers["low"] > 0, "low"]
    floor = (positive.min() if len(positive) else 1e-3) / 2  # where empty layers stand
    styles = [look.curve_style(j) for j in range(len(curves))]
    for i, (name, panel) in enumerate(panels):
        ax = figure.add_subplot(
            lines, columns, i + 1, title=f"sparsity {name}" if panels is by_sparsity else name
        )
        for j, (_, curve) in enumerate(curves):
            here = panel.loc[panel.index.intersection(curve.index)]
            x = [names.index(name) + 0.06 * (j - (len(curves) - 1) / 2) for name in here["layer"]]
            share, low, high = (
                here[name].clip(lower=floor).to_numpy() for name in ("share", "low", "high")
            )
            bars = {
                "yerr": [share - low, high - share],
                "elinewidth": 0.8,
                "markersize": 3.5,
                "linewidth": 0.8,
            }
            ax.errorbar(x, share, **bars, **styles[j])
        ax.set_yscale("log")
        ax.set_ylim(floor / 1.3, 1.3)
        look.plain_ticks(ax.yaxis)
        for sparsity in panel["sparsity"].unique():
            ax.axhline(1 - sparsity, **EVEN)
        short = [name.removesuffix(".weight").removeprefix("network.") for name in names]
        ax.set_xticks(range(len(names)), short, rotation=45, ha="right")
        if i % columns == 0:
            ax.set_ylabel("share of the layer that is kept")
    _legend(figure, curves, "" if panels is by_sparsity else "sparsity ", "1 - S")
    return figure


@matplotlib.rc_context(look.STYLE)
def draw_collapse(collapse: pd.DataFrame) -> Figure:
    """The least share of a layer against the share that is kept of all; hollow at the bottom where
    one is empty.

    Each method with an empty layer has a level of its own there.
    """
    figure, ways = Figure(figsize=(4.6, 3.5)), _ways(collapse)
    ax = figure.add_subplot(xscale="log", yscale="log", xlabel="share of all weights that is kept")
    ax.set_ylabel("least share of a layer that is kept")
    positive = collapse.loc[collapse["least"] > 0, "least"]
    floor = (positive.min() if len(positive) else 1e-3) / 2
    for i, (_, part) in enumerate(ways):
        part, style, empty = part.sort_values("sparsity"), look.curve_style(i), part["least"].eq(0)
        if empty.any():
            floor /= 1.5
        part, hollow = part.assign(least=part["least"].clip(lower=floor)), part[empty[part.index]]
        ax.plot(part["kept"], part["least"], **style)
        ax.plot(
            hollow["kept"],
            [floor] * len(hollow),
            linestyle="none",
            markerfacecolor="white",
            **style,
        )
    ends = [collapse["kept"].min(), collapse["kept"].max()]
    ax.plot(ends, ends, **EVEN)
    look.plain_ticks(ax.xaxis)
    look.plain_ticks(ax.yaxis)
    ax.invert_xaxis()
    if (collapse["least"] == 0).any():
        ax.text(0.02, 0.02, "hollow: a layer is empty", transform=ax.transAxes, fontsize=7)
    _legend(figure, ways, even="equal shares")
    return figure


def _ways(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The parts of a table by further axes, and what they are called."""
    first = {"layer", "sparsity"}
    ways = []
    for name in table.columns:
        if name in first:
            if name == "layer" or table.columns[0] != "sparsity":
                break
            continue
        ways.append(name)
    if not ways:
        return [("all", table)]
    return [(", ".join(map(text_of, way)), part) for way, part in table.groupby(ways, sort=False)]


def _legend(
    figure: Figure, curves: list[tuple[str, pd.DataFrame]], what: str = "", even: str = ""
) -> None:
    handles = [
        look.Line2D([], [], label=what + name, **look.curve_style(i))
        for i, (name, _) in enumerate(curves)
    ]
    look.legend_above(
        figure, [*(handles if len(curves) > 1 else []), look.Line2D([], [], label=even, **EVEN)]
    )
