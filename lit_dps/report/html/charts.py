"""The interactive charts of a study's report page, as plotly figures made from the tables of
`Analysis`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law_bootstrap import Scaling
from lit_dps.analysis.tables import legend, numbers
from lit_dps.core.search_space import Box, Range, short_names
from lit_dps.core.trial import Series, Status
from lit_dps.report.no_result import COUNT_HEADS

# Okabe and Ito (2008), as in `lit_dps.report.figures.style`, which needs matplotlib
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
BEYOND = 4  # how far beyond the largest batch size the law is drawn, hatched: a factor
PER_OCTAVE = 8
_GRID, BATCH_SIZE = "#e5e5e5", "batch size B [examples]"


def colour(i: int) -> str:
    """Colour of the i-th series."""
    return COLOURS[i % len(COLOURS)]


def plain(text: object) -> str:
    """Text in which plotly, which reads some HTML in labels, finds none."""
    return html.escape(str(text), quote=False)


def curve(study: Analysis) -> go.Figure | None:
    """K* against batch size: what was measured, the law with its 95 % band, and, hatched, the law
    beyond the data."""
    figure = go.Figure()
    for i, (series, scaling) in enumerate(study.scalings.items()):
        if scaling.k_star:
            _law(figure, series, scaling, colour(i))
            _points(figure, series, scaling, colour(i))
    if not figure.data:
        return None
    sizes = study.record.batch_sizes
    beyond = BEYOND if any(scaling.fit for scaling in study.scalings.values()) else 1
    return dress(
        figure, BATCH_SIZE, "steps to result K* [optimizer steps]", _doublings(sizes, beyond)
    )


def _points(figure: go.Figure, series: Series, scaling: Scaling, colour: str) -> None:
    for symbol, bounds in (("circle", False), ("triangle-down-open", True)):
        known = {b: k for b, k in scaling.k_star.items() if (b in scaling.at_first_check) == bounds}
        if known:
            figure.add_scatter(
                x=list(known),
                y=list(known.values()),
                mode="markers",
                marker={"color": colour, "size": 9, "symbol": symbol},
                name=plain(legend(series)) + (", at most" if bounds else ""),
                legendgroup=plain(series),
                hovertemplate="B = %{x}<br>K* " + ("<=" if bounds else "=") + " %{y:,}",
            )


def _law(figure: go.Figure, series: Series, scaling: Scaling, colour: str) -> None:
    if scaling.fit is None:
        return
    first, last = min(scaling.resolved), max(scaling.resolved)
    for low, high, beyond in ((first, last, False), (last, BEYOND * last, True)):
        batch = np.geomspace(low, high, 1 + round(PER_OCTAVE * math.log2(high / low)))
        common = {
            "x": batch,
            "legendgroup": plain(series),
            "showlegend": False,
            "hoverinfo": "skip",
            "mode": "lines",
        }
        if (band := scaling.band(batch)) is not None:
            pattern = {
                "shape": "/",
                "fgcolor": colour,
                "fgopacity": 0.5,
                "bgcolor": "rgba(0,0,0,0)",
                "size": 6,
            }
            filled = {"fillpattern": pattern} if beyond else {"fillcolor": _pale(colour)}
            figure.add_scatter(y=band[0], line={"width": 0}, **common)
            figure.add_scatter(y=band[1], line={"width": 0}, fill="tonexty", **filled, **common)
        dash = {"color": colour, "width": 2, "dash": "dot" if beyond else "solid"}
        figure.add_scatter(y=scaling.fit.steps(batch), line=dash, **common)


def parallel(study: Analysis) -> go.Figure | None:
    """All finished trials as parallel coordinates: drag along an axis to keep those in a range.
    None without any."""
    rows, record = study.trials, study.record
    if not len(rows):
        return None
    names = short_names(list(record.space))
    dimensions = [_log_dimension("B", rows["batch_size"], 2)]
    if len(record.sparsities) > 1:
        dimensions.append(_levels("S", rows["sparsity"].map("{:g}".format)))
    for name in rows.columns[1 : rows.columns.get_loc("batch_size")]:
        dimensions.append(_levels(name, rows[name].astype(str)))
    for key, name in names.items():
        dimensions.append(_scaled(name, rows[name], record.space[key]))
    dimensions.append(_log_dimension("last step", rows["steps_run"], 10))
    # The heads of the table below the answer, in place of the stored names.
    order = [str(status) for status in Status if (rows["status"] == str(status)).any()]
    ends = rows["status"].replace(COUNT_HEADS)
    dimensions.append(_levels("ended", ends, [COUNT_HEADS.get(name, name) for name in order]))
    goes_well = (rows["status"] == str(Status.COMPLETE)).astype(float)
    line = {
        "color": goes_well,
        "colorscale": [[0, "#d0d0d0"], [1, COLOURS[0]]],
        "cmin": 0,
        "cmax": 1,
    }
    figure = go.Figure(
        go.Parcoords(dimensions=dimensions, line=line, tickfont={"size": 12, "color": "black"})
    )
    figure.update_layout(margin={"t": 60, "b": 30, "l": 60, "r": 60}, height=420)
    return figure


def _scaled(name: str, values: pd.Series, box: Box) -> dict[str, object]:
    if not isinstance(box, Range):
        return _levels(name, values.astype(str))
    known = numbers(values)
    if box.scale == "log":
        return _log_dimension(name, values, 10)
    if box.scale == "reverse_log":
        return _ticked(f"1 - {name}", np.log10(1 - known), 10)
    return {"label": plain(name), "values": known, "range": [box.low, box.high]}


def _log_dimension(name: str, values: pd.Series, base: int) -> dict[str, object]:
    known = np.maximum(numbers(values), 1e-300)
    return _ticked(name, np.log(known) / math.log(base), base)


def _ticked(name: str, logs: np.ndarray, base: int) -> dict[str, object]:
    if not np.isfinite(logs).any():
        return {"label": plain(name), "values": logs}
    low, high = math.floor(np.nanmin(logs)), math.ceil(np.nanmax(logs))
    ticks = list(range(low, max(high, low + 1) + 1))
    shown = [f"{base**tick:g}" for tick in ticks]
    return {
        "label": plain(name),
        "values": logs,
        "tickvals": ticks,
        "ticktext": shown,
        "range": [ticks[0], ticks[-1]],
    }


def _levels(name: str, values: pd.Series, order: Sequence[str] = ()) -> dict[str, object]:
    order = list(order) or sorted(set(values))
    place: Mapping[str, int] = {value: i for i, value in enumerate(order)}
    shown = [
        plain(value.rpartition(".")[2] if "." in value and not _number(value) else value)
        for value in order
    ]
    reach = [-0.3, len(order) - 0.7]
    return {
        "label": plain(name),
        "values": values.map(place),
        "tickvals": list(place.values()),
        "ticktext": shown,
        "range": reach,
    }


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _doublings(sizes: Sequence[int], beyond: int) -> list[int]:
    """The batch sizes of the grid, and the doublings of the largest up to so many times it."""
    return [*sizes, *(sizes[-1] * 2**i for i in range(1, beyond.bit_length()))]


def dress(figure: go.Figure, x: str, y: str, ticks: Sequence[float]) -> go.Figure:
    """Gives a chart the axes, both logarithmic, and the legend of the page."""
    axis = {"gridcolor": _GRID, "linecolor": "#666666", "ticks": "outside", "zeroline": False}
    figure.update_xaxes(
        type="log", title=x, tickvals=list(ticks), ticktext=[f"{t:g}" for t in ticks], **axis
    )
    # without a format of ticks 2 and 5 stand for 200 and 500
    figure.update_yaxes(type="log", title=y, dtick="D2", tickformat=",~g", automargin=True, **axis)
    figure.update_layout(
        template="none",
        height=430,
        margin={"t": 20, "b": 60, "l": 80, "r": 20},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        hoverlabel={"namelength": -1},
    )
    return figure


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
