"""Quantities of where in the search space trials succeed (Lee et al. 2021, Section 3.2).

They are about the trials that are complete within a limit of steps: the budget of a study whose
trials all spend it, or `study.race_factor` times K* of the cell, where the race ends the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import betaincinv

from lit_dps import Range, Series, Status, StudyRecord, TrialResult
from lit_dps.analysis import RATE_NAMES, REPLICATES, Analysis, Interval, cell_of
from lit_dps.replication.comparable import measure_pairs
from lit_dps.replication.estimates import MIN_SAMPLES, SPARSE, Estimate, estimate_of
from lit_dps.replication.rules import Measurement, Measurements
from lit_dps.replication.search import MOMENTUM, searched_keys

_SEED = 0
# The race ends trials at K*, so that the others in the region are unknown.
_MIN_RACE_FACTOR = 2


def share_inside(study: Analysis) -> Measurements | None:
    """Return the share of cells whose best point is on no end of a range, over all series.

    The interval is that of Clopper and Pearson (1934). Cells whose K* is at the first check are
    left out, since their best point is not known. None for a study without search space.
    """
    if not study.record.space:
        return None
    inside = 0
    cells = 0
    for summary in study.cells:
        if summary.best is not None and not summary.is_upper_bound:
            cells += 1
            inside += not summary.boundary
    if cells < MIN_SAMPLES:
        return {"": Measurement(f"the best point is known in {cells} cells")}
    number = Estimate(inside / cells, binomial_interval(inside, cells))
    return {"": Measurement(f"inside in {inside} of {cells} cells: {number}", number)}


def binomial_interval(hits: int, count: int) -> Interval:
    """Return the exact 95 % interval of a share (Clopper and Pearson 1934)."""
    low = 0.0
    high = 1.0
    if hits:
        low = float(betaincinv(hits, count - hits + 1, 0.025))
    if hits < count:
        high = float(betaincinv(hits + 1, count - hits, 0.975))
    return Interval(low, high)


class Widths(NamedTuple):
    """The width of a range of rates in decades, and its limits."""

    low: float
    value: float
    high: float


def rate_range_ratio(study: Analysis, sparsity: float = SPARSE) -> Measurements | None:
    """Return the width of the range of complete learning rates, sparse over dense (Figure 5).

    The width is in decades, and its geometric mean is over the batch sizes where both networks have
    a range inside the search space. A range ends between its last complete rate and the next rate
    that was run. The interval has these two ends as limits; other seeds are not in it.

    None without both sparsities, if the learning rate is not the only searched key, and for a race
    that ends trials before `_MIN_RACE_FACTOR` x K*.
    """
    record = study.record
    keys = searched_keys(record, *RATE_NAMES)
    if len(keys) != 1 or len(record.space) != 1 or not isinstance(record.space[keys[0]], Range):
        return None
    if record.race_factor is not None and record.race_factor < _MIN_RACE_FACTOR:
        return None

    def measure(study: Analysis, sparse: Series, dense: Series) -> Measurement | None:
        return _rate_range_ratio(study, keys[0], sparse, dense)

    return measure_pairs(study, sparsity, measure)


def _rate_range_ratio(study: Analysis, key: str, sparse: Series, dense: Series) -> Measurement:
    value = 0.0
    low = 0.0
    high = 0.0
    texts = []
    for batch_size in study.record.batch_sizes:
        over = _width(study, key, sparse, batch_size)
        under = _width(study, key, dense, batch_size)
        if over is None or under is None:
            continue
        value += math.log(over.value / under.value)
        # A range of one rate may have no width.
        with np.errstate(divide="ignore"):
            low += float(np.log(over.low / under.high))
            high += float(np.log(over.high) - np.log(under.low))
        texts.append(f"{over.value:.2g} and {under.value:.2g} at B={batch_size}")
    if not texts:
        return Measurement("no batch size has both ranges")
    count = len(texts)
    limits = Interval(math.exp(low / count), math.exp(high / count))
    number = Estimate(math.exp(value / count), limits)
    sentence = (
        f"range of rates that are {_limit_text(study.record)}: x{number} at {sparse} over {dense}, "
        f"in decades {', '.join(texts)}"
    )
    return Measurement(sentence, number)


def _width(study: Analysis, key: str, series: Series, batch_size: int) -> Widths | None:
    """Return the width of the range of complete rates; None if it has no end inside the space."""
    trials = _finished(study, series, batch_size)
    rates = sorted((math.log10(float(each.trial.params[key])), each) for each in trials)
    is_complete = [_is_complete(study, result) for _, result in rates]
    if not any(is_complete):
        return None
    first = is_complete.index(True)
    last = len(rates) - 1 - is_complete[::-1].index(True)
    if first == 0 or last == len(rates) - 1:
        return None
    inner = rates[last][0] - rates[first][0]
    outer = rates[last + 1][0] - rates[first - 1][0]
    return Widths(inner, (inner + outer) / 2, outer)


def effective_rate_kappa(study: Analysis) -> Measurements | None:
    """Return how well the effective learning rate alone divides complete from other trials.

    The paper sees a straight line between them in its plots of log rate against log (1 - momentum).
    Such a line, of slope 1, is an effective rate, rate / (1 - momentum). Here two of them, a lowest
    and a highest one, predict which trials are complete. They are those of fewest errors on the
    other trials of the cell. The number is Cohen's kappa of these predictions: 1 if all are right,
    0 if they are as right as chance. The interval resamples trials.

    None for a raced study, and unless exactly one learning rate and a momentum are searched.
    """
    record = study.record
    rates = searched_keys(record, *RATE_NAMES)
    momenta = searched_keys(record, MOMENTUM)
    if len(rates) != 1 or len(momenta) != 1 or record.race_factor is not None:
        return None
    measurements = {}
    for series in record.series:
        measurements[str(series)] = _effective_rate_kappa(study, series, rates[0], momenta[0])
    return measurements


def _effective_rate_kappa(
    study: Analysis, series: Series, rate_key: str, momentum_key: str
) -> Measurement:
    complete: list[bool] = []
    predicted: list[bool] = []
    batch_sizes = []
    for batch_size in study.record.batch_sizes:
        trials = _finished(study, series, batch_size)
        rates = []
        is_complete = []
        for result in trials:
            params = result.trial.params
            rates.append(float(params[rate_key]) / (1 - float(params[momentum_key])))
            is_complete.append(_is_complete(study, result))
        if min(sum(is_complete), len(trials) - sum(is_complete)) < MIN_SAMPLES:
            continue
        batch_sizes.append(batch_size)
        complete += is_complete
        predicted += predict_each(np.array(rates), np.array(is_complete))
    if not batch_sizes:
        return Measurement(f"no batch size has {MIN_SAMPLES} complete trials and as many others")
    truth = np.array(complete)
    guess = np.array(predicted)
    chosen = np.random.default_rng(_SEED).integers(len(truth), size=(REPLICATES, len(truth)))
    kappa = float(cohens_kappa(truth[None], guess[None])[0])
    number = estimate_of(kappa, cohens_kappa(truth[chosen], guess[chosen]))
    right = int((truth == guess).sum())
    sentence = (
        f"the effective rate alone predicts {right} of {len(truth)} trials at "
        f"B={', '.join(map(str, batch_sizes))}: Cohen's kappa {number}"
    )
    return Measurement(sentence, number)


def predict_each(rates: np.ndarray, is_complete: np.ndarray) -> list[bool]:
    """Return for each trial whether the others predict that it is complete.

    Args:
        rates: (n,), the effective rate of each trial.
        is_complete: (n,), whether it is complete.
    """
    predictions = []
    for left_out in range(len(rates)):
        others = np.delete(rates, left_out)
        low, high = best_range(others, np.delete(is_complete, left_out))
        predictions.append(bool(low <= rates[left_out] <= high))
    return predictions


def best_range(rates: np.ndarray, is_complete: np.ndarray) -> tuple[float, float]:
    """Return the lowest and the highest rate between which "complete" has the fewest errors.

    The ends are halfway (in logarithms) to the next rate outside, or unbounded.
    """
    order = np.argsort(rates)
    logs = np.log(rates[order])
    middles = np.concatenate([[-np.inf], (logs[1:] + logs[:-1]) / 2, [np.inf]])
    # Each complete trial inside gains one, each other one costs one: the largest sum of a slice.
    gains = np.cumsum(np.concatenate([[0], np.where(is_complete[order], 1, -1)]))
    sums = gains[None, :] - gains[:, None]
    first, last = np.unravel_index(np.argmax(np.triu(sums, 1)), sums.shape)
    return math.exp(middles[first]), float(np.exp(middles[last]))


def cohens_kappa(truth: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Return Cohen's kappa of each row of two arrays (R, n) of booleans; nan if all are equal."""
    agreement = (truth == guess).mean(axis=1)
    both = truth.mean(axis=1) * guess.mean(axis=1)
    chance = both + (1 - truth.mean(axis=1)) * (1 - guess.mean(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (agreement - chance) / (1 - chance)


def _finished(study: Analysis, series: Series, batch_size: int) -> Sequence[TrialResult]:
    """Return the finished trials of a cell."""
    return study.by_cell[cell_of(series, batch_size)].trials


def _is_complete(study: Analysis, result: TrialResult) -> bool:
    """Return True if a trial is complete within the limit of its study."""
    if result.status is not Status.COMPLETE or result.steps is None:
        return False
    factor = study.record.race_factor
    k_star = study.by_cell[result.trial.cell].k_star_steps
    return factor is None or (k_star is not None and result.steps <= factor * k_star)


def _limit_text(record: StudyRecord) -> str:
    if record.race_factor is None:
        return f"complete by step {record.goal.max_steps:,}"
    return f"complete by {record.race_factor:g} times the fewest steps"
