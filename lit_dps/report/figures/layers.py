"""What each pruning method keeps of each layer, and from which sparsity on a layer is empty."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.layers import collapse_rows, kept_of, layer_rows, trials_with_changes
from lit_dps.analysis.tables import columns_before, records, where
from lit_dps.core.trial import text_of
from lit_dps.report.figures.page_size import new_figure
from lit_dps.report.figures.pruners import by_default as by_default

NAME, PAPER = "layers", ""
COLLAPSE = "collapse"  # the name of its second table and figure
CAPTION = "share of each layer that pruning keeps, and the smallest share against the sparsity"
EVEN: dict[str, Any] = {"color": look.GREY, "linestyle": ":", "linewidth": 0.8, "zorder": 1}
MOST_CURVES = 6  # methods that can be distinguished in one panel
SPARSITY_COLUMNS, METHOD_COLUMNS = 3, 5  # panels side by side
DODGE = 0.06  # distance of neighbouring curves within a layer
DEFAULT_SHARE = 1e-3  # the smallest share if no layer keeps anything


class _Part(NamedTuple):
    """Some rows of a table, and what they are called."""

    name: str
    rows: pd.DataFrame


def missing(*studies: Analysis) -> str | None:
    """Return why there is nothing to draw; None if there is something."""
    for study in studies:
        if list(kept_of(study.record)):
            return None
    if _changed_masks(studies):
        return "no trials that keep one mask"
    return "no pruned trials"


def notes(*studies: Analysis) -> list[str]:
    """Return from which sparsity of the study on layers are empty, and what is omitted."""
    lines = collapse_notes(_layers(studies))
    changed = _changed_masks(studies)
    if changed:
        lines.append(f"{NAME}: without {changed} trials whose masks change during training")
    return lines


def _changed_masks(studies: Sequence[Analysis]) -> int:
    """Return the number of trials whose masks change during training."""
    count = 0
    for study in studies:
        count += sum(map(len, trials_with_changes(study.record).values()))
    return count


def collapse_notes(layers: pd.DataFrame) -> list[str]:
    """Return a line for each way of pruning that leaves a layer empty."""
    table = collapse_rows(layers)
    names = columns_before(table, "sparsity")
    lines = []
    for row in records(table):
        if row["sparsity"] != row["collapses"]:
            continue
        values = []
        for name in names:
            values.append(f"{name}={text_of(row[name])}")
        lines.append(
            f"{' '.join(values) or 'pruning'}: from S={row['sparsity']:g} on a layer is empty, "
            f"{row['layer']} at {row['empty']} of {row['samples']} samples"
        )
    return lines


def tables(*studies: Analysis) -> dict[str, pd.DataFrame]:
    """Return the tables of `tables_of` of some studies."""
    return tables_of(_layers(studies))


def tables_of(layers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return `layers.layer_rows`, and with several sparsities also `layers.collapse_rows`."""
    tables = {NAME: layers}
    if len(set(layers["sparsity"])) > 1:
        tables[COLLAPSE] = collapse_rows(layers)
    return tables


def _layers(studies: Sequence[Analysis]) -> pd.DataFrame:
    """Return the rows of `layers.layer_rows` of some studies together."""
    kept = []
    for study in studies:
        kept += kept_of(study.record)
    return layer_rows(kept)


def figures(tables: Mapping[str, pd.DataFrame], *studies: Analysis) -> Iterator[tuple[str, Figure]]:
    """Yield the figure of each table, with its name."""
    yield NAME, draw(tables[NAME])
    if COLLAPSE in tables:
        yield COLLAPSE, draw_collapse(tables[COLLAPSE])


@matplotlib.rc_context(look.STYLE)
def draw(layers: pd.DataFrame) -> Figure:
    """Return the share of each layer that is kept, with bars over the samples.

    A panel per sparsity has a curve per method; of many methods a panel per method has a curve per
    sparsity. Empty layers are at the bottom. Dotted: 1 - S.
    """
    curves = _by_method(layers)
    panels = [_Part(f"sparsity {s:g}", part) for s, part in layers.groupby("sparsity")]
    columns = min(SPARSITY_COLUMNS, len(panels))
    panels_are_methods = len(curves) > MOST_CURVES
    if panels_are_methods:
        curves, panels = panels, curves
        columns = min(METHOD_COLUMNS, len(panels))
    styles = [look.curve_style(j) for j in range(len(curves))]
    if panels_are_methods:
        # Sparsities have an order, which colours of their own would hide.
        styles = look.shades(len(curves))
    names = list(layers["layer"].unique())
    lines = math.ceil(len(panels) / columns)
    width = max((0.9 + 0.3 * len(names)) * columns, 2.2 * columns, 3.6)
    figure = new_figure(width, 2.1 * lines + 0.8)
    floor = _smallest_positive(layers["low"]) / 2
    for i, panel in enumerate(panels):
        ax = figure.add_subplot(lines, columns, i + 1, title=panel.name)
        for j, curve in enumerate(curves):
            part = panel.rows.loc[panel.rows.index.intersection(curve.rows.index)]
            shift = DODGE * (j - (len(curves) - 1) / 2)
            _draw_shares(ax, part, names, floor, shift, styles[j])
        ax.set_yscale("log")
        ax.set_ylim(floor / 1.3, 1.3)
        look.plain_ticks(ax.yaxis)
        for sparsity in panel.rows["sparsity"].unique():
            ax.axhline(1 - sparsity, **EVEN)
        ax.set_xticks(range(len(names)), list(map(_short, names)), rotation=45, ha="right")
        if i % columns == 0:
            ax.set_ylabel("share of the layer that is kept")
    _draw_legend(figure, curves, styles)
    return figure


