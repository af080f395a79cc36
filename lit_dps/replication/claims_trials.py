"""The paper's claims that are judged trial by trial: on the metaparameter search and on the terms of the theory.

On the search (Lee et al. 2021, Section 3.2, Figure 3), where a quantity grows if its rank correlation with B (Spearman)
is above 0.5; both are resampled over the trials of each cell but failed ones, and need four batch sizes:

8. The best learning rate grows with batch size: the learning rate of the K* trial, as effective rate,
   rate / (1 - momentum), where momentum is searched too. Batch sizes whose K* is at the first check are left out: the
   best of the trials that got there is not known. So are those with too few complete trials, where one resample in 40
   or more has none, as all are in which trials stop at K*: which other point would be the best is not known.
9. The region of successful metaparameters grows with batch size: the share of complete trials, at the budget in steps
   that all cells share, over the points that have finished in all of them. Not decidable where trials were stopped by
   racing (study.slack) and not by that budget.

On the theory (Section 4), 90 % sparse over dense. Ratios are geometric means over pairs of trials, of the same point
and batch size (`theory.paired_terms`), resampled over points: the trials of a point at several batch sizes share their
initial weights. Four points are needed.

10. L rises with sparsity: L(0.9) > 1.1 L(0). Paper, Simple-CNN on MNIST: 0.57, 0.72, 0.81, 1.76 at 0, 50, 70, 90 %.
11. The gradient variance falls: beta(0.9) <= beta(0) / 1.1. Paper: x0.54.
12. The loss to go stays: Delta within a factor of 1.1. Paper: x1.00.
13. The theory tells the steps of small batches: the ratio of the fitted c1 is that of Delta beta L, within a factor of
    1.5. Paper: x1.67. The terms may come from a study of their own, of the same workload and update rule.

The claims 10 to 12 are on the direction; the sizes are those of one workload, and told beside the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from lit_dps.analysis import (
    PERCENTILES,
    REPLICATES,
    Analysis,
    Pair,
    cell_of,
    lipschitz_at_the_same_steps,
    measured_terms,
    paired_terms,
    setting,
    significant,
)
from lit_dps.analysis.best_rates import RATE_NAMES
from lit_dps.record import StudyRecord
from lit_dps.replication.claims_scaling import RULE, alike
from lit_dps.replication.rules import (
    FEWEST,
    MARGIN,
    SEED,
    Finding,
    Verdict,
    at_each,
    at_each_pair,
    decide,
    estimated,
    fit_ratio,
)
from lit_dps.trial import Series, Status, TrialResult

TREND = 0.5
MOMENTUM_NAME = "momentum"
AGREES = 1.5  # factor within which a predicted ratio tells the measured one

# A number of a cell from samples of its trials: the trials, best first, and (R, n) indices into them -> (R,)
Statistic = Callable[[Sequence[TrialResult], np.ndarray], np.ndarray]


def rate_grows(study: Analysis) -> Finding | None:
    """Claim 8; None where not exactly one learning rate is searched, or for a study of one batch size."""
    record = study.record
    keys, momenta = _searched(record, *RATE_NAMES), _searched(record, MOMENTUM_NAME)
    if len(keys) != 1 or len(record.batch_sizes) < 2:
        return None

    def rates(results: Sequence[TrialResult], drawn: np.ndarray) -> np.ndarray:
        params = [result.trial.params for result in results]
        values = [found[keys[0]] / (1 - (found[momenta[0]] if momenta else 0.0)) for found in params]
        return np.where(_complete(results), values, np.nan)[drawn.min(axis=1)]

    name = "best effective learning rate" if momenta else "best learning rate"

    def judge(series: Series) -> Finding:
        cells = {b: study.by_cell[cell_of(series, b)] for b in record.batch_sizes}
        return _trend({b: cell.trials for b, cell in cells.items() if not cell.at_first_check}, rates, name)

    return at_each(record.series, judge)


def region_grows(study: Analysis) -> Finding | None:
    """Claim 9; None for a study of one batch size."""
    record = study.record
    if len(record.batch_sizes) < 2:
        return None
    if record.slack is not None:
        return Finding(Verdict.UNDECIDABLE, f"trials stop at {record.slack:g} K*, not at a budget that all cells share")

    def shares(results: Sequence[TrialResult], drawn: np.ndarray) -> np.ndarray:
        return _complete(results)[drawn].mean(axis=1)

    def judge(series: Series) -> Finding:
        cells = {b: study.by_cell[cell_of(series, b)].trials for b in record.batch_sizes}
        common = set.intersection(*({result.trial.point for result in results} for results in cells.values()))
        cells = {b: [result for result in results if result.trial.point in common] for b, results in cells.items()}
        return _trend(cells, shares, f"share of trials complete by step {record.goal.max_steps:,}")

    return at_each(record.series, judge)


def rank_correlation(values: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of each row of values (R, n) with its columns' order; nan where there is no value.

    Returns:
        (R,) in [-1, 1]; 0 where all values are equal: no trend; nan for rows of fewer than `FEWEST` values.
    """
    order = np.where(np.isfinite(values), np.arange(values.shape[1]), np.nan)
    ranks = [pd.DataFrame(x).where(np.isfinite(x)).rank(axis=1) for x in (values, order)]  # of ties their mean
    x, y = (rank.sub(rank.mean(axis=1), axis=0).fillna(0).to_numpy() for rank in ranks)
    scale = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    rho = np.divide((x * y).sum(axis=1), scale, out=np.zeros(len(values)), where=scale > 0)
    return np.where(np.isfinite(order).sum(axis=1) >= FEWEST, rho, np.nan)


