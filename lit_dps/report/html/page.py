"""The report page of a study: one HTML file that needs nothing beside itself, neither a network nor
a server.

All that a user may have named is escaped. plotly's script, 5 MB, stands in the page once.
"""

from __future__ import annotations

import html
from importlib.resources import files
from string import Template

import plotly.graph_objects as go
import plotly.io as io
import yaml

import lit_dps.report.html.answers as answers
import lit_dps.report.html.charts as charts
import lit_dps.report.html.words as words
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rates import NEAR
from lit_dps.analysis.tables import records, three_digits, value_text
from lit_dps.core.search_space import Box, short_names
from lit_dps.report.answer import LIMITS, answer_text
from lit_dps.report.text import render, table_and_law, theory_text
from lit_dps.report.warnings import study_notes

SHOWN = 3000  # trials in the table at most; the page says so where there are more
# plotly's button that uploads a chart to a server of its makers is no part of an offline page
_CHART = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg"},
}
_PAGE = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def page(study: Analysis) -> str:
    """The report of a study, finished or not, as one HTML page, the same for the same study."""
    record, script = study.record, _Script()
    unfinished = sum(cell.pending for cell in study.cells)
    told = (
        f"{record.trials} trials a cell, {record.goal}, checked every "
        f"{record.goal.check_interval} steps, "
    )
    told += f"budget {record.goal.max_steps:,} steps"
    sections = [
        f"<h1>{_text(record.name)}</h1>",
        f'<p class="of">{_text(record.workload)}; {_text(told)}</p>',
        f'<div class="verdict">{"".join(f"<p>{_text(line)}</p>" for line in words.verdict(study))}</div>',
        f'<p class="note">{unfinished} trials have not finished.</p>' if unfinished else "",
        _chart(
            script,
            "Steps to result against batch size",
            charts.curve(study),
            "Markers: K*, the fewest steps of any trial; open ones are upper bounds. Lines: the "
            "law K* = c1 / B + c2 "
            "with its 95 % band; dotted and hatched where it is extrapolated, beyond the largest "
            "batch size measured.",
        ),
        _chart(
            script,
            "Time and examples to the goal",
            answers.to_goal(study),
            "Steps, as the verdict counts them, times the time of a training step, without "
            "validation; bars: "
            f"{LIMITS}. A star is the fastest of its series. Examples are K* B. Open markers are "
            "upper bounds.",
        ),
        _chart(
            script,
            "Learning rate against batch size",
            answers.rates(study),
            f"The rate of the K* trial; bars span the trials within {NEAR:g} times K*. Lines: "
            "linear and square-root "
            "scaling from the smallest batch size. Open markers: K* is an upper bound, which says "
            "little of the rate.",
        ),
        _chart(
            script,
            "All trials",
            charts.parallel(study),
            "A line is a trial; blue ones met the goal. Drag along an axis to keep those in a "
            "range, or a name to move "
            "its axis.",
        ),
        _trials(study),
        f"<h2>Table and law</h2><pre>{_text(_tables(study))}</pre>",
        "".join(f'<p class="note">{_text(line)}</p>' for line in study_notes(study)),
        _folded("Theory: terms of the K* trials, predicted and measured", theory_text(study)),
        *(_folded(f"At {other.record.goal}", render(other)) for other in study.at_each_goal[1:]),
        "<h2>What was assumed</h2>",
        f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in words.assumed(study))}</ul>",
        "<h2>How it was made</h2>",
        f"<dl>{''.join(f'<dt>{_text(name)}</dt><dd>{_text(said)}</dd>' for name, said in words.made(study))}</dl>",
        _folded("Configuration", yaml.safe_dump(record.config, sort_keys=False)),
    ]
    return _PAGE.substitute(
        title=_text(f"{record.name}: lit_dps"), body="\n".join(filter(None, sections))
    )


def _tables(study: Analysis) -> str:
    answer = answer_text(study.record, study.cells, study.answer, study.rate_laws)
    return f"{answer}\n{table_and_law(study)}" if answer else table_and_law(study)


class _Script:
    """Says of the first chart alone that plotly's script comes with it."""

    def __init__(self):
        self.charts = 0

    def html(self, figure: go.Figure) -> str:
        self.charts += 1
        first = self.charts == 1
        return io.to_html(
            figure, _CHART, full_html=False, include_plotlyjs=first, div_id=f"chart-{self.charts}"
        )


def _chart(script: _Script, title: str, figure: go.Figure | None, caption: str = "") -> str:
    if figure is None:
        return ""
    said = f"<figcaption>{_text(caption)}</figcaption>" if caption else ""
    return f"<h2>{_text(title)}</h2><figure>{script.html(figure)}{said}</figure>"


def _trials(study: Analysis) -> str:
    """The finished trials as a table that a click on a column's name sorts."""
    table = study.trials
    if not len(table):
        return ""
    first = table.assign(missing=table["steps"].isna()).sort_values(
        ["missing", "steps", "steps_run"], kind="stable"
    )
    rows = records(first.drop(columns="missing").head(SHOWN))
    boxes = {
        name: study.record.space[key] for key, name in short_names(list(study.record.space)).items()
    }
    names = [name for name in table.columns if name != "k_star"]
    heads = "".join(f"<th>{_text(name.replace('_', ' '))}</th>" for name in names)
    body = ""
    for row in rows:
        best = ' class="best"' if row["k_star"] else ""
        body += f"<tr{best}>{''.join(_field(row[name], boxes.get(name)) for name in names)}</tr>"
    more = (
        f" The first {SHOWN:,} of {len(table):,}, the fewest steps first."
        if len(table) > SHOWN
        else ""
    )
    said = f"Green: the trial that gave its cell's K*. Click a name to sort.{more}"
    table_html = (
        f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    )
    return f'<p class="of">{said}</p><div class="scroll">{table_html}</div>'


def _field(value: object, box: Box | None) -> str:
    if value is None:
        return '<td data-value="">-</td>'
    plain = three_digits(value) if isinstance(value, float) else str(value)
    shown = plain if box is None else value_text(value, box)
    return f'<td data-value="{html.escape(str(value))}">{_text(shown)}</td>'


def _folded(title: str, text: str) -> str:
    return (
        f"<details><summary>{_text(title)}</summary><pre>{_text(text)}</pre></details>"
        if text
        else ""
    )


def _text(text: object) -> str:
    return html.escape(str(text))
