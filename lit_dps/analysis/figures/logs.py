"""How the trials that gave K* trained (Lee et al. 2021, Figure 6), as rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure

from lit_dps.analysis.figures.entry import Entry
from lit_dps.analysis.figures.style import GREY, STEPS, STYLE, curve_style, few_ticks, log_values_axis
from lit_dps.analysis.scaling import FittedStudy
from lit_dps.analysis.summary import summarize
from lit_dps.analysis.text import Row
from lit_dps.record import StudyRecord

PANELS = 6  # as many columns as stay legible on a page


def log_rows(record: StudyRecord) -> list[Row]:
    """The curve of the K* trial of each cell, by sparsity, batch size, then step; none of a cell without K*.

    Columns: sparsity, batch_size [examples], point, step, train_loss (of that step's batch, before its update) and
    val_error (share of the entire validation split), None where the check stopped early and left a lower bound.
    """
    rows: list[Row] = []
    for summary in summarize(record):
        if summary.best is None:
            continue
        trial, curve = summary.best.trial, summary.best.curve
        steps, losses, errors = (curve.get(column, ()) for column in ("step", "train_loss", "val_error"))
        for step, loss, error, exact in zip(steps, losses, errors, _exact(curve), strict=True):
            row: Row = {"sparsity": trial.cell.sparsity, "batch_size": trial.cell.batch_size, "point": trial.point}
            rows.append(row | {"step": step, "train_loss": loss, "val_error": error if exact else None})
    return rows


def _exact(curve: Mapping[str, Sequence[float]]) -> Sequence[float]:
    """Of each check, whether it looked at the entire validation split."""
    return curve.get("exact") or [1] * len(curve.get("step", ()))


def spread(batch_sizes: Sequence[int], count: int = PANELS) -> list[int]:
    """At most `count` of some ascending batch sizes, evenly spread, both ends among them."""
    if len(batch_sizes) <= count:
        return list(batch_sizes)
    return [batch_sizes[round(i * (len(batch_sizes) - 1) / (count - 1))] for i in range(count)]


def logs_missing(study: FittedStudy) -> str | None:
    """Why there is no training to draw, if so."""
    best = [summary.best for summary in summarize(study.record) if summary.best is not None]
    if not best:
        return "no complete trial yet"
    return None if any(len(trial.curve.get("step", ())) > 1 for trial in best) else "K* of each cell is its first check"


def logs_notes(study: FittedStudy) -> list[str]:
    """That the curves of the error have gaps, where they have."""
    rows = log_rows(study.record)
    bounds = sum(row["val_error"] is None for row in rows)
    if not bounds:
        return []
    return [f"{bounds} of {len(rows)} checks of the logs stopped early (goal.early_reject): no validation error there"]


COLUMNS = {"train_loss": "training loss of the batch", "val_error": "validation error"}


@matplotlib.rc_context(STYLE)
def draw_logs(record: StudyRecord, rows: Sequence[Row]) -> Figure:
    """Training loss above, validation error with the goal below; a column per batch size, a line per sparsity.

    Without validation errors but those that met the goal, the training loss alone.

    Args:
        record: For the sparsities of the grid and the goal.
        rows: From `figure_data.log_rows`. Of many batch sizes a few are drawn; see `figure_data.logs.spread`.
    """
    sizes = spread(sorted({row["batch_size"] for row in rows}))
    columns = list(COLUMNS) if _errors_are_known(rows) else ["train_loss"]
    figure = Figure(figsize=(max(1.2 * len(sizes), 2.6) + 0.7, 0.6 + 1.5 * len(columns)))
    panels = figure.subplots(len(columns), len(sizes), sharex="col", sharey="row", squeeze=False)
    for batch_size, panels_of_size in zip(sizes, panels.T, strict=True):
        panels_of_size[0].set_title(f"B = {batch_size}")
        for i, sparsity in enumerate(record.sparsities):
            line = [row for row in rows if (row["sparsity"], row["batch_size"]) == (sparsity, batch_size)]
            style = curve_style(i) | {"markevery": [-1], "linewidth": 0.9, "label": f"S = {sparsity:g}"}
            for ax, name in zip(panels_of_size, columns, strict=True):
                known = [row for row in line if row[name] is not None]
                ax.plot([row["step"] for row in known], [row[name] for row in known], **style)
        panels_of_size[0].set_xlim(left=0)
        few_ticks(panels_of_size[0].xaxis)
    for line, name in zip(panels, columns, strict=True):
        line[0].set_ylabel(COLUMNS[name])
        shown = [row[name] for row in rows if row["batch_size"] in sizes and 0 < (row[name] or 0) < math.inf]
        log_values_axis(line[0], shown, 1.3, 1.3)
        for ax in line if name == "val_error" else ():
            ax.axhline(record.goal.error, color=GREY, linestyle="--", linewidth=0.8, zorder=1, label="goal error")
    figure.supxlabel(STEPS, fontsize=8)
    handles, labels = panels[-1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(handles), columnspacing=1.2, handlelength=1.5)
    return figure


def _errors_are_known(rows: Sequence[Row]) -> bool:
    """Not where checks that stopped early leave those alone that met the goal."""
    known = sum(row["val_error"] is not None for row in rows)
    return known == len(rows) or known > len({(row["sparsity"], row["batch_size"]) for row in rows})


LOGS = Entry(
    name="logs",
    paper="6",
    tables=lambda study: {"logs": log_rows(study.record)},
    draw=lambda study, tables: [("logs", draw_logs(study.record, tables["logs"]))],
    missing=logs_missing,
    notes=logs_notes,
)
