"""How a claim is decided: a number with its 95 % interval against a range.

The ranges were fixed before the first trial of a study at the paper's scale, but that of claim 4.
What else is in this file, what is judged, how intervals are made, when nothing can be told, was
settled while such studies ran: the commits say when and why.

A claim says that a number lies in a range. It is *seen* where the whole interval lies in the range,
*not seen* where all of it lies outside, and *not decidable at this scale* otherwise. The intervals
come from resampling what a study has drawn at random, its trials, and from K* being known to one
check interval; they do not know of other initial weights or data.

The claims on steps are judged on the medians over seeds where the best points were repeated, else
on K* (`curves`). The intervals of medians come from resampling the seeds, that is initial weights,
masks and orders of examples. Other points of the search might have had another best one: for that
`point_luck` is added to each cell.

Where a claim is about several series it is not seen if it is not seen at one of them, seen if it is
seen at all; which is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.intervals import PERCENTILES, REPLICATES, Interval, estimate
from lit_dps.analysis.law import MAX_MISFIT
from lit_dps.analysis.law_bootstrap import Scaling, bootstrap_median_law, median_draws, resample
from lit_dps.analysis.repeats import seeds_of
from lit_dps.core.racing import last_step
from lit_dps.core.trial import Cell, Series, Status

SEED = 0
# trials of a cell, points or batch sizes below which a bootstrap says too little to decide anything
FEWEST = 4
FEWEST_SHARED = 3  # words of a sentence that are worth saying once
MARGIN = 1.1  # factor within which two quantities count as equal
DENSE, SPARSE = 0.0, 0.9  # the sparsities that the paper compares
# Standard deviation of log K* between searches of 25 points. The next 75 lower it by 0.658, 0.346,
# 0.310, 0.260, 0.071, 0.069, 9 times 0 in dense cells, by 0.681, 0.616, 0.602, 0.428, 0.400, 0.396,
# 0.300, 0.258, 0.227, 0.160, 0.132, 0.129, twice 0 at S = 0.9: in mean square 1.5 variances of
# exponential excesses, of 0.18 and 0.31; not narrowed to it.
POINT_LUCK, LUCK_OF = {DENSE: 0.18, SPARSE: 0.35}, 25


class Verdict(StrEnum):
    """What a study says of a claim."""

    SEEN = "seen"
    NOT_SEEN = "not seen"
    UNDECIDABLE = "not decidable at this scale"

    @property
    def short(self) -> str:
        """The verdict on one of several series."""
        return "undecided" if self is Verdict.UNDECIDABLE else str(self)


class Finding(NamedTuple):
    """A verdict and the sentence with the numbers that it rests on."""

    verdict: Verdict
    measured: str
    apart: bool = False  # whether the paper's number lies outside the interval


class Estimate(NamedTuple):
    """A number with its interval, which is unbounded on the sides that the data leave open."""

    value: float
    interval: Interval

    def __str__(self) -> str:
        return estimate(self.value, self.interval)

    def map(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of an increasing function of the number."""
        return Estimate(function(self.value), Interval(*map(function, self.interval)))


def estimated(value: float, low: np.ndarray, high: np.ndarray | None = None) -> Estimate:
    """A number from all trials with the interval of its resamples, widened to hold it.

    Args:
        value: The number.
        low: (R,) of the resamples, nan where it could be anything; their lower limits, where
            `high`, (R,), has upper.
    """
    lowest = np.where(np.isnan(low), -np.inf, low)
    highest = low if high is None else high
    highest = np.where(np.isnan(highest), np.inf, highest)
    # Of the data themselves: an interpolated percentile does not survive infinities.
    ends = (
        np.percentile(x, p, method="inverted_cdf")
        for x, p in zip((lowest, highest), PERCENTILES, strict=True)
    )
    return Estimate(value, Interval(min(float(next(ends)), value), max(float(next(ends)), value)))