def _short(layer: str) -> str:
    """Return the name of a layer without the parts that most layers share."""
    return layer.removesuffix(".weight").removeprefix("network.")


def _draw_shares(
    ax: Axes,
    rows: pd.DataFrame,
    names: Sequence[str],
    floor: float,
    shift: float,
    style: dict[str, Any],
) -> None:
    """Draw the shares of layers that one way of pruning keeps.

    Args:
        ax: The panel.
        rows: The layers.
        names: All layers, in the order of the axis.
        floor: The share at which empty layers are drawn.
        shift: From the place of a layer, so that bars of other curves are beside.
        style: Colour and marker.
    """
    places = np.array(list(map(names.index, rows["layer"]))) + shift
    share = rows["share"].clip(lower=floor).to_numpy()
    low = rows["low"].clip(lower=floor).to_numpy()
    high = rows["high"].clip(lower=floor).to_numpy()
    ax.errorbar(
        places,
        share,
        yerr=[share - low, high - share],
        elinewidth=0.8,
        markersize=3.5,
        linewidth=0.8,
        **style,
    )


@matplotlib.rc_context(look.STYLE)
def draw_collapse(collapse: pd.DataFrame) -> Figure:
    """Return the smallest share of a layer against the share that is kept of all weights.

    A method with an empty layer has a hollow point there, at the bottom on a level that no other
    method has.
    """
    figure = new_figure(4.9, 3.5)
    methods = _by_method(collapse)
    ax = figure.add_subplot(xscale="log", yscale="log", xlabel="share of all weights that is kept")
    ax.set_ylabel("smallest share of a layer that is kept")
    floor = _smallest_positive(collapse["least"]) / 2
    ends = []
    for i, method in enumerate(methods):
        part = method.rows.sort_values("sparsity")
        empty = where(part, least=0)
        if len(empty):
            floor /= 1.5
        style = look.curve_style(i)
        shares = part["least"].clip(lower=floor)
        ax.plot(part["kept"], shares, **(style | look.line_of(i)))
        kept = empty["kept"]
        ax.plot(kept, [floor] * len(kept), linestyle="none", markerfacecolor="white", **style)
        ends.append((float(shares.iloc[-1]), method.name, style["color"]))
    limits = [collapse["kept"].min(), collapse["kept"].max()]
    ax.plot(limits, limits, **EVEN)
    look.plain_ticks(ax.xaxis)
    look.plain_ticks(ax.yaxis)
    ax.invert_xaxis()
    notes = ["dotted: equal shares"]
    if len(where(collapse, least=0)):
        notes.append("hollow: a layer is empty")
    ax.text(0.02, 0.02, "\n".join(notes), transform=ax.transAxes, fontsize=7)
    if len(methods) > 1:
        look.label_ends(ax, ends, figure.get_figheight())
    return figure


def _smallest_positive(shares: Any) -> float:
    """Return the smallest share that is not 0."""
    return min(shares[shares > 0], default=DEFAULT_SHARE)


def _by_method(table: pd.DataFrame) -> list[_Part]:
    """Return the parts of a table by the further axes of its series: a method each."""
    axes = columns_before(table, "sparsity")  # `collapse_rows`: axes, sparsity
    if not axes:  # `layer_rows`: sparsity, axes, layer
        axes = columns_before(table, "layer")[1:]
    if "layer" not in axes and axes:
        parts = []
        groups: Any = table.groupby(axes, sort=False)
        for values, part in groups:
            parts.append(_Part(", ".join(map(text_of, values)), part))
        return parts
    return [_Part("all", table)]


def _draw_legend(figure: Figure, curves: Sequence[_Part], styles: Sequence[dict[str, Any]]) -> None:
    """Draw a legend of the curves, if there are several, and of the dotted line."""
    handles = []
    if len(curves) > 1:
        for curve, style in zip(curves, styles, strict=True):
            handles.append(look.entry(curve.name, **style))
    look.legend_above(figure, [*handles, look.entry("1 - S", **EVEN)])
