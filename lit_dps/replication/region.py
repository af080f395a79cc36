"""Quantities on the region of the search space where trials succeed (Lee et al. 2021, Section 3.2).

A trial succeeds if it is complete within a limit of steps. Without a race, the limit is the budget.
With a race, the limit is `study.race_factor` times K* of the cell, because the race stops the other
trials there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

from lit_dps import Range, Series, Status, StudyRecord, TrialResult
from lit_dps.analysis import RATE_NAMES, REPLICATES, Analysis, Interval, cell_of
from lit_dps.replication.comparable import measure_pairs
from lit_dps.replication.estimates import MIN_SAMPLES, SPARSE, Estimate, estimate_of
from lit_dps.replication.rules import Measurement, Measurements
from lit_dps.replication.search import MOMENTUM, budget_text, searched_keys

_SEED = 0
# A race with a smaller factor stops most trials, so it is unknown whether they would have
# succeeded.
_MIN_RACE_FACTOR = 2


def share_inside(study: Analysis) -> Measurements | None:
    """Return the share of the best points that are inside all their ranges, over all series.

    A point at an end of a range is outside. A point that is best in several cells counts once. The
    interval is exact (Clopper and Pearson 1934). Cells whose K* is only an upper bound are
    omitted, because their best point is unknown.

    Returns:
        None for a study without search space.
    """
    if not study.record.space:
        return None
    is_inside = {}
    cells = 0
    cells_inside = 0
    for summary in study.cells:
        if summary.best is not None and not summary.is_upper_bound:
            is_inside[summary.best.trial.point] = not summary.boundary
            cells += 1
            cells_inside += not summary.boundary
    points = len(is_inside)
    if points < MIN_SAMPLES:
        sentence = f"{cells} cells have {points} distinct best points; {MIN_SAMPLES} are needed"
        return {"": Measurement(sentence)}
    inside = sum(is_inside.values())
    number = Estimate(inside / points, binomial_interval(inside, points))
    sentence = (
        f"{inside} of {points} distinct best points are inside, a share of {number}; "
        f"{cells_inside} of {cells} cells have their best point inside"
    )
    return {"": Measurement(sentence, number)}


def binomial_interval(hits: int, count: int) -> Interval:
    """Return the exact 95 % interval of a share (Clopper and Pearson 1934)."""
    return Interval(*binomtest(hits, count).proportion_ci(0.95, method="exact"))


class Widths(NamedTuple):
    """The width of a range of rates in decades, and its limits."""

    low: float
    value: float
    high: float


def rate_range_ratio(study: Analysis, sparsity: float = SPARSE) -> Measurements | None:
    """Return the width of the range of complete learning rates, sparse over dense (Figure 5).

    A width is in decades. The number is the geometric mean of the ratio of widths. It includes the
    batch sizes where both networks have a range inside the search space with at least `MIN_SAMPLES`
    complete rates. A range ends between its last complete rate and the next rate that was run.
    These two rates give the limits of the number. The limits are no 95 % interval, because they do
    not include other seeds.

    Returns:
        None without both sparsities, if the learning rate is not the only searched key, and for a
        race with a factor below `_MIN_RACE_FACTOR`.
    """
    record = study.record
    keys = searched_keys(record, *RATE_NAMES)
    if len(keys) != 1 or len(record.space) != 1 or not isinstance(record.space[keys[0]], Range):
        return None
    if record.race_factor is not None and record.race_factor < _MIN_RACE_FACTOR:
        return None
    return measure_pairs(study, sparsity, partial(_rate_range_ratio, key=keys[0]))


def _rate_range_ratio(study: Analysis, sparse: Series, dense: Series, key: str) -> Measurement:
    log_value = 0.0
    log_low = 0.0
    log_high = 0.0
    texts = []
    for batch_size in study.record.batch_sizes:
        sparse_widths = _widths(study, key, sparse, batch_size)
        dense_widths = _widths(study, key, dense, batch_size)
        if sparse_widths is None or dense_widths is None:
            continue
        log_value += math.log(sparse_widths.value / dense_widths.value)
        # The lower limit of a width may be 0, if all its rates are equal.
        with np.errstate(divide="ignore"):
            log_low += float(np.log(sparse_widths.low / dense_widths.high))
            log_high += float(np.log(sparse_widths.high) - np.log(dense_widths.low))
        texts.append(
            f"{sparse_widths.value:.2g} and {dense_widths.value:.2g} decades at B={batch_size}"
        )
    if not texts:
        return Measurement(
            f"no batch size has a sparse and a dense range of at least {MIN_SAMPLES} rates"
        )
    count = len(texts)
    limits = Interval(math.exp(log_low / count), math.exp(log_high / count))
    number = Estimate(math.exp(log_value / count), limits)
    sentence = (
        f"range of rates that are {_limit_text(study.record)}: x{number} at {sparse} over {dense}; "
        f"the limits are neighbouring rates of the grid; {', '.join(texts)}"
    )
    notes = ()
    if count < len(study.record.batch_sizes):
        without_range = len(study.record.batch_sizes) - count
        notes = (f"no range is known at {without_range} of {without_range + count} batch sizes",)
    return Measurement(sentence, number, notes=notes)


def _widths(study: Analysis, key: str, series: Series, batch_size: int) -> Widths | None:
    """Return the width of the range of complete rates of a cell, with its limits.

    Returns:
        None if an end of the range is outside the search space, for fewer than `MIN_SAMPLES`
        complete rates, and if the limit of steps is unknown or beyond the budget.
    """
    trials = _finished(study, series, batch_size)
    summary = study.by_cell[cell_of(series, batch_size)]
    factor = study.record.race_factor
    if factor is not None:
        if summary.is_upper_bound or summary.k_star_steps is None:
            return None
        if factor * summary.k_star_steps > study.record.goal.max_steps:
            return None
    rates = [(math.log10(float(each.trial.params[key])), each) for each in trials]
    rates.sort(key=lambda pair: pair[0])
    is_complete = [_is_complete(study, result) for _, result in rates]
    if sum(is_complete) < MIN_SAMPLES:
        return None
    first = is_complete.index(True)
    last = len(rates) - 1 - is_complete[::-1].index(True)
    if first == 0 or last == len(rates) - 1:
        return None
    smallest = rates[last][0] - rates[first][0]
    largest = rates[last + 1][0] - rates[first - 1][0]
    return Widths(smallest, (smallest + largest) / 2, largest)


def effective_rate_kappa(study: Analysis) -> Measurements | None:
    """Return how well the effective learning rate alone separates complete from other trials.

    The paper plots log rate against log (1 - momentum), and a straight line separates the trials.
    A line of slope 1 is a constant effective rate, rate / (1 - momentum). Here a lowest and a
    highest effective rate predict which trials are complete. For each trial, the two rates are
    fitted to the other trials of its cell, with as few errors as possible.

    The number is Cohen's kappa of the predictions, averaged over batch sizes. It is 1 if all
    predictions are right, and 0 if they are not better than chance. The interval resamples points.
    If all predictions are right, `binomial_interval` gives the lower limit.

    Returns:
        None for a raced study, and unless exactly one learning rate and one momentum are searched.
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
    cells = []
    batch_sizes = []
    for batch_size in study.record.batch_sizes:
        trials = _finished(study, series, batch_size)
        points = []
        rates = []
        complete = []
        for result in trials:
            params = result.trial.params
            points.append(result.trial.point)
            rates.append(float(params[rate_key]) / (1 - float(params[momentum_key])))
            complete.append(_is_complete(study, result))
        if min(sum(complete), len(trials) - sum(complete)) < MIN_SAMPLES:
            continue
        batch_sizes.append(batch_size)
        truth = np.array(complete)
        guess = np.array(predict_each(np.array(rates), truth))
        cells.append(Predictions(np.array(points), truth, guess))
    if not cells:
        return Measurement(
            f"no batch size has at least {MIN_SAMPLES} complete and {MIN_SAMPLES} other trials"
        )
    number = _mean_kappa(cells)
    right = sum(int((cell.truth == cell.guess).sum()) for cell in cells)
    count = sum(len(cell.truth) for cell in cells)
    sentence = (
        f"the effective rate alone predicts correctly for {right} of {count} trials at "
        f"B={', '.join(map(str, batch_sizes))} whether they are {budget_text(study.record)}: "
        f"Cohen's kappa {number}"
    )
    return Measurement(sentence, number)


