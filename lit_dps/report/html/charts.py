"""The interactive charts of a report page: plotly figures of the rows that figures draw too."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import are_upper_bounds
from lit_dps.analysis.law import Law
from lit_dps.analysis.rates import EFFECTIVE, PLAIN, RULE_NAMES, RULES, RateCurve, rule_line
from lit_dps.analysis.tables import has_values, k_star_axis, legend, numbers, rows_of, where
from lit_dps.core.search_space import Box, Range
from lit_dps.core.trial import Series, Status
from lit_dps.report.no_result import COUNT_HEADS

# Okabe and Ito (2008), as in `lit_dps.report.figures.style`, which imports matplotlib.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
BEYOND = 4  # how far beyond the largest batch size the law is drawn, a factor
BATCH_SIZE = "batch size B [examples]"
RATES = {EFFECTIVE: "effective rate eta / (1 - m)", PLAIN: "learning rate"}
RULE_DASHES = {"linear": "dash", "square_root": "dot"}
GRID = "#e5e5e5"
PALE = "#d0d0d0"  # trials that did not reach the goal
MARKER_SIZE, STAR_SIZE = 9, 14
BOUND = "triangle-down-open"  # the symbol of upper bounds
BARS = {"symmetric": False, "thickness": 1, "width": 3}
SMALLEST = 1e-300  # in place of 0 on a logarithmic axis


def colour(i: int) -> str:
    """Return the colour of the i-th series."""
    return COLOURS[i % len(COLOURS)]


def plain(text: object) -> str:
    """Return text without HTML: plotly would interpret some tags in labels."""
    return html.escape(str(text), quote=False)


# K* against batch size


def curve(study: Analysis) -> go.Figure | None:
    """Return K* against batch size with the law and its 95 % band; None without any K*.

    Beyond the largest batch size of a series the law is dotted and its band hatched.
    """
    figure = go.Figure()
    rows = study.curves_beyond(BEYOND)
    sizes = list(study.record.batch_sizes)
    sizes_beyond = []
    for i, (series, law) in enumerate(study.laws.items()):
        if law.k_star:
            of_series = rows_of(series, rows)
            _add_law(figure, series, law, of_series, colour(i))
            _add_k_stars(figure, series, of_series, colour(i))
        if law.fit is not None:
            sizes_beyond = _doublings(sizes[-1], BEYOND)
    if not figure.data:
        return None
    label = k_star_axis(study.record.statistic, study.record.goal.cost_unit)
    return dress(figure, BATCH_SIZE, label, sizes + sizes_beyond)


def _doublings(size: int, factor: int) -> list[int]:
    """Return the doublings of a batch size up to a factor of it."""
    return [size * 2**i for i in range(1, factor.bit_length())]


def _add_k_stars(figure: go.Figure, series: Series, rows: pd.DataFrame, colour: str) -> None:
    """Add the K* of a series: measured values, and upper bounds with an open marker."""
    for floor, symbol, suffix, relation in ((0, "circle", "", "="), (1, BOUND, ", at most", "<=")):
        points = where(rows, floor=floor).dropna(subset=["k_star"])
        if len(points):
            figure.add_scatter(
                x=points["batch_size"].tolist(),
                y=points["k_star"].tolist(),
                mode="markers",
                marker={"color": colour, "size": MARKER_SIZE, "symbol": symbol},
                name=plain(legend(series)) + suffix,
                legendgroup=plain(series),
                hovertemplate=f"B = %{{x}}<br>K* {relation} %{{y:,}}",
            )


def _add_law(figure: go.Figure, series: Series, law: Law, rows: pd.DataFrame, colour: str) -> None:
    """Add the law of a series within the fitted batch sizes, and beyond them."""
    if law.fit is None:
        return
    first, last = min(law.exact_k), max(law.exact_k)
    batch = numbers(rows["batch_size"])
    within = rows.loc[(batch >= first) & (batch <= last)]
    _add_part_of_law(figure, series, within, {"color": colour}, {"fillcolor": _pale(colour)})
    pattern = {
        "shape": "/",
        "fgcolor": colour,
        "fgopacity": 0.5,
        "bgcolor": "rgba(0,0,0,0)",
        "size": 6,
    }
    beyond = rows.loc[batch >= last]
    dotted = {"color": colour, "dash": "dot"}
    _add_part_of_law(figure, series, beyond, dotted, {"fillpattern": pattern})


def _add_part_of_law(
    figure: go.Figure,
    series: Series,
    rows: pd.DataFrame,
    line: Mapping[str, Any],
    fill: Mapping[str, Any],
) -> None:
    """Add a line and its band, if there is one."""
    common = {
        "x": numbers(rows["batch_size"]),
        "legendgroup": plain(series),
        "showlegend": False,
        "hoverinfo": "skip",
        "mode": "lines",
    }
    if has_values(rows, "fit_low"):
        figure.add_scatter(y=numbers(rows["fit_low"]), line={"width": 0}, **common)
        high = numbers(rows["fit_high"])
        figure.add_scatter(y=high, line={"width": 0}, fill="tonexty", **fill, **common)
    figure.add_scatter(y=numbers(rows["fit"]), line={"width": 2, **line}, **common)


def _pale(colour: str) -> str:
    """Return a colour with little opacity."""
    red = int(colour[1:3], 16)
    green = int(colour[3:5], 16)
    blue = int(colour[5:7], 16)
    return f"rgba({red},{green},{blue},0.15)"


# Time and examples to the goal


def to_goal(study: Analysis) -> go.Figure | None:
    """Return time and examples to the goal against batch size; None without any K*.

    A line per series. Open markers are upper bounds, a star is the fastest, bars are the limits of
    the time (`answer.LIMITS`).
    """
    table = study.answer
    if not len(table):
        return None
    has_times = has_values(table, "seconds")
    examples_column = 2 if has_times else 1
    figure = make_subplots(1, examples_column, horizontal_spacing=0.11)
    for i, series in enumerate(study.record.series):
        rows = rows_of(series, table)
        if not len(rows):
            continue
        common = {
            "x": rows["batch_size"].tolist(),
            "legendgroup": plain(series),
            "line": {"color": colour(i)},
            "name": plain(legend(series)),
            "mode": "lines+markers",
            "row": 1,
        }
        if has_times:
            _add_times(figure, rows, common)
        figure.add_scatter(
            y=rows["examples"].tolist(),
            marker={"symbol": _symbols(are_upper_bounds(rows)), "size": MARKER_SIZE},
            hovertemplate="B = %{x}<br>%{y:,.0f} examples",
            showlegend=not has_times,
            col=examples_column,
            **common,
        )
    dress(figure, BATCH_SIZE, "", study.record.batch_sizes)
    figure.update_yaxes(title="examples to the goal", col=examples_column)
    if has_times:
        figure.update_yaxes(title="time to the goal [s]", col=1)
    return figure


def _add_times(figure: go.Figure, rows: pd.DataFrame, common: Mapping[str, Any]) -> None:
    """Add the times of a series."""
    seconds = numbers(rows["total_seconds"])
    up = numbers(rows["total_high"]) - seconds
    down = seconds - numbers(rows["total_low"])
    symbols = _symbols(are_upper_bounds(rows))
    sizes = [MARKER_SIZE] * len(rows)
    for i, is_fastest in enumerate(rows["fastest"]):
        if is_fastest:
            symbols[i], sizes[i] = "star", STAR_SIZE
    figure.add_scatter(
        y=seconds,
        marker={"symbol": symbols, "size": sizes},
        error_y={"array": up, "arrayminus": down, **BARS},
        hovertemplate="B = %{x}<br>%{y:.3g} s",
        col=1,
        **common,
    )


def _symbols(is_bound: Any) -> list[str]:
    """Return the symbol of each value (n,)."""
    return np.where(is_bound, BOUND, "circle").tolist()


# Learning rates


def rates(study: Analysis) -> go.Figure | None:
    """Return the rate of each K* trial against batch size, with two scaling rules.

    None if no series has a K* at two batch sizes. The rate is the effective one, eta / (1 - m),
    where a momentum is counted.
    """
    figure = go.Figure()
    every = list(study.record.series)
    labels = set()
    for curve in study.rate_curves:
        if len(curve.cells) > 1:
            rows = rows_of(curve.series, study.rates)
            _add_rates(figure, curve, rows, colour(every.index(curve.series)))
            labels.add(RATES[EFFECTIVE if curve.source.has_momentum else PLAIN])
    if not labels:
        return None
    return dress(figure, BATCH_SIZE, " or ".join(sorted(labels)), study.record.batch_sizes)


def _add_rates(figure: go.Figure, curve: RateCurve, rows: pd.DataFrame, colour: str) -> None:
    """Add the best rates of a series, bars of nearby trials, and the lines of the rules."""
    best = numbers(rows[EFFECTIVE])
    up = numbers(rows[f"{EFFECTIVE}_high"]) - best
    down = best - numbers(rows[f"{EFFECTIVE}_low"])
    symbols = _symbols(rows["floor"] == 1)
    group = plain(curve.series)
    figure.add_scatter(
        x=rows["batch_size"].tolist(),
        y=best,
        mode="markers",
        name=plain(legend(curve.series)),
        legendgroup=group,
        marker={"color": colour, "size": MARKER_SIZE, "symbol": symbols},
        error_y={"array": up, "arrayminus": down, **BARS},
        hovertemplate="B = %{x}<br>%{y:.3g}",
    )
    for rule in RULES:
        line = rule_line(rows, EFFECTIVE, rule)
        if len(line):
            in_legend = any(figure.select_traces({"name": RULE_NAMES[rule]}))
            figure.add_scatter(
                x=numbers(line["batch_size"]),
                y=numbers(line["rate"]),
                mode="lines",
                name=RULE_NAMES[rule],
                legendgroup=group,
                showlegend=not in_legend,
                line={"color": colour, "width": 1, "dash": RULE_DASHES[rule]},
                hoverinfo="skip",
            )


# All trials


def parallel(study: Analysis) -> go.Figure | None:
    """Return all finished trials as parallel coordinates; None without any.

    Dragging along an axis keeps the trials in a range.
    """
    rows = study.trials
    if not len(rows):
        return None
    is_complete = (rows["status"] == str(Status.COMPLETE)).astype(float)
    line = {"color": is_complete, "colorscale": [[0, PALE], [1, COLOURS[0]]], "cmin": 0, "cmax": 1}
    tickfont = {"size": 12, "color": "black"}
    figure = go.Figure(
        go.Parcoords(dimensions=_dimensions(study, rows), line=line, tickfont=tickfont)
    )
    figure.update_layout(margin={"t": 60, "b": 30, "l": 60, "r": 60}, height=420)
    return figure


def _dimensions(study: Analysis, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the axes of parallel coordinates: cell, metaparameters, last step and end."""
    record = study.record
    dimensions = [_log_dimension("B", numbers(rows["batch_size"]), 2)]
    if len(record.sparsities) > 1:
        dimensions.append(_levels("S", rows["sparsity"].map("{:g}".format)))
    columns = list(rows.columns)
    for name in columns[1 : columns.index("batch_size")]:
        dimensions.append(_levels(name, rows[name]))
    for name, box in record.named_space.items():
        dimensions.append(_metaparameter(name, rows[name], box))
    dimensions.append(_log_dimension("last step", numbers(rows["steps_run"]), 10))
    ends = list(map(_end_text, rows["status"]))
    order = [end for end in map(_end_text, Status) if end in ends]
    dimensions.append(_levels("ended", ends, order))
    return dimensions


