"""What the figures show, as rows: the drawing functions draw these and nothing else, and the CSV files hold them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lit_dps.analysis.results import StudyRecord
from lit_dps.analysis.scaling import Scaling
from lit_dps.analysis.summary import summarize
from lit_dps.space import Range, short_names

Row = dict[str, object]
PER_OCTAVE = 8  # points of a fitted curve in each doubling of the batch size


def scaling_rows(record: StudyRecord, scalings: Mapping[float, Scaling]) -> list[Row]:
    """K* and the fitted law against batch size (Lee et al. 2021, Figure 1), by sparsity, then batch size.

    The batch sizes of the grid are among the rows, those between them draw the curves. Columns, None where unknown:
    sparsity; batch_size [examples]; k_star [steps]; fit, fit_low, fit_high [steps], the law and its 95 % limits;
    perfect [steps], K*(b) b / B from the smallest b with a K*; normalised_by, the smallest batch size that has a K* at
    every sparsity that has any; k_star, fit and perfect over the K* there as normalised_k_star, _fit and _perfect.
    """
    measured = [set(scaling.k_star) for scaling in scalings.values() if scaling.k_star]
    common = min(set.intersection(*measured), default=None) if measured else None
    batch = _curve_points(record.batch_sizes)
    unknown = [None] * len(batch)
    rows = []
    for sparsity in record.sparsities:
        k_star, fit, band = scalings[sparsity].k_star, scalings[sparsity].fit, scalings[sparsity].band(batch)
        first, unit = min(k_star, default=None), k_star.get(common)
        law = unknown if fit is None else fit.steps(batch).tolist()
        low, high = (unknown, unknown) if band is None else (limit.tolist() for limit in band)
        for b, fitted, b_low, b_high in zip(batch.tolist(), law, low, high, strict=True):
            k = k_star.get(b)
            rows.append(
                {
                    "sparsity": sparsity,
                    "batch_size": int(b) if b in record.batch_sizes else b,
                    "k_star": k,
                    "fit": fitted,
                    "fit_low": b_low,
                    "fit_high": b_high,
                    "perfect": None if first is None else k_star[first] * first / b,
                    "normalised_by": common,
                    "normalised_k_star": None if unit is None or k is None else k / unit,
                    "normalised_fit": None if unit is None or fitted is None else fitted / unit,
                    "normalised_perfect": None if unit is None else common / b,
                }
            )
    return rows


def _curve_points(batch_sizes: tuple[int, ...]) -> np.ndarray:
    low, high = min(batch_sizes), max(batch_sizes)
    between = np.geomspace(low, high, 1 + round(PER_OCTAVE * float(np.log2(high / low))))
    # Points that rounding puts next to a measured batch size would double it.
    far = np.abs(np.log(between[:, None] / np.array(batch_sizes))).min(axis=1) > 1e-6
    return np.sort(np.concatenate([between[far], batch_sizes]))


def metaparameter_columns(record: StudyRecord) -> list[str]:
    """The columns of `metaparameter_rows`."""
    return ["sparsity", "batch_size", "point", "status", "steps", "k_star", *short_names(list(record.space)).values()]


def metaparameter_rows(record: StudyRecord) -> list[Row]:
    """Every finished trial (Lee et al. 2021, Figure 3), by sparsity, batch size, then point.

    Columns: sparsity, batch_size [examples], point, status, steps (None unless complete), k_star (whether it is the
    trial that gave K*), and each metaparameter by its short name.
    """
    columns, rows = metaparameter_columns(record), []
    for summary in summarize(record):
        for result in record.results[summary.cell]:
            trial = result.trial
            values = [trial.cell.sparsity, trial.cell.batch_size, trial.point, str(result.status), result.steps]
            values += [result is summary.best, *(trial.params.get(key) for key in record.space)]
            rows.append(dict(zip(columns, values, strict=True)))
    return rows


def shown(values, box: Range) -> np.ndarray:
    """Where values of a metaparameter go on its axis: on a reverse_log scale the axis shows 1 - value."""
    values = np.asarray(values, float)
    return 1 - values if box.scale == "reverse_log" else values


def axis_label(name: str, box: Range) -> str:
    """An axis's label: the name, that it shows 1 - value, and that it is logarithmic."""
    return {"linear": name, "log": f"{name} (log)", "reverse_log": f"1 - {name} (log, reversed)"}[box.scale]
