"""The answer as text: the recommendation, the table, what it assumes, what would change it.

A terminal that is narrower than the table shows fewer details. Files have all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.advice.answer import HOUR, Answer
from lit_dps.analysis.intervals import Interval, estimate
from lit_dps.analysis.law import Law
from lit_dps.analysis.tables import aligned, significant, three_digits
from lit_dps.core.text import duration_unit, wrap

MARKS = {"extrapolated": "~", "prior": "^", "predicted": "?"}
# Rows of a table, unless all are asked for.
MAX_ROWS = 8
WIDTH = 100  # most columns of a sentence; a narrower terminal has fewer
# Details that a table loses, one after the other, until it fits the width.
LIMITS = "limits"
STEP = "a step"
RATE = "rate"


def render(
    answer: Answer,
    all_rows: bool = False,
    terminal: int | None = None,
    file: str = "",
    is_below_law: bool = False,
) -> str:
    """Return the recommendation, the table and what it assumes, as text.

    Args:
        answer: The answer.
        all_rows: Whether the table has all rows.
        terminal: Columns of the terminal; None for a file, whose table has all details.
        file: The name of the file that has the limits if the terminal is too narrow; "" without a
            file.
        is_below_law: Whether the text is below the line of the law.
    """
    width = width_at(terminal)
    lines = wrapped(_recommendation(answer, is_below_law), width=width)
    if len(answer.table):
        lines += ["", *_table(answer, all_rows, terminal, file), ""]
    for title, texts in (("assumed:", answer.assumed), ("what would change it:", answer.changes)):
        if texts:
            lines += [title, *wrapped(texts, "  ", width)]
    return "\n".join(lines) + "\n"


def width_at(terminal: int | None) -> int:
    """Return the columns of a sentence at a terminal of some columns; None is a file."""
    return WIDTH if terminal is None else min(WIDTH, terminal)


def wrapped(texts: Iterable[str], indent: str = "", width: int = WIDTH) -> list[str]:
    """Return texts as lines of at most `width` columns; the later ones of a text are indented."""
    lines = []
    for text in texts:
        whole_percents = text.replace(" %", "\xa0%")
        lines += [f"{indent}{line}" for line in wrap(whole_percents, width - len(indent))]
    return lines


def _recommendation(answer: Answer, is_below_law: bool) -> list[str]:
    """Return the row to run, and the interval of batch sizes, as two sentences."""
    best = answer.best
    if best is None:
        if not any(each.bound == 0 for each in answer.law.observations):
            return ["No answer: no run shows how many steps the goal takes."]
        why = "No answer: K or the step time is not known for anything that was asked."
        notes = answer.law.notes
        if is_below_law and isinstance(answer.law, Law):
            notes = answer.law.notes_beside_line
        return [why, *notes]
    assert answer.fastest is not None and answer.interval is not None
    rate = ""
    if answer.rate is not None:
        value = answer.rate.at(best["batch_size"])
        if value is not None:
            rate = f", {answer.rate.name} = {three_digits(value)}"
    place = f"B = {best['batch_size']} on {devices_text(int(best['devices']))}"
    first = f"Train with {place}{rate}: {_time_and_steps(best, answer)}."
    probability = f"{100 * best['near_probability']:.0f} %"
    second = f"It is within 10 % of the shortest time with a probability of {probability}"
    low, high = answer.interval
    is_same = answer.fastest["devices"] == best["devices"]
    if is_same and not low <= best["batch_size"] <= high:
        sentences = [first, f"{second}."]
        # The batch sizes that were asked for may skip the fastest ones. Without a law, a value
        # between two measured batch sizes is no evidence of that.
        if isinstance(answer.law, Law) and answer.law.describes_k:
            sentences.append(f"Any B from {low:g} to {high:g} would take less time.")
        return sentences
    where = ""
    if not is_same:
        where = f" on {devices_text(int(answer.fastest['devices']))}"
    if low < high:
        second += f", as is any B from {low:g} to {high:g}{where}{_cut(answer)}"
    return [first, f"{second}."]


def _cut(answer: Answer) -> str:
    """Return why the interval has its ends, if batch sizes beyond them may be as fast."""
    below, above = answer.cut
    if below and below == above:
        return f", the smallest and largest {below}"
    ends = []
    if below:
        ends.append(f"the smallest {below}")
    if above:
        ends.append(f"the largest {above}")
    if not ends:
        return ""
    return f", {' and '.join(ends)}"


def devices_text(count: int) -> str:
    if count == 1:
        return "1 device"
    return f"{count} devices"


def _with_limits(row: Mapping[str, Any], name: str, has_limits: bool = True) -> str:
    """Return a value of a row with its limits, such as 160 [96.7, 265]; without, if they agree."""
    interval = Interval(row[f"{name}_low"], row[f"{name}_high"])
    if not has_limits or three_digits(interval.low) == three_digits(interval.high):
        return three_digits(row[name])
    return estimate(row[name], interval)


def _time(row: Mapping[str, Any], has_limits: bool = True) -> str:
    """Return the time of a row with its limits in one unit, such as 738 ms [354, 1440]."""
    seconds = HOUR * row["hours"]
    unit, size = duration_unit(seconds)
    scaled = {key: HOUR * row[key] / size for key in ("hours", "hours_low", "hours_high")}
    text = _with_limits(scaled, "hours", has_limits)
    value, *limits = text.partition(" [")
    return f"{value} {unit}{''.join(limits)}"


def _time_and_steps(row: Mapping[str, Any], answer: Answer) -> str:
    """Return time and steps of a row with their limits."""
    if row["steps_high"] <= answer.check_interval:
        interval = three_digits(answer.check_interval)
        return f"{_time(row)}, at most one check interval ({interval} steps)"
    value, *limits = _with_limits(row, "steps").partition(" [")
    return f"{_time(row)}, {value} steps{''.join(limits)}"


def _steps(row: Mapping[str, Any], answer: Answer, has_limits: bool) -> str:
    """Return the steps of a row with their limits; a K surely below the first check is a bound."""
    if row["steps_high"] <= answer.check_interval:
        return f"<= {three_digits(answer.check_interval)}"
    return _with_limits(row, "steps", has_limits)


def _table(answer: Answer, all_rows: bool, terminal: int | None, file: str) -> list[str]:
    """Return the lines of the table, and a legend of its marks, missing limits and rows."""
    table = answer.table
    shown = table
    if len(table) > MAX_ROWS and not all_rows:
        shown = _most_telling(answer)
    rows = shown.to_dict("records")
    has_devices = set(table["devices"]) != {1}
    lines = []
    missing: list[str] = []
    for missing in ([], [LIMITS], [LIMITS, STEP], [LIMITS, STEP, RATE]):
        lines = aligned(_row(row, answer, has_devices, missing) for row in rows)
        lines = [line.rstrip() for line in lines]
        if terminal is None or max(map(len, lines)) <= terminal:
            break
    sources = {*shown["steps_known"]}
    if STEP not in missing:
        sources |= {*shown["step_known"]}
    legend = [f"{mark} {source}" for source, mark in MARKS.items() if source in sources]
    if answer.price is not None:
        legend.append(f"a device-hour costs {answer.price:g}")
    if np.any(shown["steps"].to_numpy(float) <= answer.check_interval):
        legend.append("<= at most one check interval")
    if missing:
        where = "the terminal is too narrow for the limits"
        legend.append(f"{where}, which are in {file}" if file else where)
    if len(shown) < len(table):
        legend.append(f"{len(shown)} of {len(table)} rows are shown")
    if legend:
        lines += wrapped(["; ".join(legend)], "  ", width_at(terminal))
    return lines


def _most_telling(answer: Answer) -> pd.DataFrame:
    """Return the rows that a reader needs most, in the order of the table.

    They are the recommended, the fastest and the cheapest row, then the batch sizes nearest to the
    recommended one on its devices.
    """
    table = answer.table
    best = answer.best
    assert best is not None and answer.fastest is not None and answer.cheapest is not None
    wanted = []
    for row in (best, answer.fastest, answer.cheapest):
        is_row = (table["batch_size"] == row["batch_size"]) & (table["devices"] == row["devices"])
        wanted += list(table.index[is_row])
    distances = np.abs(np.log(table["batch_size"].to_numpy(float) / best["batch_size"]))
    is_elsewhere = table["devices"].to_numpy() != best["devices"]
    wanted += list(table.index[np.lexsort((distances, is_elsewhere))])
    return table.loc[sorted(list(dict.fromkeys(wanted))[:MAX_ROWS])]


def _row(
    row: Mapping[str, Any], answer: Answer, has_devices: bool, missing: Sequence[str]
) -> dict[str, str]:
    """Return a row of the table as text, by column, without some details."""
    cells = {"B": str(row["batch_size"])}
    if has_devices:
        cells["devices"] = str(int(row["devices"]))
    has_limits = LIMITS not in missing
    cells["steps"] = MARKS.get(row["steps_known"], "") + _steps(row, answer, has_limits)
    if STEP not in missing:
        step = f"{significant(1e3 * row['step_seconds'])} ms"
        cells[STEP] = MARKS.get(row["step_known"], "") + step
    cells["time"] = _time(row, has_limits)
    if answer.price is not None:
        cells["cost"] = three_digits(row["cost"])
    elif has_devices:
        cells["device-hours"] = three_digits(row["device_hours"])
    if answer.rate is not None and RATE not in missing:
        cells[answer.rate.name] = significant(answer.rate.at(row["batch_size"]))
    cells[""] = _role(row, answer)
    return cells


def _role(row: Mapping[str, Any], answer: Answer) -> str:
    """Return what a row of the table is for a reader."""
    roles = (
        ("recommended", answer.best),
        ("fastest", answer.fastest),
        ("cheapest", answer.cheapest),
    )
    for role, other in roles:
        if is_same_row(other, row):
            return role
    return "Pareto" if row["pareto"] else ""


def is_same_row(first: Mapping[str, Any] | None, second: Mapping[str, Any]) -> bool:
    """Return True if two rows are of the same batch size and number of devices."""
    if first is None:
        return False
    return all(first[name] == second[name] for name in ("batch_size", "devices"))
