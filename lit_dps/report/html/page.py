"""The report page of a study: one HTML file that works without a network or a server.

Every name that a user chose is escaped. The page includes plotly's script, 5 MB, once.
"""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from string import Template
from types import ModuleType
from typing import Any

import plotly.graph_objects as go
import plotly.io as io
import yaml

import lit_dps.report.html.charts as charts
from lit_dps import __version__
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rates import NEAR
from lit_dps.analysis.tables import Row, records, three_digits, value_text
from lit_dps.core.environment import KEY, SINCE
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.search_space import Box
from lit_dps.core.trial import Value
from lit_dps.core.unit import Unit
from lit_dps.report.answer import LIMITS, answer_text, retrain_command, sentences
from lit_dps.report.figures import png_of
from lit_dps.report.notes import lines_of
from lit_dps.report.repeats import LAW_INTERVALS
from lit_dps.report.text import protocol_text, readings_text, render, sections, theory_text
from lit_dps.report.timing_notes import timing_notes, validation_text
from lit_dps.report.warnings import PENDING, study_notes

SHOWN = 3000  # trials in the table at most
# An offline page must not have plotly's button that uploads a chart to a server.
_CHART = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg"},
}
_PAGE = Template(files("lit_dps.report.html").joinpath("page.html").read_text(encoding="utf-8"))


def page(study: Analysis, figures: Sequence[ModuleType] = ()) -> str:
    """Return the report of a study, finished or not, as one HTML page.

    Args:
        study: The study.
        figures: Figures of the user, shown below the charts.
    """
    record = study.record
    # The head has the note on trials that have not finished.
    pending = lines_of([PENDING], study)
    other_notes = [line for line in study_notes(study) if line not in pending]
    parts = [
        *_head(study),
        *_notes(pending),
        *_charts(study),
        *map(partial(_picture, study), figures),
        _trials(study),
        f"<h2>Table and law</h2><pre>{_text(_tables(study))}</pre>",
        *_notes(other_notes),
        _folded("Theory: terms of the K* trials, predicted and measured", theory_text(study)),
        _folded("Readings of the K* trials", readings_text(study)),
    ]
    for other in study.at_each_goal[1:]:
        parts.append(_folded(f"At {other.record.goal}", render(other)))
    parts += [
        "<h2>Assumptions</h2>",
        f"<ul>{''.join(_elements('li', _assumptions(study)))}</ul>",
        "<h2>How it was made</h2>",
        _definitions(_origin(study)),
        _folded("Configuration", yaml.safe_dump(record.config, sort_keys=False)),
    ]
    body = "\n".join(filter(None, parts))
    return _PAGE.substitute(title=_text(f"{record.name}: lit_dps"), body=body)


def _head(study: Analysis) -> list[str]:
    """Return the title, the protocol and the verdict."""
    record = study.record
    protocol = f"{record.workload}; {protocol_text(record)}"
    paragraphs = "".join(_elements("p", _answer(study)))
    return [
        f"<h1>{_text(record.name)}</h1>",
        f'<p class="of">{_text(protocol)}</p>',
        f'<div class="verdict">{paragraphs}</div>',
    ]


def _notes(lines: Iterable[str]) -> list[str]:
    return _elements('p class="note"', lines)