class Predictions(NamedTuple):
    """Predictions for the n trials of a cell.

    Attributes:
        points: (n,), the point of each trial.
        truth: (n,), whether the trial is complete.
        guess: (n,), whether the prediction is complete.
    """

    points: np.ndarray
    truth: np.ndarray
    guess: np.ndarray


def _mean_kappa(cells: Sequence[Predictions]) -> Estimate:
    """Return the mean of Cohen's kappa over cells; trials of different cells share points."""
    points = np.unique(np.concatenate([cell.points for cell in cells]))
    chosen = np.random.default_rng(_SEED).integers(len(points), size=(REPLICATES, len(points)))
    # The first row counts each point once. The other rows count how often a resample draws it.
    draws = np.stack([np.bincount(row, minlength=len(points)) for row in chosen])
    counts = np.concatenate([np.ones((1, len(points))), draws])
    kappas = []
    is_right = []
    for cell in cells:
        weights = counts[:, np.searchsorted(points, cell.points)]
        kappas.append(cohens_kappa(cell.truth, cell.guess, weights))
        is_right.append(cell.truth == cell.guess)
    means = np.mean(kappas, axis=0)
    if not np.all(np.concatenate(is_right)):
        return estimate_of(float(means[0]), means[1:])
    low = binomial_interval(len(points), len(points)).low
    truths = np.concatenate([cell.truth for cell in cells])
    chance = truths.mean() ** 2 + (1 - truths.mean()) ** 2
    return Estimate(1.0, Interval((low - chance) / (1 - chance), 1.0))