def _searched(record: StudyRecord, *names: str) -> list[str]:
    return [key for key in record.space if key.rsplit(".", 1)[-1] in names]


def _complete(results: Sequence[TrialResult]) -> np.ndarray:
    return np.array([result.status is Status.COMPLETE for result in results], bool)


def _trend(cells: Mapping[int, Sequence[TrialResult]], statistic: Statistic, name: str) -> Finding:
    whole, drawn = [], []
    for batch_size, results in cells.items():
        best_first = sorted(results, key=lambda r: (r.steps is None, r.steps or 0, r.trial.point))
        count = len(results)
        if count < FEWEST:
            drawn.append(np.full(REPLICATES, np.nan))
            whole.append(np.nan)
            continue
        samples = np.random.default_rng((SEED, batch_size)).integers(count, size=(REPLICATES, count))
        values = statistic(best_first, samples)
        rare = np.isnan(values).mean() < PERCENTILES[0] / 100
        drawn.append(values if rare else np.full(REPLICATES, np.nan))
        whole.append(float(statistic(best_first, np.arange(count)[None])[0]) if rare else np.nan)
    known = [f"{significant(value)} at B={b}" for b, value in zip(cells, whole, strict=True) if np.isfinite(value)]
    rho = float(rank_correlation(np.array([whole]))[0])
    if not np.isfinite(rho):
        return Finding(Verdict.UNDECIDABLE, f"{name} known at {len(known)} of {len(cells)} batch sizes")
    number = estimated(rho, rank_correlation(np.stack(drawn, axis=1))).map(lambda x: min(max(x, -1.0), 1.0))
    said = f"rank correlation of the {name} with B: {number}, from {known[0]} to {known[-1]}"
    if left := len(cells) - len(known):
        said += f", {left} batch size{'s' * (left > 1)} with too few complete trials left out"
    return Finding(decide(number, above=TREND), said)


def lipschitz_rises(study: Analysis) -> Finding | None:
    """Claim 10; None without measurements at both sparsities."""
    return _term(study, "lipschitz", "L", above=MARGIN, told=_levels)


def variance_falls(study: Analysis) -> Finding | None:
    """Claim 11; None without measurements at both sparsities."""
    return _term(study, "beta", "beta", to=1 / MARGIN)


