"""Describes a study in MLflow: the text on its run, in Markdown, and its constant parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import k_star_text, records, short_columns
from lit_dps.core.config import SPARSITY_KEY
from lit_dps.report.answer import interval_text, mark, sentences, timing_notes

SECTIONS = ("model", "data", "pruning", "optim", "local")
TRAINER = ("accelerator", "devices", "precision", "accumulate_grad_batches", "gradient_clip_val")
MAX_PARAM_CHARACTERS = 250  # of a parameter's value in MLflow


def markdown(study: Analysis, report: str | None = None) -> str:
    """Return the description of a study: answer, table, notes, and where the report is.

    The answer comes first, because MLflow folds all but a few lines.

    Args:
        study: The study.
        report: Address of the report page.
    """
    record = study.record
    first_lines, other_lines = [], []
    for series in record.series:
        rate_law = study.rate_laws[series]
        first, *others = sentences(series, study.answer, rate_law, study.validate_every)
        first_lines.append(f"- {first}")
        if others:
            other_lines += ["", f"{series}:", "", *(f"- {line.strip()}" for line in others)]
    lines = [*first_lines, "", *_table(study), *other_lines, "", _goal_line(study)]
    notes = timing_notes(record, study.answer)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    if report is not None:
        lines += ["", f"[report.html]({report}): curves, rates, all trials"]
    return "\n".join(_escaped(line) for line in lines)


def _goal_line(study: Analysis) -> str:
    record, goal = study.record, study.record.goal
    unfinished = sum(cell.pending for cell in study.cells)
    line = (
        f"{goal}, checked every {goal.check_interval} steps, budget {goal.max_steps} steps; "
        f"{record.trials} trials a cell"
    )
    if unfinished:
        line += f"; **{unfinished} trials have not finished**"
    return line


def _table(study: Analysis) -> list[str]:
    """Return the lines of a table of the cells with K*."""
    cells = [summary.cell for summary in study.cells if summary.k_star is not None]
    rows = []
    for cell, row in zip(cells, records(study.answer), strict=True):
        rows.append(
            {
                "B": str(row["batch_size"]),
                **short_columns(cell.series),
                "K*": k_star_text(row),
                "time to goal": interval_text(row),
                "examples": f"{row['examples']}",
                "": mark(row),
            }
        )
    if not rows:
        return []
    columns = list(rows[0])
    lines = [columns, ["---:"] * len(columns)]
    lines += [list(row.values()) for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _escaped(line: str) -> str:
    return line.replace("K*", "K\\*").replace("<", "&lt;")


def constants(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what all trials of a study share, by dotted key, without missing and empty values.

    Keys that differ between cells or trials, such as the batch size, are left out.
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
    for key in TRAINER:
        values |= _flat_values(f"trainer.{key}", config.get("trainer", {}).get(key), varied)
    return values


def _flat_values(key: str, value: object, varied: Collection[str]) -> dict[str, str]:
    """Return nested values by dotted key, without "init_args" and "class_path"."""
    if key in varied:
        return {}
    if isinstance(value, Mapping):
        values = {}
        for name, each in value.items():
            inner_key = key if name == "init_args" else f"{key}.{name}"
            values |= _flat_values(inner_key, each, varied)
        return values
    if value in (None, [], ""):
        return {}
    return {key.removesuffix(".class_path"): str(value)[:MAX_PARAM_CHARACTERS]}
