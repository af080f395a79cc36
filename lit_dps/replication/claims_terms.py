"""The paper's claims on the terms of its theory (Lee et al. 2021, Section 4), 90 % sparse over
dense.

Ratios are geometric means over pairs of trials, of the same point and batch size (`paired_terms`).
The trials of a point at several batch sizes share their initial weights (under one version of
PyTorch), so that intervals are Student's of the means of points: of four or five, percentiles of
resamples would be too narrow. Four points are needed. Beta and Delta are those before the first
step, so that trials without a measurement of L count for them too.

11. L rises with sparsity: L(0.9) > 1.1 L(0). Paper, Simple-CNN on MNIST: 0.57, 0.72, 0.81, 1.76 at
    0, 50, 70, 90 %.
12. The gradient variance falls: beta(0.9) <= beta(0) / 1.1. Paper: x0.54.
13. The loss to go stays: Delta within a factor of 1.1. Paper: x1.00.
14. The theory tells the steps of small batches: the ratio of the fitted c1 is that of Delta beta L,
    within a factor of 1.5. Paper: x1.67. The terms may come from a study of their own, of the same
    workload and update rule.

The claims 11 to 13 are on the direction; the sizes are those of one workload, and told beside the
paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from scipy.special import stdtrit

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.tables import significant
from lit_dps.analysis.term_comparisons import (
    Pair,
    lipschitz_at_the_same_steps,
    measured_terms,
    paired_terms,
)
from lit_dps.analysis.theory import Start, Terms, start_of, terms_of
from lit_dps.core.racing import to_goal
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.trial import Series, TrialResult
from lit_dps.replication.compared import RULE, alike, goal_of, searched
from lit_dps.replication.rules import (
    FEWEST,
    MARGIN,
    REPLICATES,
    SEED,
    Finding,
    Verdict,
    at_each_pair,
    curves,
    decide,
    estimated,
    fit_ratio,
    misfits,
)

AGREES = 1.5  # factor within which a predicted ratio tells the measured one


def lipschitz_rises(study: Analysis) -> Finding | None:
    """Claim 11; None without measurements at both sparsities."""
    return _term(study, "lipschitz", "L", terms_of, above=MARGIN, paper=3.09, told=_levels)


def variance_falls(study: Analysis) -> Finding | None:
    """Claim 12; None without measurements at both sparsities."""
    return _term(study, "beta", "beta", start_of, to=1 / MARGIN, paper=0.54)


def loss_stays(study: Analysis) -> Finding | None:
    """Claim 13; None without measurements at both sparsities."""
    return _term(study, "delta", "Delta", start_of, above=1 / MARGIN, to=MARGIN)


def theory_tells(study: Analysis, other: Analysis) -> Finding | None:
    """Claim 14, of terms measured in one study and laws fitted in another, or in the same.

    None without measurements at both sparsities, without laws in another study, or where the two do
    not train the same by the same rule to the same goal, up to which the terms are means. c1 is
    that of the laws that the other claims on steps are judged on (`curves`), and not known where
    one of them misses what it is fitted to (`misfits`).
    """
    rules, records = (
        [setting(s.record.config, RULE) for s in (study, other)],
        (study.record, other.record),
    )
    if (
        rules[0] != rules[1]
        or not alike(*records)
        or goal_of(study.record) != goal_of(other.record)
    ):
        return None

    def judge(sparse: Series, dense: Series) -> Finding | None:
        pairs = paired_terms(study.record, dense, sparse)
        if not pairs or not {sparse, dense} <= other.scalings.keys():
            return None
        laws = curves(other, sparse, dense)
        if other is not study and None in [law.fit for law in laws]:
            return None
        value, drawn = _log_ratio(pairs, "delta", "beta", "lipschitz")
        predicted = estimated(value, drawn).map(math.exp)
        fitted = fit_ratio(*laws, lambda c1, c2: c1)
        if fitted is None:
            return Finding(
                Verdict.UNDECIDABLE, f"Delta beta L x{predicted}, no fitted c1 at both sparsities"
            )
        count = min(len(drawn), len(fitted[1]))
        quotient = estimated(fitted[0] / math.exp(value), fitted[1][:count] / np.exp(drawn[:count]))
        medians = " (medians)" * laws[0].of_medians
        words = (
            f"Delta beta L x{predicted}, fitted c1 x{estimated(*fitted)}{medians}: "
            f"x{quotient} of "
            "the predicted"
        )
        of_c1 = [
            p.log_ratio("delta", "beta", "lipschitz") - 2 * p.log_ratio("epsilon") for p in pairs
        ]
        epsilon, own = (
            _log_ratio(pairs, "epsilon"),
            _mean_log([pair.point for pair in pairs], of_c1),
        )
        epsilon, own = (estimated(*ratio).map(math.exp) for ratio in (epsilon, own))
        words += f"; with the measured epsilon, x{epsilon}, Delta beta L / epsilon^2 is x{own}"
        if off := misfits(
            {str(series): law for series, law in zip((sparse, dense), laws, strict=True)}
        ):
            return Finding(Verdict.UNDECIDABLE, f"{words}; {off}")
        return Finding(decide(quotient, above=1 / AGREES, to=AGREES), words)

    return at_each_pair(study, judge)


def _term(
    study: Analysis,
    name: str,
    symbol: str,
    of: Callable[[TrialResult], Terms | Start | None],
    above: float = 0.0,
    to: float = math.inf,
    paper: float | None = None,
    told: Callable[[StudyRecord, Series, Series], str] = lambda record, sparse, dense: "",
) -> Finding | None:
    def judge(sparse: Series, dense: Series) -> Finding | None:
        if not (pairs := paired_terms(study.record, dense, sparse, of)):
            return None
        ratio = estimated(*_log_ratio(pairs, name)).map(math.exp)
        each = "" if searched(study.record) else ", each sparsity at its own best point"
        words = (
            f"{symbol} x{ratio} over {len(pairs)} pairs of "
            f"trials{each}{told(study.record, sparse, dense)}"
        )
        apart = paper is not None and not ratio.interval.low <= paper <= ratio.interval.high
        words += f"; the paper's x{paper:g} lies outside" if apart else ""
        return Finding(decide(ratio, above, to), words, apart)

    return at_each_pair(study, judge)


def _levels(record: StudyRecord, sparse: Series, dense: Series) -> str:
    """The ratio at the same steps; L at each sparsity over the points that all have, of how many
    measurements.

    And over how many training examples, where these are a part of them; the paper takes all.
    """
    same = lipschitz_at_the_same_steps(record, dense, sparse)
    told = (
        f"; at the same steps x{estimated(*_mean_log(*zip(*same, strict=True))).map(math.exp)}"
        if same
        else ""
    )
    beside = (series for series in record.series if series.axes == sparse.axes)
    known = {series: terms for series in beside if (terms := measured_terms(record, series))}
    common = set.intersection(*(set(terms) for terms in known.values()))
    if not common:
        return told
    means = [
        math.exp(float(np.mean([math.log(terms[key].lipschitz) for key in common])))
        for terms in known.values()
    ]
    of = [_measurements(record, series, common) for series in known]
    where = ", ".join(f"{series.sparsity:g}" for series in known)
    part = setting(record.config, "smoothness.examples")
    over = f" over {part:,} training examples" if isinstance(part, int) else ""
    return (
        f"{told}; L = {', '.join(map(significant, means))} at S={where}, of {', '.join(of)} "
        f"measurements a run{over}"
    )


def _measurements(record: StudyRecord, series: Series, points: Collection[tuple[int, int]]) -> str:
    """How many measurements of L a run has up to its goal, over some (batch size, point) of a
    series: "2-3"."""
    counts = {
        len(to_goal(result).smoothness["step"])
        for cell, results in record.results.items()
        for result in results
        if cell.series == series and (cell.batch_size, result.trial.point) in points
    }
    return "-".join(map(str, sorted({min(counts), max(counts)})))


def _log_ratio(pairs: Sequence[Pair], *names: str) -> tuple[float, np.ndarray]:
    """Log of the mean ratio of a product of terms, and (R,) draws of what else it may be; see
    `_mean_log`."""
    return _mean_log([pair.point for pair in pairs], [pair.log_ratio(*names) for pair in pairs])


def _mean_log(points: Sequence[int], logs: Sequence[float]) -> tuple[float, np.ndarray]:
    """The mean of logarithms, each of a point of the search, and (R,) draws from Student's
    distribution around it."""
    value = float(np.mean(logs))
    points, index = np.unique(points, return_inverse=True)
    if len(points) < FEWEST:
        return value, np.full(REPLICATES, np.nan)
    means = np.bincount(index, logs) / np.bincount(index)
    error = means.std(ddof=1) / math.sqrt(len(points))
    quantiles = stdtrit(len(points) - 1, (np.arange(REPLICATES) + 0.5) / REPLICATES)
    return value, value + error * np.random.default_rng(SEED).permutation(quantiles)
