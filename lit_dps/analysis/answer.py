"""Answers the question behind a study: which batch size is the fastest on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from lit_dps.analysis.expected_steps import K_STAR, Steps
from lit_dps.analysis.rate_law import RateLaw
from lit_dps.analysis.step_seconds import QUIET, TRIALS, WITH_CHECKS, StepSeconds
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import (
    Row,
    aligned,
    columns_of,
    frame,
    k_star_text,
    records,
    rows_of,
    short_columns,
    significant,
    three_digits,
)
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series

NEAR = 1.1  # times the least time
# A batch size belongs to the verdict if it is the fastest with at least this probability.
MIN_PROBABILITY = 0.05
DRAWS = 4000
LIMITS = "95 % interval of the time"
NORMAL_95 = 1.96
NORMAL_QUARTILE = 0.6745
# Ratio of the quartiles of a cell's seconds a step above which the text says that the machine was
# busy.
BUSY = 1.25
TIED = "not told apart"


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


def answer_text(
    record: StudyRecord,
    cells: Sequence[CellSummary],
    table: pd.DataFrame,
    rates: Mapping[Series, RateLaw | None],
    validate_every: int | None = None,
) -> str:
    """Return the first section of a report: which batch size is the fastest here; empty without any
    K*.

    Args:
        record, cells: The study and its cells.
        table, rates: Of `answer_rows` and, of each series, `best_rates.rate_laws`.
        validate_every: As in `answer_rows`.
    """
    if not len(table):
        return ""
    lawful = any(_bent(row) for row in records(table))
    validated = table["validation_seconds"].notna().any()
    known = [summary.cell for summary in cells if summary.k_star is not None]
    rows = []
    for cell, row in zip(known, records(table), strict=True):
        columns = {
            "B": str(row["batch_size"]),
            **short_columns(cell.series),
            "K*": k_star_text(row),
        }
        if lawful:
            columns["steps"] = three_digits(row["steps"])
        columns["examples to goal"] = f"{'<= ' * row['floor']}{row['examples']}"
        columns["a step"] = seconds_text(row["step_seconds"])
        if validated:
            columns[f"validation every {validate_every}"] = seconds_text(row["validation_seconds"])
        columns["time to goal"] = time_text(row)
        columns[""] = mark(row)
        rows.append(columns)
    lines = [f"study {record.name}: which batch size? {record.goal}, {_place(record, table)}", ""]
    lines += [*(line.rstrip() for line in aligned(rows, words=True)), ""]
    for series in record.series:
        lines += sentences(series, table, rates[series], validate_every)
    return "\n".join([*lines, *timing_notes(record, table)]) + "\n"


def mark(row: Row) -> str:
    """Return the last column of the table of the answer: fastest, not told apart, or nothing."""
    if row["fastest"]:
        return "fastest"
    return TIED if row["tied"] else ""


def _place(record: StudyRecord, table: pd.DataFrame) -> str:
    """Return on which machine the times were measured, in words."""
    if record.step_timing is not None and (table["timing"] == QUIET).any():
        return f"on {record.step_timing.machine}"
    return "on the machine that ran the trials"


def timing_notes(record: StudyRecord, table: pd.DataFrame) -> list[str]:
    """Return what to know of the times of `answer_rows`, a line each; nothing if there are no
    times.

    How steps were timed; trials on several kinds of machines, or maybe so; a busy machine.
    """
    if not _timed(table):
        return []
    sources = set(table["timing"].dropna())
    notes = [_source_note(record, sources)]
    if QUIET not in sources:
        notes += _hardware_notes(record.hardware)
    spread = (table["step_high"].astype(float) / table["step_low"].astype(float)).max()
    if spread > BUSY:
        known = table["seconds_low"].notna().any()
        consequence = (
            "The intervals include that."
            if known
            else "Ignore smaller differences between batch sizes."
        )
        notes.append(
            "Other programs were running: the middle half of the times of one step spans a factor "
            "of "
            f"{three_digits(spread)}. {consequence}"
        )
    return notes


def _source_note(record: StudyRecord, sources: set[str]) -> str:
    """Return how the seconds of a step were measured, and that checks of the goal are not
    counted."""
    alone = (
        "Checks of the goal are not counted; --validate-every N shows the time of a "
        "validation "
        "every N steps."
    )
    if QUIET in sources and record.step_timing is not None:
        timing = record.step_timing
        threads = f"{timing.threads} thread{'s' * (timing.threads > 1)}"
        where = threads if timing.ranks == 1 else f"{timing.ranks} processes of {threads}"
        return (
            f"A step: median of {timing.rounds} rounds after the study, {timing.date}, "
            f"{where}. "
            f"{alone}"
        )
    missing = "lit-dps study --time-steps measures them alone"
    if sources == {TRIALS}:
        return f"A step: median over trials, beside other workers and programs; {missing}. {alone}"
    part = "" if sources == {WITH_CHECKS} else " of some cells"
    return (
        f"A step: median over trials, beside other workers and programs. Trials{part} ran under "
        "an earlier version, "
        "which did not time steps and checks separately: there a step includes its share of the "
        f"checks; {missing}."
    )


def _timed(table: pd.DataFrame) -> bool:
    return len(table) > 0 and not table["step_seconds"].isna().all()


def _hardware_notes(hardware: Sequence[str | None]) -> list[str]:
    unknown = "hardware that an earlier version did not keep"
    if len(hardware) > 1:
        found = ", on ".join(each or unknown for each in hardware)
        return [
            f"trials ran on {found}: what is the fastest here may only have run on the faster of "
            "them"
        ]
    if None in hardware:
        return [
            f"trials ran on {unknown}: on several machines, times of their batch sizes cannot be "
            "compared"
        ]
    return []


def sentences(
    series: Series, table: pd.DataFrame, rate: RateLaw | None, validate_every: int | None = None
) -> list[str]:
    """Return the answer of a series in words: the fastest batch sizes, the fewest examples, and the
    rate."""
    rows = records(rows_of(series, table)) if len(table) else []
    if not rows:
        return [f"{series}: no K* yet"]
    fewest = next(row for row in rows if row["fewest"])
    least = (
        f"B = {fewest['batch_size']} needs the fewest examples, "
        f"{'<= ' * fewest['floor']}{fewest['examples']}"
    )
    fastest = next((row for row in rows if row["fastest"]), None)
    if fastest is None:
        return [
            f"{series}: {least}; no trial shows how long a step takes, so the fastest is not known"
        ]
    lines = [f"{series}: {_verdict(rows, fastest)}"]
    at = rows.index(fastest)
    if at in (0, len(rows) - 1):
        end = "smallest" if at == 0 else "largest"
        lines.append(
            f"B = {fastest['batch_size']} is the {end} batch size of the study; the best may lie "
            "beyond"
        )
    if bounds := [row["batch_size"] for row in rows if _bound(row) and row is not fastest]:
        lines.append(
            f"K* is an upper bound at B = {', '.join(map(str, bounds))}, which may be faster"
        )
    lines += _with_validation(rows, fastest, validate_every)
    lines += [least, *_based(rows)]
    if rate is not None:
        own = rate.at(fastest["batch_size"])
        lines.append(
            (f"{rate.name} = {three_digits(own)} there; " if own is not None else "")
            + rate.describe()
        )
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def _verdict(rows: Sequence[Row], fastest: Row) -> str:
    """Return the set of batch sizes that may be the fastest, with the best estimate."""
    time = time_text(fastest).replace("<=", "at most")
    falls = min(rows, key=lambda row: (row["k_star"], row["batch_size"]))["batch_size"]
    best = fastest["batch_size"]
    tied = [row["batch_size"] for row in rows if row["tied"]]
    if len(tied) > 1:
        inside = [row["batch_size"] for row in rows if min(tied) <= row["batch_size"] <= max(tied)]
        span = f"B = {', '.join(map(str, tied))}"
        if inside == tied:
            span = f"B = {tied[0]} to {tied[-1]}"
        return f"{span} are {TIED} here; the best estimate is B = {best}, {time} to the goal"
    if falls == best:
        return f"B = {best} has the least K* and is the fastest here, {time} to the goal"
    return f"K* falls up to B = {falls}, but B = {best} is the fastest here, {time} to the goal"


def _with_validation(rows: Sequence[Row], fastest: Row, validate_every: int | None) -> list[str]:
    """Return what validation adds, and whether another batch size is the fastest with it."""
    known = [row for row in rows if row["validation_seconds"] is not None]
    if fastest not in known:
        return []
    best = min(known, key=lambda row: row["seconds"] + row["validation_seconds"])
    added = (
        f"validation every {validate_every} steps adds "
        f"{seconds_text(fastest['validation_seconds'])}"
    )
    line = f"{added} at B = {fastest['batch_size']}"
    if best is not fastest:
        total = seconds_text(best["seconds"] + best["validation_seconds"])
        line += f"; with it B = {best['batch_size']} is the fastest, {total} in all"
    return [line]


def _bent(row: Row) -> bool:
    """Whether the steps to the goal are another number than K*."""
    return row["steps"] != row["k_star"]


def _bound(row: Row) -> bool:
    """Whether the time to the goal is an upper bound, as K* is."""
    return bool(row["floor"]) and row["steps_low"] is None


def time_text(row: Row) -> str:
    """The time to the goal with its limits: 2.31 s [1.98 s, 2.70 s]."""
    time = f"{'<= ' * _bound(row)}{seconds_text(row['seconds'])}"
    if row["seconds_low"] is None:
        return time
    return f"{time} [{seconds_text(row['seconds_low'])}, {seconds_text(row['seconds_high'])}]"


def _based(rows: Sequence[Row]) -> list[str]:
    """What the times to the goal are based on; nothing where no limits are known."""
    known = [row for row in rows if row["steps_low"] is not None]
    if not known:
        return []
    of, why = known[0]["steps_of"], known[0]["why_not_law"]
    brackets = "Brackets: 95 % interval."
    if why:
        lines = [f"Times use {of} itself, since its law is not identifiable: {why}. {brackets}"]
    else:
        single = "single K*" if of == K_STAR else "single medians"
        lines = [f"Times use the fitted law of {of}, since {single} are noisy. {brackets}"]
    if of == K_STAR:
        lines.append(
            "K* is the best of several trials; expect one run to need more (study.repeats "
            "measures it)."
        )
    return lines


def seconds_text(seconds: float | None) -> str:
    """A time to 3 digits in its unit: 8.10 ms, 42.0 s, 3.10 min, 2.50 h, 12.0 days; "-" for
    None."""
    if seconds is None or math.isnan(seconds):
        return "-"
    for unit, size, most in (
        ("ms", 1e-3, 1),
        ("s", 1, 120),
        ("min", 60, 7200),
        ("h", 3600, 172800),
    ):
        if seconds < most:
            return f"{significant(seconds / size)} {unit}"
    return f"{significant(seconds / 86400)} days"
