"""Which terms of the convergence theory change with sparsity as K* does (Lee et al. 2021, Sec. 4).

`theory` computes the terms. Ratios of sparse over dense are over pairs of trials, one point at one
batch size. Rank correlations are over the series of a study, within one batch size: if smoothness
carries the effect of a mask, a series with a larger L needs more steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import PERCENTILES, REPLICATES, resampling_rng
from lit_dps.analysis.law import Law
from lit_dps.analysis.summary import is_comparable
from lit_dps.analysis.tables import base_of, cell_of, columns_of, frame
from lit_dps.analysis.theory import Start, Terms, finite, terms_of
from lit_dps.core.racing import to_goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.statistic import Statistic
from lit_dps.core.trial import LIPSCHITZ, Series, TrialResult

Measured = Terms | Start
TermsReader = Callable[[TrialResult], Any]  # `terms_of` or `start_of`

# Terms whose ratios are in the table of ratios.
RATIOS = ("delta", "beta", "lipschitz", "epsilon")
# Series that a rank correlation needs.
MIN_SERIES = 4
# Terms that are correlated with K*.
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
    point is a seed, and metaparameters differ between sparsities.
    """

    batch_size: int
    point: int
    base: Measured
    sparse: Measured

    def log_ratio(self, *names: str) -> float:
        """Return the logarithm of sparse over base, of the product of some of the terms."""
        total = 0.0
        for name in names:
            total += math.log(getattr(self.sparse, name) / getattr(self.base, name))
        return total


def measured_terms(
    record: StudyRecord, series: Series, read_terms: TermsReader = terms_of
) -> dict[tuple[int, int], Any]:
    """Return the terms of the comparable trials of a series, by (batch size, point).

    Args:
        record: The study.
        series: One of its series.
        read_terms: `terms_of`, or `start_of` for the terms before the first step, which trials have
            without a measurement of L.
    """
    by_trial = {}
    for key, result in _comparable(record, series).items():
        terms = read_terms(result)
        if terms is not None:
            by_trial[key] = terms
    return by_trial


def _comparable(record: StudyRecord, series: Series) -> dict[tuple[int, int], TrialResult]:
    """Return the trials of a series whose means compare, by (batch size, point)."""
    trials = {}
    for cell, results in record.results.items():
        if cell.series != series:
            continue
        for result in results:
            if is_comparable(result):
                trials[cell.batch_size, result.trial.point] = result
    return trials


def paired_terms(
    record: StudyRecord, base: Series, series: Series, read_terms: TermsReader = terms_of
) -> list[Pair]:
    """Return the points measured in two series, by batch size, then point; see `measured_terms`."""
    dense = measured_terms(record, base, read_terms)
    sparse = measured_terms(record, series, read_terms)
    return [Pair(*key, dense[key], sparse[key]) for key in sorted(dense.keys() & sparse.keys())]


def lipschitz_at_the_same_steps(
    record: StudyRecord, base: Series, series: Series
) -> list[tuple[int, float]]:
    """Return (point, log of sparse over base L) of each pair of trials, by batch size, point.

    Unlike in `paired_terms`, L is the mean over the steps at which both trials measured it. If the
    constant changes along the run, means over runs of different lengths differ for that reason
    alone.
    """
    dense = _comparable(record, base)
    sparse = _comparable(record, series)
    ratios = []
    for key in sorted(dense.keys() & sparse.keys()):
        of_base = _lipschitz_by_step(dense[key])
        of_sparse = _lipschitz_by_step(sparse[key])
        total_base = 0.0
        total_sparse = 0.0
        for step, value in of_base.items():
            pair = (value, of_sparse.get(step, math.nan))
            if len(finite(pair)) == 2:
                total_base += pair[0]
                total_sparse += pair[1]
        if min(total_base, total_sparse) > 0:
            ratios.append((key[1], math.log(total_sparse / total_base)))
    return ratios


def readings_to_goal(record: StudyRecord, series: Series) -> dict[tuple[int, int], int]:
    """Return how often L was measured up to the goal, by (batch size, point) of a series."""
    counts = {}
    for cell, results in record.results.items():
        if cell.series == series:
            for result in results:
                counts[cell.batch_size, result.trial.point] = len(_lipschitz_by_step(result))
    return counts


def _lipschitz_by_step(result: TrialResult) -> dict[int, float]:
    """Return L up to the goal of a trial, by step."""
    curve: Any = to_goal(result).readings.get(LIPSCHITZ, {})
    return dict(zip(curve.get("step", ()), curve.get("lipschitz", ()), strict=True))


