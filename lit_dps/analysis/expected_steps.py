"""Steps to the goal as an answer takes them: by the law of batch size where it serves, since a
single K* is noisy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.fit import AT_LEAST, AT_MOST
from lit_dps.analysis.law import law_of
from lit_dps.analysis.observations import Observation, medians
from lit_dps.analysis.repeats import RepeatSummary
from lit_dps.analysis.scaling import FEWEST_SEEDS, resample
from lit_dps.analysis.summary import CellSummary
from lit_dps.core.progress_line import with_progress
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import short_names
from lit_dps.core.trial import Cell, Status

REPLICATES = 200
K_STAR, MEDIAN = "K*", "the median K over seeds"  # what a law is fitted to


class Steps(NamedTuple):
    """Steps to the goal and their 95 % limits, nan where none are known.

    `of` says whose: "K*" or "the median K over seeds"; `why` why they are not by its law, empty
    where they are.
    """

    value: float
    low: float
    high: float
    of: str
    why: str


def observed(record: StudyRecord, cell: CellSummary) -> Observation | None:
    """What the trials of a cell say of K, maybe a bound.

    The noise of log K* is that of the best of as many trials, resampled. Where no trial met the
    goal, the budget is a lower bound of K as far as every one of them spent it. Where more than
    half of the trials were not run, K* is an upper bound: a search goes on to better rates.
    """
    goal, size = record.goal, float(cell.cell.batch_size)
    if cell.k_star is None:
        spent = [r for r in cell.trials if r.status in (Status.INCOMPLETE, Status.INFEASIBLE)]
        whole = (
            bool(cell.trials)
            and not (cell.pending or cell.undetermined_points)
            and len(spent) == len(cell.trials)
        )
        return Observation(size, float(goal.max_steps), bound=AT_LEAST) if whole else None
    if cell.at_first_check or 2 * (cell.pending + len(cell.undetermined_points)) > record.trials:
        return Observation(size, float(cell.k_star), bound=AT_MOST)
    found = np.asarray(resample(cell.steps, REPLICATES, (0, int(size))), float)
    found = found[np.isfinite(found) & (found > 0)]
    noise = float(np.log(found).std()) if len(found) > 1 else 0.0
    names = short_names(list(record.space))
    edge = ", ".join(f"{names[key]} {end}" for key, end in cell.boundary.items())
    return Observation(size, float(cell.k_star), noise, float(goal.check_interval), edge=edge)


def expected_steps(
    record: StudyRecord, cells: Sequence[CellSummary], repeats: Sequence[RepeatSummary] = ()
) -> dict[Cell, Steps]:
    """Steps to the goal of each cell that has a K*.

    They are those of the law of its series (`law_of`), where that is not refused, between the batch
    sizes that it is fitted to; else K itself. K is the median over seeds where each K* of the
    series has `FEWEST_SEEDS` repeats, for one run is seldom as lucky as the best of many; else K*.
    """
    found = {}
    for series in with_progress("expected steps", record.series):
        own = [summary for summary in cells if summary.cell.series == series]
        known = [summary for summary in own if summary.k_star is not None]
        if not known:
            continue
        of, observations = K_STAR, [o for summary in own if (o := observed(record, summary))]
        if (over_seeds := _medians(record, known, repeats)) is not None:
            of, observations = MEDIAN, over_seeds
        law = law_of(observations)
        at = {o.batch_size: o for o in observations}
        rows = law.predict([summary.cell.batch_size for summary in known]).to_dict("records")
        for summary, row in zip(known, rows, strict=True):
            limits = float(row["steps"]), float(row["low"]), float(row["high"])
            if row["known"] == "law":
                found[summary.cell] = Steps(*limits, of, "")
            elif row["known"] == "measured":
                found[summary.cell] = Steps(*limits, of, str(law.refused))
            else:  # beyond what the law is fitted to: a bound, or too few trials
                k = (
                    at[row["batch_size"]].steps
                    if row["batch_size"] in at
                    else float(summary.k_star)
                )
                found[summary.cell] = Steps(k, math.nan, math.nan, of, "K is an upper bound there")
    return found


def _medians(
    record: StudyRecord, known: Sequence[CellSummary], repeats: Sequence[RepeatSummary]
) -> list[Observation] | None:
    """The median over seeds of each cell; None where a cell has too few repeats, or most of them
    missed the goal."""
    best = {each.cell: each for each in repeats if each.rank == 1}
    if any(len(best[s.cell].results) < FEWEST_SEEDS if s.cell in best else True for s in known):
        return None
    interval = record.goal.check_interval
    rows = [
        {
            "batch_size": s.cell.batch_size,
            "steps": bound,
            "censored": math.isinf(k),
            "check": interval,
        }
        for s in known
        for k, bound in zip(best[s.cell].known, best[s.cell].bounded, strict=True)
    ]
    found = medians(pd.DataFrame(rows))
    if any(o.bound for o in found):
        return None
    return [replace(o, bound=AT_MOST, check=0.0) if o.steps <= interval else o for o in found]