def predict_each(rates: np.ndarray, is_complete: np.ndarray) -> list[bool]:
    """Return for each trial whether the other trials predict that it is complete.

    Args:
        rates: (n,), the effective rate of each trial.
        is_complete: (n,), whether it is complete.
    """
    predictions = []
    for i, rate in enumerate(rates):
        low, high = best_range(np.delete(rates, i), np.delete(is_complete, i))
        predictions.append(bool(low <= rate <= high))
    return predictions


def best_range(rates: np.ndarray, is_complete: np.ndarray) -> tuple[float, float]:
    """Return the range of rates that separates complete trials with the fewest errors.

    Each end is the geometric mean with the next rate outside, or unbounded.
    """
    order = np.argsort(rates)
    logs = np.log(rates[order])
    middles = np.concatenate([[-np.inf], (logs[1:] + logs[:-1]) / 2, [np.inf]])
    # Maximum subarray: a complete trial inside counts 1, another trial inside counts -1.
    gains = np.cumsum(np.concatenate([[0], np.where(is_complete[order], 1, -1)]))
    sums = gains[None, :] - gains[:, None]
    first, last = np.unravel_index(np.argmax(np.triu(sums, 1)), sums.shape)
    return math.exp(middles[first]), float(np.exp(middles[last]))


def cohens_kappa(truth: np.ndarray, guess: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return Cohen's kappa (R,) of weighted predictions; nan if all trials have one class.

    Args:
        truth: (n,), whether a trial is complete.
        guess: (n,), whether the prediction is complete.
        weights: (R, n), how often each trial counts.
    """
    total = weights.sum(axis=1)
    agreement = weights @ (truth == guess) / total
    true_share = weights @ truth / total
    guessed_share = weights @ guess / total
    chance = true_share * guessed_share + (1 - true_share) * (1 - guessed_share)
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
    """Return the limit of steps within which a trial counts as complete, as text."""
    if record.race_factor is None:
        return budget_text(record)
    return f"complete by {record.race_factor:g} K*"
