"""When the law of batch size is refused: not identifiable, because ..."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_dps.analysis.observations import Observation, exact
from lit_dps.analysis.tables import listed_numbers, three_digits

FEWEST = 3  # batch sizes with a K
CLOSE = 1.2  # batch sizes whose largest is below this times the smallest show no curve
REACHED = (
    0.5  # share of B_crit that the largest batch size has to reach: c2 is then a third of K there
)
OFF = 0.2  # of log K: a law that misses what it is fitted to by more says little of anything else
DECLINE = 0.1  # log of the fall of K over the range, below which a curve is flat
RISE, TYPICAL = (
    0.2,
    0.07,
)  # log of a rise of K with B that is none by chance, for a law's typical error
WIDE = 100.0  # B_crit is not known, where its 95 % interval spans more than this factor


@dataclass(frozen=True)
class Reason:
    """Why a law is not identifiable.

    Attributes:
        why: A clause.
        within: Whether the law still describes what was measured, so that it serves between those
            batch sizes.
    """

    why: str
    within: bool = False

    def __str__(self) -> str:
        return self.why


def why_not_fitted(observations: Sequence[Observation]) -> Reason | None:
    """What is missing to tell a law at all."""
    known = exact(observations)
    sizes = [o.batch_size for o in known]
    if len(known) < FEWEST:
        listed = listed_numbers(sizes) or "none"
        return Reason(f"K is known at {len(known)} batch sizes ({listed}), and {FEWEST} are needed")
    if max(sizes) <= CLOSE * min(sizes):
        span = max(sizes) / min(sizes) - 1
        return Reason(f"all batch sizes lie within {100 * span:.0f} %: {listed_numbers(sizes)}")
    return None


def reason_to_refuse(
    observations: Sequence[Observation],
    ends: tuple[float, float],
    misfit: float,
    critical: tuple[float, float, float],
) -> Reason | None:
    """What a fitted law lacks: it does not fit, is flat or linear, or B_crit is out of sight.

    Args:
        observations: What it is fitted to.
        ends: Its steps at the smallest and the largest batch size with a K.
        misfit: Root mean square of its residuals of log K.
        critical: B_crit and its 95 % limits.
    """
    known = sorted(exact(observations))
    low, high = known[0].batch_size, known[-1].batch_size
    for before in known:
        for after in known:
            rise = math.log(after.steps / before.steps)
            noise = math.sqrt(before.variance + after.variance + 2 * TYPICAL**2)
            if after.batch_size > before.batch_size and rise > max(RISE, 3 * noise):
                ends = (
                    f"{before.steps:.0f} at B = {before.batch_size:g} to {after.steps:.0f} at "
                    f"{after.batch_size:g}"
                )
                return Reason(
                    f"K rises, from {ends}, which no law of it does: is the rate tuned at each "
                    "batch size?"
                )
    fall = math.log(ends[0] / ends[1])
    if misfit > OFF:
        forms = "nor does c3 / B^2 mend it" if len(known) > 4 else "with too few points for another"
        return Reason(f"c1 / B + c2 does not fit: it misses K by {misfit:.0%}, {forms}")
    if fall < DECLINE:
        return Reason(
            f"K is flat: it falls by {1 - math.exp(-fall):.0%} from B = {low:g} to {high:g}",
            within=True,
        )
    value, least, most = critical
    if high < REACHED * value:
        least = max(least, high)
        kind = (
            "K falls in proportion to 1 / B as far as it is measured"
            if value > 10 * high
            else "B_crit is far"
        )
        return Reason(
            f"{kind}: the largest B, {high:g}, is below half of B_crit, which lies above "
            f"{three_digits(least)}",
            True,
        )
    if most > WIDE * least:
        interval = f"[{three_digits(least)}, {three_digits(most)}]"
        return Reason(
            f"the 95 % interval of B_crit, {interval}, spans more than a factor of {WIDE:g}",
            within=True,
        )
    return None
