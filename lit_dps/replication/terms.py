"""Quantities of the terms of the theory (Lee et al. 2021, Section 4), sparse over dense.

Ratios are geometric means over pairs of trials of the same point and batch size (`paired_terms`).
The trials of a point at several batch sizes share their initial weights (under one version of
PyTorch). So intervals are Student's t intervals over the means of points. Percentiles of resamples
of four or five points would be too narrow. At least `MIN_SAMPLES` points are needed. Beta and Delta
are measured before the first step, so trials without a measurement of L count for them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.special import stdtrit

from lit_dps import Series, StudyRecord, TrialResult
from lit_dps.analysis import (
    REPLICATES,
    Analysis,
    Pair,
    lipschitz_at_the_same_steps,
    measured_terms,
    paired_terms,
    readings_to_goal,
    significant,
    start_of,
    terms_of,
)
from lit_dps.replication.comparable import (
    OPTIMIZER,
    have_same_goal,
    is_search,
    measure_pairs,
    trained_the_same,
)
from lit_dps.replication.estimates import (
    MIN_SAMPLES,
    SPARSE,
    Resampled,
    estimate_of,
    is_misfit,
    laws_of,
    misfit_note,
    ratio_of_laws,
)
from lit_dps.replication.rules import Measurement, Measurements

_SEED = 0
SYMBOLS = {"lipschitz": "L", "beta": "beta", "delta": "Delta"}
_DRIVERS = ("delta", "beta", "lipschitz")  # c1 is proportional to their product, at equal epsilon
# Where each term is from: L is a mean over the run, the others are measured before its first step.
_READERS: Mapping[str, Callable[[TrialResult], Any]] = {
    "lipschitz": terms_of,
    "beta": start_of,
    "delta": start_of,
}


def term_ratio(study: Analysis, term: str, sparsity: float = SPARSE) -> Measurements | None:
    """Return the ratio of a term, sparse over dense; None without measurements at both.

    Args:
        study: The study.
        term: "lipschitz" (L), "beta" or "delta".
        sparsity: The sparsity of the sparse networks.
    """
    return measure_pairs(study, sparsity, partial(_term_ratio, term=term))


def _term_ratio(study: Analysis, sparse: Series, dense: Series, term: str) -> Measurement | None:
    record = study.record
    pairs = paired_terms(record, dense, sparse, _READERS[term])
    if not pairs:
        return None
    number = _mean_ratio(pairs, term).estimate.map(math.exp)
    over = f"{len(pairs)} pairs of trials"
    if not is_search(record):
        sizes = ", ".join(f"B={batch_size}" for batch_size in record.batch_sizes)
        over = (
            f"{len(pairs)} pairs of seeds at {sizes}, each sparsity at its best point, whose "
            "choice the interval does not include"
        )
    sentence = f"{SYMBOLS[term]} x{number} over {over}"
    notes = ()
    if term == "lipschitz":
        notes = _lipschitz_notes(record, sparse, dense)
    return Measurement(sentence, number, notes=notes)


def _lipschitz_notes(record: StudyRecord, sparse: Series, dense: Series) -> tuple[str, ...]:
    """Return the ratio at the same steps, and L at each sparsity."""
    notes = []
    same = lipschitz_at_the_same_steps(record, dense, sparse)
    if same:
        notes.append(f"at the same steps x{_mean_of_logs(same).estimate.map(math.exp)}")
    sizes = _lipschitz_sizes(record, sparse)
    if sizes is not None:
        notes.append(sizes)
    return tuple(notes)


def _lipschitz_sizes(record: StudyRecord, sparse: Series) -> str | None:
    """Return L at each sparsity, over the points that all sparsities have; None without any.

    The text includes the number of measurements per run, and the number of training examples if a
    measurement does not use all.
    """
    terms_by_series = {}
    for series in record.series:
        terms = measured_terms(record, series)
        if series.axes == sparse.axes and terms:
            terms_by_series[series] = terms
    shared = set.intersection(*map(set, terms_by_series.values()))
    if not shared:
        return None
    sparsities = []
    sizes = []
    counts = []
    for series, terms in terms_by_series.items():
        mean_log = float(np.mean([math.log(terms[key].lipschitz) for key in shared]))
        sparsities.append(f"{series.sparsity:g}")
        sizes.append(significant(math.exp(mean_log)))
        counts.append(_counts_of_readings(record, series, shared))
    text = (
        f"L = {', '.join(sizes)} at S={', '.join(sparsities)}, from {', '.join(counts)} "
        "measurements per run"
    )
    examples = record.setting("smoothness.examples")
    if isinstance(examples, int):
        text += f" over {examples:,} training examples"
    return text


def _counts_of_readings(
    record: StudyRecord, series: Series, points: Collection[tuple[int, int]]
) -> str:
    """Return how many measurements of L a run has up to its goal, such as "2-3".

    Args:
        record: The study.
        series: One of its series.
        points: The pairs (batch size, point) that count.
    """
    counts = []
    for key, count in readings_to_goal(record, series).items():
        if key in points:
            counts.append(count)
    return "-".join(map(str, sorted({min(counts), max(counts)})))


def c1_over_theory(
    study: Analysis, other: Analysis, sparsity: float = SPARSE
) -> Measurements | None:
    """Return the ratio of c1 over the ratio of Delta beta L, both sparse over dense.

    The terms are measured in `study`. The laws are fitted in `other`, which may be the same study
    (`laws_of`). The terms are means up to the goal, so both studies must train the same by the same
    rule to the same goal.

    Returns:
        None without measurements at both sparsities, without laws in another study, and if the
        studies cannot be compared.
    """
    record = study.record
    if record.setting(OPTIMIZER) != other.record.setting(OPTIMIZER):
        return None
    if not trained_the_same(record, other.record) or not have_same_goal(record, other.record):
        return None
    return measure_pairs(study, sparsity, partial(_c1_over_theory, other=other))


def _c1_over_theory(
    study: Analysis, sparse: Series, dense: Series, other: Analysis
) -> Measurement | None:
    pairs = paired_terms(study.record, dense, sparse)
    if not pairs or sparse not in other.laws or dense not in other.laws:
        return None
    sparse_law, dense_law = laws_of(other, sparse, dense)
    has_laws = sparse_law.fit is not None and dense_law.fit is not None
    if other is not study and not has_laws:
        return None
    log_predicted = _mean_ratio(pairs, *_DRIVERS)
    predicted = log_predicted.estimate.map(math.exp)
    fitted = ratio_of_laws(sparse_law, dense_law, lambda c1, c2: c1)
    if fitted is None:
        return Measurement(
            f"Delta beta L predicts c1 x{predicted}; c1 is not fitted at both sparsities"
        )
    count = min(len(log_predicted.draws), len(fitted.draws))
    number = estimate_of(
        fitted.value / math.exp(log_predicted.value),
        fitted.draws[:count] / np.exp(log_predicted.draws[:count]),
    )
    sentence = (
        f"Delta beta L predicts c1 x{predicted}; the fitted c1 is x{fitted.estimate}, which is "
        f"x{number} of the prediction"
    )
    notes = [_epsilon_note(pairs)]
    misfit = misfit_note({str(sparse): sparse_law, str(dense): dense_law})
    if misfit is not None:
        notes.append(misfit)
        number = None
    for name, law in ((sparse, sparse_law), (dense, dense_law)):
        if not law.describes_k and not is_misfit(law):
            notes.append(f"K* does not follow the law at {name}: {law.verdict.reason}")
            number = None
    return Measurement(sentence, number, uses_medians=sparse_law.uses_medians, notes=tuple(notes))


def _epsilon_note(pairs: Sequence[Pair]) -> str:
    """Return the ratio of the measured epsilon, and the prediction that includes it."""
    logs = []
    for pair in pairs:
        logs.append((pair.point, pair.log_ratio(*_DRIVERS) - 2 * pair.log_ratio("epsilon")))
    predicted = _mean_of_logs(logs).estimate.map(math.exp)
    epsilon = _mean_ratio(pairs, "epsilon").estimate.map(math.exp)
    return f"the measured epsilon is x{epsilon}, so Delta beta L / epsilon^2 is x{predicted}"


def _mean_ratio(pairs: Sequence[Pair], *names: str) -> Resampled:
    """Return the logarithm of the mean ratio of a product of terms (`_mean_of_logs`)."""
    return _mean_of_logs([(pair.point, pair.log_ratio(*names)) for pair in pairs])


def _mean_of_logs(logs_of_points: Sequence[tuple[int, float]]) -> Resampled:
    """Return the mean of logarithms, and draws (R,) from Student's distribution around it.

    Args:
        logs_of_points: The logarithms, each with its point of the search.
    """
    points, logs = zip(*logs_of_points, strict=True)
    value = float(np.mean(logs))
    distinct, index = np.unique(points, return_inverse=True)
    if len(distinct) < MIN_SAMPLES:
        return Resampled(value, np.full(REPLICATES, np.nan))
    means = np.bincount(index, logs) / np.bincount(index)
    error = means.std(ddof=1) / math.sqrt(len(distinct))
    quantiles = stdtrit(len(distinct) - 1, (np.arange(REPLICATES) + 0.5) / REPLICATES)
    draws = value + error * np.random.default_rng(_SEED).permutation(quantiles)
    return Resampled(value, draws)
