"""The table of time and cost by batch size, which three sliders of the report page recompute.

The numbers of the table are in the page as JSON. `page.js` multiplies them as `answer_rows` and
`cost_of` do, and writes them as `format_duration` and `three_digits` do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.step_seconds import QUIET, WITH_CHECKS
from lit_dps.analysis.tables import three_digits
from lit_dps.core.text import counted, every, format_duration
from lit_dps.core.trial import RANKS
from lit_dps.report.html.elements import html_table, text_of
from lit_dps.report.result_table import FASTEST, bound_sign, cell_names, validation_time
from lit_dps.report.timing_notes import computation_text, counts_validations, sources_of

HOUR_SECONDS = 3600
PRICE = 1.0  # of a device-hour, until the reader moves the slider: the cost is in device-hours
MAX_PRICE = 20.0
PRICE_STEP = 0.1
MAX_DEVICES = 64


@dataclass(frozen=True)
class Setting:
    """The positions of the three sliders.

    Attributes:
        validate_every: Steps between two validations; None for no validation.
        devices: Number of devices that are paid for.
        price: Price of a device-hour.
    """

    validate_every: int | None
    devices: int
    price: float = PRICE

    def __str__(self) -> str:
        validation = "no validation"
        if self.validate_every is not None:
            validation = f"validation {every(self.validate_every)}"
        return f"{validation}, {counted(self.devices, 'device')}, {self.price:g} per device-hour"


def cost_section(study: Analysis) -> str:
    """Return the sliders, the table at their first positions and its numbers as JSON.

    Empty if no time to the goal is known.
    """
    if all(row["seconds"] is None for row in study.answers.values()):
        return ""
    devices = timed_devices(study)
    if len(devices) > 1:
        return (
            '<h2>Time and cost</h2><p class="warning">The cost is unknown: trials ran on different '
            f"numbers of processes ({', '.join(map(str, devices))}).</p>"
        )
    interval = study.validate_every if counts_validations(study) else None
    setting = Setting(interval, devices[0])
    numbers = cost_numbers(study, setting)
    # Names of users must not end the script.
    embedded = json.dumps(numbers, allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            "<h2>Time and cost of one training</h2>",
            _sliders(numbers),
            f'<p class="setting">Shown: <output id="setting">{text_of(setting)}</output>.</p>',
            html_table(cost_rows(study, setting), "costs"),
            f'<p class="of">{text_of(_assumption(study, setting))}</p>',
            f'<script type="application/json" id="cost-numbers">{embedded}</script>',
        ]
    )


def timed_devices(study: Analysis) -> list[int]:
    """Return the numbers of processes that trained together when steps were timed."""
    timing = study.record.step_timing
    numbers = set()
    for cell, row in study.answers.items():
        best = study.by_cell[cell].best
        if timing is not None and row["timing"] == QUIET:
            numbers.add(timing.ranks)
        elif best is not None:
            numbers.add(int(best.flags.get(RANKS, 1)))
    return sorted(numbers)


def cost_of(seconds: float, setting: Setting) -> float:
    """Return the price of a time on all devices."""
    return seconds / HOUR_SECONDS * setting.devices * setting.price


def cost_rows(study: Analysis, setting: Setting) -> list[dict[str, str]]:
    """Return the rows of the table as text, by column.

    Args:
        study: The study, with the `validate_every` of the setting.
        setting: The positions of the sliders.
    """
    rows = []
    for cell, row in study.answers.items():
        columns = cell_names(study, cell)
        validation = row["validation_seconds"]
        if setting.validate_every is None and row["check_seconds"] is not None:
            validation = 0.0
        columns["training"] = "-"
        if row["seconds"] is not None:
            columns["training"] = bound_sign(row) + format_duration(row["seconds"])
        columns["validation"] = validation_time(row, validation)
        columns |= {"total": "-", "cost": "-", "": ""}
        total = row["total_seconds"]
        if total is not None:
            columns["total"] = bound_sign(row) + format_duration(total)
            columns["cost"] = bound_sign(row) + three_digits(cost_of(total, setting))
        if row["fastest"]:
            columns[""] = FASTEST
        rows.append(columns)
    return rows


def cost_numbers(study: Analysis, setting: Setting) -> dict[str, Any]:
    """Return the numbers that the sliders multiply, and their positions.

    Each of `rows` has the number of its series, the steps to the goal, the seconds of training to
    the goal, the seconds of one validation, and whether these are upper bounds. A number that is
    unknown is null.
    """
    all_series = list(study.record.series)
    rows = []
    for cell, row in study.answers.items():
        rows.append(
            {
                "series": all_series.index(cell.series),
                "steps": row["steps"],
                "seconds": row["seconds"],
                "check": row["check_seconds"],
                "bound": bound_sign(row),
            }
        )
    return {
        "rows": rows,
        "intervals": _intervals(study),
        "validate_every": setting.validate_every,
        "devices": setting.devices,
        "price": setting.price,
    }


def _intervals(study: Analysis) -> list[int | None]:
    """Return the positions of the validation interval, in steps; None is no validation.

    They are 1, 2, 5, 10, ... up to the most steps to the goal, the interval of the study and the
    interval of `--validate-every`.
    """
    rows = list(study.answers.values())
    if all(row["check_seconds"] is None for row in rows):
        return [None]
    most = max(row["steps"] for row in rows)
    intervals = {study.record.goal.check_interval}
    if study.validate_every is not None:
        intervals.add(study.validate_every)
    decade = 1
    while decade <= most:
        intervals |= {decade, 2 * decade, 5 * decade}
        decade *= 10
    return [*sorted(intervals), None]


def _sliders(numbers: Mapping[str, Any]) -> str:
    """Return the sliders, which the script of the page shows."""
    intervals = numbers["intervals"]
    sliders = [
        _slider("devices", "Devices", numbers["devices"], numbers["devices"], MAX_DEVICES, 1),
        _slider("price", "Price of a device-hour", numbers["price"], 0, MAX_PRICE, PRICE_STEP),
    ]
    if len(intervals) > 1:
        position = intervals.index(numbers["validate_every"])
        validation = "Steps between validations"
        last = len(intervals) - 1
        sliders.insert(0, _slider("interval", validation, position, 0, last, 1))
    return f'<div id="sliders" hidden>{"".join(sliders)}</div>'


def _slider(name: str, label: str, value: float, low: float, high: float, step: float) -> str:
    """Return a slider with its label."""
    high = max(high, value)
    return (
        f'<label>{label}: <output id="{name}-value"></output>'
        f'<input type="range" id="{name}" min="{low:g}" max="{high:g}" step="{step:g}" '
        f'value="{value:g}"></label>'
    )


def _assumption(study: Analysis, setting: Setting) -> str:
    """Return what the table assumes, and what the sliders do not change."""
    timed = counted(setting.devices, "device")
    sentences = [f"Training: {computation_text(study)}."]
    if WITH_CHECKS in sources_of(study):
        sentences.append("It includes validation where the study did not time validation alone.")
    if len(_intervals(study)) > 1:
        sentences.append("Total: training and a validation of the entire split at each interval.")
    sentences.append("Cost: total time x devices x price.")
    sentences.append(
        f"The devices change the cost alone: the study timed steps on {timed}, so the time on more "
        "is unknown. The command advise predicts it."
    )
    return " ".join(sentences)
