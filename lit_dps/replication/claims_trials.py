"""The paper's claims that are judged trial by trial: on the metaparameter search.

On the search (Lee et al. 2021, Section 3.2, Figure 3), where a quantity grows if its rank correlation with B (Spearman)
is above 0.5; both are resampled over the trials of each cell but failed ones, and need four batch sizes:

8. The best learning rate grows with batch size: the learning rate of the K* trial, as effective rate,
   rate / (1 - momentum), where momentum is searched too. Batch sizes whose K* is at the first check are left out: the
   best of the trials that got there is not known. So are those with too few complete trials, where one resample in 40
   or more has none: which other point would be the best is not known. A study whose trials stop at K* has no more than
   one in most cells, and is none of this claim.
9. The region of successful metaparameters grows with batch size: the share of complete trials, at the budget in steps
   that all cells share, over the points that have finished in all of them. A study whose trials a race ends
   (study.slack), and not that budget, is none of this claim. Not decidable where all are complete or none is. At a
   small budget the share grows for that alone that K* falls with B: the budget is told beside the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from lit_dps.analysis import (
    PERCENTILES,
    REPLICATES,
    Analysis,
    cell_of,
    significant,
)
from lit_dps.analysis.best_rates import RATE_NAMES
from lit_dps.racing import last_step
from lit_dps.record import StudyRecord
from lit_dps.replication.protocol import WORKLOADS, classes
from lit_dps.replication.rules import (
    FEWEST,
    SEED,
    Finding,
    Verdict,
    at_each,
    decide,
    estimated,
)
from lit_dps.trial import Series, Status, TrialResult

TREND = 0.5
MOMENTUM_NAME = "momentum"

# A number of a cell from samples of its trials: the trials, best first, and (R, n) indices into them -> (R,)
Statistic = Callable[[Sequence[TrialResult], np.ndarray], np.ndarray]


def rate_grows(study: Analysis) -> Finding | None:
    """Claim 8; None where not exactly one learning rate is searched, trials stop at K*, or for one batch size."""
    record = study.record
    keys, momenta = _searched(record, *RATE_NAMES), _searched(record, MOMENTUM_NAME)
    if len(keys) != 1 or len(record.batch_sizes) < 2 or last_step(1, record.slack) <= 1:
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
    """Claim 9; None for a study of one batch size, and where a race and not the budget ends trials."""
    record = study.record
    if len(record.batch_sizes) < 2 or record.slack is not None:
        return None
    paper = WORKLOADS.get(classes(record.config))
    own = f" (the paper's budget: {paper.max_steps:,})" if paper and paper.max_steps != record.goal.max_steps else ""
    name = f"complete by step {record.goal.max_steps:,}{own}"

    def shares(results: Sequence[TrialResult], drawn: np.ndarray) -> np.ndarray:
        return _complete(results)[drawn].mean(axis=1)

    def judge(series: Series) -> Finding:
        cells = {b: study.by_cell[cell_of(series, b)].trials for b in record.batch_sizes}
        common = set.intersection(*({result.trial.point for result in results} for results in cells.values()))
        cells = {b: [result for result in results if result.trial.point in common] for b, results in cells.items()}
        complete = np.concatenate([_complete(results) for results in cells.values()])
        if complete.all() or not complete.any():
            return Finding(Verdict.UNDECIDABLE, f"{'all' if complete.any() else 'no'} trials are {name}")
        return _trend(cells, shares, f"share of trials {name}")

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
