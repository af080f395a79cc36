"""The table of results: one row a cell, as wide as the terminal allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import is_upper_bound
from lit_dps.analysis.readings import reading_columns, reading_values
from lit_dps.analysis.summary import CellSummary, can_move
from lit_dps.analysis.tables import (
    Row,
    fitted,
    k_star_text,
    reading_text,
    short_columns,
    three_digits,
    value_text,
    without_column,
)
from lit_dps.core.text import format_duration, format_interval
from lit_dps.core.trial import Cell, Status
from lit_dps.core.unit import STEPS
from lit_dps.report.no_result import have_diverged, have_failed

FASTEST = "fastest"
TIED = "tied"
# A best value at an end of its range that can be moved.
EDGE = "edge"

# Columns that are left out, in this order, until the table fits the terminal.
STEP = "a step"
EXAMPLES = "examples"
# Steps that the time is computed from: of the law, which is less noisy, or medians over seeds.
EXPECTED = "expected"
BY_LAW = "by law"
# If K* is not in steps.
MEASURED_STEPS = "steps"
EXPECTED_STEPS = "expected steps"
STEPS_BY_LAW = "steps by law"
TIME = "time to goal"
TIME_WITH_INTERVAL = "time to goal [95 %]"
# The part of the time to goal that its validations take.
VALIDATION = "in validation"
RATE = "best rate"
LESS_NEEDED = (STEP, BY_LAW, EXPECTED, STEPS_BY_LAW, EXPECTED_STEPS, MEASURED_STEPS, EXAMPLES, RATE)


def result_table(study: Analysis, width: int) -> list[str]:
    """Return the lines of the table of results, and a line on the columns that do not fit.

    Args:
        study: The study.
        width: Columns of the terminal.
    """
    rows = result_rows(study)
    # Readings are the columns before the marks.
    first = len(rows[0]) - 1 - len(reading_columns(study.record))
    readings = list(rows[0])[first:-1]
    return fitted(rows, [*reversed(readings), *LESS_NEEDED], width, words=True)


def result_rows(study: Analysis) -> list[dict[str, str]]:
    """Return the rows of the table of results as text, by column."""
    rows = []
    readings = reading_columns(study.record)
    for summary in study.cells:
        values = {}
        if readings and summary.best is not None:
            values = reading_values(summary.best)
        row = with_readings(_row_to_print(study, summary), readings, values)
        rows.append(row | {"": ", ".join(marks(study, summary))})
    if study.record.goal.cost_unit is STEPS and _are_steps_measured(study):
        rows = without_column(rows, EXPECTED)
    return [_with_heads(study, row) for row in _without_empty_columns(rows)]


def _with_heads(study: Analysis, row: dict[str, str]) -> dict[str, str]:
    """Return a row with the heads of its columns as they are printed."""
    heads = {}
    if any(row["total_low"] is not None for row in study.answers.values()):
        heads[TIME] = TIME_WITH_INTERVAL
    is_by_law = not any(row["why_not_law"] for row in study.answers.values())
    if study.record.goal.cost_unit is STEPS:
        if is_by_law:
            heads[EXPECTED] = BY_LAW
    elif _are_steps_measured(study):
        heads[EXPECTED] = MEASURED_STEPS
    elif is_by_law:
        heads[EXPECTED] = STEPS_BY_LAW
    else:
        heads[EXPECTED] = EXPECTED_STEPS
    return {heads.get(name, name): text for name, text in row.items()}


def _are_steps_measured(study: Analysis) -> bool:
    """Return True if the expected steps of each cell are the steps of its K*."""
    for cell, row in study.answers.items():
        if row["steps"] != study.by_cell[cell].k_star_steps:
            return False
    return True


def _without_empty_columns(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return rows without the less needed columns that have no value, such as unknown times."""
    for name in (*LESS_NEEDED, TIME):
        if name in rows[0] and all(row[name] in ("-", "<= -") for row in rows):
            rows = without_column(rows, name)
    return rows


