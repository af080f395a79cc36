"""Answers the question behind a study: which batch size is the fastest on this machine.

`expected_steps` takes the steps to the goal from the law of batch size where it describes K, since
a single K* is noisy; `answer_rows` multiplies them with the seconds of a step.
`lit_dps.report.answer` says it in words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import NORMAL_95
from lit_dps.analysis.law import Law
from lit_dps.analysis.repeats import RepeatSummary
from lit_dps.analysis.step_seconds import StepSeconds
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame, rows_of
from lit_dps.core.trial import Cell, Series

# What a law is fitted to.
K_STAR = "K*"
MEDIAN = "the median K over seeds"

MIN_SEEDS = 3  # repeats of each K* on whose medians the answer may rest
NEAR = 1.1  # times the least time
# A batch size belongs to the verdict if it is the fastest with at least this probability.
MIN_PROBABILITY = 0.05
DRAWS = 4000
NORMAL_QUARTILE = 0.6745


class Steps(NamedTuple):
    """Steps to the goal with 95 % limits.

    Attributes:
        value, low, high: The steps and their limits; these are nan where they are not known.
        of: What they are: "K*" or "the median K over seeds".
        why: Why they are not from its law; empty where they are.
    """

    value: float
    low: float
    high: float
    of: str
    why: str


def expected_steps(
    cells: Sequence[CellSummary],
    laws: Mapping[Series, Law],
    median_laws: Mapping[Series, Law],
    repeats: Sequence[RepeatSummary] = (),
) -> dict[Cell, Steps]:
    """Return the steps to the goal of each cell that has a K*.

    They are from the law of its series, where that describes K, between the batch sizes that it is
    fitted to; else K itself. K is the median over seeds where each K* of the series has `MIN_SEEDS`
    repeats, for one run is seldom as lucky as the best of many; else K*.

    Args:
        cells: Of a study.
        laws, median_laws: By series, of K* and of medians over seeds.
        repeats: Of the best points.
    """
    counts = {each.cell: len(each.results) for each in repeats if each.rank == 1}
    steps = {}
    for series, law in laws.items():
        answered = []
        for summary in cells:
            if summary.cell.series == series and summary.k_star is not None:
                answered.append(summary)
        has_seeds = all(counts.get(summary.cell, 0) >= MIN_SEEDS for summary in answered)
        if has_seeds and series in median_laws:
            medians = median_laws[series].k_star
            if all(summary.cell.batch_size in medians for summary in answered):
                law = median_laws[series]
        steps |= _steps_by_law(law, answered)
    return steps


def _steps_by_law(law: Law, answered: Sequence[CellSummary]) -> dict[Cell, Steps]:
    """Return the expected steps of the cells of one series that have a K*."""
    statistic = MEDIAN if law.of_medians else K_STAR
    predictions = law.predict([summary.cell.batch_size for summary in answered])
    steps = {}
    for summary, row in zip(answered, predictions.to_dict("records"), strict=True):
        limits = float(row["steps"]), float(row["low"]), float(row["high"])
        if row["known"] == "law":
            steps[summary.cell] = Steps(*limits, statistic, "")
        elif row["known"] == "measured":
            steps[summary.cell] = Steps(*limits, statistic, str(law.verdict))
        else:
            # Beyond what the law is fitted to: a bound, or too few trials.
            assert summary.k_star is not None
            k = float(law.k_star.get(summary.cell.batch_size, summary.k_star))
            why = "K is an upper bound there"
            steps[summary.cell] = Steps(k, math.nan, math.nan, statistic, why)
    return steps


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
        cell = summary.cell
        if summary.k_star is None:
            continue
        steps = Steps(summary.k_star, math.nan, math.nan, K_STAR, "")
        if expected is not None and cell in expected:
            steps = expected[cell]
        rows.append(_row(summary, steps, seconds.get(cell), validate_every))
    table = frame(rows)
    if not len(table):
        return table
    table["probability"] = table["probability"].astype(float)
    for series in dict.fromkeys(summary.cell.series for summary in cells):
        part = rows_of(series, table)
        if len(part):
            _mark(table, part)
    return table


def _row(
    summary: CellSummary,
    steps: Steps,
    times: StepSeconds | None,
    validate_every: int | None,
) -> dict[str, object]:
    """Return the row of a cell, before rows of its series are compared."""
    k_star = summary.k_star
    assert k_star is not None
    batch_size = summary.cell.batch_size
    # Columns keep this order, also where times are missing.
    row: dict[str, object] = {
        **columns_of(summary.cell.series),
        "batch_size": batch_size,
        "k_star": k_star,
        "floor": int(summary.is_upper_bound),
        "examples": k_star * batch_size,
        "step_seconds": None,
        "step_low": None,
        "step_high": None,
        "seconds": None,
        "fastest": False,
        "near": False,
        "fewest": False,
        "training_seconds": None,
        "check_seconds": None,
        "steps": steps.value,
        "steps_low": steps.low,
        "steps_high": steps.high,
        "seconds_low": None,
        "seconds_high": None,
        "steps_of": steps.of,
        "why_not_law": steps.why,
        "validation_seconds": None,
        "probability": None,
        "tied": False,
        "timing": None,
    }
    if times is None:
        return row
    row |= {
        "step_seconds": times.median,
        "step_low": times.low,
        "step_high": times.high,
        "seconds": steps.value * times.median,
        "training_seconds": times.training,
        "check_seconds": times.check,
        "timing": times.source,
    }
    if not math.isnan(steps.low):
        row["seconds_low"], row["seconds_high"] = _limits(steps, times)
    if validate_every is not None and not math.isnan(times.check):
        row["validation_seconds"] = math.ceil(steps.value / validate_every) * times.check
    return row


def _limits(steps: Steps, times: StepSeconds) -> tuple[float, float]:
    """Return the 95 % limits of the seconds to the goal.

    The limits of the steps and the spread of step times, a normal distribution of the logarithm
    with the measured quartiles, are taken to be independent.
    """
    wide = NORMAL_95 / NORMAL_QUARTILE
    below = math.hypot(math.log(steps.value / steps.low), wide * math.log(times.median / times.low))
    above = math.hypot(
        math.log(steps.high / steps.value), wide * math.log(times.high / times.median)
    )
    seconds = steps.value * times.median
    return seconds * math.exp(-below), seconds * math.exp(above)


def _mark(table: pd.DataFrame, part: Any) -> None:
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


def probabilities_of_fastest(rows: Any) -> np.ndarray:
    """Return the probability that each row (n,) has the least time to the goal.

    The logarithm of each time is drawn `DRAWS` times from a normal distribution whose sides have
    the 95 % limits of the row. Rows are independent. That overstates the uncertainty of
    differences, since the law has a common error, and so errs on the side of more batch sizes in
    the verdict. The draws are the same at every call.

    Args:
        rows: A table with columns seconds, seconds_low and seconds_high. A row without limits is
            taken as exact.
    """
    seconds = rows["seconds"].astype(float)
    middle = np.log(seconds).to_numpy()
    low = np.log(rows["seconds_low"].astype(float).fillna(seconds)).to_numpy()
    high = np.log(rows["seconds_high"].astype(float).fillna(seconds)).to_numpy()
    below = (middle - low) / NORMAL_95
    above = (high - middle) / NORMAL_95
    deviates = np.random.default_rng(0).standard_normal((DRAWS, len(rows)))
    spread = np.where(deviates < 0, below, above)
    fastest = (middle + spread * deviates).argmin(axis=1)
    return np.bincount(fastest, minlength=len(rows)) / DRAWS
