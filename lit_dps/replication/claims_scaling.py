"""The paper's claims on K* against batch size and sparsity (Lee et al. 2021, Section 3.1).

The first three, on the regimes of Figure 1, are judged by the local exponent e of K* ~ B^e between
two batch sizes, which needs no fitted law: -1 is perfect scaling, 0 a plateau. K* is known to one
check interval; the intervals allow for that. Batch sizes whose K* is at the first check, an upper
bound, are left out.

1. Linear scaling: e <= -0.8 over the first two doublings from the smallest batch size.
2. Diminishing returns: a run needs more than 1.1 times the examples B K* at the largest batch size
   that it needs at the smallest.
3. Plateau: K* falls by less than 10 % a doubling, e > log2(0.9), over the last two doublings. Not
   decidable where B_crit is not identifiable (`Scaling.identifiable`).

These are about small, larger and large enough batches. A study that does not get there cannot
refute them, so they are "not seen" only where it does: its smallest batch size is at most B_crit /
9 or the paper's 2 (for 1), its largest at least the paper's 16,384 (for 2 and 3) or 12 B_crit (for
3). From there on a study that follows the law c1 / B + c2 exactly is in the range: over two
doublings from B_crit / 9 on e = -0.81, and up to 12 B_crit K* falls by 9.9 % a doubling.

4. A 90 % sparse network needs more steps: the geometric mean of the ratios of K*, 0.9 over 0, over
   the batch sizes with a dense K*, is above 1.1. Where no sparse trial met the goal the ratio is at
   least that of the budget. Batch sizes where one of the two K* is at the first check are left out;
   not decidable where these are more than half.
5. It needs 1.5 to 4.5 times the steps (Figure 12): the same mean in that range. Claim 4 is part of
   it, and was told apart while studies ran: one that found x4.4 [3.7, 5.7] said of both that they
   were not decidable.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law_bootstrap import Scaling
from lit_dps.analysis.tables import cell_of, three_digits
from lit_dps.core.trial import Series
from lit_dps.replication.rules import (
    MARGIN,
    Estimate,
    Finding,
    Verdict,
    at_each,
    at_each_pair,
    curves,
    decide,
    estimated,
    if_reached,
    k_star_draws,
    log_ratio,
)

LINEAR, FLAT = -0.8, math.log2(0.9)
SMALLEST, LARGEST = 2, 16384  # batch sizes of the paper
SMALL, LARGE = 1 / 9, 12  # times B_crit
DOUBLINGS = 4  # two of them, as a factor
FEW_STEPS, MANY_STEPS = 1.5, 4.5


def linear_scaling(study: Analysis) -> Finding | None:
    """Claim 1; None for a study of one batch size."""

    def judge(series: Series, scaling: Scaling, sizes: list[int]) -> Finding:
        small = sizes[0]
        large = max([b for b in sizes if small < b <= DOUBLINGS * small], default=sizes[1])
        number = exponent(study, series, small, large)
        reached = small <= SMALLEST or (
            scaling.identifiable and small <= SMALL * scaling.fit.critical_batch_size
        )
        verdict = if_reached(decide(number, to=LINEAR), reached)
        said = f"K* goes as B^e from B={small} to B={large}, e = {number}"
        least = study.scalings[series].resolved
        if scaling.of_medians and {small, large} <= least.keys():
            own = math.log(least[large] / least[small]) / math.log(large / small)
            said += f" (K*: {three_digits(own)})"
        return Finding(verdict, said)

    return _at_each_law(study, judge)


def diminishing_returns(study: Analysis) -> Finding | None:
    """Claim 2; None for a study of one batch size."""

    def judge(series: Series, scaling: Scaling, sizes: list[int]) -> Finding:
        small, large = sizes[0], sizes[-1]
        examples = exponent(study, series, small, large).map(lambda e: (large / small) ** (1 + e))
        verdict = if_reached(decide(examples, above=MARGIN), large >= LARGEST)
        return Finding(verdict, f"examples at B={large} over those at B={small}: x{examples}")

    return _at_each_law(study, judge)


def plateau(study: Analysis) -> Finding | None:
    """Claim 3; None for a study of one batch size."""

    def judge(series: Series, scaling: Scaling, sizes: list[int]) -> Finding:
        large = sizes[-1]
        small = min([b for b in sizes if large / DOUBLINGS <= b < large], default=sizes[-2])
        number = exponent(study, series, small, large)
        said = f"K* a doubling from B={small} to B={large}: x{number.map(lambda e: 2**e)}"
        if not scaling.identifiable:
            return Finding(
                Verdict.UNDECIDABLE, f"{said}; B_crit {scaling.describe().removeprefix('B_crit ')}"
            )
        reached = large >= LARGEST or large >= LARGE * scaling.fit.critical_batch_size
        said = f"{said}, up to {large / scaling.fit.critical_batch_size:.2g} B_crit"
        return Finding(if_reached(decide(number, above=FLAT), reached), said)

    return _at_each_law(study, judge)


def exponent(study: Analysis, series: Series, small: int, large: int) -> Estimate:
    """e of K* ~ B^e between two batch sizes that have a K* beyond the first check."""
    (law,), octaves = curves(study, series), math.log(large / small)
    k_star, cells = law.resolved, [cell_of(series, batch_size) for batch_size in (large, small)]
    low, high = log_ratio(*(k_star_draws(study, cell, law.of_medians) for cell in cells))
    return estimated(
        math.log(k_star[large] / k_star[small]) / octaves, low / octaves, high / octaves
    )


def _at_each_law(
    study: Analysis, judge: Callable[[Series, Scaling, list[int]], Finding]
) -> Finding | None:
    """The findings on each series, from its law and the batch sizes that the law is fitted to, as
    one."""
    if len(study.record.batch_sizes) < 2:
        return None
    whole = all(
        curves(study, series)[0].of_medians for series in study.record.series
    )  # then it is said once

    def judged(series: Series) -> Finding:
        (scaling,) = curves(study, series)
        sizes = list(scaling.resolved)
        if len(sizes) < 2:
            found = Finding(Verdict.UNDECIDABLE, f"K* at {len(sizes)} batch sizes")
        else:
            found = judge(series, scaling, sizes)
        if not whole:
            found = found._replace(measured=found.measured + medians_note(scaling))
        left = len(scaling.at_first_check)
        return (
            found._replace(measured=f"{found.measured}; {left} at the first check left out")
            if left
            else found
        )

    found = at_each(study.record.series, judged)
    return found._replace(measured=f"medians: {found.measured}") if whole else found


def more_steps_of_sparse(study: Analysis) -> Finding | None:
    """Claim 4; None for a study without both sparsities."""
    return _steps_of_sparse(study, above=MARGIN)


def steps_of_sparse(study: Analysis) -> Finding | None:
    """Claim 5; None for a study without both sparsities."""
    return _steps_of_sparse(study, above=FEW_STEPS, to=MANY_STEPS)


def _steps_of_sparse(study: Analysis, above: float, to: float = math.inf) -> Finding | None:
    def limits(
        sparse: Series, dense: Series, batch_size: int, medians: bool
    ) -> tuple[np.ndarray, ...]:
        over, under = (cell_of(series, batch_size) for series in (sparse, dense))
        known = study.by_cell[over].k_star is not None
        return log_ratio(
            k_star_draws(study, over, medians and known), k_star_draws(study, under, medians)
        )

    def judge(sparse: Series, dense: Series) -> Finding:
        laws = curves(study, sparse, dense)
        over, under = (law.k_star for law in laws)
        bounds = laws[0].at_first_check | laws[1].at_first_check
        told = (
            f"{len(over.keys() & under.keys())} of the {len(under)} batch sizes with a dense "
            "K* "
            "have a sparse one"
        )
        if left := len(bounds & over.keys() & under.keys()):
            told += f", at {left} of these one is at the first check"
        usable = [b for b in under if b not in bounds]
        ratios = {b: over[b] / under[b] for b in usable if b in over}
        if not ratios or len(usable) < len(under) / 2:
            return Finding(Verdict.UNDECIDABLE, told)
        drawn = {b: limits(sparse, dense, b, laws[0].of_medians) for b in usable}
        low, high = (np.mean(side, axis=0) for side in zip(*drawn.values(), strict=True))
        every = [
            math.log(ratios[b]) if b in ratios else float(np.median(drawn[b][0])) for b in usable
        ]
        mean = estimated(float(np.mean(every)), low, high).map(lambda x: float(np.exp(x)))
        least = "" if len(ratios) == len(usable) else "at least "
        words = (
            f"K* x{min(ratios.values()):.3g} to x{max(ratios.values()):.3g} over B, mean "
            f"{least}x{mean}"
        )
        words += medians_note(laws[0])
        return Finding(
            decide(mean, above, to), words if len(ratios) == len(under) else f"{words}; {told}"
        )

    return at_each_pair(study, judge)


def medians_note(scaling: Scaling) -> str:
    return " (medians)" if scaling.of_medians else ""
