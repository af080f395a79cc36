"""Quantities of K* against batch size and sparsity (Lee et al. 2021, Section 3.1).

The quantities on the regimes of Figure 1 compare two batch sizes of each series and need no fitted
law. They use the local exponent e of K* ~ B^e: -1 is perfect scaling, 0 is a plateau. Batch sizes
whose K* is only an upper bound are omitted: at the first check, or of few trials.

These claims are about small, larger and large enough batches. A study refutes them only if it
reaches such batches. Its smallest batch size must be at most `SMALL_SHARE` x B_crit or the paper's
2. Its largest batch size must be at least the paper's 16,384 or `LARGE_MULTIPLE` x B_crit. Beyond
these limits, a study that follows the law c1 / B + c2 exactly is in the claimed ranges: over two
doublings from B_crit / 9 on, e = -0.81, and up to 12 B_crit, K* falls by 9.9 % per doubling.

A ratio of critical batch sizes needs an identifiable denominator. If the numerator is not
identifiable, it may exceed the largest batch size. Its lower limit can then confirm a claim, not
refute it. A law that does not fit its data has no critical batch size (`misfit_note`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import root_scalar
from scipy.special import chdtri

from lit_dps import Series
from lit_dps.analysis import (
    REPLICATES,
    Analysis,
    Interval,
    Law,
    cell_of,
    data_of,
    three_digits,
)
from lit_dps.replication.comparable import measure_pairs
from lit_dps.replication.estimates import (
    MIN_SAMPLES,
    SPARSE,
    Draws,
    Estimate,
    estimate_of,
    is_misfit,
    k_star_draws,
    laws_of,
    log_ratio,
    misfit_note,
    ratio_of_laws,
    widest,
)
from lit_dps.replication.rules import Measurement, Measurements

SMALLEST, LARGEST = 2, 16384  # batch sizes of the paper
SMALL_SHARE, LARGE_MULTIPLE = 1 / 9, 12  # of B_crit
TWO_DOUBLINGS = 4  # as a factor


class Curve(NamedTuple):
    """A series of a study, its law, and at least two batch sizes that the law is fitted to."""

    study: Analysis
    series: Series
    law: Law
    batch_sizes: list[int]


def exponent_at_small_batches(study: Analysis) -> Measurements | None:
    """Return e of K* ~ B^e over the first two doublings of each series.

    None for a study of one batch size.
    """
    return _measure_curves(study, _exponent_at_small_batches)


def _exponent_at_small_batches(curve: Curve) -> Measurement:
    small = curve.batch_sizes[0]
    large = curve.batch_sizes[1]
    for batch_size in curve.batch_sizes[1:]:
        if batch_size <= TWO_DOUBLINGS * small:
            large = batch_size
    number = exponent(curve.study, curve.series, small, large)
    is_small = small <= SMALLEST
    critical = _critical(curve.law)
    if critical is not None:
        is_small = is_small or small <= SMALL_SHARE * critical
    # A wider pair of batch sizes reaches into the bend.
    is_small = is_small and large <= TWO_DOUBLINGS * small
    sentence = f"K* ~ B^e from B={small} to B={large}, e = {number}"
    k_star = curve.study.laws[curve.series].exact_k
    if curve.law.uses_medians and small in k_star and large in k_star:
        e = math.log(k_star[large] / k_star[small]) / math.log(large / small)
        sentence += f" (K*: {three_digits(e)})"
    return Measurement(sentence, number, can_refute=is_small)


def examples_ratio(study: Analysis) -> Measurements | None:
    """Return the examples B K* at the largest batch size over B K* at the smallest.

    None for a study of one batch size.
    """
    return _measure_curves(study, _examples_ratio)


def _examples_ratio(curve: Curve) -> Measurement:
    small = curve.batch_sizes[0]
    large = curve.batch_sizes[-1]
    e = exponent(curve.study, curve.series, small, large)
    number = e.map(lambda x: (large / small) ** (1 + x))
    sentence = f"examples at B={large} over examples at B={small}: x{number}"
    return Measurement(sentence, number, can_refute=large >= LARGEST)


def steps_per_doubling(study: Analysis) -> Measurements | None:
    """Return the factor of K* per doubling of B, over the last two doublings of each series.

    The factor is unknown in a series whose B_crit is not identifiable. None for a study of one
    batch size.
    """
    return _measure_curves(study, _steps_per_doubling)


def _steps_per_doubling(curve: Curve) -> Measurement:
    large = curve.batch_sizes[-1]
    small = curve.batch_sizes[-2]
    for batch_size in reversed(curve.batch_sizes[:-1]):
        if batch_size >= large / TWO_DOUBLINGS:
            small = batch_size
    number = exponent(curve.study, curve.series, small, large).map(lambda e: 2**e)
    sentence = f"K* per doubling from B={small} to B={large}: x{number}"
    critical = _critical(curve.law)
    if critical is None:
        reason = _describe_critical(curve.law)
        if curve.law.fit is not None:
            why = curve.law.verdict.reason or misfit_note({str(curve.series): curve.law})
            reason = f"undecided, because B_crit is not identifiable: {why}"
        return Measurement(f"{sentence}; {reason}")
    is_large = large >= LARGEST or large >= LARGE_MULTIPLE * critical
    is_large = is_large and large <= TWO_DOUBLINGS * small
    sentence += f", up to {large / critical:.2g} B_crit"
    return Measurement(sentence, number, can_refute=is_large)


def exponent(study: Analysis, series: Series, small: int, large: int) -> Estimate:
    """Return e of K* ~ B^e between two batch sizes whose K* is no bound."""
    (law,) = laws_of(study, series)
    octaves = math.log(large / small)
    over = k_star_draws(study, law, cell_of(series, large))
    under = k_star_draws(study, law, cell_of(series, small))
    low, high = log_ratio(over, under)
    value = math.log(law.exact_k[large] / law.exact_k[small]) / octaves
    return estimate_of(value, low / octaves, high / octaves)


def _critical(law: Law) -> float | None:
    """Return B_crit of a law in examples; None if it is not identifiable or not reliable."""
    if law.fit is None or not law.is_b_crit_known or is_misfit(law):
        return None
    return law.fit.critical_batch_size


def _measure_curves(
    study: Analysis, measure: Callable[[Curve], Measurement]
) -> Measurements | None:
    """Return the measurement of each series; None for a study of one batch size."""
    if len(study.record.batch_sizes) < 2:
        return None
    measurements = {}
    for series in study.record.series:
        (law,) = laws_of(study, series)
        batch_sizes = list(law.exact_k)
        if len(batch_sizes) < 2:
            known = f"{len(batch_sizes)} of {len(study.record.batch_sizes)} batch sizes"
            sentence = f"K* is known at {known}; 2 are needed"
            measurement = Measurement(sentence)
        else:
            measurement = measure(Curve(study, series, law, batch_sizes))
        notes = measurement.notes
        bounds = len(law.upper_bounds)
        if bounds:
            verb = "is" if bounds == 1 else "are"
            notes = (*notes, f"{bounds} K* that {verb} only an upper bound {verb} omitted")
        measurements[str(series)] = dataclasses.replace(
            measurement, uses_medians=law.uses_medians, notes=notes
        )
    return measurements


def law_misfit(study: Analysis) -> Measurements | None:
    """Return how far K* deviates from the fitted c1 / B + c2 in each series, beyond its noise.

    The number is the standard deviation of log K* about the law, without the noise of K*. So 0.1 is
    a deviation of 10 %. Q is the sum of squared residuals, each divided by the variance of log K*
    plus the square of the number. At the estimate, Q equals the degrees of freedom (Paule and
    Mandel 1982). At the limits of the interval, Q equals quantiles of the chi-squared distribution
    (Viechtbauer 2007).

    Returns:
        None for a study of one batch size.
    """
    return _measure_curves(study, _law_misfit)


def _law_misfit(curve: Curve) -> Measurement:
    law = curve.law
    if law.fit is None:
        return Measurement(f"no law ({law.verdict.reason})")
    data = data_of([o for o in law.observations if o.bound == 0])
    residuals = np.log(data.steps) - np.log(law.fit.steps(data.batch_sizes))
    free = len(residuals) - 2
    if free < 1:
        return Measurement(f"K* is known at {len(residuals)} batch sizes; 3 are needed")
    deviations = []
    for expected in (free, *chdtri(free, (0.025, 0.975))):
        deviations.append(_deviation(residuals, data.variance, float(expected)))
    value, low, high = deviations
    largest = int(np.argmax(np.abs(residuals)))
    most = (
        f"the largest residual, noise included, is x{math.exp(residuals[largest]):.3g} at "
        f"B={data.batch_sizes[largest]:g}"
    )
    if high == 0:
        return Measurement(f"K* scatters about c1 / B + c2 less than its noise; {most}")
    number = Estimate(value, Interval(min(low, value), max(high, value)))
    return Measurement(f"K* deviates from c1 / B + c2 by {number} beyond its noise; {most}", number)


def _deviation(residuals: np.ndarray, variance: np.ndarray, expected: float) -> float:
    """Return the deviation of a law at which Q is an expected value; 0 if Q is always smaller.

    Args:
        residuals: (n,), of log K*.
        variance: (n,), of log K*.
        expected: The value of Q.
    """

    def excess(deviation: float) -> float:
        return float((residuals**2 / (variance + deviation**2)).sum()) - expected

    # An exact K* has no variance.
    smallest = 1e-6
    if excess(smallest) <= 0:
        return 0.0
    # Beyond the root by more than rounding.
    largest = math.sqrt(float((residuals**2).sum()) / expected) * (1 + 1e-9)
    return root_scalar(excess, bracket=(smallest, largest)).root


def sparse_steps_ratio(study: Analysis, sparsity: float = SPARSE) -> Measurements | None:
    """Return the mean ratio of K*, sparse over dense, over the batch sizes with a dense K*.

    The mean is geometric. If no sparse trial met the goal, its K* is at least max_steps. Batch
    sizes where one of the two K* is only an upper bound, or the sparse cell is unfinished, are
    omitted. The ratio is unknown if they are more than half of the batch sizes. None for a study
    without both sparsities.
    """
    return measure_pairs(study, sparsity, _sparse_steps_ratio)


def _sparse_steps_ratio(study: Analysis, sparse: Series, dense: Series) -> Measurement:
    sparse_law, dense_law = laws_of(study, sparse, dense)
    over = sparse_law.k_star
    under = dense_law.k_star
    bounds = sparse_law.upper_bounds | dense_law.upper_bounds
    shared = over.keys() & under.keys()
    coverage = f"{len(shared)} of the {len(under)} batch sizes with a dense K* have a sparse K*"
    shared_bounds = len(bounds & shared)
    if shared_bounds:
        coverage += f"; at {shared_bounds} of them a K* is only an upper bound"
    draws = _ratio_draws(study, sparse, dense)
    ratios = []
    logs = {}
    for batch_size in under:
        if batch_size in bounds:
            continue
        if batch_size in over:
            ratio = over[batch_size] / under[batch_size]
            ratios.append(ratio)
            logs[batch_size] = math.log(ratio)
            continue
        bound = k_star_draws(study, sparse_law, cell_of(sparse, batch_size)).low[0]
        if bound > 0:  # an unfinished sparse cell has no bound of K*
            logs[batch_size] = math.log(bound / under[batch_size])
    if not ratios or len(logs) < len(under) / 2:
        return Measurement(coverage)

    def mean_of_logs(shares_search: bool) -> Estimate:
        drawn = [draws(batch_size, shares_search) for batch_size in logs]
        low = np.mean([each.low for each in drawn], axis=0)
        high = np.mean([each.high for each in drawn], axis=0)
        return estimate_of(float(np.mean(list(logs.values()))), low, high)

    mean = widest(mean_of_logs).map(math.exp)
    at_least = ""
    if len(ratios) < len(logs):
        at_least = "at least "
    low = f"x{min(ratios):.3g}"
    high = f"x{max(ratios):.3g}"
    sentence = f"sparse over dense K*: {low} to {high} across B, mean {at_least}x{mean}"
    notes = ()
    if len(ratios) < len(under):
        notes = (coverage,)
    return Measurement(sentence, mean, uses_medians=sparse_law.uses_medians, notes=notes)


def _ratio_draws(study: Analysis, sparse: Series, dense: Series) -> Callable[[int, bool], Draws]:
    """Return a function of batch size and `shares_search`: draws of log K*, sparse over dense."""
    laws = laws_of(study, sparse, dense)

    def draws(batch_size: int, shares_search: bool) -> Draws:
        drawn = []
        for series, law in zip((sparse, dense), laws, strict=True):
            cell = cell_of(series, batch_size)
            drawn.append(k_star_draws(study, law, cell, shares_search))
        return log_ratio(*drawn)

    return draws


def sparse_ratio_trend(study: Analysis, sparsity: float = SPARSE) -> Measurements | None:
    """Return how the ratio of K*, sparse over dense, changes from the smallest to the largest B.

    A line is fitted to the logarithm of the ratio against log B. The number is the line's value at
    the largest batch size over its value at the smallest. Batch sizes whose K* is a bound are
    omitted. None for a study without both sparsities.
    """
    return measure_pairs(study, sparsity, _sparse_ratio_trend)


def _sparse_ratio_trend(study: Analysis, sparse: Series, dense: Series) -> Measurement:
    sparse_law, dense_law = laws_of(study, sparse, dense)
    batch_sizes = sorted(sparse_law.exact_k.keys() & dense_law.exact_k.keys())
    if len(batch_sizes) < MIN_SAMPLES:
        known = f"both K* are known at {len(batch_sizes)} batch sizes; {MIN_SAMPLES} are needed"
        return Measurement(known)
    # Least squares: the slope is a weighted sum of the logarithms.
    centred = np.log(batch_sizes) - np.mean(np.log(batch_sizes))
    weights = centred / np.square(centred).sum() * math.log(batch_sizes[-1] / batch_sizes[0])
    logs = []
    for batch_size in batch_sizes:
        logs.append(math.log(sparse_law.exact_k[batch_size] / dense_law.exact_k[batch_size]))
    draws = _ratio_draws(study, sparse, dense)

    def change_of_log(shares_search: bool) -> Estimate:
        low = np.zeros(REPLICATES)
        high = np.zeros(REPLICATES)
        for batch_size, weight in zip(batch_sizes, weights, strict=True):
            drawn = draws(batch_size, shares_search)
            low += np.minimum(weight * drawn.low, weight * drawn.high)
            high += np.maximum(weight * drawn.low, weight * drawn.high)
        return estimate_of(float(weights @ logs), low, high)

    change = widest(change_of_log).map(math.exp)
    sentence = (
        f"K* at {sparse} over {dense}: x{math.exp(logs[0]):.3g} at B={batch_sizes[0]}, "
        f"x{math.exp(logs[-1]):.3g} at B={batch_sizes[-1]}; a line through all batch sizes changes "
        f"by x{change}"
    )
    notes = ()
    omitted = len(dense_law.k_star) - len(batch_sizes)
    if omitted:
        # A missed goal at the largest batch sizes could mean a rise.
        notes = (
            f"{omitted} of {len(dense_law.k_star)} batch sizes lack an exact K* of one of the two",
        )
    return Measurement(sentence, change, uses_medians=sparse_law.uses_medians, notes=notes)


def sparse_critical_ratio(study: Analysis, sparsity: float = SPARSE) -> Measurements | None:
    """Return B_crit of sparse over dense networks; None for a study without both sparsities."""
    return measure_pairs(study, sparsity, _sparse_critical_ratio)


def _sparse_critical_ratio(study: Analysis, sparse: Series, dense: Series) -> Measurement:
    over, under = laws_of(study, sparse, dense)
    return critical_ratio(over, under, str(sparse), str(dense))


def critical_ratio(over: Law, under: Law, name: str, other_name: str) -> Measurement:
    """Return the ratio of B_crit of two laws, each with a name for the sentence.

    B_crit of `over` may be unknown if K follows its law. It then exceeds the batch sizes.
    """
    sentence = f"{_describe_critical(over)} at {name}, {_describe_critical(under)} at {other_name}"
    ratio = ratio_of_laws(over, under, lambda c1, c2: c1 / c2)
    if ratio is None or not under.is_b_crit_known:
        return Measurement(sentence, uses_medians=over.uses_medians)
    number = ratio.estimate
    misfit = misfit_note({name: over, other_name: under})
    if misfit is None and not over.describes_k:
        return Measurement(sentence, uses_medians=over.uses_medians)
    sentence += f", x{number}"
    if misfit is not None:
        return Measurement(sentence, uses_medians=over.uses_medians, notes=(misfit,))
    return Measurement(
        sentence, number, can_refute=over.is_b_crit_known, uses_medians=over.uses_medians
    )


def _describe_critical(law: Law) -> str:
    """Return B_crit of a law, its lower bound, or why it is unknown, as text."""
    if law.fit is None:
        return f"no law ({law.verdict.reason})"
    if law.is_b_crit_known:
        return law.describe().removesuffix(", below the smallest batch size")
    if law.verdict.bound is None:
        return f"B_crit is not identifiable: {law.verdict.reason}"
    return f"B_crit > {three_digits(law.verdict.bound)}"