def term_ratio_rows(record: StudyRecord, laws: Mapping[Series, Law]) -> pd.DataFrame:
    """Return how the terms change from the smallest sparsity to each higher one, one row each.

    By series, then batch size, then over all batch sizes. The two sparsities have the same further
    axes. Ratios of terms are geometric means over pairs of trials (`paired_terms`), in the row of
    all batch sizes over all pairs. Values are missing if unknown.

    Columns:
        sparsity and further axes; base: the smallest sparsity.
        batch_size [examples]: missing in the row of all.
        pairs: The number of pairs.
        delta, beta, lipschitz, epsilon: The ratios.
        predicted_c1: The ratio of c1 at equal epsilon as in the paper (Delta x beta x L: 1.00 x
            0.54 x 3.09 = 1.67 for 90 % of Simple-CNN on MNIST).
        predicted_c1_measured_epsilon: predicted_c1 over the squared ratio of epsilon.
        c1: The ratio of the fitted c1; missing if K does not follow one of the laws.
        k_star: The ratio of K*, without upper bounds; in the row of all the geometric mean over the
            batch sizes with both K*, k_star_low and k_star_high the least and the greatest.
    """
    rows = []
    for series in record.series:
        base = base_of(series, record.series)
        if base == series:
            continue
        pairs = paired_terms(record, base, series)
        c1 = _c1_ratio(laws[base], laws[series])
        k_star = _k_star_ratios(laws[base], laws[series])
        names = {**columns_of(series), "base": base.sparsity}
        for batch_size in record.batch_sizes:
            here = [pair for pair in pairs if pair.batch_size == batch_size]
            ratios = []
            if batch_size in k_star:
                ratios.append(k_star[batch_size])
            rows.append({**names, "batch_size": batch_size, **_ratio_columns(here, c1, ratios)})
        of_all = _ratio_columns(pairs, c1, list(k_star.values()))
        rows.append({**names, "batch_size": None, **of_all})
    if not rows:
        return frame(rows, ["base", "batch_size", "pairs"])
    return frame(rows)


def _c1_ratio(dense: Law, sparse: Law) -> float | None:
    """Return the ratio of the fitted c1, sparse over dense; None unless K follows both laws."""
    if dense.fit is None or sparse.fit is None:
        return None
    if not dense.describes_k or not sparse.describes_k:
        return None
    return sparse.fit.c1 / dense.fit.c1


def _k_star_ratios(dense: Law, sparse: Law) -> dict[int, float]:
    """Return the ratio of K*, sparse over dense, at each batch size with both and no bound."""
    ratios = {}
    for batch_size, k_star in dense.exact_k.items():
        if batch_size in sparse.exact_k:
            ratios[batch_size] = sparse.exact_k[batch_size] / k_star
    return ratios


def _ratio_columns(
    pairs: Sequence[Pair], c1: float | None, k_star: Sequence[float]
) -> dict[str, Any]:
    """Return the columns of a row of `term_ratio_rows` after those that name it."""
    row: dict[str, Any] = {"pairs": len(pairs), **_term_ratios(pairs), "c1": c1}
    row |= dict.fromkeys(("k_star", "k_star_low", "k_star_high"))
    if k_star:
        row["k_star"] = float(np.exp(np.mean(np.log(k_star))))
        row["k_star_low"] = min(k_star)
        row["k_star_high"] = max(k_star)
    return row


def _term_ratios(pairs: Sequence[Pair]) -> dict[str, float | None]:
    """Return the geometric means of the ratios of the terms, and the predicted ratios of c1."""
    if not pairs:
        return dict.fromkeys((*RATIOS, "predicted_c1", "predicted_c1_measured_epsilon"))
    logs = []
    for pair in pairs:
        logs.append([pair.log_ratio(name) for name in RATIOS])
    ratios = np.exp(np.mean(logs, axis=0)).tolist()
    means: dict[str, Any] = dict(zip(RATIOS, ratios, strict=True))
    predicted = means["delta"] * means["beta"] * means["lipschitz"]
    means["predicted_c1"] = predicted
    means["predicted_c1_measured_epsilon"] = predicted / means["epsilon"] ** 2
    return means


class _StudyTerms(NamedTuple):
    """The trials of a study at one batch size, of the points that have ended in every series.

    Series without trials of their own are skipped. A dense series that shows the trials of an equal
    one (`StudyRecord.shared`) would count twice.
    """

    series: list[Series]
    steps: np.ndarray  # (series, points), infinite for a trial that is not complete
    terms: np.ndarray  # (series, points, TERMS), nan if unknown


