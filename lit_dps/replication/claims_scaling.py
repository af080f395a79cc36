"""The paper's claims on K* against batch size (Lee et al. 2021, Section 3.1, Figure 1): three regimes.

All three are judged by the local exponent e of K* ~ B^e between two batch sizes, which needs no fitted law: -1 is
perfect scaling, 0 a plateau. K* is known to one check interval; the intervals allow for that. Batch sizes whose K* is
at the first check, an upper bound, are left out.

1. Linear scaling: e <= -0.8 over the first two doublings from the smallest batch size.
2. Diminishing returns: a run needs more than 1.1 times the examples B K* at the largest batch size that it needs at
   the smallest.
3. Plateau: K* falls by less than 10 % a doubling, e > log2(0.9), over the last two doublings. Not decidable where
   B_crit is not identifiable (`Scaling.identifiable`).

The claims are about small, larger and large enough batches. A study that does not get there cannot refute them, so they
are "not seen" only where it does: its smallest batch size is at most B_crit / 8 or the paper's 2 (for 1), its largest
at least the paper's 16,384 (for 2 and 3) or 8 B_crit (for 3). At 8 B_crit the law c1 / B + c2 itself falls by 10 % a
doubling; from B_crit / 8 on its exponent over two doublings is -0.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lit_dps.analysis import Analysis, cell_of
from lit_dps.replication.rules import (
    MARGIN,
    Estimate,
    Finding,
    Verdict,
    at_each,
    decide,
    estimated,
    k_star_draws,
    log_ratio,
)
from lit_dps.trial import Series

LINEAR, FLAT = -0.8, math.log2(0.9)
SMALLEST, LARGEST = 2, 16384  # batch sizes of the paper
REACH = 8  # times B_crit
DOUBLINGS = 4  # two of them, as a factor


def linear_scaling(study: Analysis) -> Finding | None:
    """Claim 1; None for a study of one batch size."""
    return _at_each(study, _linear)


def diminishing_returns(study: Analysis) -> Finding | None:
    """Claim 2; None for a study of one batch size."""
    return _at_each(study, _diminishing)


def plateau(study: Analysis) -> Finding | None:
    """Claim 3; None for a study of one batch size."""
    return _at_each(study, _plateau)


def exponent(study: Analysis, series: Series, small: int, large: int) -> Estimate:
    """e of K* ~ B^e between two batch sizes that have a K* beyond the first check."""
    k_star, octaves = study.scalings[series].resolved, math.log(large / small)
    ends = (k_star_draws(study, cell_of(series, batch_size)) for batch_size in (large, small))
    low, high = log_ratio(*ends)
    return estimated(math.log(k_star[large] / k_star[small]) / octaves, low / octaves, high / octaves)


def _at_each(study: Analysis, judge: Callable[[Analysis, Series, list[int]], Finding]) -> Finding | None:
    if len(study.record.batch_sizes) < 2:
        return None

    def judged(series: Series) -> Finding:
        scaling = study.scalings[series]
        sizes = list(scaling.resolved)
        if len(sizes) < 2:
            found = Finding(Verdict.UNDECIDABLE, f"K* at {len(sizes)} batch sizes")
        else:
            found = judge(study, series, sizes)
        left = len(scaling.at_first_check)
        return found._replace(measured=f"{found.measured}; {left} at the first check left out") if left else found

    return at_each(study.record.series, judged)


def _linear(study: Analysis, series: Series, sizes: list[int]) -> Finding:
    small = sizes[0]
    large = max([b for b in sizes if small < b <= DOUBLINGS * small], default=sizes[1])
    number = exponent(study, series, small, large)
    scaling = study.scalings[series]
    reached = small <= SMALLEST or (scaling.identifiable and REACH * small <= scaling.fit.critical_batch_size)
    verdict = _within(decide(number, to=LINEAR), reached)
    return Finding(verdict, f"K* goes as B^e from B={small} to {large}, e = {number}")


def _diminishing(study: Analysis, series: Series, sizes: list[int]) -> Finding:
    small, large = sizes[0], sizes[-1]
    examples = exponent(study, series, small, large).map(lambda e: (large / small) ** (1 + e))
    verdict = _within(decide(examples, above=MARGIN), large >= LARGEST)
    return Finding(verdict, f"x{examples} the examples at B={large} as at {small}")


def _plateau(study: Analysis, series: Series, sizes: list[int]) -> Finding:
    large, scaling = sizes[-1], study.scalings[series]
    small = min([b for b in sizes if large / DOUBLINGS <= b < large], default=sizes[-2])
    number = exponent(study, series, small, large)
    said = f"K* x{number.map(lambda e: 2**e)} a doubling from B={small} to {large}"
    if not scaling.identifiable:
        return Finding(Verdict.UNDECIDABLE, f"{said}; B_crit {scaling.describe().removeprefix('B_crit ')}")
    reached = large >= LARGEST or large >= REACH * scaling.fit.critical_batch_size
    said = f"{said}, the largest being {large / scaling.fit.critical_batch_size:.2g} B_crit"
    return Finding(_within(decide(number, above=FLAT), reached), said)


def _within(verdict: Verdict, reached: bool) -> Verdict:
    return Verdict.UNDECIDABLE if verdict is Verdict.NOT_SEEN and not reached else verdict
