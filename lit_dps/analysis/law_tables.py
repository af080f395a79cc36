"""The laws of a study as tables: their constants, their curves, and medians outside of a band."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import interval_columns
from lit_dps.analysis.law import Law
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.trial import Series

# Points of a fitted curve in each doubling of the batch size.
POINTS_PER_DOUBLING = 8
# A curve has no points that are closer than this to a measured batch size, in log B.
MIN_LOG_DISTANCE = 1e-6
# Columns of a curve in the unit of K*.
_STEPS = ("k_star", "k_star_low", "k_star_high", "fit", "fit_low", "fit_high", "perfect")
_NORMALISED = ("normalised_k_star", "normalised_fit", "normalised_perfect")


def law_rows(laws: Mapping[Series, Law]) -> pd.DataFrame:
    """Return one row a series: its law, 95 % limits and a verdict.

    Columns: sparsity and further axes, batch_sizes (the number of those that the law is fitted to),
    c1 [examples], c2 [steps] and b_crit [examples], each with its limits (_low and _high),
    identifiable, verdict. b_crit and b_crit_high are missing where the law is refused (verdict has
    the reason), also b_crit_low unless the data show this lower bound.
    """
    rows = []
    for series, law in sorted(laws.items()):
        row: dict[str, object] = {**columns_of(series), "batch_sizes": len(law.exact_k)}
        c1, c2, b_crit = None, None, None
        if law.fit is not None:
            c1, c2, b_crit = law.fit.c1, law.fit.c2, law.fit.critical_batch_size
        row |= interval_columns("c1", c1, law.c1_interval)
        row |= interval_columns("c2", c2, law.c2_interval)
        if law.is_b_crit_known:
            row |= interval_columns("b_crit", b_crit, law.b_crit_interval)
        else:
            row |= interval_columns("b_crit", None, None)
            row["b_crit_low"] = law.verdict.bound
        row["identifiable"] = law.is_b_crit_known
        row["verdict"] = law.describe()
        rows.append(row)
    return frame(rows)


def medians_outside(law: Law, medians: Law, check_interval: int) -> dict[int, float]:
    """Return median over law, by batch size, of the medians outside the law's 95 % band.

    Empty without a band. A median is exact up to a check interval: it leaves the band if this
    entire interval does. Batch sizes where the law or the median is a bound are skipped.
    """
    outside = {}
    for batch_size, median in medians.exact_k.items():
        sizes = np.array([float(batch_size)])
        band = law.band(sizes)
        if law.fit is None or band is None or batch_size not in law.exact_k:
            continue
        low, high = band
        if median < low[0] or median - check_interval > high[0]:
            outside[batch_size] = float(median / law.fit.steps(sizes)[0])
    return outside


def series_curves(
    laws: Mapping[Series, Law], medians: Mapping[Series, Law], batch_sizes: Sequence[int]
) -> pd.DataFrame:
    """Return the rows of `law_curve` of each series of a study, with its columns first.

    They are normalised at `common_batch_size`. `median` [steps] is the median over seeds of the
    best point, missing if it was not repeated; `median_floor` is 1 where it is an upper bound.

    Args:
        laws: The law of K*, by series.
        medians: The law of the median over seeds, for series that have repeats.
        batch_sizes: The grid, ascending.
    """
    common = common_batch_size(laws.values())
    parts = []
    for series, law in laws.items():
        curve = law_curve(law, batch_sizes, common)
        steps = {}
        bounds = frozenset()
        if series in medians:
            bounds = medians[series].upper_bounds
            for batch_size, k in medians[series].k_star.items():
                steps[batch_size] = k * law.unit.per_step(batch_size)
        curve["median"] = pd.array(list(map(steps.get, curve["batch_size"])), "Float64")
        curve["median_floor"] = [int(b in bounds) for b in curve["batch_size"]]
        parts.append(pd.DataFrame({**columns_of(series), **curve}))
    return pd.concat(parts, ignore_index=True)


def law_curve(law: Law, batch_sizes: Sequence[int], common: int | None) -> pd.DataFrame:
    """Return K* and the fitted law of one series, by batch size, as the points of a curve.

    The batch sizes of the grid are among the rows; those between them draw the curve. Values are
    missing where they are unknown. Upper bounds of K* are not normalised, and `perfect` does not
    start from one.

    Columns:
        batch_size [examples]: an integer if it is of the grid.
        k_star, k_star_low, k_star_high: K* and its 95 % limits (`Observation.limits`); like the
            columns below in steps, or in the unit of the law.
        floor: 1 where K* is an upper bound, else 0.
        fit, fit_low, fit_high: the law and its 95 % limits.
        perfect: K*(b) b / B in steps from the smallest b with a K*.
        normalised_by [examples]: the batch size `common`.
        normalised_k_star, normalised_fit, normalised_perfect: over K* at that batch size.

    Args:
        law: The law of K*.
        batch_sizes: The grid, ascending.
        common: The batch size to normalise at (`common_batch_size`).
    """
    sizes = _curve_points(batch_sizes)
    batch = np.array(sizes, float)
    curve = pd.DataFrame({"batch_size": pd.Series(sizes, dtype=object)})
    curve["k_star"] = pd.array(list(map(law.k_star.get, sizes)), "Float64")
    limits = np.array([law.limits.get(b, (np.nan, np.nan)) for b in sizes])
    curve["k_star_low"] = limits[:, 0]
    curve["k_star_high"] = limits[:, 1]
    curve["floor"] = [int(b in law.upper_bounds) for b in sizes]
    curve[["fit", "fit_low", "fit_high", "perfect"]] = np.nan
    band = law.band(batch)
    if law.fit is not None and band is not None:
        curve["fit"] = law.fit.steps(batch)
        curve["fit_low"], curve["fit_high"] = band
    if law.exact_k:
        first = min(law.exact_k)
        curve["perfect"] = law.exact_k[first] * first / batch
    curve = curve.assign(**_normalised(curve, law, common))
    return _in_unit(curve, law, common)


def _in_unit(curve: pd.DataFrame, law: Law, common: int | None) -> pd.DataFrame:
    """Return the rows of `law_curve` in the unit of a law instead of steps."""
    factors = np.array([law.unit.per_step(batch_size) for batch_size in curve["batch_size"]])
    for name in _STEPS:
        curve[name] = curve[name] * factors
    if common is not None:
        for name in _NORMALISED:
            curve[name] = curve[name] * (factors / law.unit.per_step(common))
    if law.unit.has_law:
        curve["k_star"] = curve["k_star"].round().astype("Int64")
    return curve


def _normalised(curve: pd.DataFrame, law: Law, common: int | None) -> dict[str, Any]:
    """Return the columns of `law_curve` that are normalised at a batch size."""
    sizes = curve["batch_size"].tolist()
    unit = np.nan
    perfect = np.full(len(sizes), np.nan)
    if common is not None:
        unit = law.exact_k.get(common, np.nan)
        if law.k_star:
            perfect = common / np.array(sizes, float)
    return {
        "normalised_by": pd.array([common] * len(sizes), "Int64"),
        "normalised_k_star": np.array([law.exact_k.get(b, np.nan) for b in sizes]) / unit,
        "normalised_fit": curve["fit"] / unit,
        "normalised_perfect": perfect,
    }


def _curve_points(batch_sizes: Sequence[int]) -> list[Any]:
    """Return the batch sizes of a curve: the grid as integers, and points between its sizes."""
    low, high = min(batch_sizes), max(batch_sizes)
    count = 1 + round(POINTS_PER_DOUBLING * float(np.log2(high / low)))
    points = np.geomspace(low, high, count)
    distances = np.abs(np.log(points[:, None] / np.array(batch_sizes))).min(axis=1)
    return sorted([*points[distances > MIN_LOG_DISTANCE].tolist(), *map(int, batch_sizes)])


def common_batch_size(laws: Iterable[Law]) -> int | None:
    """Return the smallest batch size at which curves can be normalised; None without one.

    Every curve that has an exact K* has one there.
    """
    measured = [set(law.exact_k) for law in laws if law.exact_k]
    if not measured:
        return None
    return min(set.intersection(*measured), default=None)
