"""Which terms of the convergence theory change with sparsity as K* does (Lee et al. 2021, Sec. 4).

The terms are those of `theory`. Ratios of sparse over dense are taken over pairs of trials, one
point at one batch size. Rank correlations are over the series of a study, within one batch size: if
smoothness carries the effect of a mask, the series with the larger L needs the more steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import PERCENTILES, REPLICATES, resampling_rng
from lit_dps.analysis.law import Law
from lit_dps.analysis.summary import comparable
from lit_dps.analysis.tables import base_of, columns_of, frame
from lit_dps.analysis.theory import Start, Terms, finite, terms_of
from lit_dps.core.racing import to_goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series, TrialResult

RATIOS = ("delta", "beta", "lipschitz", "epsilon")
Measured = Terms | Start

FEWEST = 4  # series that a rank correlation takes
TERMS: dict[str, Callable[[Terms], float]] = {
    "lipschitz": lambda terms: terms.lipschitz,
    "beta": lambda terms: terms.beta,
    "delta": lambda terms: terms.delta,
    "c1_equal_epsilon": lambda terms: terms.delta * terms.beta * terms.lipschitz,
    "c1": lambda terms: terms.c1,
}
# Random orders from which the chance level of a rank correlation is taken.
_ORDERS = 4000


class Pair(NamedTuple):
    """One point at one batch size, dense and sparse, with the same initial weights.

    In a search the two have the same metaparameters. In a study of best points (study.best_of) a
    point is a seed, and each sparsity has its own metaparameters.
    """

    batch_size: int
    point: int
    base: Measured
    sparse: Measured

    def log_ratio(self, *names: str) -> float:
        """Return the logarithm of sparse over base, of the product of some of the terms."""
        return sum(
            math.log(getattr(self.sparse, name) / getattr(self.base, name)) for name in names
        )


def measured_terms(
    record: StudyRecord, series: Series, of: Callable[[TrialResult], Any] = terms_of
) -> dict[tuple[int, int], Any]:
    """Return the terms of the comparable trials of a series, by (batch size, point).

    Args:
        record: The study.
        series: One of its series.
        of: `terms_of`, or `start_of` for what is known before the first step, also where L was
            never measured.
    """
    found = {}
    for key, result in _comparable(record, series).items():
        terms = of(result)
        if terms is not None:
            found[key] = terms
    return found


def _comparable(record: StudyRecord, series: Series) -> dict[tuple[int, int], TrialResult]:
    """Return the trials of a series whose means compare, by (batch size, point)."""
    trials = {}
    for cell, results in record.results.items():
        if cell.series != series:
            continue
        for result in results:
            if comparable(result):
                trials[cell.batch_size, result.trial.point] = result
    return trials


def paired_terms(
    record: StudyRecord,
    base: Series,
    series: Series,
    of: Callable[[TrialResult], Any] = terms_of,
) -> list[Pair]:
    """Return the points measured in two series, by batch size, then point; see `measured_terms`."""
    dense = measured_terms(record, base, of)
    sparse = measured_terms(record, series, of)
    return [Pair(*key, dense[key], sparse[key]) for key in sorted(dense.keys() & sparse.keys())]


def lipschitz_at_the_same_steps(
    record: StudyRecord, base: Series, series: Series
) -> list[tuple[int, float]]:
    """Return (point, log of L over L) of each pair of trials, by batch size, then point.

    As in `paired_terms`, but L is the mean over the steps that both trials measured it at: where
    the constant changes along the run, the means over runs of different lengths differ for that
    reason alone.
    """
    dense = _comparable(record, base)
    sparse = _comparable(record, series)
    ratios = []
    for key in sorted(dense.keys() & sparse.keys()):
        below = _lipschitz_by_step(dense[key])
        above = _lipschitz_by_step(sparse[key])
        shared = [step for step in below if step in above]
        shared = [step for step in shared if len(finite([above[step], below[step]])) == 2]
        total_above = sum(above[step] for step in shared)
        total_below = sum(below[step] for step in shared)
        if shared and min(total_above, total_below) > 0:
            ratios.append((key[1], math.log(total_above / total_below)))
    return ratios


def readings_to_goal(record: StudyRecord, series: Series) -> dict[tuple[int, int], int]:
    """Return how often L was measured up to the goal, by (batch size, point) of a series."""
    counts = {}
    for cell, results in record.results.items():
        if cell.series == series:
            for result in results:
                steps = to_goal(result).smoothness.get("step", ())
                counts[cell.batch_size, result.trial.point] = len(steps)
    return counts


def _lipschitz_by_step(result: TrialResult) -> dict[int, float]:
    """Return L up to the goal of a trial, by step."""
    curve: Any = to_goal(result).smoothness
    return dict(zip(curve.get("step", ()), curve.get("lipschitz", ()), strict=True))


def term_ratio_rows(record: StudyRecord, laws: Mapping[Series, Law]) -> pd.DataFrame:
    """Return how the terms change from the smallest sparsity to each higher one, one row each.

    By series, then batch size, then over all; the two sparsities agree on all further axes of the
    grid. Ratios of the terms are geometric means over pairs of trials (`paired_terms`), in the row
    of all batch sizes over all pairs. Columns: sparsity and further axes; base; batch_size
    [examples], missing in the row of all; pairs; delta, beta, lipschitz, epsilon, the ratios;
    predicted_c1, the ratio of c1 at equal epsilon as in the paper (Delta x beta x L: 1.00 x 0.54 x
    3.09 = 1.67 for 90 % of Simple-CNN on MNIST); predicted_c1_measured_epsilon, that over the
    squared ratio of epsilon; c1, the ratio of the fitted c1; k_star, the ratio of K*, in the row of
    all the geometric mean over the batch sizes with both, k_star_low and k_star_high the least and
    the greatest, without K* that are upper bounds. Missing where unknown.
    """
    rows = []
    for series in record.series:
        base = base_of(series, record.series)
        if base == series:
            continue
        dense, sparse = laws[base], laws[series]
        pairs = paired_terms(record, base, series)
        c1 = None
        if dense.fit is not None and sparse.fit is not None:
            c1 = sparse.fit.c1 / dense.fit.c1
        ratios = {}
        for batch_size, k_star in dense.resolved.items():
            if batch_size in sparse.resolved:
                ratios[batch_size] = sparse.resolved[batch_size] / k_star
        for batch_size in (*record.batch_sizes, None):
            if batch_size is None:
                pairs_here = pairs
                ratios_here = list(ratios.values())
            else:
                pairs_here = [pair for pair in pairs if pair.batch_size == batch_size]
                ratios_here = [ratio for b, ratio in ratios.items() if b == batch_size]
            row = {
                **columns_of(series),
                "base": base.sparsity,
                "batch_size": batch_size,
                "pairs": len(pairs_here),
            }
            row |= _term_ratios(pairs_here)
            row["c1"] = c1
            row["k_star"] = float(np.exp(np.mean(np.log(ratios_here)))) if ratios_here else None
            row["k_star_low"] = min(ratios_here, default=None)
            row["k_star_high"] = max(ratios_here, default=None)
            rows.append(row)
    return frame(rows, None if rows else ["base", "batch_size", "pairs"])


def _term_ratios(pairs: Sequence[Pair]) -> dict[str, float | None]:
    """Return the geometric means of the ratios of the terms, and the predicted ratios of c1."""
    if not pairs:
        return dict.fromkeys((*RATIOS, "predicted_c1", "predicted_c1_measured_epsilon"))
    logs = np.array([[pair.log_ratio(name) for name in RATIOS] for pair in pairs])
    means: dict[str, Any] = dict(zip(RATIOS, np.exp(np.mean(logs, axis=0)).tolist(), strict=True))
    predicted = means["delta"] * means["beta"] * means["lipschitz"]
    means["predicted_c1"] = predicted
    means["predicted_c1_measured_epsilon"] = predicted / means["epsilon"] ** 2
    return means


def series_terms(
    record: StudyRecord, batch_size: int
) -> tuple[dict[Series, np.ndarray], dict[Series, np.ndarray]]:
    """Return steps to result (points,) and terms (points, TERMS) of each series.

    Of the points whose trial has ended in every series. Steps are infinite where a trial is not
    complete, terms nan where unknown.
    """
    results: dict[Series, Mapping[int, TrialResult]] = {}
    for series in record.series:
        cell = Cell(batch_size, series.sparsity, series.axes)
        by_point = {r.trial.point: r for r in record.resolved_results(cell)}
        if by_point:
            results[series] = by_point
    points = []
    if results:
        points = sorted(set.intersection(*map(set, results.values())))
    steps, terms = {}, {}
    for series, by_point in results.items():
        trials = [by_point[point] for point in points]
        steps[series] = np.array([math.inf if r.steps is None else r.steps for r in trials], float)
        values = np.array([_values(result) for result in trials], float)
        terms[series] = values.reshape(len(points), len(TERMS))
    return steps, terms


def _values(result: TrialResult) -> list[float]:
    """Return the terms of a trial, in the order of `TERMS`; nan where it is not comparable."""
    terms = terms_of(result) if comparable(result) else None
    if terms is None:
        return [math.nan] * len(TERMS)
    return [of(terms) for of in TERMS.values()]


def rank_rows(record: StudyRecord) -> pd.DataFrame:
    """Return one row a batch size and series: K* and the terms.

    Columns: batch_size [examples], sparsity and further axes, points, k_star [steps] over these
    points, and lipschitz, beta, delta, c1_equal_epsilon (Delta x beta x L) and c1 (with the
    measured epsilon), geometric means over the points where they were measured.
    """
    rows = []
    for batch_size in record.batch_sizes:
        steps, terms = series_terms(record, batch_size)
        for series, of_series in steps.items():
            best = of_series.min() if len(of_series) else math.inf
            means = _geometric_means(terms[series][None])[0]
            row = {
                "batch_size": batch_size,
                **columns_of(series),
                "points": len(of_series),
                "k_star": int(best) if math.isfinite(best) else None,
            }
            for name, mean in zip(TERMS, means, strict=True):
                row[name] = None if math.isnan(mean) else float(mean)
            rows.append(row)
    return frame(rows)


def correlation_rows(record: StudyRecord, replicates: int = REPLICATES) -> pd.DataFrame:
    """Return Spearman's rank correlation over the series of each term and K*, by batch size.

    The limits are of two kinds, each 95 %. `low` and `high` are percentiles over resampled points,
    with the series fixed: the uncertainty of K* and of the terms. `chance` is the value that |rho|
    exceeds in one of 20 orders drawn at random: with few series that is high, and series of one
    network are no independent sample.

    Columns: batch_size [examples], term, series (how many have both), rho, low, high, chance.
    """
    rows = []
    for batch_size in record.batch_sizes:
        steps, terms = series_terms(record, batch_size)
        if not steps or not len(next(iter(steps.values()))):
            continue
        k = np.array(list(steps.values()))  # (series, points)
        values = np.array(list(terms.values()))  # (series, points, terms)
        points = k.shape[1]
        random = resampling_rng(0, batch_size)
        resamples = random.integers(points, size=(replicates, points))
        k_star = k.min(axis=1)
        resampled_k_star = k[:, resamples].min(axis=2).T  # (replicates, series)
        means = _geometric_means(values)  # (series, terms)
        resampled_means = np.array([_geometric_means(values[:, chosen]) for chosen in resamples])
        for i, name in enumerate(TERMS):
            known = np.isfinite(means[:, i]) & np.isfinite(k_star)
            count = int(known.sum())
            if count < FEWEST:
                continue
            rho = _rank_correlation(means[known, i], k_star[known])
            low, high = _limits(resampled_means[:, known, i], resampled_k_star[:, known])
            rows.append(
                {
                    "batch_size": batch_size,
                    "term": name,
                    "series": count,
                    "rho": rho,
                    "low": min(low, rho),
                    "high": max(high, rho),
                    "chance": _chance(count),
                }
            )
    return frame(rows)


def _limits(terms: np.ndarray, k_star: np.ndarray) -> tuple[float, float]:
    """Return percentiles of the correlation over resamples (R, series); nan without any."""
    rhos = []
    for of_terms, of_k_star in zip(terms, k_star, strict=True):
        rho = _rank_correlation(of_terms, of_k_star)
        if math.isfinite(rho):
            rhos.append(rho)
    if not rhos:
        return math.nan, math.nan
    low, high = np.percentile(rhos, PERCENTILES)
    return low, high


def _geometric_means(values: np.ndarray) -> np.ndarray:
    """Return geometric means (..., terms) over the known points of values (..., points, terms)."""
    logs = np.log(values)
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.exp(np.where(known, logs, 0).sum(-2) / known.sum(-2))


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rho; nan for values that are not finite or all equal."""
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.nan
    from scipy.stats import rankdata  # its import takes half a second

    a, b = rankdata(x), rankdata(y)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a * a).sum() * (b * b).sum()))
    if not scale:
        return math.nan
    return float((a * b).sum()) / scale


@cache
def _chance(count: int) -> float:
    """Return the 95th percentile of |rho| over random orders of some series."""
    random = resampling_rng(0, count)
    order = np.arange(count)
    rhos = [abs(_rank_correlation(order, random.permutation(count))) for _ in range(_ORDERS)]
    return float(np.percentile(rhos, 95))