def _study_terms(record: StudyRecord, batch_size: int) -> _StudyTerms:
    """Return steps to result and terms of the trials at a batch size."""
    results: dict[Series, Mapping[int, TrialResult]] = {}
    for series in record.series:
        cell = cell_of(series, batch_size)
        trials = record.results_without_failed(cell)
        if trials and cell not in record.shared:
            results[series] = {result.trial.point: result for result in trials}
    points = []
    if results:
        points = sorted(set.intersection(*map(set, results.values())))
    steps = np.full((len(results), len(points)), math.inf)
    terms = np.full((*steps.shape, len(TERMS)), math.nan)
    for i, of_series in enumerate(results.values()):
        for j, point in enumerate(points):
            result = of_series[point]
            if result.steps is not None:
                steps[i, j] = result.steps
            measured = None
            if is_comparable(result):
                measured = terms_of(result)
            if measured is not None:
                terms[i, j] = [of(measured) for of in TERMS.values()]
    return _StudyTerms(list(results), steps, terms)


def rank_rows(record: StudyRecord) -> pd.DataFrame:
    """Return one row a batch size and series: K* and the terms.

    Columns: batch_size [examples], sparsity and further axes, samples, k_star [steps] over these
    samples, and lipschitz, beta, delta, c1_equal_epsilon (Delta x beta x L) and c1 (with the
    measured epsilon), geometric means over the samples where they were measured.
    """
    rows = []
    for batch_size in record.batch_sizes:
        for series, steps, terms in zip(*_study_terms(record, batch_size), strict=True):
            row = {"batch_size": batch_size, **columns_of(series), "samples": len(steps)}
            row["k_star"] = None
            if len(steps):
                row["k_star"] = record.statistic.k_star(_steps_or_none(steps))
            for name, mean in zip(TERMS, _geometric_means(terms), strict=True):
                row[name] = None
                if not math.isnan(mean):
                    row[name] = float(mean)
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
        study = _study_terms(record, batch_size)
        if not study.steps.size:
            continue
        resamples = resampling_rng(0, batch_size).integers(
            study.steps.shape[1], size=(replicates, study.steps.shape[1])
        )
        for correlation in _correlations(study, resamples, record.statistic):
            rows.append({"batch_size": batch_size, **correlation})
    return frame(rows)


def _correlations(
    study: _StudyTerms, resamples: np.ndarray, statistic: Statistic
) -> Iterator[dict[str, Any]]:
    """Yield the columns of `correlation_rows` of each term that enough series have.

    Args:
        study: At one batch size.
        resamples: (R, points), indices of points.
        statistic: What K* is.
    """
    k_star = statistic.of_draws(study.steps)
    resampled_k_star = statistic.of_draws(study.steps[:, resamples]).T  # (R, series)
    means = _geometric_means(study.terms)  # (series, terms)
    resampled_means = np.array([_geometric_means(study.terms[:, chosen]) for chosen in resamples])
    for i, name in enumerate(TERMS):
        has_both = np.isfinite(means[:, i]) & np.isfinite(k_star)
        count = int(has_both.sum())
        if count < MIN_SERIES:
            continue
        rho = _rank_correlation(means[has_both, i], k_star[has_both])
        low, high = _limits(resampled_means[:, has_both, i], resampled_k_star[:, has_both])
        yield {
            "term": name,
            "series": count,
            "rho": rho,
            "low": min(low, rho),
            "high": max(high, rho),
            "chance": _chance(count),
        }


def _steps_or_none(steps: np.ndarray) -> list[int | None]:
    """Return steps to result, None in place of infinity."""
    return [int(k) if math.isfinite(k) else None for k in steps]


def _limits(terms: np.ndarray, k_star: np.ndarray) -> tuple[float, float]:
    """Return percentiles of the correlation over resamples (R, series); nan without any."""
    rhos = []
    for resampled_terms, resampled_k_star in zip(terms, k_star, strict=True):
        rho = _rank_correlation(resampled_terms, resampled_k_star)
        if math.isfinite(rho):
            rhos.append(rho)
    if not rhos:
        return math.nan, math.nan
    low, high = np.percentile(rhos, PERCENTILES)
    return low, high


def _geometric_means(values: np.ndarray) -> np.ndarray:
    """Return geometric means (..., terms) over the finite points of values (..., points, terms)."""
    logs = np.log(values)
    is_finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.exp(np.where(is_finite, logs, 0).sum(-2) / is_finite.sum(-2))


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rho; nan for values that are not finite or all equal."""
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.nan
    from scipy.stats import rankdata  # its import takes half a second

    a = rankdata(x)
    b = rankdata(y)
    a = a - a.mean()
    b = b - b.mean()
    scale = math.sqrt(float((a * a).sum() * (b * b).sum()))
    if not scale:
        return math.nan
    return float((a * b).sum()) / scale


@cache
def _chance(count: int) -> float:
    """Return the 95th percentile of |rho| over random orders of some series."""
    random = resampling_rng(0, count)
    order = np.arange(count)
    rhos = []
    for _ in range(_ORDERS):
        rhos.append(abs(_rank_correlation(order, random.permutation(count))))
    return float(np.percentile(rhos, 95))
