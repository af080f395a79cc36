"""The report page of a study: one HTML file that works without a network or a server.

The first lines are the answer as the last screen has it (`lit_dps.report.screen`). Below it are a
table of time and cost with sliders, two figures, and folded sections with everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import Any

import yaml

from lit_dps import __version__
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import Row, columns_of, records, three_digits, value_text
from lit_dps.core.config import folder_name
from lit_dps.core.config_yaml import ConfigDumper
from lit_dps.core.environment import KEY, SINCE
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Box
from lit_dps.core.text import WIDTH, counted, every
from lit_dps.core.trial import Series, Value
from lit_dps.core.unit import Unit
from lit_dps.report.answer import details, recommendation_sentences, retrain_command, trained_series
from lit_dps.report.figures import Picture
from lit_dps.report.html.cost_table import cost_section
from lit_dps.report.html.elements import (
    definitions,
    elements,
    folded,
    html_table,
    picture_element,
    preformatted,
    text_of,
)
from lit_dps.report.no_result import is_without_k_star, no_result_lines, no_result_table
from lit_dps.report.repeats import LAW_INTERVALS
from lit_dps.report.result_table import result_rows
from lit_dps.report.screen import law_text, prefix, protocol_line, shown_warnings
from lit_dps.report.text import all_notes, readings_text, render, sections, theory_text
from lit_dps.report.timing_notes import computation_text, validation_text

MAX_TRIALS = 1000  # in the table
MAIN_FIGURES = 2  # that are not folded
MAX_LARGE_ANSWERS = 2  # more series have smaller text, so that the first screen has them all


def page(study: Analysis, pictures: Iterable[Picture] = ()) -> str:
    """Return the report of a study, finished or not, as one HTML page.

    Args:
        study: The study.
        pictures: Its figures, the most important ones first.
    """
    shown = []
    for picture in pictures:
        file = f"{folder_name(study.record.name)}-{picture.name}"
        shown.append(picture_element(picture, file))
    more = shown[MAIN_FIGURES:]
    parts = [
        _answer(study),
        cost_section(study),
        *shown[:MAIN_FIGURES],
        folded("Table of results", _results(study)),
        folded(f"More figures ({len(more)})", "".join(more)),
        folded("Notes", elements("p", all_notes(study))),
        folded("How the answer was computed", _assumptions(study)),
        folded("Cells, laws and critical batch sizes", _tables(study)),
        folded("Theory: terms of the K* trials", preformatted(theory_text(study))),
        folded("Readings of the K* trials", preformatted(readings_text(study))),
    ]
    for other in study.at_each_goal[1:]:
        parts.append(folded(f"At {other.record.goal}", preformatted(render(other))))
    configuration = yaml.dump(study.record.config, Dumper=ConfigDumper, sort_keys=False)
    parts += [
        folded("All trials", _trials(study), is_printed=False),
        folded("How the page was made", definitions(_origin(study))),
        folded("Configuration", preformatted(configuration), is_printed=False),
    ]
    template = Template(_frame("page.html"))
    return template.substitute(
        title=text_of(f"{study.record.name}: lit_dps"),
        style=_frame("page.css"),
        script=_frame("page.js"),
        body="\n".join(filter(None, parts)),
    )


def _frame(name: str) -> str:
    """Return a file of the frame of the page."""
    return files("lit_dps.report.html").joinpath(name).read_text(encoding="utf-8")


def _answer(study: Analysis) -> str:
    """Return the first screen: the answer and two sentences a series, warnings, and the goal."""
    lines = [f"<h1>Study {text_of(study.record.name)}</h1>"]
    if is_without_k_star(study.cells):
        answer, *advice = no_result_lines(study.record, study.cells)
        table = "\n".join(no_result_table(study.record.goal, study.cells))
        lines += [elements('p class="answer"', [answer]), elements("p", advice)]
        lines.append(preformatted(table))
    else:
        for series in trained_series(study):
            lines += _answer_of_series(study, series)
    warnings = [f"Warning: {warning}" for warning in shown_warnings(study, WIDTH)]
    lines.append(elements('p class="warning"', warnings))
    lines.append(elements('p class="of"', [_meanings(study)]))
    size = "large"
    if len(trained_series(study)) > MAX_LARGE_ANSWERS:
        size = "small"
    return f'<section class="{size}">{"".join(lines)}</section>'


def _answer_of_series(study: Analysis, series: Series) -> list[str]:
    """Return the recommendation in a large line, and what it costs and the law in small ones."""
    answer, *others = recommendation_sentences(study, series)
    law = f"{law_text(study.laws_of_answer[series])}."
    law = law[:1].upper() + law[1:]
    text = " ".join([*details(study, series)[:1], *others, law])
    return [
        elements('p class="answer"', [f"{prefix(study, series)}{answer}"]),
        elements("p", [_with_whole_equations(text)]),
    ]


def _with_whole_equations(text: str) -> str:
    """Return a text in which an equation such as B = 8 stays on one line."""
    return text.replace(" = ", "\xa0=\xa0")


def _meanings(study: Analysis) -> str:
    """Return the goal, and what K* and the critical batch size are."""
    text = protocol_line(study)
    if any(law.is_b_crit_known for law in study.laws_of_answer.values()):
        text += " B_crit: the batch size at which half of the steps are due to noise."
    return text[:1].upper() + text[1:]


def _results(study: Analysis) -> str:
    """Return the table of results as the last screen has it; empty if all missed the goal."""
    if is_without_k_star(study.cells):
        return ""
    return html_table(result_rows(study))


def _tables(study: Analysis) -> str:
    """Return the sections of the report that have no place of their own."""
    texts = sections(study, ("cells", "repeats", "critical", "delay", "local"))
    return "".join(map(preformatted, texts.values()))


def _trials(study: Analysis) -> str:
    """Return the finished trials as a table that a click on a column head sorts."""
    # The notes of the page name the loops.
    table = study.trials.drop(columns=["engine", "engine_reason"])
    if not len(table):
        return ""
    # Trials without steps to result come last.
    rows = records(table.sort_values(["steps", "steps_run"]).head(MAX_TRIALS))
    boxes = study.record.named_space
    names = list(table.columns.drop("k_star"))
    heads = ""
    for name in names:
        heads += f'<th scope="col"><button>{text_of(name.replace("_", " "))}</button></th>'
    axes = columns_of(study.record.series[0])
    body = "".join(_trial_row(row, names, boxes, axes) for row in rows)
    caption = "Bold: the K* trial of its cell. Click a column head to sort."
    if len(table) > MAX_TRIALS:
        caption += (
            f" The {MAX_TRIALS:,} trials of {len(table):,} with the fewest steps; "
            "metaparameters.csv has all."
        )
    return (
        f'<p class="of">{caption}</p><div class="scroll" tabindex="0"><table class="sortable">'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _trial_row(
    row: Row, names: Sequence[str], boxes: Mapping[str, Box], axes: Collection[str]
) -> str:
    """Return a row of the table of trials, with a mark for the K* trial."""
    attributes = ' class="best"' if row["k_star"] else ""
    fields = []
    for name in names:
        if name in axes:
            # Not rounded to 3 digits: values of an axis such as 0.9995 and 0.9999 must differ.
            value = row[name]
            fields.append(f"{value:.12g}" if isinstance(value, float) else str(value))
        else:
            fields.append(_field(row[name], boxes.get(name)))
    return f"<tr{attributes}>{elements('td', fields)}</tr>"


def _field(value: Value | None, box: Box | None) -> str:
    """Return a field of the table of trials."""
    if value is None:
        return "-"
    if box is not None:
        return value_text(value, box)
    if isinstance(value, float):
        return three_digits(value)
    return str(value)


def _law_text(unit: Unit) -> str:
    """Return what is fitted to K*."""
    if not unit.has_law:
        return f"No law is fitted, because K* is in {unit.axis}."
    return (
        f"The law K* = {unit.law} is fitted robustly to log K*; {LAW_INTERVALS}. Beyond the "
        "largest batch size the law is an extrapolation."
    )


def _assumptions(study: Analysis) -> str:
    """Return what the numbers of the page rest on."""
    record = study.record
    goal = record.goal
    further_budget = ""
    if goal.limits:
        further_budget = f" Its budget is {goal.budget_text}."
    lines = []
    for series in trained_series(study):
        lines += [f"{prefix(study, series)}{line}" for line in details(study, series)[1:]]
    lines += [
        _search_text(study),
        f"The goal, {goal}, is tested on the entire validation split {every(goal.check_interval)}, "
        "so K* is known to within that interval. No trial takes more than "
        f"{goal.max_steps:,} steps.{further_budget}",
        _law_text(goal.cost_unit),
        _seeds_text(record),
    ]
    computation = computation_text(study)
    if computation:
        lines.append(
            f"Time to the goal: {computation}, {validation_text(study)}. It excludes the start of "
            "a trial."
        )
    if record.race_factor is not None:
        best = "the best K"
        if not record.statistic.is_minimum:
            best = "the step that K*"
        lines.append(
            f"Trials were stopped early at {record.race_factor:g} times {best} of their cell so "
            "far. This does not change K*."
        )
    return f"<ul>{elements('li', lines)}</ul>"


def _search_text(study: Analysis) -> str:
    """Return how the metaparameters were searched."""
    record = study.record
    sampler = record.setting("study.sampler") or "sobol"
    smallest = f"the smallest number of {record.goal.unit} among"
    if not record.statistic.is_minimum:
        smallest = f"{record.k_star_words}, of"
    trials = counted(record.trials, "trial")
    if any(summary.pending for summary in study.cells):
        trials = f"the trials so far, at most {record.trials}"
    best_of = record.setting("study.best_of")
    if best_of is not None:
        return f"K* is {smallest} {trials}, which are seeds of the best sample of study {best_of}."
    return (
        f"K* is {smallest} {trials}. study.sampler {sampler} drew them from "
        f"{_space_text(record)}. More trials or a larger search space can only lower K*."
    )


def _space_text(record: StudyRecord) -> str:
    """Return the search space, and the former ones if it was expanded."""
    if not record.spaces:
        return f"this search space: {record.space_text}"
    first, *expansions = record.spaces
    texts = [f"this search space: {record.text_of_space(first.space)}"]
    for each in expansions:
        texts.append(
            f"--extend-space widened it to {record.text_of_space(each.space)}, and points "
            f"{each.first} to {each.end - 1} are in the added part"
        )
    return ". ".join(texts)


def _seeds_text(record: StudyRecord) -> str:
    """Return how trials were seeded and repeated."""
    text = (
        "A sample starts from the same weights and order of examples at every batch size and "
        f"sparsity, from study.seed {record.seed}. "
    )
    if record.setting("study.best_of") is not None:
        text = f"Each trial has a seed of its own, derived from study.seed {record.seed}. "
    if record.plan.count:
        best = "best sample"
        if record.plan.points > 1:
            best = f"{record.plan.points} best samples"
        seeds = counted(record.plan.count, "fresh seed")
        return f"{text}study.repeats trains the {best} of each cell again on {seeds}."
    return f"{text}Each ran once, so K* includes the luck of its seed (study.repeats measures it)."


def _origin(study: Analysis) -> list[tuple[str, str]]:
    """Return how the study was made, by name: commands, and versions that its trials ran under."""
    commands = "; then ".join(_commands(study.record))
    rows = [("Run it again", f"save the configuration below as study.yaml; {commands}")]
    command = retrain_command(study)
    if command is not None:
        rows.append(("Retrain the best trial", command))
    for text in dict.fromkeys(map(_versions, study.record.environments)):
        rows.append(("Trials ran under", text))
    page = f"lit_dps {__version__}, optuna {version('optuna')}"
    rows.append(("This page", page))
    return rows


def _commands(record: StudyRecord) -> list[str]:
    """Return the commands that run a study, one after the other."""
    command = "lit-dps study --config study.yaml"
    if not record.spaces:
        return [command]
    commands = []
    trials = 0
    for expansion in record.spaces[1:]:
        # An expansion depends on the results of all trials before it.
        if expansion.first > trials:
            commands.append(f"{command} --study.trials {expansion.first}")
        trials = expansion.end
        commands.append(f"{command} --study.trials {trials} --extend-space")
    if record.trials > trials:
        commands.append(f"{command} --study.trials {record.trials}")
    return commands


def _versions(environment: Mapping[str, Any]) -> str:
    """Return the versions of an environment: python 3.11, torch 2.15."""
    shown = []
    for name, value in environment.items():
        if isinstance(value, str) and name not in (KEY, SINCE):
            shown.append(f"{name.removeprefix('version.')} {value}")
    return ", ".join(shown)
