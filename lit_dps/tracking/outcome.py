"""What MLflow shows of the outcome of a study: metrics and parameters of its runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.local_sgd import communications
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import records
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import FINAL_STATUSES, Cell, Series
from lit_dps.tracking.description import constants

# Terms of the theory and its predictions, which the run of each cell shows.
THEORY = (
    "delta",
    "lipschitz",
    "beta",
    "epsilon",
    "rate",
    "predicted_c1",
    "predicted_c2",
    "predicted_k_star",
)
# Metric of a cell's run -> column of the answer.
ANSWER_METRICS = {
    "seconds_to_goal": "seconds",
    "examples_to_goal": "examples",
    "step_seconds": "step_seconds",
}


class CellOutcome(NamedTuple):
    """The metrics of a cell's run."""

    cell: Cell
    metrics: dict[str, Any]


def cell_outcomes(study: Analysis) -> Iterator[CellOutcome]:
    """Yield the metrics of each cell: K*, counts of statuses, times and terms of the theory."""
    answer_rows = iter(records(study.answer))  # of the cells with K*
    for summary, terms in zip(study.cells, records(study.theory), strict=True):
        metrics = _counts(study, summary)
        if summary.k_star is not None:
            metrics["K_star"] = summary.k_star
            row = next(answer_rows)
            for name, column in ANSWER_METRICS.items():
                if row[column] is not None:
                    metrics[name] = row[column]
        for name in THEORY:
            if terms[name] is not None:
                metrics[f"theory/{name}"] = terms[name]
        yield CellOutcome(summary.cell, metrics)


def _counts(study: Analysis, summary: CellSummary) -> dict[str, Any]:
    """Return the counts of a cell's trials, and the steps of its repeats."""
    metrics: dict[str, Any] = {status: summary.counts[status] for status in FINAL_STATUSES}
    if summary.is_upper_bound:
        # K* is only an upper bound.
        metrics["K_star_at_first_check"] = 1
    for repeats in study.repeats:
        if repeats.cell == summary.cell and repeats.rank == 1:
            metrics["repeats"] = len(repeats.results)
            metrics["missed"] = repeats.missed
    median = _repeats_median(study, summary.cell)
    if median is not None:
        metrics["K_median"] = median
    exchanges = communications(study.record, summary)
    if exchanges is not None:
        metrics["communications"] = exchanges
    return metrics


def _repeats_median(study: Analysis, cell: Cell) -> float | None:
    """Return the median steps of the repeats of a cell's best point; None if it is unknown."""
    median = None
    for repeats in study.repeats:
        is_best_point = repeats.cell == cell and repeats.rank == 1
        if is_best_point and repeats.median is not None and math.isfinite(repeats.median):
            median = repeats.median
    return median


def scaling(study: Analysis) -> dict[str, dict[int, float]]:
    """Return K* and the median of repeats of each series, by batch size."""
    scaling: dict[str, dict[int, float]] = {}
    for summary in study.cells:
        cell = summary.cell
        series = _metric_name(cell.series)
        median = _repeats_median(study, cell)
        if median is not None:
            scaling.setdefault(f"K_median/{series}", {})[cell.batch_size] = median
        if summary.k_star is not None:
            scaling.setdefault(f"K_star/{series}", {})[cell.batch_size] = summary.k_star
    return scaling


def study_metrics(study: Analysis) -> dict[str, Any]:
    """Return the constants of the fitted laws and the noise scale."""
    metrics: dict[str, Any] = {}
    for series, row in zip(sorted(study.scalings), records(study.laws), strict=True):
        critical = "b_crit" if row["identifiable"] else "b_crit_low"
        for name in ("c1", "c2", critical):
            if row[name] is not None:
                metrics[f"{name}/{_metric_name(series)}"] = row[name]
    noise = study.record.noise
    if noise is not None:
        metrics["noise_scale_low"] = noise.low
        if noise.resolved:
            metrics["noise_scale"] = noise.value
    return metrics


def study_params(record: StudyRecord) -> dict[str, object]:
    params: dict[str, object] = dict(constants(record.config))
    for key, value in record.goal.to_dict().items():
        params[f"goal.{key}"] = value
    params["seed"] = record.seed
    for key, box in record.space.items():
        params[key] = str(box)
    return params


def is_finished(study: Analysis) -> bool:
    """Return True if no trial and no repeat remains to be run."""
    has_repeats = all(len(repeats.results) >= repeats.planned for repeats in study.repeats)
    return has_repeats and not any(cell.pending for cell in study.cells)


def _metric_name(series: Series) -> str:
    """Return a series as part of a metric's name, with characters that MLflow allows: S_0.9."""
    return re.sub(r"[^\w\-. :/]", "_", str(series))
