"""K* and the fitted law of each series by batch size, as the points of a curve."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from lit_dps.analysis.law import Law
from lit_dps.analysis.tables import columns_of
from lit_dps.core.trial import Series

POINTS_PER_DOUBLING = 8  # of a fitted curve, in each doubling of the batch size
# Points that rounding puts this near a measured batch size, in log B, would double it.
SAME_BATCH_SIZE = 1e-6


def curve_rows(
    scaling: Law, batch_sizes: Sequence[int], common: int | None, beyond: float = 1
) -> pd.DataFrame:
    """Return K* and the fitted law of one curve, by batch size.

    The batch sizes of the grid are among the rows; those between them draw the curve. Values are
    missing where they are unknown. Upper bounds of K* are not normalised, and `perfect` does not
    start from one.

    Columns:
        batch_size [examples]: an integer if it is of the grid.
        k_star, k_star_low, k_star_high [steps]: K* and its 95 % limits (`Observation.limits`).
        floor: 1 where K* is at the first validation and so an upper bound, else 0.
        fit, fit_low, fit_high [steps]: the law and its 95 % limits.
        perfect [steps]: K*(b) b / B from the smallest b with a K*.
        normalised_by [examples]: the batch size `common`.
        normalised_k_star, normalised_fit, normalised_perfect: over K* at that batch size.

    Args:
        scaling: K* and the law.
        batch_sizes: The grid, ascending.
        common: The batch size to normalise at (`common_batch_size`).
        beyond: How far beyond the largest batch size the curve extends, a factor.
    """
    batch = _curve_points(batch_sizes, beyond)
    unknown = np.full(len(batch), np.nan)
    fit = unknown if scaling.fit is None else scaling.fit.steps(batch)
    fit_low, fit_high = scaling.band(batch) or (unknown, unknown)
    limits = np.array([scaling.limits.get(b, (np.nan, np.nan)) for b in batch])
    resolved = scaling.resolved
    first = min(resolved, default=0)
    unit = np.nan if common is None else resolved.get(common, np.nan)
    normalised_perfect = unknown
    if common is not None and scaling.k_star:
        normalised_perfect = common / batch
    return pd.DataFrame(
        {
            "batch_size": _integers_of_grid(batch, batch_sizes),
            "k_star": pd.array([scaling.k_star.get(b) for b in batch], "Int64"),
            "k_star_low": limits[:, 0],
            "k_star_high": limits[:, 1],
            "floor": [int(b in scaling.upper_bounds) for b in batch],
            "fit": fit,
            "fit_low": fit_low,
            "fit_high": fit_high,
            "perfect": resolved.get(first, np.nan) * first / batch,
            "normalised_by": pd.array([common] * len(batch), "Int64"),
            "normalised_k_star": np.array([resolved.get(b, np.nan) for b in batch]) / unit,
            "normalised_fit": fit / unit,
            "normalised_perfect": normalised_perfect,
        }
    )


def _curve_points(batch_sizes: Sequence[int], beyond: float) -> np.ndarray:
    """Return the batch sizes of a curve: those of the grid, and points between and beyond them."""
    low = min(batch_sizes)
    high = beyond * max(batch_sizes)
    count = 1 + round(POINTS_PER_DOUBLING * float(np.log2(high / low)))
    points = np.geomspace(low, high, count)
    distances = np.abs(np.log(points[:, None] / np.array(batch_sizes))).min(axis=1)
    return np.sort(np.concatenate([points[distances > SAME_BATCH_SIZE], batch_sizes]))


def _integers_of_grid(batch: np.ndarray, batch_sizes: Collection[int]) -> pd.Series:
    """Return the batch sizes of a curve, those of the grid as integers."""
    values = []
    for batch_size in batch.tolist():
        values.append(int(batch_size) if batch_size in batch_sizes else batch_size)
    return pd.Series(values, dtype=object)


def common_batch_size(scalings: Iterable[Law]) -> int | None:
    """Return the smallest batch size at which curves can be normalised; None without one.

    Every curve that has a K* beyond the first validation has one there.
    """
    measured = [set(scaling.resolved) for scaling in scalings if scaling.resolved]
    if not measured:
        return None
    return min(set.intersection(*measured), default=None)


def series_curves(
    scalings: Mapping[Series, Law],
    medians: Mapping[Series, Law],
    batch_sizes: Sequence[int],
    beyond: float = 1,
) -> pd.DataFrame:
    """Return the rows of `curve_rows` of each series of a study, with its columns first.

    They are normalised at `common_batch_size`. `median` [steps] is the median over seeds of the
    best sample, missing if it was not repeated.

    Args:
        scalings: The law of K*, by series.
        medians: The law of the median over seeds, for series that have repeats.
        batch_sizes: The grid, ascending.
        beyond: As of `curve_rows`.
    """
    common = common_batch_size(scalings.values())
    parts = []
    for series, scaling in scalings.items():
        curve = curve_rows(scaling, batch_sizes, common, beyond)
        steps = medians[series].k_star if series in medians else {}
        of_rows = [steps.get(batch_size) for batch_size in curve["batch_size"]]
        curve["median"] = pd.array(of_rows, "Float64")
        parts.append(pd.DataFrame({**columns_of(series), **curve}))
    return pd.concat(parts, ignore_index=True)
