"""The first section of a report in words: which batch size is the fastest on this machine.

`lit_dps.analysis.answer` computes the numbers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import K_STAR
from lit_dps.analysis.ramps import constant_series
from lit_dps.analysis.rates import RateLaw
from lit_dps.analysis.step_seconds import OWN_CLOCK, QUIET, TRIALS, WITH_CHECKS
from lit_dps.analysis.tables import (
    Row,
    aligned,
    has_values,
    k_star_text,
    listed,
    numbers,
    records,
    rows_of,
    short_columns,
    three_digits,
    where,
)
from lit_dps.core.batch_schedule import CONSTANT, GROWING, NAME_KEY
from lit_dps.core.record import StudyRecord, cell_text
from lit_dps.core.statistic import Statistic
from lit_dps.core.text import format_duration
from lit_dps.core.trial import Cell, Series
from lit_dps.core.unit import Unit

LIMITS = "95 % interval of the time"
TIED = "not told apart"


def answer_text(study: Analysis) -> str:
    """Return the table and sentences of the answer; empty without any K*."""
    if not len(study.answer):
        return ""
    record = study.record
    lines = [f"study {record.name}: which batch size? {record.goal}, {_place(study)}", ""]
    lines += map(str.rstrip, aligned(_rows_to_print(study), words=True))
    lines.append("")
    for series in record.series:
        lines += sentences(study, series)
    lines += timing_notes(study)
    return "\n".join(lines) + "\n"


def _rows_to_print(study: Analysis) -> list[dict[str, str]]:
    """Return the answer's table as text: one row a cell, one entry a column."""
    table = study.answer
    steps_differ = bool((table["steps"] != table["k_star"]).any())
    has_validation = has_values(table, "validation_seconds")
    rows = []
    for cell, row in study.answers.items():
        columns = {"B": str(row["batch_size"])}
        columns |= short_columns(cell.series)
        columns[study.record.goal.cost_unit.head] = k_star_text(row)
        if steps_differ:
            columns["steps"] = three_digits(row["steps"])
        columns["examples to goal"] = examples_text(row)
        columns["a step"] = format_duration(row["step_seconds"])
        if has_validation:
            added = format_duration(row["validation_seconds"])
            columns[f"validation every {study.validate_every}"] = added
        columns["time to goal"] = interval_text(row)
        columns[""] = mark(row)
        rows.append(columns)
    return rows


def mark(row: Row) -> str:
    """Return the last column of the answer's table: "fastest", `TIED`, or nothing."""
    if row["fastest"]:
        return "fastest"
    if row["tied"]:
        return TIED
    return ""


def examples_text(row: Row) -> str:
    """Return the examples to the goal, with <= if they are an upper bound."""
    examples = three_digits(row["examples"])
    if math.isclose(row["examples"], round(row["examples"])):
        examples = f"{row['examples']:.0f}"
    if _is_upper_bound(row):
        return f"<= {examples}"
    return examples


def interval_text(row: Row) -> str:
    """Return the time to the goal with its 95 % interval, such as 2.31 s [1.98 s, 2.70 s]."""
    time = format_duration(row["seconds"])
    if _is_upper_bound(row):
        time = f"<= {time}"
    if row["seconds_low"] is None:
        return time
    return f"{time} [{format_duration(row['seconds_low'])}, {format_duration(row['seconds_high'])}]"


def _is_upper_bound(row: Row) -> bool:
    """Return True if examples and time to the goal are upper bounds because K* is one."""
    return bool(row["floor"]) and row["steps_low"] is None


def sentences(study: Analysis, series: Series) -> list[str]:
    """Return the answer of a series in lines: the fastest batch sizes, the examples, the rate."""
    rows = []
    if len(study.answer):
        rows = records(rows_of(series, study.answer))
    if not rows:
        return [f"{series}: no K* yet"]
    fewest = _first_with(rows, "fewest")
    assert fewest is not None
    examples = f"B = {fewest['batch_size']} needs the fewest examples, {examples_text(fewest)}"
    fastest = _first_with(rows, "fastest")
    if fastest is None:
        unknown = "no trial shows how long a step takes, so the fastest is not known"
        return [f"{series}: {examples}; {unknown}"]
    lines = _limits_of_answer(rows, fastest)
    lines += _with_validation(rows, fastest, study.validate_every)
    lines.append(examples)
    if not study.record.batch_schedule(series).is_constant:
        lines.append(ramp_text(study, series, fastest["batch_size"]))
    lines += _basis(rows, study.record.statistic, study.record.goal.cost_unit)
    rate = study.rate_laws[series]
    if rate is not None:
        lines.append(_rate_text(rate, fastest["batch_size"]))
    for curve in study.rate_curves:
        if curve.series == series and not curve.has_constant_batch:
            lines.append(f"no law of the learning rate: {GROWING}")
    return [f"{series}: {_fastest_text(rows, fastest)}", *map("  {}".format, lines)]