def _charts(study: Analysis) -> list[str]:
    """Return the charts for which the study has data, each with its title and caption."""
    unit = study.record.goal.cost_unit
    drawings = [
        (
            f"{unit.name.capitalize()} to result against batch size",
            charts.curve(study),
            f"Markers: K*, {study.record.statistic.describe_in(unit)}; open markers are upper "
            f"bounds. {_lines_text(unit)}",
        ),
        (
            "Time and examples to the goal",
            charts.to_goal(study),
            "Time is the number of steps, as in the verdict, times the time of a training step, "
            f"{validation_text(study)}. Bars: {LIMITS}. Star: the fastest batch size of a series. "
            "Examples are those of the same number of steps. Open markers are upper bounds.",
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
    """Return the answer, and the sections of the report that have no place of their own."""
    texts = sections(study, ("cells", "repeats", "critical", "delay", "local"))
    return "\n".join(filter(None, [answer_text(study), *texts.values()]))


def _picture(study: Analysis, figure: ModuleType) -> str:
    """Return a figure of the user as a picture with its caption; empty without data for it."""
    caption = _text(getattr(figure, "CAPTION", figure.NAME))
    try:
        if figure.missing(study) is not None:
            return ""
        picture = b64encode(png_of(figure, study)).decode()
    except Exception:  # `write_figures` notes the error
        return ""
    return f'<h2>{caption}</h2><figure><img src="data:image/png;base64,{picture}"></figure>'


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
    boxes = study.record.named_space
    names = list(table.columns.drop("k_star"))
    heads = "".join(_elements("th", table.columns.drop("k_star").str.replace("_", " ")))
    body = "".join(_trial_row(row, names, boxes) for row in rows)
    caption = "Green: the K* trial of its cell. Click a column head to sort."
    if len(table) > SHOWN:
        caption += f" The {SHOWN:,} trials of {len(table):,} with the fewest steps."
    return (
        f'<p class="of">{caption}</p><div class="scroll"><table class="sortable">'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _trial_row(row: Row, names: Sequence[str], boxes: Mapping[str, Box]) -> str:
    """Return a row of the table of trials, with a mark for the K* trial."""
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


# Texts


def _answer(study: Analysis) -> list[str]:
    """Return a paragraph per series, the answer and the critical batch size, and timing notes."""
    paragraphs = []
    for series, law in sorted(study.laws.items()):
        lines = sentences(study, series)
        lines.append(
            f"critical batch size, where half of the steps are due to noise: {law.describe()}"
        )
        paragraphs.append(". ".join(map(_sentence, lines)) + ".")
    for line in timing_notes(study):
        paragraphs.append(_sentence(line) + ".")
    return paragraphs


def _sentence(line: str) -> str:
    """Return a line without its last full stop, with a capital unless it begins with a key."""
    line = line.strip().rstrip(".")
    begins_with_key = "_" in line.split()[0]
    if begins_with_key:
        return line
    return line[:1].upper() + line[1:]


def _lines_text(unit: Unit) -> str:
    """Return what the lines of the curve are."""
    if not unit.has_law:
        return f"No law is fitted to {unit.axis}."
    return (
        f"Lines: the law K* = {unit.law} with its 95 % band; dotted and hatched beyond the "
        "largest batch size, where it is extrapolated."
    )


def _law_text(unit: Unit) -> str:
    """Return what is fitted to K*."""
    if not unit.has_law:
        return f"No law is fitted, because K* is in {unit.axis}."
    return (
        f"The law K* = {unit.law} is fitted robustly to log K*; {LAW_INTERVALS}. Beyond the "
        "largest batch size the law is an extrapolation."
    )


def _assumptions(study: Analysis) -> list[str]:
    """Return what the numbers of the page rest on, a line each."""
    record = study.record
    goal = record.goal
    further_budget = ""
    if goal.limits:
        further_budget = f" Its budget is {goal.budget_text}."
    lines = [
        _search_text(record),
        f"The goal, {goal}, is tested on the entire validation split every {goal.check_interval} "
        "steps, so K* is known to within that interval. No trial takes more than "
        f"{goal.max_steps:,} steps.{further_budget}",
        _law_text(goal.cost_unit),
        _seeds_text(record),
        "Time to the goal is the number of steps, as in the verdict, times the time of a training "
        f"step, {validation_text(study)}. It excludes the start of a trial.",
    ]
    if record.race_factor is not None:
        best = "the best K"
        if not record.statistic.is_minimum:
            best = "the step that K*"
        lines.append(
            f"Trials were stopped early at {record.race_factor:g} times {best} of their cell so "
            "far. This does not change K*."
        )
    return lines


def _search_text(record: StudyRecord) -> str:
    """Return how the metaparameters were searched."""
    sampler = setting(record.config, "study.sampler") or "sobol"
    smallest = f"the smallest number of {record.goal.unit} among"
    if not record.statistic.is_minimum:
        smallest = f"{record.statistic.describe_in(record.goal.cost_unit)}, of"
    return (
        f"K* is {smallest} {record.trials} trials. study.sampler {sampler} "
        f"drew them from this search space: {record.space_text}. More trials or a larger search "
        "space can only lower K*."
    )


def _seeds_text(record: StudyRecord) -> str:
    """Return how trials were seeded and repeated."""
    text = (
        "A sample starts from the same weights and order of examples at every batch size and "
        f"sparsity, from study.seed {record.seed}. "
    )
    if record.plan.count:
        best = "best sample"
        if record.plan.points > 1:
            best = f"{record.plan.points} best samples"
        return f"{text}The {best} of each cell ran again on {record.plan.count} fresh seeds."
    return f"{text}Each ran once, so K* includes the luck of its seed (study.repeats measures it)."


def _origin(study: Analysis) -> list[tuple[str, str]]:
    """Return how the study was made, by name: commands, and versions that its trials ran under."""
    rows = [
        (
            "Run it again",
            "save the configuration below as study.yaml; lit-dps study --config study.yaml",
        )
    ]
    command = retrain_command(study)
    if command is not None:
        rows.append(("Retrain the best trial", command))
    for text in dict.fromkeys(map(_versions, study.record.environments)):
        rows.append(("Trials ran under", text))
    page = f"lit_dps {__version__}, optuna {version('optuna')}, plotly {version('plotly')}"
    rows.append(("This page", page))
    return rows


def _versions(environment: Mapping[str, Any]) -> str:
    """Return the versions of an environment: python 3.11, torch 2.15."""
    shown = []
    for name, value in environment.items():
        if isinstance(value, str) and name not in (KEY, SINCE):
            shown.append(f"{name.removeprefix('version.')} {value}")
    return ", ".join(shown)


# Elements of the page


def _folded(title: str, text: str) -> str:
    """Return a section that opens on a click; empty without a text."""
    if not text:
        return ""
    return f"<details><summary>{_text(title)}</summary><pre>{_text(text)}</pre></details>"


def _elements(tag: str, texts: Iterable[object]) -> list[str]:
    """Return an element for each text; the tag may have attributes, as p class="note"."""
    name = tag.split()[0]
    return [f"<{tag}>{_text(text)}</{name}>" for text in texts]


def _definitions(rows: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in rows)
    return f"<dl>{items}</dl>"


def _text(text: object) -> str:
    return html.escape(str(text))
