"""Values along the training of trials: metrics of the K* trials, and the Lipschitz constant."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from lit_dps.analysis.readings import metric_column
from lit_dps.analysis.summary import CellSummary, is_comparable
from lit_dps.analysis.tables import cell_columns, columns_of, frame
from lit_dps.core.racing import to_goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import LIPSCHITZ, TrialResult, Value


def best_trial_curves(cells: Iterable[CellSummary], metric: str) -> pd.DataFrame:
    """Return the curve of the K* trial of each cell up to its goal, a row a validation.

    By series, batch size, then step; cells without a K* have no rows.

    Columns: sparsity and further axes, batch_size [examples], point, step, train_loss (of that
    step's batch, before its update) and the goal's metric (of the entire validation split), missing
    if the validation stopped early and has only a lower bound.

    Args:
        cells: The cells of a study.
        metric: The metric of the goal.
    """
    rows = []
    for summary in cells:
        if summary.best is None:
            continue
        names = _trial_columns(summary.best)
        curve = to_goal(summary.best).curve
        steps = curve.get("step", ())
        is_exact = curve.get("exact") or [1] * len(steps)
        columns = (steps, curve.get("train_loss", ()), curve.get(metric, ()), is_exact)
        for step, loss, value, exact in zip(*columns, strict=True):
            row = {**names, "step": step, "train_loss": loss, metric_column(metric): None}
            if exact:
                row[metric_column(metric)] = value
            rows.append(row)
    return frame(rows)


def lipschitz_rows(record: StudyRecord) -> pd.DataFrame:
    """Return every measurement of the Lipschitz constant up to the goal.

    By series, batch size, point, then step. Columns: sparsity and further axes, batch_size
    [examples], point, status, step, lipschitz (missing if it is not a number), and drawn: whether
    `lipschitz_means` includes it. These are the positive and finite constants of comparable trials
    (`summary.is_comparable`), of the points that all series share, or of all points if the series
    share none.
    """
    rows = []
    for cell in record.cells:
        common = common_points(record, cell.batch_size)
        for result in record.results[cell]:
            cut = to_goal(result)
            names = {**_trial_columns(cut), "status": str(cut.status)}
            is_used = has_lipschitz(cut) and (not common or cut.trial.point in common)
            curve = cut.readings.get(LIPSCHITZ, {})
            steps = curve.get("step", ())
            for step, value in zip(steps, curve.get("lipschitz", ()), strict=True):
                is_drawn = is_used and is_positive(value)
                rows.append({**names, "step": step, "lipschitz": value, "drawn": is_drawn})
    return frame(rows)


def lipschitz_means(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean Lipschitz constant over trials at each step, by series and batch size.

    Columns: those of the series, batch_size [examples], step; mean (geometric), low and high
    (smallest and largest) of the trials, and their number; run_mean, the geometric mean over the
    trials of the arithmetic mean over each trial's run, as the theory takes it.

    Args:
        rows: `lipschitz_rows`.
    """
    cell = cell_columns(rows)
    drawn = rows[rows["drawn"]]
    at_step = drawn.groupby([*cell, "step"])["lipschitz"]
    means = at_step.agg(mean=_geometric_mean, low="min", high="max", trials="count").reset_index()
    of_runs = drawn.groupby([*cell, "point"])["lipschitz"].agg(_arithmetic_mean)
    run_means = of_runs.groupby(cell).agg(run_mean=_geometric_mean)
    return means.join(run_means, on=cell)


def measured_points(record: StudyRecord, batch_size: int) -> list[set[int]]:
    """Return the points with a measured Lipschitz constant, for each series that has any."""
    points_of_series = []
    for cell in record.cells:
        if cell.batch_size == batch_size:
            measured = filter(has_lipschitz, record.results[cell])
            points = {result.trial.point for result in measured}
            if points:
                points_of_series.append(points)
    return points_of_series


def common_points(record: StudyRecord, batch_size: int) -> set[int]:
    """Return the points that were measured in every series: these alone compare series."""
    points_of_series = measured_points(record, batch_size)
    if not points_of_series:
        return set()
    return set.intersection(*points_of_series)


def has_lipschitz(result: TrialResult) -> bool:
    """Return True if the Lipschitz constant of a comparable trial was measured."""
    return bool(result.readings.get(LIPSCHITZ, {}).get("step")) and is_comparable(result)


def is_positive(value: float) -> bool:
    """Return True if a constant is positive and finite; others have no logarithm."""
    return value > 0 and math.isfinite(value)


def _trial_columns(result: TrialResult) -> dict[str, Value]:
    """Return the columns that name a trial: its series, batch size and point."""
    cell = result.trial.cell
    return {**columns_of(cell.series), "batch_size": cell.batch_size, "point": result.trial.point}


def _geometric_mean(values: pd.Series) -> float:
    return float(np.exp(np.mean(np.log(values.to_numpy()))))


def _arithmetic_mean(values: pd.Series) -> float:
    return float(np.mean(values.to_numpy()))