def loss_stays(study: Analysis) -> Finding | None:
    """Claim 12; None without measurements at both sparsities."""
    return _term(study, "delta", "Delta", above=1 / MARGIN, to=MARGIN)


def theory_tells(study: Analysis, other: Analysis) -> Finding | None:
    """Claim 13, of terms measured in one study and laws fitted in another, or in the same.

    None without measurements at both sparsities, without laws in another study, or where the two do not train the same
    by the same rule.
    """
    rules, records = [setting(s.record.config, RULE) for s in (study, other)], (study.record, other.record)
    if rules[0] != rules[1] or not alike(*records):
        return None

    def judge(sparse: Series, dense: Series) -> Finding | None:
        pairs, laws = paired_terms(study.record, dense, sparse), [other.scalings.get(s) for s in (sparse, dense)]
        if not pairs or None in laws or (other is not study and None in [law.fit for law in laws]):
            return None
        value, drawn = _log_ratio(pairs, "delta", "beta", "lipschitz")
        predicted = estimated(value, drawn).map(math.exp)
        fitted = fit_ratio(*laws, lambda c1, c2: c1)
        if fitted is None:
            return Finding(Verdict.UNDECIDABLE, f"Delta beta L x{predicted}, no fitted c1 at both sparsities")
        count = min(len(drawn), len(fitted[1]))
        quotient = estimated(fitted[0] / math.exp(value), fitted[1][:count] / np.exp(drawn[:count]))
        words = f"Delta beta L x{predicted}, fitted c1 x{estimated(*fitted)}: x{quotient} of the predicted"
        return Finding(decide(quotient, above=1 / AGREES, to=AGREES), words)

    return at_each_pair(study, judge)


def _term(
    study: Analysis,
    name: str,
    symbol: str,
    above: float = 0.0,
    to: float = math.inf,
    told: Callable[[StudyRecord, Series, Series], str] = lambda record, sparse, dense: "",
) -> Finding | None:
    def judge(sparse: Series, dense: Series) -> Finding | None:
        if not (pairs := paired_terms(study.record, dense, sparse)):
            return None
        ratio = estimated(*_log_ratio(pairs, name)).map(math.exp)
        words = f"{symbol} x{ratio} over {len(pairs)} pairs of trials{told(study.record, sparse, dense)}"
        return Finding(decide(ratio, above, to), words)

    return at_each_pair(study, judge)


def _levels(record: StudyRecord, sparse: Series, dense: Series) -> str:
    """The ratio at the same steps, and L at each sparsity over the points that all of them have."""
    same = lipschitz_at_the_same_steps(record, dense, sparse)
    told = f"; at the same steps x{estimated(*_mean_log(*zip(*same, strict=True))).map(math.exp)}" if same else ""
    beside = (series for series in record.series if series.others == sparse.others)
    known = {series.sparsity: terms for series in beside if (terms := measured_terms(record, series))}
    common = set.intersection(*(set(terms) for terms in known.values()))
    if not common:
        return told
    means = [math.exp(float(np.mean([math.log(terms[key].lipschitz) for key in common]))) for terms in known.values()]
    return f"{told}; L = {' / '.join(map(significant, means))} at S={' / '.join(f'{s:g}' for s in known)}"


def _log_ratio(pairs: Sequence[Pair], *names: str) -> tuple[float, np.ndarray]:
    """Log of the mean ratio of a product of terms, and its (R,) resamples over points."""
    return _mean_log([pair.point for pair in pairs], [sum(pair.log_ratios[name] for name in names) for pair in pairs])


def _mean_log(points: Sequence[int], logs: Sequence[float]) -> tuple[float, np.ndarray]:
    """The mean of logarithms, each of a point of the search, and its (R,) resamples over points."""
    value = float(np.mean(logs))
    points, index = np.unique(points, return_inverse=True)
    if len(points) < FEWEST:
        return value, np.full(REPLICATES, np.nan)
    sums, counts = np.bincount(index, logs), np.bincount(index)
    drawn = np.random.default_rng(SEED).integers(len(points), size=(REPLICATES, len(points)))
    return value, sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