def _row_to_print(study: Analysis, summary: CellSummary) -> dict[str, str]:
    """Return the row of a cell as text, without readings and marks, one entry a column."""
    row = study.answers.get(summary.cell)
    columns = cell_names(study, summary.cell)
    head = study.record.goal.cost_unit.head
    if row is None:
        columns |= {head: "-", EXPECTED: "-", EXAMPLES: "-", STEP: "-"}
    else:
        columns |= {
            head: k_star_text(row["k_star"], row["floor"]),
            EXPECTED: bound_sign(row) + three_digits(row["steps"]),
            EXAMPLES: examples_text(row),
            STEP: format_duration(row["step_seconds"]),
        }
    columns[TIME] = "-" if row is None else interval_text(row)
    if any(each["validation_seconds"] is not None for each in study.answers.values()):
        columns[VALIDATION] = "-"
        if row is not None:
            columns[VALIDATION] = validation_time(row, row["validation_seconds"])
    columns[RATE] = rate_text(study, summary)
    return columns


def validation_time(row: Row, seconds: float | None) -> str:
    """Return the time of the validations of a row; an upper bound has its sign."""
    if not seconds:
        return format_duration(seconds)
    return bound_sign(row) + format_duration(seconds)


def cell_names(study: Analysis, cell: Cell) -> dict[str, str]:
    """Return the columns that name a cell; without its series if the study is of one dense one."""
    names = {"B": str(cell.batch_size)}
    if len(study.record.series) > 1 or cell.sparsity:
        names |= short_columns(cell.series)
    return names


def with_readings(
    row: Mapping[str, str], names: Iterable[str], values: Mapping[str, float | None]
) -> dict[str, str]:
    """Return a row of a text table, followed by readings.

    Args:
        row: The row.
        names: The columns of the readings. A name that the row has already gets "(reading)".
        values: Their values, as far as they are known.
    """
    columns = dict(row)
    for name in names:
        head = name
        if name in row:
            head = f"{name} (reading)"
        columns[head] = reading_text(values.get(name))
    return columns


def marks(study: Analysis, summary: CellSummary) -> list[str]:
    """Return in short whether a cell is the fastest or has an edge, or why it has no K*."""
    row = study.answers.get(summary.cell)
    if row is None:
        return [_reason_without_k_star(summary)]
    words = list(filter(None, [speed_mark(row)]))
    if any(can_move(study.record, key, end) for key, end in summary.boundary.items()):
        words.append(EDGE)
    return words


def _reason_without_k_star(summary: CellSummary) -> str:
    """Return in short why a cell has no K*."""
    if summary.pending:
        return "unfinished"
    if summary.may_have_k_star:
        return "unknown"
    if have_failed(summary):
        return "failed"
    if have_diverged(summary):
        return "diverged"
    if summary.counts[Status.COMPLETE]:
        return "too few reached the goal"
    return "goal not reached"


def speed_mark(row: Row) -> str:
    """Return whether a cell is the fastest of its series, or may be; empty if it is neither."""
    if row["fastest"]:
        return FASTEST
    if row["tied"]:
        return TIED
    return ""


def examples_text(row: Row) -> str:
    """Return the examples to the goal, with <= if they are an upper bound."""
    examples = three_digits(row["examples"])
    if math.isclose(row["examples"], round(row["examples"])):
        examples = f"{row['examples']:.0f}"
    return bound_sign(row) + examples


def interval_text(row: Row) -> str:
    """Return the time to the goal with its 95 % interval, such as 2.31 [1.98, 2.70] s.

    It includes the validations of `Analysis.validate_every`.
    """
    if row["total_low"] is not None:
        return format_interval(row["total_seconds"], row["total_low"], row["total_high"])
    return bound_sign(row) + format_duration(row["total_seconds"])


def bound_sign(row: Row) -> str:
    """Return what precedes examples, times and costs that are upper bounds."""
    if is_upper_bound(row):
        return "<= "
    return ""


def rate_text(study: Analysis, summary: CellSummary) -> str:
    """Return the learning rate of the K* trial; "-" if it is unknown or not searched."""
    for curve in study.rate_curves:
        key = curve.source.rate_key
        is_of_series = curve.series == summary.cell.series
        if is_of_series and summary.best is not None and key in summary.best.trial.params:
            return value_text(summary.best.trial.params[key], study.record.space[key])
    return "-"
