"""What a study says of the question behind it: which batch size is fastest on the machine that it ran on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.rates import RateLaw
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import (
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
from lit_dps.trial import STACKED, Cell, Series, Status

NEAR = 1.1  # times the least time: as near, nobody can tell which is the best
# Trials of these ends ran as many steps as their curves have; one that a race ended may be shown shorter than it was.
WHOLE = (Status.COMPLETE, Status.INCOMPLETE)
QUIET = 1.25  # ratio of the quartiles of a cell's seconds a step, above which its machine was busy with other things
LEAST = 0.05  # share of a trial's time that counts as steps at least, where its start took longer on other trials


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step in the trials of a cell, with its share of checks: the median, and the quartiles around it.

    Attributes:
        median, low, high: Of the trials.
        training, check: Seconds of a step alone, and of a check, medians; nan where trials did not tell them.
    """

    median: float
    low: float
    high: float
    training: float = math.nan
    check: float = math.nan


def step_seconds(record: StudyRecord) -> dict[Cell, StepSeconds]:
    """Seconds of a step of each cell, from its trials that ran to the goal or the budget.

    They were timed (`TrialResult.timed`), whatever else was measured along them. Of a cell whose trials were not, by an
    earlier version, it is from their wall time: a trial takes start + steps x seconds a step. The start (building,
    pruning) is one number for all cells of the study, fitted with the steps of each by least squares of relative
    errors, all at least 0; what is left of a trial is divided by its steps. Where no cell has trials of different
    lengths the start counts as steps. Left out are trials that were stacked, which shared their time, and, of those not
    timed, the ones that measured smoothness, which costs more than the training that it watches. The share of checks
    is in, as is whatever other workers and other programs of the machine took.
    """
    found = {}
    for cell, results in record.results.items():
        timed = [r.timed for r in results if r.status in WHOLE and r.timed.get("steps")]
        if not timed:
            continue
        each = np.percentile([(t["training"] + t["checking"]) / t["steps"] for t in timed], (50, 25, 75))
        alone = np.median([t["training"] / t["steps"] for t in timed])
        check = np.median([t["checking"] / t["checks"] for t in timed])
        found[cell] = StepSeconds(*map(float, (*each, alone, check)))
    return found | _of_whole_trials(record, {*record.results} - {*found})


def _of_whole_trials(record: StudyRecord, among: set[Cell]) -> dict[Cell, StepSeconds]:
    """The same of some cells from the wall time of their trials."""
    from scipy.optimize import nnls  # a tenth of a second that a study without seconds does not need

    rows = [
        (cell, result.steps_run, result.seconds)
        for cell, results in record.results.items()
        for result in results
        if cell in among and result.status in WHOLE and result.seconds > 0 and result.steps_run
        if not (result.observed.get(STACKED) or result.smoothness.get("step"))
    ]
    if not rows:
        return {}
    cells = list(dict.fromkeys(cell for cell, _, _ in rows))
    steps, seconds = (np.array(column, float) for column in list(zip(*rows, strict=True))[1:])
    which = np.array([cells.index(cell) for cell, _, _ in rows])
    design = np.zeros((len(rows), len(cells) + 1))
    design[:, 0], design[np.arange(len(rows)), which + 1] = 1, steps
    told = any(np.unique(steps[which == i]).size > 1 for i in range(len(cells)))
    start = nnls(design / seconds[:, None], np.ones(len(rows)))[0][0] if told else 0.0
    each = np.maximum(seconds - start, LEAST * seconds) / steps
    return {
        cell: StepSeconds(*map(float, np.percentile(each[which == i], (50, 25, 75)))) for i, cell in enumerate(cells)
    }


def answer_rows(cells: Sequence[CellSummary], seconds: Mapping[Cell, StepSeconds]) -> pd.DataFrame:
    """One row a cell that has a K*, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], k_star [steps], floor (1 where K* is an upper bound, and
    so are the columns that follow from it), examples (K* B), step_seconds with step_low and step_high (quartiles),
    seconds (K* steps; without the start of a trial), fastest, near (within 10 % of the fastest of the series), fewest
    (least examples of the series), training_seconds (of a step alone) and check_seconds (of a check). Seconds are
    missing where no trial tells them.
    """
    rows = []
    for summary in cells:
        if summary.k_star is None:
            continue
        cell, k_star, each = summary.cell, summary.k_star, seconds.get(summary.cell)
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
                "seconds": None if each is None else k_star * each.median,
                "fastest": False,
                "near": False,
                "fewest": False,
                "training_seconds": None if each is None else each.training,
                "check_seconds": None if each is None else each.check,
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
    known = [summary.cell for summary in cells if summary.k_star is not None]
    rows = (
        {
            "B": str(row["batch_size"]),
            **short_columns(cell.series),
            "K*": k_star_text(row),
            "examples to goal": f"{'<= ' * row['floor']}{row['examples']}",
            "a step": seconds_text(row["step_seconds"]),
            "time to goal": f"{'<= ' * row['floor']}{seconds_text(row['seconds'])}",
            "": "fastest" if row["fastest"] else "within 10 %" if row["near"] else "",
        }
        for cell, row in zip(known, records(table), strict=True)
    )
    lines = [f"study {record.name}: which batch size? {record.goal}, on the machine that ran the trials", ""]
    lines += [*(line.rstrip() for line in aligned(rows, words=True)), ""]
    for series in record.series:
        lines += sentences(series, table, rates[series])
    spread = (table["step_high"].astype(float) / table["step_low"].astype(float)).max()
    if spread > QUIET:
        lines.append(
            f"the machine was not quiet: a step takes up to x{spread:.2g} as long between the quartiles of a cell, and "
            "smaller differences between batch sizes are no evidence"
        )
    if table["step_seconds"].notna().any():
        lines.append("a step: the median over trials, with its share of checks and what else ran there")
    return "\n".join(lines) + "\n"


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
    time = f"{'at most ' * fastest['floor']}{seconds_text(fastest['seconds'])}"
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
    if bounds := [row["batch_size"] for row in rows if row["floor"] and row is not fastest]:
        lines.append(f"K* is an upper bound at B = {', '.join(map(str, bounds))}, which may be faster")
    lines.append(least)
    if rate is not None:
        own = rate.at(fastest["batch_size"])
        lines.append((f"{rate.name} = {three_digits(own)} there; " if own is not None else "") + rate.describe())
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def seconds_text(seconds: float | None) -> str:
    """A time to 3 digits in its unit: 8.10 ms, 42.0 s, 3.10 min, 2.50 h, 12.0 days; "-" for None."""
    if seconds is None or math.isnan(seconds):
        return "-"
    for unit, size, most in (("ms", 1e-3, 1), ("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < most:
            return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds / 86400:#.3g}".rstrip(".") + " days"
