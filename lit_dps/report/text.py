"""The report of a study: text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import starmap
from typing import NamedTuple

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.critical import DEFINITIONS
from lit_dps.analysis.delay import DelayLaw
from lit_dps.analysis.intervals import estimate
from lit_dps.analysis.local_sgd import FLAT
from lit_dps.analysis.readings import reading_columns
from lit_dps.analysis.tables import (
    Row,
    base_of,
    cell_texts,
    count,
    in_parts,
    k_star_text,
    records,
    short_columns,
    significant,
    three_digits,
    times,
    value_text,
)
from lit_dps.core.errors import ConfigError
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import counted, every
from lit_dps.core.trial import Cell, Series
from lit_dps.report.answer import answer_lines
from lit_dps.report.no_result import COUNT_HEADS
from lit_dps.report.repeats import law_head, law_lines, repeats_section
from lit_dps.report.result_table import with_readings
from lit_dps.report.timing_notes import times_text, timing_notes
from lit_dps.report.warnings import study_notes

NOTES = "notes"
FILES = "files"
ALWAYS_COUNTED = ("complete", "incomplete", "infeasible")
COUNTED_IF_ANY = ("outraced", "stopped", "failed", "pending")

# Heads of the two tables of the theory, by column of the rows.
_SIZES = {
    "delta": "Delta",
    "lipschitz": "L",
    "beta": "beta",
    "epsilon": "epsilon",
    "rate": "mean rate",
}
_LAWS = {
    "predicted_c1": "predicted c1",
    "c1": "fitted c1",
    "predicted_c2": "predicted c2",
    "c2": "fitted c2",
    "predicted_k_star": "predicted K*",
}
_RATIOS = {
    "delta": "Delta",
    "beta": "beta",
    "lipschitz": "L",
    "epsilon": "epsilon",
    "predicted_c1": "predicted c1",
    "predicted_c1_measured_epsilon": "c1 / epsilon^2",
    "c1": "fitted c1",
    "k_star": "K*",
}


class Section(NamedTuple):
    """A section of a report.

    Attributes:
        text: Returns its text; empty if the study has no data for it. The arguments are the study
            and the columns of the terminal, for tables; None for tables of any width.
        reason: Why a study has no such section.
    """

    text: Callable[[Analysis, int | None], str]
    reason: str = ""


def parts_of(option: str) -> tuple[str, ...]:
    """Return the parts that `--show` names, such as "theory,files" or "all".

    Raises:
        ConfigError: for an unknown name.
    """
    parts = (*SECTIONS, FILES)
    names = tuple(filter(None, map(str.strip, option.split(","))))
    for name in names:
        if name not in (*parts, "all"):
            allowed = f"any of {', '.join(parts)}, with commas between, or all"
            raise ConfigError("--show", name, allowed)
    if "all" in names:
        return parts
    return names


def render(study: Analysis) -> str:
    """Return all sections without times and the notes; they are equal on every run."""
    names = [name for name in SECTIONS if name not in ("answer", NOTES)]
    texts = [*sections(study, names).values(), _notes_text(study_notes(study))]
    return "\n".join(filter(None, texts))


def sections(study: Analysis, names: Collection[str], width: int | None = None) -> dict[str, str]:
    """Return the text of each named section of `SECTIONS` for which the study has data.

    Args:
        study: The study.
        names: Names of `SECTIONS`.
        width: Columns of the terminal, for tables; None for tables of any width.
    """
    texts = {}
    for name, section in SECTIONS.items():
        if name in names:
            text = section.text(study, width)
            if text:
                texts[name] = text
    return texts


def requested(study: Analysis, show: Collection[str], width: int | None = None) -> list[str]:
    """Return the sections that `--show` names; a line with the reason for one without data."""
    texts = sections(study, show, width)
    parts = []
    for name, section in SECTIONS.items():
        if name in texts:
            parts.append(texts[name])
        elif name in show:
            parts.append(f"{name}: nothing to show, because {section.reason}\n")
    return parts


def answer_text(study: Analysis, width: int | None = None) -> str:
    """Return the sentences of the answer, and what its times are; empty without any K*."""
    lines = answer_lines(study)
    if lines:
        lines.append(times_text(study))
    return "".join(map("{}\n".format, filter(None, lines)))


def all_notes(study: Analysis) -> list[str]:
    """Return what to know before trusting the table and the times of a study, a line each."""
    return [*study_notes(study), *timing_notes(study)]


def notes_section(study: Analysis, width: int | None = None) -> str:
    """Return all notes as a section."""
    return _notes_text(all_notes(study))


def _notes_text(notes: Iterable[str]) -> str:
    """Return notes as lines."""
    return "".join(map("note: {}\n".format, notes))


def table_and_law(analysis: Analysis, width: int | None = None) -> str:
    """Return the head of the report: the protocol, the table, a line of the law per series."""
    record = analysis.record
    lines = [
        f"study {record.name}: workload {record.workload}, {protocol_text(record)}",
        "",
        *_table(analysis, width),
        "",
        law_head("K*", record.goal.cost_unit, ", robust fit of log K*"),
        *law_lines(analysis.laws),
    ]
    if record.noise is not None:
        lines.append(f"  {record.noise.sentence}")
    return "\n".join(lines) + "\n"


def protocol_text(record: StudyRecord) -> str:
    """Return what all trials of a study have in common: their number, goal and length."""
    goal = record.goal
    trials = counted(record.trials, "trial")
    text = (
        f"{trials} per cell, {goal} validated {every(goal.check_interval)}, at "
        f"most {goal.budget_text}"
    )
    if record.train_past_goal:
        text += ", also after the goal"
    if not record.statistic.is_minimum:
        text += f"; K* is {record.k_star_words}"
    return text


def _table(analysis: Analysis, width: int | None) -> list[str]:
    """Return the lines of the table of cells."""
    record = analysis.record
    rows = records(analysis.table)
    counts = list(ALWAYS_COUNTED)
    counts += [name for name in COUNTED_IF_ANY if count(analysis.table[name])]
    names = record.short_names
    head = record.goal.cost_unit.head
    # On a screen, an empty column would often be a table of its own.
    shows_edges = width is None or any(row["boundary"] for row in rows)
    lines = []
    for cell, row in zip(record.cells, rows, strict=True):
        line = {**cell_texts(cell), head: k_star_text(row["k_star"], row["floor"])}
        if "communications" in row:
            line["communications"] = k_star_text(row["communications"], row["floor"])
        for name in counts:
            line[COUNT_HEADS[name]] = str(row[name])
        for key, name in names.items():
            line[f"best {name}"] = value_text(row[name], record.space[key])
        if shows_edges:
            line["at a range edge"] = row["boundary"] or "-"
        lines.append(line)
    return in_parts(lines, keys_of(record), width, words=shows_edges)


def keys_of(record: StudyRecord) -> int:
    """Return how many columns of a text table name a cell."""
    return len(cell_texts(record.cells[0]))


def readings_text(analysis: Analysis, width: int | None = None) -> str:
    """Return the section on readings, of the K* trials and of repeats; empty without readings."""
    columns = reading_columns(analysis.record)
    if not columns:
        return ""
    head = analysis.record.goal.cost_unit.head
    rows = []
    for cell, row in zip(analysis.record.cells, records(analysis.table), strict=True):
        line = {**cell_texts(cell), head: k_star_text(row["k_star"], row["floor"])}
        rows.append(with_readings(line, columns, row))
    keys = keys_of(analysis.record)
    lines = ["readings of the K* trials: the last value up to the goal"]
    lines += in_parts(rows, keys, width)
    at_end = [each.best for each in analysis.cells if each.best and each.best.end_readings]
    if any(best.steps is not None and best.steps_run > best.steps for best in at_end):
        lines.append(
            "  metaparameters.csv has readings at the end of trials that ran past the goal"
        )
    if analysis.repeats:
        lines.append("readings of the repeats: median over the fresh seeds of these values")
        lines += in_parts(_readings_of_repeats(analysis, columns), keys, width)
    return "\n".join(lines) + "\n"


def _readings_of_repeats(analysis: Analysis, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of the readings of repeated samples, by column."""
    rows = []
    for each, row in zip(analysis.repeats, records(analysis.repeat_table), strict=True):
        line = cell_texts(each.cell)
        line |= {"sample": str(each.point), "repeats": str(len(each.results))}
        medians = {name: row[f"{name}_median"] for name in columns}
        rows.append(with_readings(line, columns, medians))
    return rows


