"""The local Lipschitz constant of the gradient along training (Lee et al. 2021, Figure 4), as rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_dps.analysis.figures.entry import Entry, Tables
from lit_dps.analysis.figures.style import STEPS, STYLE, curve_style, few_ticks, log_values_axis
from lit_dps.analysis.scaling import FittedStudy
from lit_dps.analysis.summary import comparable, setting
from lit_dps.analysis.text import Row, significant
from lit_dps.record import StudyRecord
from lit_dps.trial import Cell, TrialResult


def lipschitz_rows(record: StudyRecord) -> list[Row]:
    """Every measurement, by sparsity, batch size, point, then step.

    Columns: sparsity, batch_size [examples], point, status, step, lipschitz, and drawn: whether it is among those that
    `lipschitz_mean_rows` takes. These are of the points of `_common_points`, or of all where the sparsities share none;
    of trials that compare (`summary.comparable`); and above 0 and finite, since others have no logarithm.
    """
    rows: list[Row] = []
    for cell in record.cells:
        common = _common_points(record, cell.batch_size)
        for result in record.results[cell]:
            point = result.trial.point
            taken = _measured(result) and (not common or point in common)
            for step, value in zip(*(result.smoothness.get(key, ()) for key in ("step", "lipschitz")), strict=True):
                row: Row = {"sparsity": cell.sparsity, "batch_size": cell.batch_size, "point": point}
                row |= {"status": str(result.status), "step": step, "lipschitz": value}
                rows.append(row | {"drawn": taken and _positive(value)})
    return rows


def lipschitz_mean_rows(rows: Sequence[Row]) -> list[Row]:
    """The lines of the figure: at each step the mean of the trials measured there, by sparsity, batch size, then step.

    Columns: sparsity, batch_size [examples], step; mean (geometric), low and high (smallest and largest) of the trials,
    and their number; run_mean, the arithmetic mean over the run of each trial (as the theory takes it), of these the
    geometric mean over the trials.

    Args:
        rows: From `lipschitz_rows`.
    """
    cells: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row["drawn"]:
            cells[row["sparsity"], row["batch_size"]].append(row)
    lines: list[Row] = []
    for (sparsity, batch_size), measured in cells.items():
        run_mean = _geometric_mean([np.mean(run) for run in _values(measured, "point").values()])
        for step, values in sorted(_values(measured, "step").items()):
            row = {"sparsity": sparsity, "batch_size": batch_size, "step": step}
            row |= {"mean": _geometric_mean(values), "low": min(values), "high": max(values), "trials": len(values)}
            lines.append(row | {"run_mean": run_mean})
    return lines


def lipschitz_missing(study: FittedStudy) -> str | None:
    """Why there is no Lipschitz constant to draw, if so."""
    results = [result for results in study.record.results.values() for result in results if _measured(result)]
    if any(_positive(value) for result in results for value in result.smoothness["lipschitz"]):
        return None
    interval = setting(study.record.config, "smoothness.interval")
    why = "is not set" if interval is None else f"is {interval}: no feasible trial went on for as many steps"
    return f"no Lipschitz measurements (smoothness.interval {why})"


def lipschitz_notes(study: FittedStudy) -> list[str]:
    """Batch sizes where the lines of the sparsities rest on different points of the search."""
    record = study.record
    apart = [f"{b}" for b in record.batch_sizes if not _common_points(record, b) and len(_points(record, b)) > 1]
    where = f"B = {', '.join(apart)}: the lines there rest on different points"
    return [f"no point of the search has Lipschitz measurements at every sparsity at {where}"] if apart else []


def _common_points(record: StudyRecord, batch_size: int) -> set[int]:
    """The points measured at every sparsity that has any at this batch size: only these compare sparsities."""
    points = _points(record, batch_size)
    return set.intersection(*points) if points else set()


def _points(record: StudyRecord, batch_size: int) -> list[set[int]]:
    """The points measured at each sparsity of a batch size, for those that have any."""
    cells = [record.results[Cell(batch_size, sparsity)] for sparsity in record.sparsities]
    return list(filter(None, ({result.trial.point for result in cell if _measured(result)} for cell in cells)))


def _measured(result: TrialResult) -> bool:
    return bool(result.smoothness.get("step")) and comparable(result)


def _positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _values(rows: Sequence[Row], column: str) -> dict[object, list[float]]:
    """The Lipschitz constants of some rows by what they have in a column."""
    groups = defaultdict(list)
    for row in rows:
        groups[row[column]].append(row["lipschitz"])
    return groups


def _geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


CLOSE = {"fontsize": 6, "title_fontsize": 6, "labelspacing": 0.2, "borderaxespad": 0.2}
SPAN = 1e4  # that the axis spans at most: where a network has died, its constant is as good as 0


@matplotlib.rc_context(STYLE)
def draw_lipschitz(record: StudyRecord, rows: Sequence[Row]) -> Figure:
    """A panel per batch size, in it a line per sparsity, with the range of its trials as a band.

    Args:
        record: For the sparsities of the grid.
        rows: From `figure_data.lipschitz_mean_rows`.
    """
    sizes = sorted({row["batch_size"] for row in rows})
    lines = math.ceil(len(sizes) / 4)
    columns = math.ceil(len(sizes) / lines)
    figure = Figure(figsize=(max(1.8 * columns, 2.8) + 0.5, 1.8 * lines + 0.6))
    shared = None
    for i, batch_size in enumerate(sizes):
        shared = ax = figure.add_subplot(lines, columns, i + 1, sharey=shared)
        ax.set_title(f"B = {batch_size}")
        for j, sparsity in enumerate(record.sparsities):
            line = [row for row in rows if (row["sparsity"], row["batch_size"]) == (sparsity, batch_size)]
            if not line:
                continue
            steps, mean, low, high = ([row[key] for row in line] for key in ("step", "mean", "low", "high"))
            style = curve_style(j) | {"markersize": 2.5, "markevery": math.ceil(len(steps) / 8)}
            ax.plot(steps, mean, label=significant(line[0]["run_mean"]), linewidth=1, **style)
            ax.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
        ax.set_xlim(left=0)
        few_ticks(ax.xaxis)
        ax.tick_params(labelleft=i % columns == 0)
        ax.legend(title="mean over the run", loc="upper right", ncols=2, handlelength=1.2, columnspacing=0.8, **CLOSE)
        if i + columns >= len(sizes):
            ax.set_xlabel(STEPS)
    most = max(row["mean"] for row in rows)
    values = [max(row["mean"], most / SPAN) for row in rows]
    legend = 0.1 * (1.5 + math.ceil(len(record.sparsities) / 2))  # share of a panel's height that its legend takes
    above = 2 * (max(values) / min(values)) ** (legend / (1 - legend))
    log_values_axis(figure.axes[0], values, 2, above)
    figure.supylabel("local Lipschitz constant of the gradient", fontsize=8)
    there = [(j, s) for j, s in enumerate(record.sparsities) if any(row["sparsity"] == s for row in rows)]
    handles = [Line2D([], [], label=f"S = {s:g}", linewidth=1, **curve_style(j)) for j, s in there]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), columnspacing=1.2, handlelength=1.5)
    return figure


def _tables(study: FittedStudy) -> Tables:
    measured = lipschitz_rows(study.record)
    return {"lipschitz": measured, "lipschitz-mean": lipschitz_mean_rows(measured)}


LIPSCHITZ = Entry(
    name="lipschitz",
    paper="4",
    tables=_tables,
    draw=lambda study, tables: [("lipschitz", draw_lipschitz(study.record, tables["lipschitz-mean"]))],
    missing=lipschitz_missing,
    notes=lipschitz_notes,
)
