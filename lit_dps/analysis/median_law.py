"""The law of the median over seeds: fitted to the median K of each cell's best point, beside that
of K* itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from lit_dps.analysis.best_of_n import draws_text
from lit_dps.analysis.fit import fit_scaling
from lit_dps.analysis.identifiability import FEWEST
from lit_dps.analysis.repeats import RepeatSummary, repeats_text
from lit_dps.analysis.scaling import (
    PERCENTILES,
    REPLICATES,
    Scaling,
    draw_repeats,
    estimate,
    with_intervals,
)
from lit_dps.analysis.summary import CellSummary, at_first_check
from lit_dps.analysis.tables import listed_numbers, times
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Series


def seeds_of(repeats: Sequence[RepeatSummary]) -> dict[Series, dict[int, list[float]]]:
    """Steps to result over seeds of each K* point, by series and batch size; infinite for those
    that missed the goal.

    Without cells most of whose repeats missed the goal: their median is not known.
    """
    found: dict[Series, dict[int, list[float]]] = {}
    for each in repeats:
        if each.rank == 1 and each.median is not None and np.isfinite(each.median):
            found.setdefault(each.cell.series, {})[each.cell.batch_size] = each.known
    return found


def scale_medians(
    seeds: Mapping[int, Sequence[float]],
    check_interval: int,
    replicates: int = REPLICATES,
    name: str = "",
    luck: float = 0.0,
) -> Scaling:
    """The law of the medians over seeds, with percentile intervals from resampling the repeats of
    each cell.

    A resample draws as many repeats of a cell as it has, with replacement, and takes their median,
    less a uniform part of a check interval. A median at the first check is left out, as K* there
    is. Of a median nothing leans: it is no minimum. No intervals where one in 40 resamples of a
    cell or more has its median at a repeat that missed the goal.

    Args:
        seeds: Steps to result of the repeats by batch size, infinite for those that missed; their
            medians are finite.
        check_interval: Steps between two checks.
        replicates: Of the resampling.
        name: Of the study and the series (`draw_repeats`).
        luck: As of `median_draws`.
    """
    medians = {b: float(np.median(steps)) for b, steps in sorted(seeds.items())}
    bounds = frozenset(b for b, median in medians.items() if at_first_check(median, check_interval))
    bare = Scaling(medians, at_first_check=bounds, over="seeds", of_medians=True)
    resolved = bare.resolved
    if len(resolved) < FEWEST:
        return bare
    fitted = replace(bare, fit=fit_scaling(list(resolved), list(resolved.values())))
    if min(len(seeds[b]) for b in resolved) < 2:
        return fitted
    drawn = []
    for b in resolved:
        medians = median_draws(seeds[b], replicates, (0, b), name, luck)
        if np.isinf(medians).mean() >= PERCENTILES[0] / 100:
            return fitted
        u = np.random.default_rng((0, b, 3, crc32(name.encode()))).random(replicates)
        drawn.append(np.where(np.isfinite(medians), medians, np.nan) - check_interval * u)
    return with_intervals(fitted, np.stack(drawn, axis=1))


def median_draws(
    steps: Sequence[float], replicates: int, seed: tuple[int, int], name: str, luck: float = 0.0
) -> np.ndarray:
    """Medians of resamples of a cell's repeats (`draw_repeats`), (R,) in steps; infinite where that
    is a missed one.

    Repeats are of the best of the points that were searched. `luck` is what another search may
    find: the standard deviation of log K between searches.
    """
    medians = np.median(draw_repeats(steps, replicates, (*seed, 2), name), axis=1)
    if not luck:
        return medians
    return medians * np.exp(
        luck * np.random.default_rng((*seed, 4, crc32(name.encode()))).standard_normal(replicates)
    )


def medians_outside(law: Scaling, medians: Scaling, check_interval: int) -> dict[int, float]:
    """Medians over seeds outside the 95 % band of the law of K*: median over the law's steps, by
    batch size.

    Empty without a band. A median is known up to a check interval: it leaves the band if this whole
    interval does. Batch sizes where K* or the median is at the first check are left out.
    """
    found = {}
    for batch_size, median in medians.resolved.items():
        sizes = np.array([float(batch_size)])
        band = law.band(sizes)
        if band is None or batch_size not in law.resolved:
            continue
        if median < band[0][0] or median - check_interval > band[1][0]:
            found[batch_size] = float(median / law.fit.steps(sizes)[0])
    return found


def outside_text(outside: Mapping[int, float]) -> str:
    """Where medians leave the law in words: above at B = 8, 16, below at B = 2."""
    parts = []
    for side, is_above in (("above", True), ("below", False)):
        sizes = [batch_size for batch_size, ratio in outside.items() if (ratio > 1) == is_above]
        if sizes:
            parts.append(f"{side} at B = {listed_numbers(sizes)}")
    return ", ".join(parts)


def median_notes(
    laws: Mapping[Series, Scaling], medians: Mapping[Series, Scaling], check_interval: int
) -> list[str]:
    """A note on the series and batch sizes at which medians over seeds leave the law of K*; empty
    without any."""
    parts, ratios = [], []
    for series, of_medians in sorted(medians.items()):
        outside = medians_outside(laws[series], of_medians, check_interval)
        if outside:
            parts.append(f"{series} {outside_text(outside)}")
            ratios += outside.values()
    if not parts:
        return []
    most = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    return [
        f"medians over seeds lie outside the 95 % band of the law of K*: {'; '.join(parts)}; up "
        f"to {times(most)} the "
        "law. One run at the best point needs the median, not the law"
    ]


def law_lines(scalings: Mapping[Series, Scaling]) -> list[str]:
    """A line a series: the constants of its law and what else is to say of it."""
    lines = []
    for series, scaling in sorted(scalings.items()):
        parts = [scaling.describe()]
        if scaling.fit is not None:
            c1, c2 = estimate(scaling.fit.c1, scaling.c1), estimate(scaling.fit.c2, scaling.c2)
            parts = [f"c1 = {c1}", f"c2 = {c2}", *parts]
        lines.append(f"  {series}  " + "  ".join(parts))
    return lines


def intervals_of(scalings: Mapping[Series, Scaling]) -> str:
    """What the intervals of the laws of K* are, in words."""
    over = {scaling.over for scaling in scalings.values()}
    if over == {"seeds"}:
        return "intervals over seeds"
    words = "bootstrap intervals over trials, which lean upward"
    return (
        f"intervals over seeds, or where a cell lacks repeats or one missed the goal {words}"
        if "seeds" in over
        else words
    )


def luck_text(
    record: StudyRecord,
    cells: Sequence[CellSummary],
    repeats: Sequence[RepeatSummary],
    scalings: Mapping[Series, Scaling],
) -> str:
    """The section of a report on repeats and what they say; empty where nothing is repeated."""
    if not repeats:
        return ""
    return repeats_text(record, repeats) + draws_text(record, cells) + median_law_text(scalings)


def median_law_text(scalings: Mapping[Series, Scaling]) -> str:
    """A line a series; empty where there are no repeats."""
    if not scalings:
        return ""
    lines = ["median K over seeds = c1 / B + c2, 95 % intervals over seeds", *law_lines(scalings)]
    return "\n".join(lines) + "\n"