def _end_text(status: object) -> str:
    """Return how a trial ended, as the table below the answer calls it."""
    return COUNT_HEADS.get(str(status), str(status))


def _metaparameter(name: str, values: Any, box: Box) -> dict[str, Any]:
    """Return the axis of a metaparameter with its values (n,), on its scale."""
    if not isinstance(box, Range):
        return _levels(name, values)
    as_numbers = numbers(values)
    if box.scale == "log":
        return _log_dimension(name, as_numbers, 10)
    if box.scale == "reverse_log":
        return _log_ticks(f"1 - {name}", np.log10(1 - as_numbers), 10)
    return {"label": plain(name), "values": as_numbers, "range": [box.low, box.high]}


def _log_dimension(name: str, values: np.ndarray, base: int) -> dict[str, Any]:
    """Return a logarithmic axis of values (n,)."""
    return _log_ticks(name, np.log(np.maximum(values, SMALLEST)) / math.log(base), base)


def _log_ticks(name: str, logs: np.ndarray, base: int) -> dict[str, Any]:
    """Return an axis of logarithms (n,), with ticks at powers of the base."""
    if not np.isfinite(logs).any():
        return {"label": plain(name), "values": logs}
    low, high = math.floor(np.nanmin(logs)), math.ceil(np.nanmax(logs))
    ticks = list(range(low, max(high, low + 1) + 1))
    return {
        "label": plain(name),
        "values": logs,
        "tickvals": ticks,
        "ticktext": [f"{base**tick:g}" for tick in ticks],
        "range": [ticks[0], ticks[-1]],
    }


