"""What MLflow shows of a study: a text in Markdown, its constant parameters, and its outcome."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import is_upper_bound
from lit_dps.analysis.local_sgd import communications
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import cell_texts, k_star_text, records
from lit_dps.analysis.theory import PREDICTION_COLUMNS
from lit_dps.core.config import SPARSITY_KEY
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import FINAL_STATUSES, Cell, Series
from lit_dps.report.answer import sentences, trained_series
from lit_dps.report.result_table import examples_text, interval_text, speed_mark
from lit_dps.report.screen import all_warnings
from lit_dps.report.text import protocol_text
from lit_dps.report.timing_notes import timing_notes

SECTIONS = ("model", "data", "pruning", "optim", "local", "batch")
TRAINER = ("accelerator", "devices", "precision", "accumulate_grad_batches", "gradient_clip_val")
# Key of a switch -> the prefix of the keys that have no effect if it has the value "off".
SWITCHES = {"local.workers": ("local.", "1"), "optim.delay": ("optim.delay", "0")}
MAX_PARAM_CHARACTERS = 250  # of a parameter's value in MLflow
LAST_LINE = "The rest is too long for MLflow: see the artifacts of this run."


def markdown(study: Analysis, report: str | None = None, limit: float = math.inf) -> str:
    """Return the description of a study: answer, table, warnings, notes, and the report's address.

    The answer comes first, because MLflow folds all but a few lines. The warnings are those of
    the last screen of a study, all of them, with their details. If the text exceeds the limit, the
    details of the answer are left to the report, then also the table.

    Args:
        study: The study.
        report: Address of the report page.
        limit: Characters that MLflow allows.
    """
    table = _table(study)
    left_out = [f"The table of {len(study.answers)} rows is in the report."]
    text = ""
    for has_details, lines in ((True, table), (False, table), (False, left_out)):
        text = _markdown(study, report, lines, has_details)
        if len(text) <= limit:
            break
    return text


def lines_within(text: str, limit: int) -> str:
    """Return the first lines of a text within a limit of characters; the last one marks the cut."""
    if len(text) <= limit:
        return text
    begin = text[: limit - len(LAST_LINE) - 2]
    lines, _, _ = begin.rpartition("\n")
    return f"{lines}\n\n{LAST_LINE}"


def _markdown(
    study: Analysis, report: str | None, table: list[str], has_details: bool = True
) -> str:
    first_lines, other_lines = [], []
    for series, group in trained_series(study).items():
        name = "; ".join(map(str, group))
        first, *others = sentences(study, series, name)
        first_lines.append(f"- {first}")
        if others and has_details:
            other_lines += ["", f"{name}:", "", *(f"- {line.strip()}" for line in others)]
    lines = [*first_lines, "", *table]
    warnings = all_warnings(study, has_details=True)
    if warnings:
        lines += ["", *(f"- **warning**: {warning}" for warning in warnings)]
    lines += [*other_lines, "", protocol_text(study.record)]
    notes = [note for note in timing_notes(study) if note not in warnings]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    if report is not None:
        lines += ["", f"[report.html]({report}): curves, rates, all trials"]
    return "\n".join(_escaped(line) for line in lines)


def _table(study: Analysis) -> list[str]:
    """Return the lines of a table of the cells with K*."""
    rows = []
    for cell, row in study.answers.items():
        rows.append(
            {
                **cell_texts(cell),
                study.record.goal.cost_unit.head: k_star_text(row["k_star"], row["floor"]),
                "time to goal": interval_text(row),
                "examples": examples_text(row),
                "": speed_mark(row),
            }
        )
    if not rows:
        return []
    columns = list(rows[0])
    lines = [columns, ["---:"] * len(columns)]
    for row in rows:
        lines.append(list(row.values()))
    return [f"| {' | '.join(line)} |" for line in lines]


def _escaped(line: str) -> str:
    return line.replace("K*", "K\\*").replace("<", "&lt;")


def constants(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what all trials of a study share, by dotted key, without missing and empty values.

    Keys that differ between cells or trials, such as the batch size, are not among them. Neither
    are the settings of local SGD and of delayed gradients if these are off.
    """
    study = config.get("study", {})
    varied = {
        study.get("batch_size_key", "data.batch_size"),
        SPARSITY_KEY,
        "pruning.seed",
        *study.get("grid", ()),
        *study.get("space", ()),
    }
    values: dict[str, str] = {}
    for section in SECTIONS:
        values |= _flat_values(section, config.get(section, {}), varied)
    for key, (prefix, off) in SWITCHES.items():
        if values.get(key) == off:
            values = {name: each for name, each in values.items() if not name.startswith(prefix)}
    trainer = config.get("trainer", {})
    for key in TRAINER:
        values |= _flat_values(f"trainer.{key}", trainer.get(key), varied)
    return values


def _flat_values(key: str, value: object, varied: Collection[str]) -> dict[str, str]:
    """Return nested values by dotted key, without "init_args" and "class_path"."""
    if key in varied:
        return {}
    if isinstance(value, Mapping):
        values = {}
        for name, each in value.items():
            if name == "init_args":
                values |= _flat_values(key, each, varied)
            else:
                values |= _flat_values(f"{key}.{name}", each, varied)
        return values
    if value in (None, [], ""):
        return {}
    return {key.removesuffix(".class_path"): str(value)[:MAX_PARAM_CHARACTERS]}


