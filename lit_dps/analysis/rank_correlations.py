"""Which term of the theory orders the series of a study as K* does: rank correlations, and how sure
they are.

If smoothness carries the effect of a mask, the series with the larger L needs the more steps.
Within one batch size, over series that share their points; the terms are means over those points,
K* is the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np
import pandas as pd

from lit_dps.analysis.scaling import PERCENTILES, REPLICATES
from lit_dps.analysis.summary import comparable
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.analysis.theory import Terms, terms_of
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series

FEWEST = 4  # series that a rank correlation takes
TERMS = {
    "lipschitz": lambda t: t.lipschitz,
    "beta": lambda t: t.beta,
    "delta": lambda t: t.delta,
    "c1_equal_epsilon": lambda t: t.delta * t.beta * t.lipschitz,
    "c1": lambda t: t.c1,
}


def series_terms(
    record: StudyRecord, batch_size: int
) -> tuple[dict[Series, np.ndarray], dict[Series, np.ndarray]]:
    """Steps to result (points,), infinite where not complete, and terms (points, TERMS), nan where
    unknown, by series.

    Of the points whose trial has ended in every series.
    """
    results: dict[Series, Mapping] = {}
    for series in record.series:
        cell = Cell(batch_size, series.sparsity, series.axes)
        results[series] = {r.trial.point: r for r in record.resolved_results(cell)}
    results = {series: found for series, found in results.items() if found}
    points = sorted(set.intersection(*map(set, results.values()))) if results else []
    steps, terms = {}, {}
    for series, found in results.items():
        steps[series] = np.array(
            [math.inf if found[p].steps is None else found[p].steps for p in points], float
        )
        known = [terms_of(found[p]) if comparable(found[p]) else None for p in points]
        terms[series] = np.array([_values(t) for t in known], float).reshape(
            len(points), len(TERMS)
        )
    return steps, terms


def _values(terms: Terms | None) -> list[float]:
    return [math.nan if terms is None else of(terms) for of in TERMS.values()]


def rank_rows(record: StudyRecord) -> pd.DataFrame:
    """One row a batch size and series.

    Columns: batch_size [examples], sparsity and further axes, points, k_star [steps] over these
    points, and lipschitz, beta, delta, c1_equal_epsilon (Delta x beta x L) and c1 (with the
    measured epsilon), geometric means over the points where they were measured.
    """
    rows = []
    for batch_size in record.batch_sizes:
        steps, terms = series_terms(record, batch_size)
        for series, found in steps.items():
            best, means = (
                (found.min() if len(found) else math.inf),
                _geometric(terms[series][None])[0],
            )
            row = {"points": len(found), "k_star": int(best) if math.isfinite(best) else None}
            row |= {
                name: None if math.isnan(x) else float(x)
                for name, x in zip(TERMS, means, strict=True)
            }
            rows.append({"batch_size": batch_size, **columns_of(series), **row})
    return frame(rows)


def correlation_rows(record: StudyRecord, replicates: int = REPLICATES) -> pd.DataFrame:
    """Spearman's rank correlation over the series between each term and K*, by batch size.

    The limits are of two kinds, each 95 %. `low` and `high` are percentiles over resampled points,
    the series taken as given: they tell the uncertainty of K* and of the terms. `chance` is what
    |rho| exceeds in one of 20 orders drawn at random: with few series that is high, and series of
    one network are no independent sample.

    Columns: batch_size [examples], term, series (how many have both), rho, low, high, chance.
    """
    rows = []
    for batch_size in record.batch_sizes:
        steps, terms = series_terms(record, batch_size)
        if not steps or not len(next(iter(steps.values()))):
            continue
        k, values = (
            np.array(list(steps.values())),
            np.array(list(terms.values())),
        )  # (series, points[, terms])
        points = k.shape[1]
        drawn = np.random.default_rng((0, batch_size)).integers(points, size=(replicates, points))
        best, whole = k[:, drawn].min(axis=2).T, k.min(axis=1)
        means = np.array([_geometric(values[:, d]) for d in drawn])  # (replicates, series, terms)
        for i, name in enumerate(TERMS):
            x = _geometric(values)[:, i]
            known = np.isfinite(x) & np.isfinite(whole)
            if known.sum() < FEWEST:
                continue
            rhos = [_rho(m[known], b[known]) for m, b in zip(means[:, :, i], best, strict=True)]
            rhos = [rho for rho in rhos if math.isfinite(rho)]
            low, high = np.percentile(rhos, PERCENTILES) if rhos else (math.nan, math.nan)
            rho = _rho(x[known], whole[known])
            row = {"batch_size": batch_size, "term": name, "series": int(known.sum()), "rho": rho}
            rows.append(
                {
                    **row,
                    "low": min(low, rho),
                    "high": max(high, rho),
                    "chance": _chance(int(known.sum())),
                }
            )
    return frame(rows)


def _geometric(values: np.ndarray) -> np.ndarray:
    """Geometric means over the second last axis of what is known: (..., points, terms) to (...,
    terms)."""
    logs, known = np.log(values), np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.exp(np.where(known, logs, 0).sum(-2) / known.sum(-2))


def _rho(x: np.ndarray, y: np.ndarray) -> float:
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.nan
    from scipy.stats import rankdata  # its import takes half a second

    a, b = rankdata(x), rankdata(y)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else math.nan


@cache
def _chance(n: int) -> float:
    random = np.random.default_rng((0, n))
    found = [abs(_rho(np.arange(n), random.permutation(n))) for _ in range(4000)]
    return float(np.percentile(found, 95))
