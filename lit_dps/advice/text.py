"""The answer as text: the recommendation, the table and what it assumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.advice.answer import Answer, hours_text
from lit_dps.analysis.tables import aligned, significant, three_digits

MARKS = {"extrapolated": "~", "prior": "^", "predicted": "?"}
# Rows of a table, unless all are asked for.
MAX_ROWS = 8


def render(answer: Answer, all_rows: bool = False) -> str:
    """Return the recommendation, the table and what it assumes, as text.

    Args:
        answer: The answer.
        all_rows: Whether the table has all rows.
    """
    parts = [_recommendation(answer)]
    if len(answer.table):
        parts.append(_table(answer, all_rows))
    if answer.changes:
        parts.append(["what would change the answer:", *_indent(answer.changes)])
    assumed = list(answer.assumed)
    if answer.best is not None:
        assumed += answer.law.notes
    if assumed:
        parts.append(["assumed:", *_indent(assumed)])
    if answer.rate is not None and not math.isnan(answer.rate.scale):
        parts.append(["the learning rate:", f"  {answer.rate.describe()}"])
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _indent(lines: Iterable[str]) -> list[str]:
    return list(map("  {}".format, lines))


def _recommendation(answer: Answer) -> list[str]:
    """Return the row to run, the interval of batch sizes, and the fastest and cheapest rows."""
    best = answer.best
    if best is None:
        why = "K or the step time is not known for anything that was asked"
        if not any(each.bound == 0 for each in answer.law.observations):
            why = "no run shows how many steps the goal takes"
        if len(answer.table):
            why = "nothing is within the limits"
        return [f"no answer: {why}", *answer.law.notes]
    assert answer.fastest is not None and answer.cheapest is not None
    assert answer.interval is not None
    rate = ""
    if answer.rate is not None:
        value = answer.rate.at(best["batch_size"])
        if value is not None:
            rate = f", {answer.rate.name} = {three_digits(value)}"
    lines = [f"Train with {_place(best)}{rate}: {_costs(best, answer)}."]
    probability = best["near_probability"]
    lines.append(f"It is within 10 % of the best time with a probability of {probability:.0%}.")
    if answer.seed_spread:
        lines.append(
            f"Steps are of single runs. Another seed may need {answer.seed_spread:.0%} more or "
            "fewer, the typical standard deviation; the limits include it."
        )
    low, high = answer.interval
    where = _devices(int(answer.fastest["devices"])) + _cut(answer)
    if low == high:
        lines.append(f"No other B is known to be within 10 % of the best time on {where}.")
    else:
        lines.append(f"Any B from {low:g} to {high:g} is within 10 % of the best time on {where}.")
    for name, row in (("least mean time", answer.fastest), ("cheapest", answer.cheapest)):
        if row["batch_size"] != best["batch_size"] or row["devices"] != best["devices"]:
            lines.append(f"{name}: {_place(row)}: {_costs(row, answer)}")
    return lines


def _cut(answer: Answer) -> str:
    """Return which ends of the interval are ends of the batch sizes that were asked for."""
    ends = []
    if answer.cut[0]:
        ends.append("smallest")
    if answer.cut[1]:
        ends.append("largest")
    if not ends:
        return ""
    return f" (limited by the {' and '.join(ends)} batch size asked for)"


def _place(row: Mapping[str, Any]) -> str:
    return f"B = {row['batch_size']} on {_devices(int(row['devices']))}"


def _devices(count: int) -> str:
    if count == 1:
        return "1 device"
    return f"{count} devices"


def _with_limits(row: Mapping[str, Any], name: str, text: Callable[[float], str]) -> str:
    """Return a value of a row with its limits: 160 [96.7, 265]."""
    return f"{text(row[name])} [{text(row[f'{name}_low'])}, {text(row[f'{name}_high'])}]"


def _costs(row: Mapping[str, Any], answer: Answer) -> str:
    """Return time, steps and cost of a row, with their limits."""
    hours = _with_limits(row, "hours", hours_text)
    steps = f"{three_digits(row['steps'])} steps"
    limits = f"[{three_digits(row['steps_low'])}, {three_digits(row['steps_high'])}]"
    text = f"{hours}, {steps} {limits}"
    if answer.price is not None:
        text += f", cost {_with_limits(row, 'cost', three_digits)}"
    return text


def _table(answer: Answer, all_rows: bool) -> list[str]:
    """Return the lines of the table, and a legend of its marks and missing rows."""
    table = answer.table
    shown = table
    if len(table) > MAX_ROWS and not all_rows:
        shown = _most_telling(answer)
    lines = aligned(_row(row, answer) for row in shown.to_dict("records"))
    sources = {*shown["steps_known"], *shown["step_known"]}
    legend = [f"{mark} {source}" for source, mark in MARKS.items() if source in sources]
    if len(shown) < len(table):
        legend.append(f"{len(shown)} of {len(table)} rows are shown")
    if legend:
        lines.append("  " + "; ".join(legend))
    return lines


def _most_telling(answer: Answer) -> pd.DataFrame:
    """Return the rows that a reader needs most, in the order of the table.

    They are the recommended, the fastest and the cheapest row, then the batch sizes nearest to the
    recommended one on its devices.
    """
    table = answer.table
    best = answer.best
    if best is None:
        return table.head(MAX_ROWS)
    wanted = []
    for row in (best, answer.fastest, answer.cheapest):
        assert row is not None
        is_row = (table["batch_size"] == row["batch_size"]) & (table["devices"] == row["devices"])
        wanted += list(table.index[is_row])
    distances = np.abs(np.log(table["batch_size"].to_numpy(float) / best["batch_size"]))
    is_elsewhere = table["devices"].to_numpy() != best["devices"]
    wanted += list(table.index[np.lexsort((distances, is_elsewhere))])
    return table.loc[sorted(list(dict.fromkeys(wanted))[:MAX_ROWS])]


def _row(row: Mapping[str, Any], answer: Answer) -> dict[str, str]:
    """Return a row of the table as text, by column."""
    cells = {
        "B": str(row["batch_size"]),
        "devices": str(int(row["devices"])),
        "steps": MARKS.get(row["steps_known"], "") + _with_limits(row, "steps", three_digits),
        "a step": MARKS.get(row["step_known"], "") + f"{significant(1e3 * row['step_seconds'])} ms",
        "time": _with_limits(row, "hours", hours_text),
    }
    if answer.price is None:
        cells["device-hours"] = _with_limits(row, "device_hours", hours_text)
    else:
        cells["cost"] = _with_limits(row, "cost", three_digits)
    if answer.rate is not None:
        cells[answer.rate.name] = significant(answer.rate.at(row["batch_size"]))
    cells[""] = "Pareto" if row["pareto"] else ""
    return cells