# Metric of a cell's run -> column of the answer.
ANSWER_METRICS = {
    "seconds_to_goal": "seconds",
    "total_seconds_to_goal": "total_seconds",
    "examples_to_goal": "examples",
    "step_seconds": "step_seconds",
}


# First characters of the metrics of a study's run that depend on the trials so far: a later
# analysis may lack some of them.
LAW_FAMILIES = ("c1/", "c2/", "b_crit/", "b_crit_low/", "K_star/", "K_median/")


class CellOutcome(NamedTuple):
    """The metrics of a cell's run."""

    cell: Cell
    metrics: dict[str, Any]


def cell_outcomes(study: Analysis) -> Iterator[CellOutcome]:
    """Yield the metrics of each cell: K*, counts of statuses, times and terms of the theory."""
    for summary, terms in zip(study.cells, records(study.theory), strict=True):
        metrics = _counts(study, summary)
        row = study.answers.get(summary.cell)
        if row is not None:
            metrics["K_star"] = row["k_star"]
            for name, column in ANSWER_METRICS.items():
                if row[column] is not None:
                    metrics[name] = row[column]
            if is_upper_bound(row):
                metrics["to_goal_upper_bound"] = 1
        for name in PREDICTION_COLUMNS:
            if terms[name] is not None:
                metrics[f"theory/{name}"] = terms[name]
        yield CellOutcome(summary.cell, metrics)


def _counts(study: Analysis, summary: CellSummary) -> dict[str, Any]:
    """Return the counts of a cell's trials, and the steps of its repeats."""
    metrics: dict[str, Any] = {status: summary.counts[status] for status in FINAL_STATUSES}
    if summary.is_upper_bound:
        metrics["K_star_upper_bound"] = 1
    if summary.is_at_first_check:
        metrics["K_star_at_first_check"] = 1
    repeats = study.repeats_of_k_star.get(summary.cell)
    if repeats is not None:
        metrics["repeats"] = len(repeats.results)
        metrics["missed"] = repeats.missed
        if repeats.finite_median is not None:
            metrics["K_median"] = repeats.finite_median
            if repeats.is_upper_bound(0.5):
                metrics["K_median_upper_bound"] = 1
    exchanges = communications(study.record, summary)
    if exchanges is not None:
        metrics["communications"] = exchanges
    return metrics


def scaling(study: Analysis) -> dict[str, dict[int, float]]:
    """Return K* and the median of repeats of each series, by batch size.

    Upper bounds are left out, because MLflow cannot mark a point of a curve.
    """
    scaling: dict[str, dict[int, float]] = {}
    for summary in study.cells:
        cell = summary.cell
        series = _metric_name(cell.series)
        repeats = study.repeats_of_k_star.get(cell)
        if repeats is not None and not repeats.is_upper_bound(0.5):
            median = repeats.finite_median
            if median is not None:
                scaling.setdefault(f"K_median/{series}", {})[cell.batch_size] = median
        if summary.k_star is not None and not summary.is_upper_bound:
            scaling.setdefault(f"K_star/{series}", {})[cell.batch_size] = summary.k_star
    return scaling


def study_metrics(study: Analysis) -> dict[str, Any]:
    """Return the constants of the laws that describe K*, bounds of B_crit and the noise scale."""
    metrics: dict[str, Any] = {}
    for series, row in zip(sorted(study.laws), records(study.law_table), strict=True):
        names = []
        if study.laws[series].describes_k:
            names += ["c1", "c2"]
        if row["identifiable"]:
            names.append("b_crit")
        else:
            names.append("b_crit_low")
        for name in names:
            if row[name] is not None:
                metrics[f"{name}/{_metric_name(series)}"] = row[name]
    noise = study.record.noise
    if noise is not None:
        metrics["noise_scale_low"] = noise.low
        metrics["noise_scale_readings"] = noise.readings
        if noise.resolved:
            metrics["noise_scale"] = noise.value
    return metrics


def study_params(record: StudyRecord) -> dict[str, object]:
    """Return the parameters of a study's run: constants, goal and seed."""
    params: dict[str, object] = dict(constants(record.config))
    for key, value in record.goal.to_dict().items():
        params[f"goal.{key}"] = value
    params["seed"] = record.seed
    return params


def space_text(record: StudyRecord) -> str:
    """Return the search space, one parameter a line. It may expand, which no MLflow param may."""
    return "\n".join(f"{key}: {box}" for key, box in record.space.items())


def is_finished(study: Analysis) -> bool:
    """Return True if no trial and no repeat remains to be run."""
    for repeats in study.repeats:
        if len(repeats.results) < repeats.planned:
            return False
    return not any(cell.pending for cell in study.cells)


def _metric_name(series: Series) -> str:
    """Return a series as part of a metric's name, with characters that MLflow allows: S_0.9."""
    return re.sub(r"[^\w\-. :/]", "_", series.stored_name)
