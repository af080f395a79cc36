"""The paper's claims that are judged trial by trial: on the metaparameter search.

On the search (Lee et al. 2021, Section 3.2, Figure 3), where a quantity grows if its rank
correlation with B (Spearman)
is above 0.5; both need four batch sizes:

9. The best learning rate grows with batch size: the learning rate of the K* trial, as effective
   rate, rate / (1 - momentum), where momentum is searched too. Which of the points that were run is
   best is known also where trials stop at K*. The luck of those points is in how the best rates
   scatter around the trend, which the interval rests on (`correlation_interval`). Batch sizes whose
   K* is at the first check are left out: the best of the trials that got there is not known.
10. The region of successful metaparameters grows with batch size: the share of complete trials, at
    the budget in steps
   that all cells share, over the points that have finished in all of them. A study whose trials a
   race ends (study.race_factor), and not that budget, is none of this claim. Not decidable where all are
   complete or none is. At a small budget the share grows for that alone that K* falls with B: the
   budget is told beside the paper's. The trials of each cell but failed ones are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.intervals import REPLICATES, Interval
from lit_dps.analysis.rates import RATE_NAMES
from lit_dps.analysis.tables import cell_of, significant
from lit_dps.core.paper_protocol import WORKLOADS, classes
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Series, Status
from lit_dps.replication.rules import (
    FEWEST,
    SEED,
    Estimate,
    Finding,
    Verdict,
    at_each,
    decide,
    estimated,
)

TREND = 0.5
NORMAL_975 = 1.959964  # quantile of the normal distribution
MOMENTUM_NAME = "momentum"


def rate_grows(study: Analysis) -> Finding | None:
    """Claim 9; None where not exactly one learning rate is searched, or for one batch size."""
    record = study.record
    keys, momenta = _searched(record, *RATE_NAMES), _searched(record, MOMENTUM_NAME)
    if len(keys) != 1 or len(record.batch_sizes) < 2:
        return None
    name = "best effective learning rate" if momenta else "best learning rate"

    def judge(series: Series) -> Finding:
        cells = {b: study.by_cell[cell_of(series, b)] for b in record.batch_sizes}
        found = {
            b: cell.best.trial.params
            for b, cell in cells.items()
            if cell.best and not cell.at_first_check
        }
        rates = {
            b: own[keys[0]] / (1 - (own[momenta[0]] if momenta else 0.0))
            for b, own in found.items()
        }
        if len(rates) < FEWEST:
            return Finding(
                Verdict.UNDECIDABLE, f"{name} known at {len(rates)} of {len(cells)} batch sizes"
            )
        rho = float(rank_correlation(np.array([list(rates.values())]))[0])
        number = Estimate(rho, correlation_interval(rho, len(rates)))
        (first, least), *_, (last, most) = rates.items()
        said = (
            f"rank correlation of the {name} with B, and the rates at B={first} and B={last}: "
            f"{number}, "
        )
        said += f"{significant(least)}, {significant(most)}"
        if left := len(cells) - len(rates):
            said += f"; not known at {left} of {len(cells)} batch sizes"
        return Finding(decide(number, above=TREND), said)

    return at_each(record.series, judge)


def correlation_interval(rho: float, count: int) -> Interval:
    """The 95 % interval of Spearman's rank correlation of so many pairs, at least 4 (Bonett and
    Wright 2000, Eq. 4).

    Fisher's z has the variance (1 + rho^2 / 2) / (n - 3). Of pairs in perfect order z is infinite;
    it is taken halfway to the next lower correlation that so many pairs can have.
    """
    most = 1 - 6 / (count**3 - count)
    z = math.atanh(min(max(rho, -most), most))
    wide = NORMAL_975 * math.sqrt((1 + rho**2 / 2) / (count - 3))
    return Interval(min(rho, math.tanh(z - wide)), max(rho, math.tanh(z + wide)))


def region_grows(study: Analysis) -> Finding | None:
    """Claim 10; None for a study of one batch size, and where a race and not the budget ends
    trials."""
    record = study.record
    if len(record.batch_sizes) < 2 or record.race_factor is not None:
        return None
    paper = WORKLOADS.get(classes(record.config))
    own = (
        f" (the paper's budget is {paper.max_steps:,})"
        if paper and paper.max_steps != record.goal.max_steps
        else ""
    )
    name = f"complete by step {record.goal.max_steps:,}{own}"

    def judge(series: Series) -> Finding:
        cells = {b: study.by_cell[cell_of(series, b)] for b in record.batch_sizes}
        common = set.intersection(
            *({r.trial.point for r in cell.trials} for cell in cells.values())
        )
        found = {
            b: [r for r in cell.trials if r.trial.point in common] for b, cell in cells.items()
        }
        complete = {
            b: np.array([r.status is Status.COMPLETE for r in results], bool)
            for b, results in found.items()
        }
        every = np.concatenate(list(complete.values()))
        if every.all() or not every.any():
            return Finding(
                Verdict.UNDECIDABLE, f"{'all' if every.any() else 'no'} trials are {name}"
            )
        if min(len(common), len(cells)) < FEWEST:
            return Finding(
                Verdict.UNDECIDABLE,
                f"{len(common)} points finished at all of {len(cells)} batch sizes",
            )
        drawn = [_resampled_shares(own, b) for b, own in complete.items()]
        rho = float(rank_correlation(np.array([[own.mean() for own in complete.values()]]))[0])
        number = estimated(rho, rank_correlation(np.stack(drawn, axis=1))).map(
            lambda x: min(max(x, -1.0), 1.0)
        )
        said = f"rank correlation of the share of trials {name} with B: {number}, {_ends(complete)}"
        # A budget that moves with K* has no part in the trend. Where it is beyond that of the study
        # nothing is known.
        twice = {b: 2 * cell.k_star for b, cell in cells.items() if cell.k_star}
        known = {b: limit for b, limit in twice.items() if limit <= record.goal.max_steps}
        relative = {
            b: np.array([(r.steps or math.inf) <= known[b] for r in found[b]]) for b in known
        }
        if len(relative) > 1:
            said += f"; by twice the K* of each, {_ends(relative)}"
        return Finding(decide(number, above=TREND), said)

    return at_each(record.series, judge)


def _resampled_shares(complete: np.ndarray, batch_size: int) -> np.ndarray:
    """(R,) shares that are true in resamples of some trials (n,)."""
    count = len(complete)
    return complete[
        np.random.default_rng((SEED, batch_size)).integers(count, size=(REPLICATES, count))
    ].mean(axis=1)


def _ends(true: Mapping[int, np.ndarray]) -> str:
    """The share that is true at the first and at the last of some batch sizes."""
    ends = [f"{significant(float(true[b].mean()))} at B={b}" for b in (min(true), max(true))]
    return "from {} to {}".format(*ends)


def rank_correlation(values: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of each row of values (R, n) with its columns' order; nan where
    there is no value.

    Returns:
        (R,) in [-1, 1]; 0 where all values are equal: no trend; nan for rows of fewer than `FEWEST`
        values.
    """
    order = np.where(np.isfinite(values), np.arange(values.shape[1]), np.nan)
    ranks = [
        pd.DataFrame(x).where(np.isfinite(x)).rank(axis=1) for x in (values, order)
    ]  # of ties their mean
    x, y = (rank.sub(rank.mean(axis=1), axis=0).fillna(0).to_numpy() for rank in ranks)
    scale = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    rho = np.divide((x * y).sum(axis=1), scale, out=np.zeros(len(values)), where=scale > 0)
    return np.where(np.isfinite(order).sum(axis=1) >= FEWEST, rho, np.nan)


def _searched(record: StudyRecord, *names: str) -> list[str]:
    return [key for key in record.space if key.rsplit(".", 1)[-1] in names]
