"""The terms of the convergence theory, sparse over dense: how they change with sparsity (Lee et al.
2021, Section 4).

The terms are those of `theory`. They are compared over pairs of trials, one point at one batch
size.

Which term of the theory orders the series of a study as K* does: rank correlations, and how sure
they are.

If smoothness carries the effect of a mask, the series with the larger L needs the more steps.
Within one batch size, over series that share their points; the terms are means over those points,
K* is the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.law_bootstrap import PERCENTILES, REPLICATES, Scaling
from lit_dps.analysis.summary import comparable
from lit_dps.analysis.tables import base_of, columns_of, frame
from lit_dps.analysis.theory import Start, Terms, finite, terms_of
from lit_dps.core.racing import to_goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series, TrialResult

RATIOS = ("delta", "beta", "lipschitz", "epsilon")


Measured = Terms | Start


class Pair(NamedTuple):
    """One point at one batch size, dense and sparse: the same initial weights, in a search the same
    metaparameters.

    In a study of best points (study.best_of) a point is a seed, and each sparsity is at its own
    metaparameters.
    """

    batch_size: int
    point: int
    base: Measured
    sparse: Measured

    def log_ratio(self, *names: str) -> float:
        """Natural logarithm of sparse over base, of the product of some of the terms."""
        return sum(
            math.log(getattr(self.sparse, name) / getattr(self.base, name)) for name in names
        )


def measured_terms(
    record: StudyRecord, series: Series, of: Callable[[TrialResult], Measured | None] = terms_of
) -> dict[tuple[int, int], Measured]:
    """The terms of the trials of a series whose means compare (`summary.comparable`), by (batch
    size, point).

    `of` is `terms_of`, or `start_of` for what is known before the first step, also where L was
    never measured.
    """
    found = ((key, of(result)) for key, result in _comparable(record, series).items())
    return {key: terms for key, terms in found if terms is not None}


def _comparable(record: StudyRecord, series: Series) -> dict[tuple[int, int], TrialResult]:
    return {
        (cell.batch_size, result.trial.point): result
        for cell, results in record.results.items()
        for result in results
        if cell.series == series and comparable(result)
    }


def paired_terms(
    record: StudyRecord,
    base: Series,
    series: Series,
    of: Callable[[TrialResult], Measured | None] = terms_of,
) -> list[Pair]:
    """The points measured in two series, where both trials compare, by batch size, then point; see
    `measured_terms`."""
    dense, sparse = (measured_terms(record, s, of) for s in (base, series))
    return [Pair(*key, dense[key], sparse[key]) for key in sorted(dense.keys() & sparse.keys())]


def lipschitz_at_the_same_steps(
    record: StudyRecord, base: Series, series: Series
) -> list[tuple[int, float]]:
    """(point, natural logarithm of L over L) of each pair of trials, by batch size, then point.

    As in `paired_terms`, but L is the mean over the steps that both trials measured it at: where
    the constant changes along the run, the means over runs of different lengths differ for that
    alone.
    """
    found = []
    dense, sparse = (_comparable(record, s) for s in (base, series))
    for key in sorted(dense.keys() & sparse.keys()):
        curves = [to_goal(results[key]).smoothness for results in (dense, sparse)]
        under, over = (
            dict(zip(curve.get("step", ()), curve.get("lipschitz", ()), strict=True))
            for curve in curves
        )
        shared = [
            step for step in under if step in over and len(finite([over[step], under[step]])) == 2
        ]
        sums = [sum(values[step] for step in shared) for values in (over, under)]
        if shared and min(sums) > 0:
            found.append((key[1], math.log(sums[0] / sums[1])))
    return found


def term_ratio_rows(record: StudyRecord, scalings: Mapping[Series, Scaling]) -> pd.DataFrame:
    """How the terms change from the smallest sparsity to each higher one, by series, then batch
    size, then over all.

    The two agree on all further axes of the grid. Ratios of the terms are geometric means over
    pairs of trials (`paired_terms`), in the row of all batch sizes over all pairs. Columns:
    sparsity and further axes; base; batch_size [examples], missing in the row of all; pairs; delta,
    beta, lipschitz, epsilon, the ratios; predicted_c1, the ratio of c1 at equal epsilon as in the
    paper (Delta x beta x L: 1.00 x 0.54 x 3.09 = 1.67 for 90 % of Simple-CNN on MNIST);
    predicted_c1_measured_epsilon, that over the squared ratio of epsilon; c1, the ratio of the
    fitted c1; k_star, the ratio of K*, in the row of all the geometric mean over the batch sizes
    with both, k_star_low and k_star_high the least and the greatest, without K* that are upper
    bounds. Missing where unknown.
    """
    rows = []
    for series in record.series:
        if (base := base_of(series, record.series)) == series:
            continue
        pairs, dense, sparse = paired_terms(record, base, series), scalings[base], scalings[series]
        c1 = None if dense.fit is None or sparse.fit is None else sparse.fit.c1 / dense.fit.c1
        steps = {
            b: sparse.resolved[b] / k for b, k in dense.resolved.items() if b in sparse.resolved
        }
        for batch_size in (*record.batch_sizes, None):
            here = [pair for pair in pairs if batch_size in (None, pair.batch_size)]
            k_star = [ratio for b, ratio in steps.items() if batch_size in (None, b)]
            names = {
                **columns_of(series),
                "base": base.sparsity,
                "batch_size": batch_size,
                "pairs": len(here),
            }
            ranged = {
                "k_star_low": min(k_star, default=None),
                "k_star_high": max(k_star, default=None),
            }
            mean = float(np.exp(np.mean(np.log(k_star)))) if k_star else None
            rows.append({**names, **_term_ratios(here), "c1": c1, "k_star": mean, **ranged})
    return frame(rows, None if rows else ["base", "batch_size", "pairs"])


def _term_ratios(pairs: Sequence[Pair]) -> dict[str, float | None]:
    if not pairs:
        return dict.fromkeys((*RATIOS, "predicted_c1", "predicted_c1_measured_epsilon"))
    logs = np.mean([[pair.log_ratio(name) for name in RATIOS] for pair in pairs], axis=0)
    means = dict(zip(RATIOS, np.exp(logs).tolist(), strict=True))
    predicted = means["delta"] * means["beta"] * means["lipschitz"]
    measured = predicted / means["epsilon"] ** 2
    return {**means, "predicted_c1": predicted, "predicted_c1_measured_epsilon": measured}


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
