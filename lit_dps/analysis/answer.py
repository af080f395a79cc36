"""What a study says of the question behind it: which batch size is fastest on the machine that it ran on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from lit_dps.analysis.expected import K_STAR, Steps
from lit_dps.analysis.rates import RateLaw
from lit_dps.analysis.step_seconds import StepSeconds
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
    three_digits,
)
from lit_dps.record import StudyRecord
from lit_dps.trial import Cell, Series

NEAR = 1.1  # times the least time: as near, nobody can tell which is the best
LIMITS = "limits: 95 % of steps, quartiles of a step"  # what those of the time to the goal are made of
QUIET = 1.25  # ratio of the quartiles of a cell's seconds a step, above which its machine was busy with other things


def answer_rows(
    cells: Sequence[CellSummary], seconds: Mapping[Cell, StepSeconds], expected: Mapping[Cell, Steps] | None = None
) -> pd.DataFrame:
    """One row a cell that has a K*, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], k_star [steps], floor (1 where K* is an upper bound, and
    so is examples), examples (K* B), step_seconds with step_low and step_high (quartiles), seconds (of `steps`; without
    the start of a trial), fastest, near (within 10 % of the fastest of the series), fewest (least examples of the
    series), training_seconds (of a step alone) and check_seconds (of a check); steps to the goal with steps_low and
    steps_high (95 %), as `expected`, else K*; seconds_low and seconds_high, from these and the quartiles of a step;
    steps_of and why_not_law, as in `Steps`. Seconds are missing where no trial tells them.
    """
    rows = []
    for summary in cells:
        if summary.k_star is None:
            continue
        cell, k_star, each = summary.cell, summary.k_star, seconds.get(summary.cell)
        steps = (expected or {}).get(cell) or Steps(k_star, math.nan, math.nan, K_STAR, "")
        rows.append(
            {
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
            }
        )
    table = frame(rows)
    if not len(table):
        return table
    for series in dict.fromkeys(summary.cell.series for summary in cells):
        part = rows_of(series, table)
        if not len(part):
            continue
        table.loc[part["examples"].astype(int).idxmin(), "fewest"] = True
        if (known := part["seconds"].astype(float)).notna().any():
            table.loc[known.idxmin(), "fastest"] = True
            table.loc[part.index[known <= NEAR * known.min()], "near"] = True
    return table


def _limits(steps: Steps, each: StepSeconds | None) -> dict[str, float | None]:
    """Of the seconds to the goal: the 95 % limits of K and the quartiles of a step, taken to be independent.

    Quartiles, since beyond them lies what else ran on the machine. So where a step scatters as much as K does, more
    runs than one in 20 lie outside.
    """
    if each is None or math.isnan(steps.low):
        return {"seconds_low": None, "seconds_high": None}
    below = math.hypot(math.log(steps.value / steps.low), math.log(each.median / each.low))
    above = math.hypot(math.log(steps.high / steps.value), math.log(each.high / each.median))
    seconds = steps.value * each.median
    return {"seconds_low": seconds * math.exp(-below), "seconds_high": seconds * math.exp(above)}


def answer_text(
    record: StudyRecord, cells: Sequence[CellSummary], table: pd.DataFrame, rates: Mapping[Series, RateLaw | None]
) -> str:
    """The section of a report that comes first: which batch size is the fastest here; empty without any K*.

    Args:
        record, cells: The study and its cells.
        table, rates: Of `answer_rows` and, of each series, `best_rates.rate_laws`.
    """
    if not len(table):
        return ""
    lawful = any(_bent(row) for row in records(table))
    known = [summary.cell for summary in cells if summary.k_star is not None]
    rows = (
        {
            "B": str(row["batch_size"]),
            **short_columns(cell.series),
            "K*": k_star_text(row),
            **({"steps": three_digits(row["steps"])} if lawful else {}),
            "examples to goal": f"{'<= ' * row['floor']}{row['examples']}",
            "a step": seconds_text(row["step_seconds"]),
            "time to goal": time_text(row),
            "": "fastest" if row["fastest"] else "within 10 %" if row["near"] else "",
        }
        for cell, row in zip(known, records(table), strict=True)
    )
    lines = [f"study {record.name}: which batch size? {record.goal}, on the machine that ran the trials", ""]
    lines += [*(line.rstrip() for line in aligned(rows, words=True)), ""]
    for series in record.series:
        lines += sentences(series, table, rates[series])
    step = ["a step: the median over trials, with its share of checks and what else ran there"] * _timed(table)
    return "\n".join([*lines, *timing_notes(record, table), *step]) + "\n"


def timing_notes(record: StudyRecord, table: pd.DataFrame) -> list[str]:
    """What to know of the times of `answer_rows`, if there are any.

    That trials ran on several kinds of machines, or may have, and that a machine was not quiet, if so.
    """
    if not _timed(table):
        return []
    notes = _hardware_notes(record.hardware)
    spread = (table["step_high"].astype(float) / table["step_low"].astype(float)).max()
    if spread > QUIET:
        notes.append(
            f"the machine was not quiet: a step takes up to x{spread:.2g} as long between the quartiles of a cell, and "
            "smaller differences between batch sizes are no evidence"
        )
    return notes


def _timed(table: pd.DataFrame) -> bool:
    return len(table) > 0 and not table["step_seconds"].isna().all()


def _hardware_notes(hardware: Sequence[str | None]) -> list[str]:
    unknown = "hardware that an earlier version did not keep"
    if len(hardware) > 1:
        found = ", on ".join(each or unknown for each in hardware)
        return [f"trials ran on {found}: what is the fastest here may only have run on the faster of them"]
    if None in hardware:
        return [f"trials ran on {unknown}: on several machines, times of their batch sizes cannot be compared"]
    return []


def sentences(series: Series, table: pd.DataFrame, rate: RateLaw | None) -> list[str]:
    """The answer of a series in words: the fastest batch size, those near it, the fewest examples, and the rate."""
    rows = records(rows_of(series, table)) if len(table) else []
    if not rows:
        return [f"{series}: no K* yet"]
    falls = min(rows, key=lambda row: (row["k_star"], row["batch_size"]))
    fewest = next(row for row in rows if row["fewest"])
    least = f"B = {fewest['batch_size']} needs the fewest examples, {'<= ' * fewest['floor']}{fewest['examples']}"
    lines, fastest = [], next((row for row in rows if row["fastest"]), None)
    if fastest is None:
        return [f"{series}: {least}; no trial tells what a step takes, so that the fastest is not known"]
    time = time_text(fastest).replace("<=", "at most")
    if falls["batch_size"] == fastest["batch_size"]:
        lines.append(
            f"{series}: B = {fastest['batch_size']} has the least K* and is the fastest here, {time} to the goal"
        )
    else:
        reach = f"K* falls up to B = {falls['batch_size']}"
        lines.append(f"{series}: {reach}, but B = {fastest['batch_size']} is the fastest here, {time} to the goal")
    near = [row["batch_size"] for row in rows if row["near"]]
    if len(near) > 1:
        whole = [row["batch_size"] for row in rows if min(near) <= row["batch_size"] <= max(near)]
        span = f"B = {min(near)} to {max(near)}" if whole == near else f"B = {', '.join(map(str, near))}"
        lines.append(f"within 10 % of the best time: {span}")
    else:
        lines.append("no other batch size is within 10 % of its time")
    at = rows.index(fastest)
    if at in (0, len(rows) - 1):
        lines[-1] += f"; it is the {'smallest' if at == 0 else 'largest'} one tried, the best may lie beyond"
    if bounds := [row["batch_size"] for row in rows if _bound(row) and row is not fastest]:
        lines.append(f"K* is an upper bound at B = {', '.join(map(str, bounds))}, which may be faster")
    lines += [least, *_based(rows)]
    if rate is not None:
        own = rate.at(fastest["batch_size"])
        lines.append((f"{rate.name} = {three_digits(own)} there; " if own is not None else "") + rate.describe())
    return [lines[0], *(f"  {line}" for line in lines[1:])]


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
    luck = ["one run usually needs more than K*, the least of many trials: study.repeats tells how much"]
    luck = luck if of == K_STAR else []
    if why:
        return [f"times go by {of} itself: its law is not identifiable, because {why}; with {LIMITS}", *luck]
    return [f"times go by the law of {of}, whose single values scatter, with {LIMITS}", *luck]


def seconds_text(seconds: float | None) -> str:
    """A time to 3 digits in its unit: 8.10 ms, 42.0 s, 3.10 min, 2.50 h, 12.0 days; "-" for None."""
    if seconds is None or math.isnan(seconds):
        return "-"
    for unit, size, most in (("ms", 1e-3, 1), ("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < most:
            return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds / 86400:#.3g}".rstrip(".") + " days"
