"""How good predictions were: predicted against real steps and hours of runs with a recommended
configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_dps.analysis.tables import aligned, significant, three_digits
from lit_dps.core.format import number_text

WHAT = ("steps", "hours")


def calibrate(outcomes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A table of all pairs, then bias and coverage.

    The bias is the geometric mean of real over predicted; the coverage the share of runs within the
    95 % limits. A run that did not meet its goal counts as outside where it ran beyond the upper
    limit; else nothing is known of it.

    Args:
        outcomes: By study: batch_size, devices, reached, steps, hours of steps and checks,
            other_hours to begin, to log and to save (absent in earlier versions, whose hours hold
            them), real_devices (absent where they are devices), and predicted_steps and
            predicted_hours, each lower limit, value and upper limit.
    """
    rows = [(name, each) for name, kept in outcomes.items() for each in kept]
    if not rows:
        return "no run of fit with a recommended configuration is stored yet\n"
    lines = aligned((_row(name, each) for name, each in rows), words=True)
    for what in WHAT:
        lines.append("")
        of = [each for _, each in rows if what == "steps" or _as_asked(each)]
        lines.append(f"{what}: {_summary(what, of)}")
    if others := sum(not _as_asked(each) for _, each in rows):
        lines.append(
            f"{others} ran on another number of devices than predicted: their hours do not count"
        )
    if older := sum("other_hours" not in each for _, each in rows):
        lines.append(
            f"the hours of {older} of them, of an earlier version, hold what fit took to begin, "
            "log and save"
        )
    return "\n".join(lines) + "\n"


def _as_asked(each: Mapping[str, Any]) -> bool:
    """Whether it ran on as many devices as predicted."""
    return each.get("real_devices", each["devices"]) == each["devices"]


def _row(name: str, each: Mapping[str, Any]) -> dict[str, str]:
    found = {"study": name, "B": str(each["batch_size"]), "devices": str(each["devices"])}
    found["devices"] += "" if _as_asked(each) else f", run on {each['real_devices']}"
    for what in WHAT:
        low, value, high = map(three_digits, each[f"predicted_{what}"])
        sign = "" if each["reached"] else "> "
        found |= {
            f"predicted {what}": f"{value} [{low}, {high}]",
            f"real {what}": sign + significant(each[what]),
        }
    return found | {"other hours": significant(each.get("other_hours"))}


def _summary(what: str, runs: Sequence[Mapping[str, Any]]) -> str:
    met = [run for run in runs if run["reached"]]
    parts = []
    if met:
        logs = np.log([run[what] / run[f"predicted_{what}"][1] for run in met])
        spread = f", scatter {logs.std(ddof=1):.0%}" if len(logs) > 1 else ""
        ratio = number_text(math.exp(float(logs.mean())), 3)
        parts.append(f"real / predicted {ratio}{spread} (of {len(met)} that met the goal)")
    inside = sum(
        run[f"predicted_{what}"][0] <= run[what] <= run[f"predicted_{what}"][2] for run in met
    )
    beyond = sum(run[what] > run[f"predicted_{what}"][2] for run in runs if not run["reached"])
    known = len(met) + beyond
    parts.append(f"{inside} of {known} within the 95 % limits" if known else "no run tells")
    if unknown := len(runs) - known:
        parts.append(f"{unknown} ended before their goal and their upper limit")
    return "; ".join(parts)
