"""Quantities of critical batch sizes (Lee et al. 2021, Section 3.1), as c1 / c2 of fitted laws.

The critical batch size of the denominator has to be identifiable. If the critical batch size of the
numerator is not, it may exceed the largest batch size; its lower limit can then confirm a claim,
not refute it. A law that does not describe what it is fitted to has no critical batch size
(`misfit_note`).
"""

from __future__ import annotations

from lit_dps import Series
from lit_dps.analysis import Analysis, Law, three_digits
from lit_dps.replication.comparable import (
    OPTIMIZER,
    have_same_goal,
    measure_pairs,
    trained_the_same,
)
from lit_dps.replication.estimates import SPARSE, laws_of, misfit_note, ratio_of_laws
from lit_dps.replication.rules import Measurement, Measurements


def sparse_critical_ratio(study: Analysis, sparsity: float = SPARSE) -> Measurements | None:
    """Return B_crit of sparse over dense networks; None for a study without both sparsities."""
    return measure_pairs(study, sparsity, _sparse_critical_ratio)


def _sparse_critical_ratio(study: Analysis, sparse: Series, dense: Series) -> Measurement:
    over, under = laws_of(study, sparse, dense)
    return _ratio(over, under, str(sparse), str(dense))


def critical_ratio_of_optimizers(
    study: Analysis, other: Analysis, base: str
) -> Measurements | None:
    """Return the ratio of B_crit of two update rules, in each series of two studies.

    None unless the second study has the update rule `base`, the first another one, and both the
    same data, network, schedule, goal and several batch sizes.
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
        if series in other.scalings:
            (over,) = laws_of(study, series)
            (under,) = laws_of(other, series)
            if over.of_medians != under.of_medians:
                # A K* is luckier than a median, so both are laws of K*.
                over, under = study.scalings[series], other.scalings[series]
            measurements[str(series)] = _ratio(over, under, str(optimizer), base)
    return measurements or None


def _ratio(over: Law, under: Law, name: str, other_name: str) -> Measurement:
    """Return the ratio of B_crit of two laws."""
    sentence = f"{_describe(over)} at {name}, {_describe(under)} at {other_name}"
    ratio = ratio_of_laws(over, under, lambda c1, c2: c1 / c2)
    if ratio is None or not under.identifiable:
        return Measurement(sentence, of_medians=over.of_medians)
    number = ratio.estimate
    sentence += f", x{number}"
    misfit = misfit_note({name: over, other_name: under})
    if misfit is not None:
        return Measurement(sentence, of_medians=over.of_medians, notes=(misfit,))
    return Measurement(sentence, number, can_refute=over.identifiable, of_medians=over.of_medians)


def _describe(law: Law) -> str:
    """Return B_crit of a law, its lower bound, or why it is unknown."""
    if law.fit is None:
        return f"no law ({law.describe()})"
    if law.identifiable:
        return law.describe().removesuffix(", below the smallest batch size")
    if law.verdict.bound is None:
        return f"B_crit {law.describe()}"
    return f"B_crit > {three_digits(law.verdict.bound)}"