def ramp_text(study: Analysis, series: Series, batch_size: int) -> str:
    """Return what the growing batch of a series saves at a batch size, in a sentence."""
    place = f"the batch schedule up to B = {batch_size}"
    rows = study.ramps
    if len(rows):
        rows = rows_of(series, rows)
    if len(rows):
        rows = where(rows, batch_size=batch_size)
    if not len(rows):
        reason = "its K*, or each K* of a constant batch, is missing or a bound"
        if constant_series(study.record, series) is None:
            reason = f"compare it with {CONSTANT} on an axis {NAME_KEY}"
        return f"what {place} saves is unknown: {reason}"
    (row,) = records(rows)
    steps = _saved_text(row, "steps")
    examples = _saved_text(row, "examples")
    constant = row["constant_batch_size"]
    return (
        f"{place} needs {steps} and {examples} than the constant batch size nearest in examples, "
        f"B = {constant} (by {row['steps_of']})"
    )


def _saved_text(row: Row, unit: str) -> str:
    """Return a ratio of `ramp_rows` in words, such as "22 % fewer steps [-31 %, -10 %]"."""
    percent = round(100 * (row[f"{unit}_ratio"] - 1))
    comparison = "more"
    if percent < 0:
        comparison = "fewer"
    text = f"{abs(percent)} % {comparison} {unit}"
    low, high = row[f"{unit}_low"], row[f"{unit}_high"]
    if low is None:
        return text
    limits = [f"{round(100 * (limit - 1)):+d} %" for limit in (low, high)]
    return f"{text} [{', '.join(limits)}]"


def _first_with(rows: Sequence[Row], column: str) -> Row | None:
    """Return the first row whose value in a column is true; None without one."""
    for row in rows:
        if row[column]:
            return row
    return None


def _fastest_text(rows: Sequence[Row], fastest: Row) -> str:
    """Return the batch sizes that may be the fastest, with the best estimate."""
    best = fastest["batch_size"]
    time = interval_text(fastest).replace("<=", "at most")
    sizes = [row["batch_size"] for row in rows]
    tied = [row["batch_size"] for row in rows if row["tied"]]
    if len(tied) > 1:
        span = f"B = {', '.join(map(str, tied))}"
        if tied == sizes[sizes.index(tied[0]) : sizes.index(tied[-1]) + 1]:
            span = f"B = {tied[0]} to {tied[-1]}"
        return f"{span} are {TIED} here; the best estimate is B = {best}, {time} to the goal"
    least = min(rows, key=lambda row: (row["k_star"], row["batch_size"]))["batch_size"]
    if least == best:
        return f"B = {best} has the least K* and is the fastest here, {time} to the goal"
    return f"B = {least} has the least K*, but B = {best} is the fastest here, {time} to the goal"


def _limits_of_answer(rows: Sequence[Row], fastest: Row) -> list[str]:
    """Return why another batch size may be faster: the end of the grid, or bounds of K*."""
    lines = []
    end = ""
    if fastest is rows[0]:
        end = "smallest"
    elif fastest is rows[-1]:
        end = "largest"
    if end:
        place = f"B = {fastest['batch_size']} is the {end} batch size of the study"
        lines.append(f"{place}; the best may lie beyond")
    bounds = []
    for row in rows:
        if _is_upper_bound(row) and row is not fastest:
            bounds.append(str(row["batch_size"]))
    if bounds:
        lines.append(f"K* is an upper bound at B = {', '.join(bounds)}, which may be faster")
    return lines


def _with_validation(rows: Sequence[Row], fastest: Row, validate_every: int | None) -> list[str]:
    """Return what validation adds, and which batch size is the fastest with it if it differs."""
    if fastest["validation_seconds"] is None:
        return []
    added = format_duration(fastest["validation_seconds"])
    line = f"validation every {validate_every} steps adds {added} at B = {fastest['batch_size']}"
    best = min(rows, key=_seconds_with_validation)
    if best is not fastest:
        total = format_duration(_seconds_with_validation(best))
        line += f"; with it B = {best['batch_size']} is the fastest, {total} in all"
    return [line]


def _seconds_with_validation(row: Row) -> float:
    """Return the time to the goal with validation; infinite if it is unknown."""
    if row["validation_seconds"] is None:
        return math.inf
    return row["seconds"] + row["validation_seconds"]


def _basis(rows: Sequence[Row], k_star: Statistic, unit: Unit) -> list[str]:
    """Return what the times to the goal are based on; nothing if they have no intervals."""
    row = _first_with(rows, "seconds_low")
    if row is None:
        return []
    statistic = row["steps_of"]
    brackets = "Brackets: 95 % interval."
    if row["why_not_law"]:
        reason = f"since the law cannot be used ({row['why_not_law']})"
        lines = [f"Times use {statistic} itself, {reason}. {brackets}"]
    else:
        single = "single K*" if statistic == K_STAR else "single medians"
        lines = [f"Times use the fitted law of {statistic}, since {single} are noisy. {brackets}"]
    if statistic == K_STAR:
        meaning = "the best of several trials"
        if not k_star.is_minimum:
            meaning = k_star.describe_in(unit)
        lines.append(f"K* is {meaning}; expect one run to need more (study.repeats measures it).")
    return lines