def theory_text(analysis: Analysis, width: int | None = None) -> str:
    """Return the section on the theory; empty if nothing is measured.

    It has a table of terms, and a table of ratios to the smallest sparsity.
    """
    terms = _measured_terms(analysis)
    ratios = _measured_ratios(analysis)
    if not terms and not ratios:
        return ""
    lines = [
        "theory (Lee et al. 2021, Section 4; bounds for SGD): terms of the K* trials, predicted "
        "and measured"
    ]
    keys = keys_of(analysis.record)
    if terms:
        lines += in_parts(starmap(_term_row, terms), keys, width)
    cells = len(analysis.record.cells)
    if len(terms) < cells:
        lines.append(
            f"  {cells - len(terms)} of {cells} cells have no K* trial with measured terms"
        )
    if ratios:
        lines += [
            "",
            f"ratios to S={min(analysis.record.sparsities):g}, geometric means over the samples "
            "measured at both; predicted c1 = Delta x beta x L",
        ]
        lines += in_parts(starmap(_ratio_row, ratios), keys, width)
    return "\n".join(lines) + "\n"


def _measured_terms(analysis: Analysis) -> list[tuple[Cell, Row]]:
    """Return the rows of the theory of cells whose terms were measured, with the cells."""
    measured = []
    for cell, row in zip(analysis.record.cells, records(analysis.theory), strict=True):
        if row["delta"] is not None:
            measured.append((cell, row))
    return measured


