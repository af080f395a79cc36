"""What MLflow says of a study in words: the description of its run, in Markdown, and what its pages
show first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import k_star_text, records, short_columns
from lit_dps.core.config import SPARSITY_KEY
from lit_dps.report.answer import interval_text, mark, sentences, timing_notes

SECTIONS = ("model", "data", "pruning", "optim", "local")
TRAINER = ("accelerator", "devices", "precision", "accumulate_grad_batches", "gradient_clip_val")
LONGEST = 250  # characters of a parameter's value


def markdown(study: Analysis, report: str | None = None) -> str:
    """The answer, first since MLflow folds all but a few lines; the table, what to know of both,
    where the report is.

    Args:
        study: The study.
        report: Address of the report page.
    """
    record, goal = study.record, study.record.goal
    unfinished = sum(cell.pending for cell in study.cells)
    said = {
        series: sentences(series, study.answer, study.rate_laws[series], study.validate_every)
        for series in record.series
    }
    lines = [f"- {first}" for first, *_ in said.values()] + ["", *_table(study)]
    for series, (_, *others) in said.items():
        lines += ["", f"{series}:", "", *(f"- {line.strip()}" for line in others)] if others else []
    lines += [
        "",
        f"{goal}, checked every {goal.check_interval} steps, budget {goal.max_steps} steps; "
        f"{record.trials} trials a cell"
        + (f"; **{unfinished} trials have not finished**" if unfinished else ""),
    ]
    if beware := timing_notes(record, study.answer):
        lines += ["", *(f"- {line}" for line in beware)]
    if report is not None:
        lines += ["", f"[report.html]({report}): curves, rates, all trials"]
    return "\n".join(_escaped(line) for line in lines)


def _table(study: Analysis) -> list[str]:
    cells = [summary.cell for summary in study.cells if summary.k_star is not None]
    rows = [
        {
            "B": str(row["batch_size"]),
            **short_columns(cell.series),
            "K*": k_star_text(row),
            "time to goal": interval_text(row),
            "examples": f"{row['examples']}",
            "": mark(row),
        }
        for cell, row in zip(cells, records(study.answer), strict=True)
    ]
    if not rows:
        return []
    table = [list(rows[0]), ["---:"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return [f"| {' | '.join(line)} |" for line in table]


def _escaped(line: str) -> str:
    return line.replace("K*", "K\\*").replace("<", "&lt;")


def constants(config: Mapping[str, Any]) -> dict[str, str]:
    """What all trials share of a study's configuration, by dotted key, but for what is left out or
    empty.

    What a cell or a trial sets, such as the batch size, is none of it.
    """
    found: dict[str, str] = {}
    study = config.get("study", {})
    batch_size = study.get("batch_size_key", "data.batch_size")
    varied = {
        batch_size,
        SPARSITY_KEY,
        "pruning.seed",
        *study.get("grid", ()),
        *study.get("space", ()),
    }

    def take(prefix: str, node: object) -> None:
        if prefix in varied:
            return
        if isinstance(node, Mapping):
            for key, value in node.items():
                take(prefix if key == "init_args" else f"{prefix}.{key}", value)
        elif node not in (None, [], ""):
            found[prefix.removesuffix(".class_path")] = str(node)[:LONGEST]

    for section in SECTIONS:
        take(section, config.get(section, {}))
    for key in TRAINER:
        take(f"trainer.{key}", config.get("trainer", {}).get(key))
    return found
