"""Answers the question behind a study: which batch size is the fastest on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from lit_dps.analysis.expected_steps import K_STAR, Steps
from lit_dps.analysis.step_seconds import StepSeconds
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame, rows_of
from lit_dps.core.trial import Cell

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
