"""How good predictions were: predicted and real steps and hours of recommended runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_dps.analysis.tables import aligned, significant, three_digits
from lit_dps.core.text import number_text


def calibrate(outcomes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a table of all runs, then the bias and the coverage of the predictions, as text.

    The bias is the geometric mean of real over predicted values. The coverage is the share of runs
    within the 95 % limits. A run that missed its goal counts as outside if it ran beyond the upper
    limit; otherwise it does not count.

    Args:
        outcomes: By study: batch_size, devices, reached, steps, hours (of steps and validations),
            other_hours (to start, log and save), real_devices, and predicted_steps and
            predicted_hours, each as lower limit, value and upper limit.
    """
    runs = []
    rows = []
    for study, of_study in outcomes.items():
        for run in of_study:
            runs.append(run)
            rows.append(_row(study, run))
    if not runs:
        return "no run of fit with a recommended configuration is stored yet\n"
    on_predicted_devices = [run for run in runs if run["real_devices"] == run["devices"]]
    lines = aligned(rows, words=True)
    lines += ["", f"steps: {_summary('steps', runs)}"]
    lines += ["", f"hours: {_summary('hours', on_predicted_devices)}"]
    others = len(runs) - len(on_predicted_devices)
    if others:
        lines.append(
            f"{others} ran on another number of devices than predicted; their hours do not count"
        )
    # Outcomes that `migrate` converted may lack other_hours: their hours include them.
    older = sum("other_hours" not in run for run in runs)
    if older:
        lines.append(
            f"{older} of the runs are of an earlier version; their hours include the time to "
            "start, log and save"
        )
    return "\n".join(lines) + "\n"


def _row(study: str, run: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of a run as text, by column."""
    devices = str(run["devices"])
    if run["real_devices"] != run["devices"]:
        devices += f", run on {run['real_devices']}"
    row = {"study": study, "B": str(run["batch_size"]), "devices": devices}
    for name in ("steps", "hours"):
        low, value, high = map(three_digits, run[f"predicted_{name}"])
        row[f"predicted {name}"] = f"{value} [{low}, {high}]"
        row[f"real {name}"] = significant(run[name])
        if not run["reached"]:
            row[f"real {name}"] = f"> {row[f'real {name}']}"
    row["other hours"] = significant(run.get("other_hours"))
    return row


def _summary(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return bias and coverage of the steps or hours of some runs."""
    parts = []
    log_ratios = []
    inside = outside = unknown = 0
    for run in runs:
        low, value, high = run[f"predicted_{name}"]
        real = run[name]
        if run["reached"]:
            log_ratios.append(math.log(real / value))
        if run["reached"] and low <= real <= high:
            inside += 1
        elif run["reached"] or real > high:
            outside += 1
        else:
            unknown += 1
    if log_ratios:
        bias = number_text(math.exp(float(np.mean(log_ratios))), 3)
        scatter = ""
        if len(log_ratios) > 1:
            scatter = f", scatter {np.std(log_ratios, ddof=1):.0%}"
        count = len(log_ratios)
        parts.append(f"real / predicted {bias}{scatter} (of {count} that met the goal)")
    coverage = "no run counts"
    if inside + outside:
        coverage = f"{inside} of {inside + outside} within the 95 % limits"
    parts.append(coverage)
    if unknown:
        parts.append(f"{unknown} ended before their goal and their upper limit")
    return "; ".join(parts)
