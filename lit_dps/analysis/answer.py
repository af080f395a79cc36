"""Steps to the goal as an answer takes them: by the law of batch size where it serves, since a
single K* is noisy.

Answers the question behind a study: which batch size is the fastest on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.law import law_of
from lit_dps.analysis.law_bootstrap import FEWEST_SEEDS
from lit_dps.analysis.law_fit import AT_MOST
from lit_dps.analysis.observations import Observation, medians, observed
from lit_dps.analysis.repeats import RepeatSummary
from lit_dps.analysis.step_seconds import StepSeconds
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame, rows_of
from lit_dps.core.progress_line import with_progress
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell

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


NEAR = 1.1  # times the least time


# A batch size belongs to the verdict if it is the fastest with at least this probability.
MIN_PROBABILITY = 0.05


DRAWS = 4000


NORMAL_95 = 1.96


NORMAL_QUARTILE = 0.6745


def answer_rows(
    cells: Sequence[CellSummary],
    seconds: Mapping[Cell, StepSeconds],
    expected: Mapping[Cell, Steps] | None = None,
    validate_every: int | None = None,
) -> pd.DataFrame:
    """Return one row for each cell that has a K*, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], k_star [steps], floor (1 where K* is
    an upper bound, and so is examples), examples (K* B), step_seconds with step_low and step_high
    (median and quartiles of a training step, without checks), seconds (steps x step_seconds;
    without the start of a trial and without validation), fastest (least seconds of the series),
    near (within 10 % of the fastest), fewest (least examples of the series), training_seconds (as
    step_seconds; missing where the trials do not separate steps from checks) and check_seconds (of
    one validation); steps to the goal with steps_low and steps_high (95 %), as `expected`, else K*;
    seconds_low and seconds_high (95 %), from these and the spread of step times; steps_of and
    why_not_law, as in `Steps`; validation_seconds (of all validations up to the goal, one every
    `validate_every` steps; missing without it), probability (of being the fastest of the series,
    `probabilities_of_fastest`), tied (whether it may be the fastest by the rule of
    `MIN_PROBABILITY`), timing (`StepSeconds.source`). Seconds are missing where they are not known.
    """
    rows = []
    for summary in cells:
        if summary.k_star is None:
            continue
        cell, k_star, each = summary.cell, summary.k_star, seconds.get(summary.cell)
        steps = (expected or {}).get(cell) or Steps(k_star, math.nan, math.nan, K_STAR, "")
        row = {
            **columns_of(cell.series),
            "batch_size": cell.batch_size,
            "k_star": k_star,
            "floor": int(summary.at_first_check),
            "examples": k_star * cell.batch_size,
            "step_seconds": None if each is None else each.median,
            "step_low": None if each is None else each.low,
            "step_high": None if each is None else each.high,
            "seconds": None if each is None else steps.value * each.median,
            "fastest": False,
            "near": False,
            "fewest": False,
            "training_seconds": None if each is None else each.training,
            "check_seconds": None if each is None else each.check,
            "steps": steps.value,
            "steps_low": steps.low,
            "steps_high": steps.high,
            **_limits(steps, each),
            "steps_of": steps.of,
            "why_not_law": steps.why,
            "validation_seconds": _validation_seconds(steps, each, validate_every),
            "probability": None,
            "tied": False,
            "timing": None if each is None else each.source,
        }
        rows.append(row)
    table = frame(rows)
    if not len(table):
        return table
    table["probability"] = table["probability"].astype(float)
    for series in dict.fromkeys(summary.cell.series for summary in cells):
        part = rows_of(series, table)
        if len(part):
            _mark(table, part)
    return table


def _mark(table: pd.DataFrame, part: pd.DataFrame) -> None:
    """Set the columns fastest, near, fewest, probability and tied of the rows of one series."""
    table.loc[part["examples"].astype(int).idxmin(), "fewest"] = True
    known = part["seconds"].astype(float)
    if known.isna().all():
        return
    best = known.idxmin()
    near = known <= NEAR * known.min()
    table.loc[best, "fastest"] = True
    table.loc[part.index[near], "near"] = True
    # A batch size without an interval has no probability; then 10 % is the rule.
    table.loc[part.index[near & part["seconds_low"].isna()], "tied"] = True
    table.loc[best, "tied"] = True
    if part["seconds_low"].isna().all():
        return
    timed = part[known.notna()]
    probability = probabilities_of_fastest(timed)
    table.loc[timed.index, "probability"] = probability
    table.loc[timed.index[probability >= MIN_PROBABILITY], "tied"] = True


def probabilities_of_fastest(rows: pd.DataFrame) -> np.ndarray:
    """Return the probability that each row (n,) has the least time to the goal.

    The logarithm of each time is drawn `DRAWS` times from a normal distribution whose sides have
    the 95 % limits of the row. Rows are independent. That overstates the uncertainty of
    differences, since the law has a common error, and so errs on the side of more batch sizes in
    the verdict. The draws are the same at every call.

    Args:
        rows: The columns seconds, seconds_low and seconds_high; a row without limits is taken as
            exact.
    """
    seconds = rows["seconds"].astype(float)
    middle = np.log(seconds)
    low = np.log(rows["seconds_low"].astype(float).fillna(seconds))
    high = np.log(rows["seconds_high"].astype(float).fillna(seconds))
    below = (middle - low).to_numpy() / NORMAL_95
    above = (high - middle).to_numpy() / NORMAL_95
    deviates = np.random.default_rng(0).standard_normal((DRAWS, len(rows)))
    spread = np.where(deviates < 0, below, above)
    fastest = (middle.to_numpy() + spread * deviates).argmin(axis=1)
    return np.bincount(fastest, minlength=len(rows)) / DRAWS


def _limits(steps: Steps, each: StepSeconds | None) -> dict[str, float | None]:
    """Return the 95 % limits of the seconds to the goal.

    Those of the steps and the spread of step times, a normal distribution of the logarithm with the
    quartiles that were measured, are taken to be independent.
    """
    if each is None or math.isnan(steps.low):
        return {"seconds_low": None, "seconds_high": None}
    wide = NORMAL_95 / NORMAL_QUARTILE
    below = math.hypot(math.log(steps.value / steps.low), wide * math.log(each.median / each.low))
    above = math.hypot(math.log(steps.high / steps.value), wide * math.log(each.high / each.median))
    seconds = steps.value * each.median
    return {"seconds_low": seconds * math.exp(-below), "seconds_high": seconds * math.exp(above)}


def _validation_seconds(
    steps: Steps, each: StepSeconds | None, validate_every: int | None
) -> float | None:
    """Return the seconds of all validations up to the goal; None if the interval or a validation is
    not known."""
    if validate_every is None or each is None or math.isnan(each.check):
        return None
    return math.ceil(steps.value / validate_every) * each.check
