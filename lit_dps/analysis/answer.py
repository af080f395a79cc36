"""The answer of a study: which batch size is the fastest on this machine.

`expected_steps` takes the steps to the goal from the law of batch size where it describes K, since
a single K* is noisy; `answer_rows` multiplies them with the seconds of a step.
`lit_dps.report.answer` writes it in words.
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
from lit_dps.analysis.step_seconds import OWN_CLOCK, StepSeconds, seconds_to_goal
from lit_dps.analysis.summary import CellSummary, by_series
from lit_dps.analysis.tables import Row, columns_of, frame
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series
from lit_dps.core.unit import EXAMPLES

# What a law is fitted to.
K_STAR = "K*"
MEDIAN = "the median K over seeds"

# Repeats that each K* of a series needs before its answer is by medians.
MIN_SEEDS = 3
# A batch size is near the fastest if its time is below this multiple of the least time.
NEAR = 1.1
# A batch size belongs to the answer if it is the fastest with at least this probability.
MIN_PROBABILITY = 0.05
TIME_DRAWS = 4000
# Decimal places to which examples are compared.
_EXAMPLE_DIGITS = 3
# Distance of a quartile from the mean of a normal distribution, in standard deviations.
NORMAL_QUARTILE = 0.6745
_UNTIMED = StepSeconds(math.nan, math.nan, math.nan, source="")


class ExpectedSteps(NamedTuple):
    """Steps to the goal with 95 % limits.

    Attributes:
        value, low, high: The steps and their limits, nan if unknown.
        statistic: What they are: `K_STAR` or `MEDIAN`.
        why_not_law: Why they are not from its law; empty if they are.
        seconds: The time to the goal with its limits, if it is not from the seconds of a step: K*
            in seconds; or, if the batch size changes along a trial, by the clock of the runs.
        is_bound: Whether the steps and the time are upper bounds.
        is_first_check: Whether they are bounds since the steps are at the first check.
        examples: The examples of the steps, if that is the unit of K*; else None.
    """

    value: float
    low: float
    high: float
    statistic: str
    why_not_law: str
    seconds: tuple[float, float, float] | None = None
    is_bound: bool = False
    is_first_check: bool = False
    examples: float | None = None


def expected_steps(
    record: StudyRecord,
    cells: Sequence[CellSummary],
    laws: Mapping[Series, Law],
    repeats: Mapping[Cell, RepeatSummary],
) -> dict[Cell, ExpectedSteps]:
    """Return the steps to the goal of each cell that has a K*.

    They are from the law of its series if that describes K, between the batch sizes that it is
    fitted to; else K itself. Steps and seconds are of the same statistic.

    Args:
        record: The study.
        cells: Its cells.
        laws: Of K* or of medians over seeds, by series.
        repeats: Repeats of the best point of each cell that has some.
    """
    expected = {}
    answered = by_series(summary for summary in cells if summary.k_star is not None)
    for series, summaries in answered.items():
        by_law = _steps_by_law(laws[series], summaries, repeats)
        for summary in summaries:
            steps = by_law[summary.cell]
            repeated = repeats.get(summary.cell) if steps.statistic == MEDIAN else None
            expected[summary.cell] = _of_runs(record, summary, steps, repeated)
    return expected


def _of_runs(
    record: StudyRecord, summary: CellSummary, steps: ExpectedSteps, repeated: RepeatSummary | None
) -> ExpectedSteps:
    """Return steps with what only the runs of a cell know: K* in seconds, and other batches.

    Args:
        record: The study.
        summary: The cell, which has a K*.
        steps: Its K by the law or itself, in seconds if that is the unit.
        repeated: The repeats whose median K is; None if K is K*.
    """
    if not record.goal.cost_unit.has_law:
        runs = float(summary.k_star_steps or 0)
        if repeated is not None:
            runs = repeated.median_of(lambda result: result.steps)
        seconds = (steps.value, steps.low, steps.high)
        return steps._replace(value=runs, low=math.nan, high=math.nan, seconds=seconds)
    if record.goal.cost_unit is EXAMPLES:
        steps = _on_trained_batches(steps, summary)
    if record.has_constant_batch(summary.cell):
        return steps
    clock = None
    if repeated is not None:
        clock = repeated.median_of(seconds_to_goal)
    elif summary.best is not None and summary.best.steps == summary.k_star_steps:
        clock = seconds_to_goal(summary.best)
    return steps._replace(seconds=(math.nan if clock is None else clock, math.nan, math.nan))


def _on_trained_batches(steps: ExpectedSteps, summary: CellSummary) -> ExpectedSteps:
    """Return steps on full batches as steps on batches of the mean size of the trial of K*.

    The last batch of each epoch may be short.
    """
    best = summary.best
    if best is None or not best.steps or not best.cost:
        return steps
    batch_size = summary.cell.batch_size
    factor = batch_size * best.steps / best.cost
    return steps._replace(
        # K* itself is then whole steps again.
        value=round(steps.value * factor, 6),
        low=steps.low * factor,
        high=steps.high * factor,
        examples=steps.value * batch_size,
    )


def _steps_by_law(
    law: Law, cells: Sequence[CellSummary], repeats: Mapping[Cell, RepeatSummary]
) -> dict[Cell, ExpectedSteps]:
    """Return the expected steps of cells of one series that have a K*."""
    statistic = K_STAR
    if law.uses_medians:
        statistic = MEDIAN
    steps = {}
    predictions = law.predict([summary.cell.batch_size for summary in cells])
    for summary, row in zip(cells, predictions.to_dict("records"), strict=True):
        limits = float(row["steps"]), float(row["low"]), float(row["high"])
        if row["known"] == "law":
            steps[summary.cell] = ExpectedSteps(*limits, statistic, "")
        elif row["known"] == "measured":
            steps[summary.cell] = ExpectedSteps(*limits, statistic, str(law.verdict))
        else:
            # K is an upper bound: it is at the first check, or runs have no result yet.
            assert summary.k_star is not None
            is_first = summary.is_at_first_check
            if statistic == MEDIAN:
                repeated = repeats[summary.cell]
                is_first = repeated.is_at_first_check(repeated.quantile(0.5))
            batch_size = summary.cell.batch_size
            k_star = summary.k_star / law.unit.per_step(batch_size)
            k = float(law.k_star.get(batch_size, k_star))
            steps[summary.cell] = ExpectedSteps(
                value=k,
                low=math.nan,
                high=math.nan,
                statistic=statistic,
                why_not_law="K is an upper bound there",
                is_bound=True,
                is_first_check=is_first,
            )
    return steps


def answer_rows(
    record: StudyRecord,
    cells: Sequence[CellSummary],
    seconds: Mapping[Cell, StepSeconds],
    expected: Mapping[Cell, ExpectedSteps] | None = None,
    validate_every: int | None = None,
) -> pd.DataFrame:
    """Return one row for each cell that has a K*, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], k_star [steps, or `goal.unit`], floor
    (1 where K* is an upper bound), examples (of these steps), step_seconds with step_low and
    step_high (median and quartiles of a training step, without checks), seconds (steps x
    step_seconds, or `ExpectedSteps.seconds`; without the start of a trial and without validation),
    fastest (least total_seconds of the series), near (within 10 % of the fastest), fewest (least
    examples of the series), training_seconds (as step_seconds; missing if the trials do not
    separate steps from checks) and check_seconds (of one validation); steps to the goal with
    steps_low and steps_high (95 %), as `expected`, else K*; steps_floor (1 where these steps, their
    examples and all times to the goal are upper bounds); seconds_low and seconds_high (95 %),
    from these and the spread of step times; steps_of and why_not_law, as in `ExpectedSteps`;
    validation_seconds (of all validations up to the goal, one every `validate_every` steps; missing
    without it), probability (of being the fastest of the series, `probabilities_of_fastest`),
    tied (whether it may be the fastest by the rule of `MIN_PROBABILITY`), timing
    (`StepSeconds.source`, or `OWN_CLOCK` with `ExpectedSteps.seconds`), busy
    (`StepSeconds.is_busy`), total_seconds with total_low and total_high (`_add_totals`). Seconds
    are missing if they are unknown.
    """
    answered = by_series(summary for summary in cells if summary.k_star is not None)
    rows: list[dict[str, Any]] = []
    for summaries in answered.values():
        of_series = []
        are_first_checks = []
        for summary in summaries:
            steps = _steps_of_k_star(summary)
            if expected is not None:
                steps = expected.get(summary.cell, steps)
            are_first_checks.append(steps.is_first_check)
            times = seconds.get(summary.cell, _UNTIMED)
            of_series.append(_row(record, summary, steps, times, validate_every))
        _add_totals(of_series, validate_every)
        _add_marks(of_series, are_first_checks)
        rows += of_series
    return frame(rows)


def _steps_of_k_star(summary: CellSummary) -> ExpectedSteps:
    """Return the steps of the K* of a cell."""
    return ExpectedSteps(
        value=float(summary.k_star_steps or 0),
        low=math.nan,
        high=math.nan,
        statistic=K_STAR,
        why_not_law="",
        is_bound=summary.is_upper_bound,
        is_first_check=summary.is_at_first_check,
    )


def _add_totals(rows: Sequence[dict[str, Any]], validate_every: int | None) -> None:
    """Set the times to the goal that are compared: total_seconds, total_low and total_high.

    They are `seconds` and its limits, plus the seconds of all validations if these are known for a
    row of the series. A row without them then has no total, since it cannot be compared. The limits
    add the validations at the limits of the steps.
    """
    has_validations = not all(math.isnan(row["validation_seconds"]) for row in rows)
    for row in rows:
        for total, seconds, steps in (
            ("total_seconds", "seconds", "steps"),
            ("total_low", "seconds_low", "steps_low"),
            ("total_high", "seconds_high", "steps_high"),
        ):
            row[total] = row[seconds]
            if has_validations and validate_every is not None:
                known_steps = row["steps"] if math.isnan(row[steps]) else row[steps]
                row[total] += np.ceil(known_steps / validate_every) * row["check_seconds"]


def is_upper_bound(row: Row) -> bool:
    """Return True if steps, examples and seconds of a row of `answer_rows` are upper bounds.

    They are where K* or the median is an upper bound and the law has no better value.
    """
    return bool(row["steps_floor"])


def fastest_of(answers: Mapping[Cell, Row]) -> Cell | None:
    """Return the cell of the least time to the goal; None if no time is known.

    If validations are timed, only cells with their time are compared.
    """
    timed = [cell for cell, row in answers.items() if row["total_seconds"] is not None]
    validated = [cell for cell in timed if answers[cell]["validation_seconds"] is not None]
    return min(validated or timed, key=lambda cell: answers[cell]["total_seconds"], default=None)


def _row(
    record: StudyRecord,
    summary: CellSummary,
    steps: ExpectedSteps,
    times: StepSeconds,
    validate_every: int | None,
) -> dict[str, Any]:
    """Return the row of a cell without comparisons with its series."""
    timing = times.source or None
    seconds = steps.value * times.median
    low, high = _limits(steps, times)
    if steps.seconds is not None:
        seconds, *limits = steps.seconds
        if not math.isnan(limits[0]):
            low, high = limits
        timing = None if math.isnan(seconds) else OWN_CLOCK
    examples = steps.examples
    if examples is None:
        examples = record.examples_of(summary.cell, steps.value, summary.best)
    validation = math.nan
    if validate_every is not None and not math.isnan(times.check):
        validation = math.ceil(steps.value / validate_every) * times.check
    return {
        **columns_of(summary.cell.series),
        "batch_size": summary.cell.batch_size,
        "k_star": summary.k_star,
        "floor": int(summary.is_upper_bound),
        "examples": examples,
        "step_seconds": times.median,
        "step_low": times.low,
        "step_high": times.high,
        "seconds": seconds,
        **dict.fromkeys(("fastest", "near", "fewest"), False),
        "training_seconds": times.training,
        "check_seconds": times.check,
        "steps": steps.value,
        "steps_low": steps.low,
        "steps_high": steps.high,
        "steps_floor": int(steps.is_bound),
        "seconds_low": low,
        "seconds_high": high,
        "steps_of": steps.statistic,
        "why_not_law": steps.why_not_law,
        "validation_seconds": validation,
        "probability": math.nan,
        "tied": False,
        "timing": timing,
        "busy": times.is_busy,
        **dict.fromkeys(("total_seconds", "total_low", "total_high"), math.nan),
    }


def _limits(steps: ExpectedSteps, times: StepSeconds) -> tuple[float, float]:
    """Return the 95 % limits of the seconds to the goal; nan if the steps have none.

    The limits of the steps and the spread of step times are assumed to be independent. The
    logarithm of step times is assumed to be normal, with the measured quartiles.
    """
    if math.isnan(steps.low):
        return math.nan, math.nan
    wide = NORMAL_95 / NORMAL_QUARTILE
    below = math.hypot(math.log(steps.value / steps.low), wide * math.log(times.median / times.low))
    above = math.hypot(
        math.log(steps.high / steps.value), wide * math.log(times.high / times.median)
    )
    seconds = steps.value * times.median
    return seconds * math.exp(-below), seconds * math.exp(above)


def _add_marks(rows: Sequence[dict[str, Any]], are_first_checks: Sequence[bool]) -> None:
    """Set fastest, near, fewest, probability and tied of the rows of one series.

    The marks of time compare the total times (`_add_totals`).

    Args:
        rows: The rows (n,).
        are_first_checks: (n,), whether the steps are at the first check, an upper bound.
    """
    # Without c2 a law needs the same examples at each batch size, but for rounding.
    examples = np.array([row["examples"] for row in rows], float).round(_EXAMPLE_DIGITS)
    rows[int(np.nanargmin(examples))]["fewest"] = True
    timed = []
    are_bounds = []
    for row, is_first in zip(rows, are_first_checks, strict=True):
        if not math.isnan(row["total_seconds"]):
            timed.append(row)
            are_bounds.append(is_first)
    if not timed:
        return
    fastest = min(timed, key=lambda row: row["total_seconds"])
    fastest |= {"fastest": True, "tied": True}
    for row in timed:
        row["near"] = bool(row["total_seconds"] <= NEAR * fastest["total_seconds"])
        # A batch size without an interval has no probability. Then 10 % is the rule.
        row["tied"] |= row["near"] and math.isnan(row["total_low"])
    if all(math.isnan(row["total_low"]) for row in timed) and not any(are_bounds):
        return
    probabilities = probabilities_of_fastest(pd.DataFrame(timed), np.array(are_bounds))
    for row, probability in zip(timed, probabilities.tolist(), strict=True):
        row["probability"] = probability
        row["tied"] |= probability >= MIN_PROBABILITY


def probabilities_of_fastest(rows: Any, are_bounds: np.ndarray | None = None) -> np.ndarray:
    """Return the probability that each row (n,) has the least time to the goal.

    The logarithm of each time is drawn `TIME_DRAWS` times from a normal distribution whose sides
    have the 95 % limits of the row. Rows are independent. That overstates the uncertainty of
    differences, since the error of the law is common, and puts more batch sizes into the answer.
    A time to the first check is drawn uniformly from 0 to this bound. Another upper bound,
    as of a cell with few trials, counts as it is. The draws are the same at every call.

    Args:
        rows: A table with columns total_seconds, total_low and total_high. A row without limits
            counts as exact, unless it is a bound.
        are_bounds: (n,), whether a time is to the first check, a bound; by default none is.
    """
    seconds = rows["total_seconds"].astype(float)
    middle = np.log(seconds).to_numpy()
    low = np.log(rows["total_low"].astype(float).fillna(seconds)).to_numpy()
    high = np.log(rows["total_high"].astype(float).fillna(seconds)).to_numpy()
    below = (middle - low) / NORMAL_95
    above = (high - middle) / NORMAL_95
    random = np.random.default_rng(0)
    deviates = random.standard_normal((TIME_DRAWS, len(rows)))
    spread = np.where(deviates < 0, below, above)
    drawn = middle + spread * deviates
    if are_bounds is not None and are_bounds.any():
        uniform = random.uniform(size=(TIME_DRAWS, int(are_bounds.sum())))
        drawn[:, are_bounds] = middle[are_bounds] + np.log1p(-uniform)
    fastest = drawn.argmin(axis=1)
    return np.bincount(fastest, minlength=len(rows)) / TIME_DRAWS
