"""Quantities of two update rules on one workload (Lee et al. 2021, Section 3.1, Figure 2).

Each quantity compares a study with another study, whose update rule is `base`. All quantities are
None unless the first study has another update rule than `base`, and both studies have the same
data, network, schedule and goal, and several batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from lit_dps import Series
from lit_dps.analysis import Analysis, Law, cell_of
from lit_dps.replication.comparable import OPTIMIZER, have_same_goal, trained_the_same
from lit_dps.replication.estimates import (
    Draws,
    Estimate,
    estimate_of,
    k_star_draws,
    laws_of,
    log_ratio,
)
from lit_dps.replication.rules import Measurement, Measurements
from lit_dps.replication.scaling import critical_ratio


class LawsOfOptimizers(NamedTuple):
    """The laws of one series under two update rules, both of K* or both of medians.

    Attributes:
        study, other: The study of the rule, and the study of `base`.
        series: The series.
        over, under: The laws of the two studies.
    """

    study: Analysis
    other: Analysis
    series: Series
    over: Law
    under: Law

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes at which both laws have an exact K*, ascending."""
        return sorted(self.over.exact_k.keys() & self.under.exact_k.keys())

    def draws(self, batch_size: int) -> Draws:
        """Return draws of the logarithm of the ratio of K* at a batch size."""
        cell = cell_of(self.series, batch_size)
        over = k_star_draws(self.study, self.over, cell)
        under = k_star_draws(self.other, self.under, cell)
        return log_ratio(over, under)

    def log_ratio(self, batch_size: int) -> Estimate:
        """Return the logarithm of the ratio of K* at a batch size, with its interval."""
        value = math.log(self.over.exact_k[batch_size] / self.under.exact_k[batch_size])
        drawn = self.draws(batch_size)
        return estimate_of(value, drawn.low, drawn.high)


def critical_ratio_of_optimizers(
    study: Analysis, other: Analysis, base: str
) -> Measurements | None:
    """Return the ratio of B_crit of two update rules, in each series."""

    def measure(laws: LawsOfOptimizers) -> Measurement:
        optimizer = str(study.record.setting(OPTIMIZER))
        return critical_ratio(laws.over, laws.under, optimizer, base)

    return _measure_optimizers(study, other, base, measure)


def steps_ratio_of_optimizers(study: Analysis, other: Analysis, base: str) -> Measurements | None:
    """Return K* of a rule over K* of `base`, in each series.

    The batch size is the largest one with an exact K* of both rules.
    """

    def measure(laws: LawsOfOptimizers) -> Measurement:
        if not laws.batch_sizes:
            return Measurement("no batch size has a K* of both rules")
        batch_size = laws.batch_sizes[-1]
        number = laws.log_ratio(batch_size).map(math.exp)
        sentence = f"K* over K* of {base}: x{number} at B={batch_size}"
        return Measurement(sentence, number, uses_medians=laws.over.uses_medians)

    return _measure_optimizers(study, other, base, measure)


def steps_ratio_change_of_optimizers(
    study: Analysis, other: Analysis, base: str
) -> Measurements | None:
    """Return how the ratio of two rules' K* changes with batch size, in each series.

    The number is the ratio at the largest batch size over the ratio at the smallest.
    """

    def measure(laws: LawsOfOptimizers) -> Measurement:
        if len(laws.batch_sizes) < 2:
            known = f"both K* are known at {len(laws.batch_sizes)} batch sizes; 2 are needed"
            return Measurement(known)
        small, large = laws.batch_sizes[0], laws.batch_sizes[-1]
        at_small, at_large = laws.log_ratio(small), laws.log_ratio(large)
        over, under = laws.draws(large), laws.draws(small)
        log_change = estimate_of(
            at_large.value - at_small.value, over.low - under.high, over.high - under.low
        )
        change = log_change.map(math.exp)
        sentence = (
            f"K* over K* of {base}: x{at_small.map(math.exp)} at B={small} and "
            f"x{at_large.map(math.exp)} at B={large}; the second ratio is x{change} of the first"
        )
        return Measurement(sentence, change, uses_medians=laws.over.uses_medians)

    return _measure_optimizers(study, other, base, measure)


def _measure_optimizers(
    study: Analysis,
    other: Analysis,
    base: str,
    measure: Callable[[LawsOfOptimizers], Measurement],
) -> Measurements | None:
    """Return the measurement of each series that both studies have.

    Returns:
        None if the studies cannot be compared (see the docstring of the module).
    """
    optimizer = study.record.setting(OPTIMIZER)
    if other.record.setting(OPTIMIZER) != base or optimizer in (None, base):
        return None
    if min(len(study.record.batch_sizes), len(other.record.batch_sizes)) < 2:
        return None
    if not trained_the_same(study.record, other.record):
        return None
    if not have_same_goal(study.record, other.record):
        return None
    measurements = {}
    for series in study.record.series:
        if series in other.laws:
            (over,) = laws_of(study, series)
            (under,) = laws_of(other, series)
            if over.uses_medians != under.uses_medians:
                # A K* is smaller than a median over seeds, so both must be laws of K*.
                over, under = study.laws[series], other.laws[series]
            laws = LawsOfOptimizers(study, other, series, over, under)
            measurements[str(series)] = measure(laws)
    return measurements or None