def decide(number: Estimate | None, above: float = -math.inf, to: float = math.inf) -> Verdict:
    """Whether the number lies in (above, to]; not decidable without a number."""
    if number is None:
        return Verdict.UNDECIDABLE
    low, high = number.interval
    if low > above and high <= to:
        return Verdict.SEEN
    return Verdict.NOT_SEEN if high <= above or low > to else Verdict.UNDECIDABLE


def if_reached(verdict: Verdict, reached: bool) -> Verdict:
    """The verdict on a claim about batches small or large enough; not seen only where a study
    reaches such ones."""
    return Verdict.UNDECIDABLE if verdict is Verdict.NOT_SEEN and not reached else verdict


def combined(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim that is about all of several cases."""
    found = set(verdicts)
    if Verdict.NOT_SEEN in found:
        return Verdict.NOT_SEEN
    return Verdict.SEEN if found == {Verdict.SEEN} else Verdict.UNDECIDABLE


def at_each(every: Iterable[Series], judge: Callable[[Series], Finding]) -> Finding:
    """The findings in some series as one."""
    found = {series: judge(series) for series in every}
    measured = together({str(series): finding.measured for series, finding in found.items()})
    by_verdict = {
        v: [str(s) for s, finding in found.items() if finding.verdict is v] for v in Verdict
    }
    if (
        len(
            several := [
                f"{v.short} at {', '.join(names)}" for v, names in by_verdict.items() if names
            ]
        )
        > 1
    ):
        measured += f"; {', '.join(several)}"
    return Finding(
        combined(by.verdict for by in found.values()),
        measured,
        any(by.apart for by in found.values()),
    )


def together(said: Mapping[str, str]) -> str:
    """What is said of several, in a sentence: what all say, or all say before the number, up to a
    colon or =, once."""
    if len(set(said.values())) == 1:
        return f"{', '.join(said)}: {next(iter(said.values()))}"
    words = {name: sentence.split(" ") for name, sentence in said.items()}
    least = min(words.values(), key=len, default=[])
    before = next((i for i, word in enumerate(least, 1) if word.endswith((":", "="))), 0)
    shared = least[:before]
    if before < FEWEST_SHARED or any(sentence[:before] != shared for sentence in words.values()):
        return "; ".join(f"{name}: {sentence}" for name, sentence in said.items())
    each = (f"{' '.join(sentence[before:])} at {name}" for name, sentence in words.items())
    return " ".join([*shared, "; ".join(each)])


def at_each_pair(
    study: Analysis, judge: Callable[[Series, Series], Finding | None]
) -> Finding | None:
    """The findings on each sparse series and its dense one as one; None where there is none."""
    dense = {series.axes: series for series in study.record.series if series.sparsity == DENSE}
    pairs = {
        s: dense[s.axes] for s in study.record.series if s.sparsity == SPARSE and s.axes in dense
    }
    found = {s: finding for s, base in pairs.items() if (finding := judge(s, base)) is not None}
    if any(series.axes for series in found):
        return at_each(found, lambda series: found[series])
    return next(iter(found.values()), None)


def repeated(study: Analysis, *every: Series) -> bool:
    """Whether the claims on steps are judged on the medians over seeds of some series, all of them,
    in place of K*.

    So they are where every K* of each was repeated on `FEWEST` seeds at least: a median is no
    minimum, so that its resamples do not lean, and where trials stop at K* a resample of trials
    without the best one says nothing. Series that are compared are judged alike, since a K* is
    luckier than a median.
    """
    seeds = seeds_of(study.repeats)
    return all(
        series in study.median_scalings
        and study.median_scalings[series].k_star.keys() == study.scalings[series].k_star.keys()
        and all(len(steps) >= FEWEST for steps in seeds[series].values())
        for series in every
    )


def curves(study: Analysis, *every: Series) -> list[Scaling]:
    """What the claims on steps are judged on: the laws of the medians of some series (`repeated`),
    else those of K*."""
    if not repeated(study, *every):
        return [study.scalings[series] for series in every]
    seeds, check = seeds_of(study.repeats), study.record.goal.check_interval
    return [
        bootstrap_median_law(
            seeds[s], check, study.replicates, name=study.name_of(s), luck=point_luck(study, s)
        )
        for s in every
    ]


def point_luck(study: Analysis, series: Series) -> float:
    """The standard deviation of log K* of a cell between searches of other points, as many as in
    the least cell.

    It falls at least with their square root: the nearest of n points is nearer to the best one by n
    to the power of one over the dimensions, here one or two, and K is smooth around it.
    """
    fewest = max(1, min(len(cell.trials) for cell in study.cells))
    return POINT_LUCK[DENSE if series.sparsity == DENSE else SPARSE] * math.sqrt(LUCK_OF / fewest)


def k_star_draws(
    study: Analysis, cell: Cell, medians: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper limits, each (R,) in steps, of K* of the resamples of a cell.

    The goal was met after the last check that missed it, and a resample without a complete trial
    would have met it after the budget, or where trials were outraced, or where the first was
    stopped by its module or a callback. Failed trials tell nothing. Cells of one batch size with as
    many trials are resampled by the same points of the search. Fewer than `FEWEST` trials give 0
    and infinity. For `medians` (`repeated`), medians of resamples of the repeats: at least that of
    the repeats that met the goal where it is at one that missed it.
    """
    found, goal = study.by_cell[cell], study.record.goal
    if medians:
        seeds, name = (
            seeds_of(study.repeats)[cell.series][cell.batch_size],
            study.name_of(cell.series),
        )
        drawn = median_draws(
            seeds, REPLICATES, (SEED, cell.batch_size), name, point_luck(study, cell.series)
        )
        least = np.where(
            np.isfinite(drawn), drawn, np.median([k for k in seeds if math.isfinite(k)])
        )
        return least - goal.check_interval, drawn
    if len(found.trials) < FEWEST:
        return np.zeros(REPLICATES), np.full(REPLICATES, np.inf)
    drawn = resample(found.steps, REPLICATES, (SEED, cell.batch_size))
    stopped = [result.steps_run for result in found.trials if result.status is Status.STOPPED]
    known = min(last_step(found.k_star, study.record.race_factor), goal.max_steps, *stopped)
    met = np.isfinite(drawn)
    return np.where(met, drawn - goal.check_interval, known), np.where(met, drawn, np.inf)


def log_ratio(
    over: tuple[np.ndarray, np.ndarray], under: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, ...]:
    """Limits of log(over / under), from those of both: (R,) lower and (R,) upper."""
    with np.errstate(divide="ignore"):  # a lower limit of 0 steps
        return np.log(over[0]) - np.log(under[1]), np.log(over[1]) - np.log(under[0])


def fit_ratio(
    over: Scaling, under: Scaling, value: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, np.ndarray] | None:
    """The ratio of `value` of c1 and c2 of two fitted laws, and its resamples; None where a law has
    none.

    The resamples of the two go together as they come: trials of one study at two sparsities are
    resampled by the same points, repeats independently.
    """
    count = min(len(over.replicates), len(under.replicates))
    if over.fit is None or under.fit is None or not count:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = [value(*law.replicates[:count].T) for law in (over, under)]
        whole = [value(np.array(law.fit.c1), np.array(law.fit.c2)) for law in (over, under)]
        return float(np.divide(*whole)), np.divide(*drawn)


def misfits(laws: Mapping[str, Scaling]) -> str:
    """Which of some fitted laws miss what they are fitted to, so that their constants say little;
    "" where none."""
    off = [
        f"by {law.misfit:.0%} at {name}" for name, law in laws.items() if law.misfit > MAX_MISFIT
    ]
    return f"c1 / B + c2 misses K* {', '.join(off)}" if off else ""