def _levels(name: str, values: Iterable[object], order: Sequence[str] = ()) -> dict[str, Any]:
    """Return an axis with a tick for each of some values, in an order, else sorted."""
    texts = list(map(str, values))
    order = list(order) or sorted(set(texts))
    return {
        "label": plain(name),
        "values": list(map(order.index, texts)),
        "tickvals": list(range(len(order))),
        "ticktext": list(map(_tick_text, order)),
        "range": [-0.3, len(order) - 0.7],
    }


def _tick_text(value: str) -> str:
    """Return the last part of a class path; other values, such as numbers, as they are."""
    try:
        float(value)
    except ValueError:
        return plain(value.rpartition(".")[2])
    return plain(value)


def dress(figure: go.Figure, x: str, y: str, ticks: Sequence[float]) -> go.Figure:
    """Set logarithmic axes and the legend of the page, and return the chart.

    Args:
        figure: The chart.
        x, y: Titles of its axes.
        ticks: Batch sizes that have a tick.
    """
    axis = {"gridcolor": GRID, "linecolor": "#666666", "ticks": "outside", "zeroline": False}
    texts = [f"{tick:g}" for tick in ticks]
    figure.update_xaxes(type="log", title=x, tickvals=list(ticks), ticktext=texts, **axis)
    # Without a format the ticks of 200 and 500 are 2 and 5.
    figure.update_yaxes(type="log", title=y, dtick="D2", tickformat=",~g", automargin=True, **axis)
    figure.update_layout(
        template="none",
        height=430,
        margin={"t": 20, "b": 60, "l": 80, "r": 20},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        hoverlabel={"namelength": -1},
    )
    return figure
