"""The answer as text."""

from __future__ import annotations

import math

from lit_dps.advice.answer import Answer, hours_text
from lit_dps.analysis.tables import aligned, significant, three_digits

MARKS = {
    "law": "",
    "measured": "",
    "branched": "",
    "fitted": "",
    "extrapolated": "~",
    "predicted": "?",
}
ROWS = 24  # of the table; more than that leave all but the Pareto front and what is close to it out


def render(answer: Answer, every: bool = False) -> str:
    """The recommendation, the table and what it rests on; with `every`, all rows of the table."""
    parts = ["\n".join(_sentences(answer)), "\n".join(_table(answer, every))]
    parts += [
        "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
        for title, lines in _lists(answer)
        if lines
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _sentences(answer: Answer) -> list[str]:
    if answer.best is None:
        why = (
            "nothing is within the limits"
            if len(answer.table)
            else "K or the step time is not known anywhere asked"
        )
        return [f"no answer: {why}", *answer.law.notes]
    best, low, high = answer.best, *answer.interval
    rate = None if answer.rate is None else answer.rate.at(best["batch_size"])
    told = "" if rate is None else f", {answer.rate.name} = {three_digits(rate)}"
    lines = [f"run {_place(best)}{told}: {_costs(best, answer)}"]
    if answer.cut[0] or answer.cut[1]:
        ends = " and ".join(
            end for end, cut in zip(("smallest", "largest"), answer.cut, strict=True) if cut
        )
        more = f", cut off at the {ends} asked for"
    else:
        more = ""
    if answer.one_run is not None:
        lines.append(answer.one_run.describe())
    on = int(answer.fastest["devices"])
    lines.append(
        f"any B from {low:g} to {high:g} is within 10 % of the best time on {_devices(on)}{more}"
    )
    for name, row in (("fastest", answer.fastest), ("cheapest", answer.cheapest)):
        if any(row[key] != best[key] for key in ("batch_size", "devices")):
            lines.append(f"{name}: {_place(row)}: {_costs(row, answer)}")
    return lines


def _place(row) -> str:
    return f"B = {row['batch_size']} on {_devices(int(row['devices']))}"


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


def _costs(row, answer: Answer) -> str:
    span = f"[{hours_text(row['hours_low'])}, {hours_text(row['hours_high'])}]"
    steps = (
        f"{three_digits(row['steps'])} steps [{three_digits(row['steps_low'])}, "
        f"{three_digits(row['steps_high'])}]"
    )
    cost = ""
    if answer.price is not None:
        cost = ", cost {} [{}, {}]".format(
            *(three_digits(row[f"cost{end}"]) for end in ("", "_low", "_high"))
        )
    return f"{hours_text(row['hours'])} {span}, {steps}{cost}"


def _table(answer: Answer, every: bool) -> list[str]:
    table = answer.table
    if not len(table):
        return []
    rows = table if every or len(table) <= ROWS else table[table["pareto"] | _close(answer)]
    lines = aligned(_row(row, answer) for row in rows.to_dict("records"))
    marks = {known for column in ("steps_known", "step_known") for known in rows[column]}
    legend = [f"{MARKS[mark]} {mark}" for mark in ("extrapolated", "predicted") if mark in marks]
    if len(rows) < len(table):
        legend.append(
            f"{len(table) - len(rows)} rows of {len(table)} left out, which others beat in time "
            "and cost"
        )
    return [*lines, *(["  " + "; ".join(legend)] if legend else [])]


def _close(answer: Answer):
    if answer.best is None:
        return False
    return (answer.table["devices"] == answer.best["devices"]) & answer.table["allowed"]


def _row(row, answer: Answer) -> dict[str, str]:
    def interval(name, text):
        return f"{text(row[name])} [{text(row[f'{name}_low'])}, {text(row[f'{name}_high'])}]"

    money = "cost" if answer.price is not None else "device_hours"
    text = three_digits if answer.price is not None else hours_text
    rate = {}
    if answer.rate is not None:
        found = answer.rate.at(row["batch_size"])
        rate = {answer.rate.name: "-" if found is None else significant(found)}
    return {
        "B": str(row["batch_size"]),
        "devices": str(int(row["devices"])),
        "steps": MARKS[row["steps_known"]] + interval("steps", three_digits),
        "a step": MARKS[row["step_known"]] + f"{significant(1e3 * row['step_seconds'])} ms",
        "time": interval("hours", hours_text),
        money.replace("_", "-"): interval(money, text),
        **rate,
        "": "Pareto" if row["pareto"] else "",
    }


def _lists(answer: Answer):
    yield "what would change the answer", answer.changes
    yield "assumed", (*answer.assumed, *([] if answer.best is None else answer.law.notes))
    if answer.rate is not None and not math.isnan(answer.rate.scale):
        yield "the learning rate", (answer.rate.describe(),)
