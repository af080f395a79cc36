"""Charts of a study's answer: time and examples to the goal, and the learning rate that goes with a
batch size."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rates import EFFECTIVE, PLAIN, RULE_NAMES, RULES, RateCurve
from lit_dps.analysis.tables import legend, numbers, rows_of
from lit_dps.report.html.charts import BATCH_SIZE, colour, dress, plain

_DASHES = {"linear": "dash", "square_root": "dot"}
RATES = {EFFECTIVE: "effective rate eta / (1 - m)", PLAIN: "learning rate"}


def to_goal(study: Analysis) -> go.Figure | None:
    """Time and examples to the goal against batch size, a line a series; None where no cell has a
    K*.

    Open markers are upper bounds, a star is the fastest, bars are the limits of the time
    (`answer.LIMITS`).
    """
    table = study.answer
    if not len(table):
        return None
    timed = int(table["seconds"].notna().any())
    figure = make_subplots(1, 1 + timed, horizontal_spacing=0.11)
    for i, series in enumerate(study.record.series):
        rows = rows_of(series, table)
        if not len(rows):
            continue
        each = {
            "x": rows["batch_size"].tolist(),
            "legendgroup": plain(series),
            "line": {"color": colour(i)},
        }
        each |= {"name": plain(legend(series)), "mode": "lines+markers"}
        bounds, best = rows["floor"] == 1, rows["fastest"]
        symbols = [
            "star" if f else "triangle-down-open" if b else "circle"
            for f, b in zip(best, bounds, strict=True)
        ]
        if timed:
            seconds = numbers(rows["seconds"])
            low, high = (numbers(rows[name]) for name in ("seconds_low", "seconds_high"))
            bars = {"array": high - seconds, "arrayminus": seconds - low, "symmetric": False}
            open_ones = bounds & rows["seconds_low"].isna()  # elsewhere the law tells more than K*
            shown = [
                "star" if f else "triangle-down-open" if b else "circle"
                for f, b in zip(best, open_ones, strict=True)
            ]
            figure.add_scatter(
                y=seconds,
                marker={"symbol": shown, "size": [14 if star else 9 for star in best]},
                error_y={**bars, "thickness": 1, "width": 3},
                hovertemplate="B = %{x}<br>%{y:.3g} s",
                **each,
                row=1,
                col=1,
            )
        figure.add_scatter(
            y=rows["examples"].tolist(),
            marker={"symbol": [symbol.replace("star", "circle") for symbol in symbols], "size": 9},
            hovertemplate="B = %{x}<br>%{y:,} examples",
            showlegend=not timed,
            **each,
            row=1,
            col=1 + timed,
        )
    dress(figure, BATCH_SIZE, "", study.record.batch_sizes)
    figure.update_yaxes(title="examples to the goal", col=1 + timed)
    if timed:
        figure.update_yaxes(title="time to the goal [s]", col=1)
    return figure


def rates(study: Analysis) -> go.Figure | None:
    """The rate of each K* trial against batch size, with linear and square-root scaling; None at
    one batch size.

    The rate is the effective one, eta / (1 - m), where a momentum is counted (`best_rates`).
    """
    figure, kinds = go.Figure(), set()
    for i, series in enumerate(study.record.series):
        curve = next((curve for curve in study.rate_curves if curve.series == series), None)
        if curve is not None and len(curve.cells) > 1:
            _rate_curve(figure, curve, colour(i))
            kinds.add(EFFECTIVE if curve.source.momentum != 0 else PLAIN)
    if not figure.data:
        return None
    return dress(
        figure,
        BATCH_SIZE,
        " or ".join(RATES[kind] for kind in sorted(kinds)),
        study.record.batch_sizes,
    )


def _rate_curve(figure: go.Figure, curve: RateCurve, colour: str) -> None:
    sizes = list(curve.cells)
    near = {b: sorted(map(curve.source.effective, curve.near(b))) for b in sizes}
    best = [curve.best(b) for b in sizes]
    bars = {
        "array": [near[b][-1] - rate for b, rate in zip(sizes, best, strict=True)],
        "arrayminus": [rate - near[b][0] for b, rate in zip(sizes, best, strict=True)],
    }
    open_ones = ["triangle-down-open" if curve.cells[b].at_first_check else "circle" for b in sizes]
    figure.add_scatter(
        x=sizes,
        y=best,
        mode="markers",
        name=plain(legend(curve.series)),
        legendgroup=plain(curve.series),
        marker={"color": colour, "size": 9, "symbol": open_ones},
        error_y={**bars, "symmetric": False, "thickness": 1, "width": 3},
        hovertemplate="B = %{x}<br>%{y:.3g}",
    )
    if curve.first is None:
        return
    ends = np.array([curve.first, sizes[-1]])
    for rule in RULES:
        figure.add_scatter(
            x=ends,
            y=[curve.rule(rule, b) for b in ends],
            mode="lines",
            name=RULE_NAMES[rule],
            legendgroup=plain(curve.series),
            showlegend=not any(trace.name == RULE_NAMES[rule] for trace in figure.data),
            line={"color": colour, "width": 1, "dash": _DASHES[rule]},
            hoverinfo="skip",
        )
