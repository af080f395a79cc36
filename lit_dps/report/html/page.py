"""The report page of a study: one HTML file that works without a network or a server.

Every name that a user chose is escaped. The page includes plotly's script, 5 MB, once.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template

import plotly.graph_objects as go
import plotly.io as io
import yaml

import lit_dps.report.html.charts as charts
import lit_dps.report.html.words as words
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rates import NEAR
from lit_dps.analysis.tables import Row, records, three_digits, value_text
from lit_dps.core.search_space import Box, short_names
from lit_dps.core.trial import Value
from lit_dps.report.answer import LIMITS, answer_text
from lit_dps.report.text import protocol_text, render, table_and_law, theory_text
from lit_dps.report.warnings import study_notes

SHOWN = 3000  # trials in the table at most; the page says so if there are more
# An offline page must not have plotly's button that uploads a chart to a server.
_CHART = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg"},
}
_PAGE = Template(files("lit_dps.report.html").joinpath("page.html").read_text(encoding="utf-8"))


def page(study: Analysis) -> str:
    """Return the report of a study, finished or not, as one HTML page."""
    record = study.record
    sections = [
        *_head(study),
        *_charts(study),
        _trials(study),
        f"<h2>Table and law</h2><pre>{_text(_tables(study))}</pre>",
        *(f'<p class="note">{_text(line)}</p>' for line in study_notes(study)),
        _folded("Theory: terms of the K* trials, predicted and measured", theory_text(study)),
        *(_folded(f"At {other.record.goal}", render(other)) for other in study.at_each_goal[1:]),
        "<h2>Assumptions</h2>",
        _list(words.assumed(study)),
        "<h2>How it was made</h2>",
        _definitions(words.made(study)),
        _folded("Configuration", yaml.safe_dump(record.config, sort_keys=False)),
    ]
    body = "\n".join(section for section in sections if section)
    return _PAGE.substitute(title=_text(f"{record.name}: lit_dps"), body=body)


def _head(study: Analysis) -> list[str]:
    """Return the title, the protocol and the verdict."""
    record = study.record
    protocol = f"{record.workload}; {protocol_text(record)}"
    paragraphs = "".join(f"<p>{_text(line)}</p>" for line in words.verdict(study))
    lines = [
        f"<h1>{_text(record.name)}</h1>",
        f'<p class="of">{_text(protocol)}</p>',
        f'<div class="verdict">{paragraphs}</div>',
    ]
    unfinished = sum(cell.pending for cell in study.cells)
    if unfinished:
        lines.append(f'<p class="note">{unfinished} trials have not finished.</p>')
    return lines


def _charts(study: Analysis) -> list[str]:
    """Return the charts for which the study has data, each with its title and caption."""
    drawings = [
        (
            "Steps to result against batch size",
            charts.curve(study),
            "Markers: K*, the fewest steps of any trial; open markers are upper bounds. Lines: the "
            "law K* = c1 / B + c2 with its 95 % band; dotted and hatched beyond the largest batch "
            "size, where it is extrapolated.",
        ),
        (
            "Time and examples to the goal",
            charts.to_goal(study),
            "Time is the number of steps, as in the verdict, times the time of a training step, "
            f"without validation. Bars: {LIMITS}. Star: the fastest batch size of a series. "
            "Examples are K* B. Open markers are upper bounds.",
        ),
        (
            "Learning rate against batch size",
            charts.rates(study),
            f"Markers: the rate of the K* trial. Bars: trials within {NEAR:g} times K*. Lines: "
            "linear and square-root scaling from the smallest batch size. Open markers: K* is an "
            "upper bound, so the rate is uncertain.",
        ),
        (
            "All trials",
            charts.parallel(study),
            "Each line is a trial; blue lines met the goal. Drag along an axis to select a range, "
            "or drag a name to move its axis.",
        ),
    ]
    lines = []
    for title, figure, caption in drawings:
        if figure is not None:
            lines.append(_chart(len(lines) + 1, title, figure, caption))
    return lines


def _chart(number: int, title: str, figure: go.Figure, caption: str) -> str:
    """Return a chart with title and caption; the first one brings plotly's script."""
    chart = io.to_html(
        figure,
        _CHART,
        full_html=False,
        include_plotlyjs=number == 1,
        div_id=f"chart-{number}",
    )
    note = f"<figcaption>{_text(caption)}</figcaption>"
    return f"<h2>{_text(title)}</h2><figure>{chart}{note}</figure>"


def _tables(study: Analysis) -> str:
    """Return the answer, the table and the law as the terminal has them."""
    answer = answer_text(study.record, study.cells, study.answer, study.rate_laws)
    return f"{answer}\n{table_and_law(study)}" if answer else table_and_law(study)


def _trials(study: Analysis) -> str:
    """Return the finished trials as a table that a click on a column head sorts."""
    # The notes of the page name the loops.
    table = study.trials.drop(columns=["engine", "engine_reason"])
    if not len(table):
        return ""
    ordered = table.assign(missing=table["steps"].isna()).sort_values(
        ["missing", "steps", "steps_run"], kind="stable"
    )
    rows = records(ordered.drop(columns="missing").head(SHOWN))
    space = study.record.space
    boxes = {name: space[key] for key, name in short_names(list(space)).items()}
    names = [name for name in table.columns if name != "k_star"]
    heads = "".join(f"<th>{_text(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(_trial_row(row, names, boxes) for row in rows)
    caption = "Green: the K* trial of its cell. Click a column head to sort."
    if len(table) > SHOWN:
        caption += f" The {SHOWN:,} trials of {len(table):,} with the fewest steps."
    return (
        f'<p class="of">{caption}</p><div class="scroll"><table class="sortable">'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _trial_row(row: Row, names: Sequence[str], boxes: Mapping[str, Box]) -> str:
    """Return a row of the table of trials; that of K* is marked."""
    attributes = ' class="best"' if row["k_star"] else ""
    fields = "".join(_field(row[name], boxes.get(name)) for name in names)
    return f"<tr{attributes}>{fields}</tr>"


def _field(value: Value | None, box: Box | None) -> str:
    """Return a field of the table of trials, with its exact value for sorting."""
    if value is None:
        return '<td data-value="">-</td>'
    if box is not None:
        shown = value_text(value, box)
    elif isinstance(value, float):
        shown = three_digits(value)
    else:
        shown = str(value)
    return f'<td data-value="{html.escape(str(value))}">{_text(shown)}</td>'


def _folded(title: str, text: str) -> str:
    """Return a section that opens on a click; empty without a text."""
    if not text:
        return ""
    return f"<details><summary>{_text(title)}</summary><pre>{_text(text)}</pre></details>"


def _list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>"


def _definitions(rows: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in rows)
    return f"<dl>{items}</dl>"


def _text(text: object) -> str:
    return html.escape(str(text))