def _rate_text(rate: RateLaw, batch_size: int) -> str:
    """Return the best learning rate at a batch size, if it is known, and its law."""
    best = rate.at(batch_size)
    if best is None:
        return rate.describe()
    return f"{rate.name} = {three_digits(best)} there; {rate.describe()}"


def fastest_cell(analysis: Analysis) -> Cell | None:
    """Return the cell with the least time to the goal; None without any K*.

    Without step times it is the cell of the least K*.
    """
    ranked = []
    for cell, row in analysis.answers.items():
        seconds = row["seconds"]
        if seconds is None:
            seconds = math.inf
        ranked.append((seconds, row["k_star"], cell))
    if not ranked:
        return None
    return min(ranked)[2]


def retrain_command(analysis: Analysis, storage: Sequence[str] = ()) -> str | None:
    """Return the command that retrains the best trial of the fastest cell; None without any K*.

    Args:
        analysis: The study.
        storage: Options that name its storage, if that is not the default one.
    """
    cell = fastest_cell(analysis)
    if cell is None:
        return None
    command = ["lit-dps", "fit", "--of", analysis.record.name, "--cell", cell_text(cell), *storage]
    return shlex.join([*command, "--checkpoint", "best.ckpt"])


def _place(study: Analysis) -> str:
    """Return on which machine the times were measured, in words."""
    timing = study.record.step_timing
    if timing is not None and len(where(study.answer, timing=QUIET)):
        return f"on {timing.machine}"
    return "on the machine that ran the trials"


def timing_notes(study: Analysis) -> list[str]:
    """Return notes on the times of the answer, a line each; nothing if there are no times.

    They are about how steps were timed, several machines, and a busy machine.
    """
    table = study.answer
    notes = []
    record = study.record
    growing = [each for each in record.series if not record.batch_schedule(each).is_constant]
    if len(table) and growing:
        notes.append(
            f"The batch size changes along a trial at {listed(growing)}: times to the goal are by "
            "the clock of the runs, beside other workers and programs. They are missing where a "
            "run was resumed, or where K* is between two trials."
        )
    if not len(table) or not has_values(table, "step_seconds"):
        return notes
    sources = set(table["timing"].dropna()) - {OWN_CLOCK}
    notes.append(_source_note(record, sources))
    if QUIET not in sources:
        notes += _hardware_notes(study.record.hardware)
    busy = where(table, busy=True)
    if len(busy):
        spread = max(numbers(busy["step_high"]) / numbers(busy["step_low"]))
        consequence = "Ignore smaller differences between batch sizes."
        if has_values(table, "seconds_low"):
            consequence = "The intervals include that."
        notes.append(
            "Other programs were running: the middle half of the times of one step spans a factor "
            f"of {three_digits(spread)}. {consequence}"
        )
    return notes


def _source_note(record: StudyRecord, sources: set[str]) -> str:
    """Return how the seconds of a step were measured, and that checks are not counted."""
    not_counted = (
        "Checks of the goal are not counted; --validate-every N shows the time of a validation "
        "every N steps."
    )
    timing = record.step_timing
    if QUIET in sources and timing is not None:
        where = f"{timing.threads} thread{'s' * (timing.threads > 1)}"
        if timing.ranks > 1:
            where = f"{timing.ranks} processes of {where}"
        rounds = f"median of {timing.rounds} rounds after the study, {timing.date}"
        return f"A step: {rounds}, {where}. {not_counted}"
    over_trials = "A step: median over trials, beside other workers and programs"
    alone = "lit-dps study --time-steps measures them alone"
    if sources == {TRIALS}:
        return f"{over_trials}; {alone}. {not_counted}"
    part = ""
    if sources != {WITH_CHECKS}:
        part = " of some cells"
    return (
        f"{over_trials}. Trials{part} ran under an earlier version, which did not time steps and "
        f"checks separately: there a step includes its share of the checks; {alone}."
    )


def _hardware_notes(hardware: Sequence[str | None]) -> list[str]:
    """Return a note if trials ran on several kinds of machines, or may have."""
    unknown = "hardware that an earlier version did not keep"
    if len(hardware) > 1:
        machines = [each or unknown for each in hardware]
        return [
            f"trials ran on {', on '.join(machines)}: what is the fastest here may only have run "
            "on the faster of them"
        ]
    if None in hardware:
        return [
            f"trials ran on {unknown}: on several machines, times of their batch sizes cannot be "
            "compared"
        ]
    return []
