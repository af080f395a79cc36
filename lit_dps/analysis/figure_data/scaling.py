"""K* and the fitted law against batch size (Lee et al. 2021, Figures 1 and 7 to 11), as rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lit_dps.analysis.results import StudyRecord
from lit_dps.analysis.scaling import FittedStudy, Scaling
from lit_dps.analysis.text import Row

PER_OCTAVE = 8  # points of a fitted curve in each doubling of the batch size


def scaling_rows(record: StudyRecord, scalings: Mapping[float, Scaling]) -> list[Row]:
    """The rows of `curve_rows` for each sparsity of a study, with their sparsity first.

    They are normalised at the smallest batch size that has a K* at every sparsity that has any (`common_batch_size`).
    """
    common = common_batch_size(list(scalings.values()))
    return [
        {"sparsity": sparsity, **row}
        for sparsity in record.sparsities
        for row in curve_rows(scalings[sparsity], record.batch_sizes, common)
    ]


def common_batch_size(scalings: Sequence[Scaling]) -> int | None:
    """The smallest batch size with a K* beyond the first check in every curve that has any; None without one."""
    measured = [set(scaling.resolved) for scaling in scalings if scaling.resolved]
    return min(set.intersection(*measured), default=None) if measured else None


def curve_rows(scaling: Scaling, batch_sizes: Sequence[int], common: int | None) -> list[Row]:
    """K* and the fitted law of one curve, by batch size.

    The batch sizes of the grid are among the rows, those between them draw the curve. Columns, None where unknown:
    batch_size [examples]; k_star [steps]; floor, 1 where it is at the first check and so an upper bound, else 0; fit,
    fit_low, fit_high [steps], the law and its 95 % limits; perfect [steps], K*(b) b / B from the smallest b with a K*;
    normalised_by, the batch size `common`; k_star, fit and perfect over the K* there as normalised_k_star, _fit and
    _perfect. Upper bounds are neither normalised nor is perfect drawn from one.
    """
    batch = _curve_points(batch_sizes)
    k_star, resolved, fit, band = scaling.k_star, scaling.resolved, scaling.fit, scaling.band(batch)
    first, unit = min(resolved, default=None), resolved.get(common)
    unknown = [None] * len(batch)
    law = unknown if fit is None else fit.steps(batch).tolist()
    low, high = (unknown, unknown) if band is None else (limit.tolist() for limit in band)
    rows: list[Row] = []
    for b, fitted, b_low, b_high in zip(batch.tolist(), law, low, high, strict=True):
        known = resolved.get(b)
        rows.append(
            {
                "batch_size": int(b) if b in batch_sizes else b,
                "k_star": k_star.get(b),
                "floor": int(b in scaling.at_first_check),
                "fit": fitted,
                "fit_low": b_low,
                "fit_high": b_high,
                "perfect": None if first is None else resolved[first] * first / b,
                "normalised_by": common,
                "normalised_k_star": None if unit is None or known is None else known / unit,
                "normalised_fit": None if unit is None or fitted is None else fitted / unit,
                "normalised_perfect": None if common is None or not k_star else common / b,
            }
        )
    return rows


def _curve_points(batch_sizes: Sequence[int]) -> np.ndarray:
    low, high = min(batch_sizes), max(batch_sizes)
    between = np.geomspace(low, high, 1 + round(PER_OCTAVE * float(np.log2(high / low))))
    # Points that rounding puts next to a measured batch size would double it.
    far = np.abs(np.log(between[:, None] / np.array(batch_sizes))).min(axis=1) > 1e-6
    return np.sort(np.concatenate([between[far], batch_sizes]))


def scaling_missing(study: FittedStudy) -> str | None:
    """Why there is no scaling curve to draw, if so."""
    sizes = set().union(*(scaling.k_star for scaling in study.scalings.values()))
    if not sizes:
        return "no complete trial yet"
    if len(study.record.batch_sizes) == 1:
        return "one batch size only"
    return "complete trials at one batch size only" if len(sizes) == 1 else None


def scaling_notes(study: FittedStudy) -> list[str]:
    """Sparsities that have no curve, and how upper bounds are drawn."""
    bare = [f"{sparsity:g}" for sparsity, scaling in sorted(study.scalings.items()) if not scaling.k_star]
    notes = [f"no complete trial at S = {', '.join(bare)}: no curve there"] if bare else []
    return notes + bound_notes(study.scalings.values())


def bound_notes(scalings: Iterable[Scaling]) -> list[str]:
    """How upper bounds are drawn, where there are any."""
    drawn = "drawn hollow, with an arrow, and left out where K* is normalised"
    return [f"K* at the first check are upper bounds: {drawn}"] if any(s.at_first_check for s in scalings) else []
