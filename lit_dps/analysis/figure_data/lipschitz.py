"""The local Lipschitz constant of the gradient along training (Lee et al. 2021, Figure 4), as rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from lit_dps.analysis.results import StudyRecord
from lit_dps.analysis.scaling import FittedStudy
from lit_dps.analysis.summary import comparable, setting
from lit_dps.analysis.text import Row
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