def _measured_ratios(analysis: Analysis) -> list[tuple[Series, Row]]:
    """Return the rows of ratios that rest on some trials, with their series."""
    record = analysis.record
    series_of_rows = []
    for series in record.series:
        if base_of(series, record.series) != series:
            # A row for each batch size, and one for all together: the order of `term_ratio_rows`.
            series_of_rows += [series] * (len(record.batch_sizes) + 1)
    rows = zip(series_of_rows, records(analysis.term_ratios), strict=True)
    return [(series, row) for series, row in rows if row["pairs"]]


def _term_row(cell: Cell, row: Row) -> dict[str, str]:
    """Return a row of the table of terms as text."""
    texts = cell_texts(cell)
    for key, name in _SIZES.items():
        texts[name] = significant(row[key])
    for key, name in _LAWS.items():
        texts[name] = three_digits(row[key])
    texts["K*"] = k_star_text(row["k_star"], row["floor"])
    return texts


def _ratio_row(series: Series, row: Row) -> dict[str, str]:
    """Return a row of the table of ratios as text."""
    batch_size = "all"
    if row["batch_size"] is not None:
        batch_size = str(row["batch_size"])
    texts = {"B": batch_size, **short_columns(series), "pairs": str(row["pairs"])}
    for key, name in _RATIOS.items():
        texts[name] = times(row[key])
    return texts


def critical_text(study: Analysis, width: int | None = None) -> str:
    """Return the section of a report, a line per series; empty for fewer than two definitions.

    Definitions without a value or bound in any series are omitted.
    """
    table = study.critical_batch_sizes
    shown = []
    for name in DEFINITIONS:
        if any(str(definitions[name]) != "-" for definitions in table.values()):
            shown.append(name)
    if len(shown) < 2:
        return ""
    rows = []
    limitations: dict[str, list[str]] = {}
    for series, definitions in table.items():
        row = short_columns(series)
        for name in shown:
            critical = definitions[name]
            row[DEFINITIONS[name]] = str(critical)
            if critical.value is not None and critical.note:
                limitations.setdefault(critical.note, []).append(str(series))
        rows.append(row)
    keys = len(rows[0]) - len(shown)
    lines = ["critical batch sizes in examples, by definition", *in_parts(rows, keys, width)]
    if limitations:
        notes = []
        for note, names in limitations.items():
            of_series = f"{', '.join(dict.fromkeys(names))}: " if len(table) > 1 else ""
            notes.append(f"{of_series}{note}")
        lines.append(f"* {'; '.join(notes)}")
    return "\n".join(lines) + "\n"


def delay_text(study: Analysis, width: int | None = None) -> str:
    """Return the section of a report on delayed gradients; empty without a fitted law."""
    lines = []
    for law in study.delay_laws:
        if law.fit is not None:
            lines.append(f"  {law.series}  {_delay_law_text(law)}")
    if not lines:
        return ""
    head = "K* = c1 / B + c2 / sin(pi / (2 (2 tau + 1))), joint fit of all delays tau"
    last = "  delay-law.csv compares it with a separate fit of each delay."
    return "\n".join([head, *lines, last, ""])


def _delay_law_text(law: DelayLaw) -> str:
    """Return the constants of a law and its critical delays in words."""
    constants = f"c1 = {three_digits(law.fitted.c1)}  c2 = {three_digits(law.fitted.c2)}"
    text = f"{constants}  misfit {law.misfit:.0%}"
    if not law.joint.describes_k:
        return f"{text}  {law.joint.verdict.reason}"
    delays = []
    for batch_size in dict.fromkeys((law.batch_sizes[0], law.batch_sizes[-1])):
        value, interval = law.known_critical_delay(batch_size)
        shown = f"> {three_digits(interval.low)}"
        if not math.isnan(value):
            shown = estimate(value, interval)
        delays.append(f"{shown} at B={batch_size}")
    return f"{text}  K* doubles at delay {' and '.join(delays)}"


def local_text(study: Analysis, width: int | None = None) -> str:
    """Return the section of a report on local SGD, a line per curve; empty without curves."""
    curves = study.local_curves
    if not curves:
        return ""
    flat = f"at most {FLAT:g} x K* at the least H, or one check above it"
    lines = [f"local SGD: K* against H (flat: {flat})"]
    for curve in curves:
        lines.append(f"  {curve.series}  B={curve.batch_size}  {curve.describe()}")
    return "\n".join(lines) + "\n"


# What `--show` names, in the order of the report. The report page has all sections, and table.txt
# all without times.
SECTIONS = {
    "answer": Section(answer_text, "no cell has a K*"),
    "cells": Section(table_and_law),
    "repeats": Section(repeats_section, "study.repeats is 0, or no cell has a K*"),
    "critical": Section(
        critical_text,
        "fewer than two definitions of the critical batch size have a value; critical.csv has the "
        "reason of each",
    ),
    "delay": Section(delay_text, "the study has no axis of delays with a fitted law"),
    "local": Section(local_text, "the study has no axis local.steps with a K*"),
    "theory": Section(
        theory_text,
        "no K* trial has measured terms; smoothness.interval below K* measures them",
    ),
    "readings": Section(readings_text, "no trial has readings; study.readings measures them"),
    NOTES: Section(notes_section, "there is nothing to note"),
}
