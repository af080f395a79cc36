"""Which batch size, on how many devices, for how long, at what cost: from the law, the step time
and prices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.advice.branch_law import Branched
from lit_dps.advice.next_probe import probes
from lit_dps.advice.one_run import OneRun
from lit_dps.advice.step_time import StepTime
from lit_dps.analysis.answer import NEAR
from lit_dps.analysis.law import Law
from lit_dps.analysis.rates import RateLaw
from lit_dps.analysis.tables import seconds_text

HOUR = 3600.0
FINE = 97  # batch sizes looked at between two ends


@dataclass(frozen=True)
class Checks:
    """Validation along the way: seconds of a check, and the steps between two."""

    seconds: float
    interval: float


@dataclass(frozen=True)
class Answer:
    """What to run.

    Attributes:
        law, step_time, rate, price: What it was made from; price of a device-hour, or None.
        table: A row a batch size and number of devices (`answer`).
        best: The row to run: the cheapest of those within 10 % of the least time. None where
            nothing is known.
        fastest, cheapest: The rows of least time, and of least cost (device-hours without a price).
        interval: Batch sizes within 10 % of the least time on as many devices as `fastest` has, in
            examples; ends of what was asked where it is cut off there (`cut`).
        cut: Whether the lower and the upper end of it are those of the batch sizes asked for.
        changes: What measurement would change it most, a line each.
        assumed: What it rests on that was not measured, a line each.
        one_run: What one run needs beside K; None where that is not known: then steps and times are
            those of K.
    """

    law: Law | Branched
    step_time: StepTime
    table: pd.DataFrame
    best: dict[str, object] | None
    fastest: dict[str, object] | None
    cheapest: dict[str, object] | None
    interval: tuple[float, float] | None
    cut: tuple[bool, bool]
    changes: tuple[str, ...]
    assumed: tuple[str, ...]
    rate: RateLaw | None = None
    price: float | None = None
    one_run: OneRun | None = None


def answer(
    law: Law | Branched,
    step_time: StepTime,
    batch_sizes: Sequence[int],
    devices: Sequence[int] = (1,),
    price: float | None = None,
    checks: Checks | None = None,
    rate: RateLaw | None = None,
    hours_at_most: float | None = None,
    cost_at_most: float | None = None,
    one_run: OneRun | None = None,
) -> Answer:
    """The answer over all batch sizes (ascending, in examples) and numbers of devices.

    Columns of its table: batch_size [examples], devices, steps with steps_low and steps_high,
    steps_known ("law", "extrapolated", "measured", "branched"), step_seconds, step_known ("fitted",
    "extrapolated", "predicted"), hours, device_hours and cost (of `price` a device-hour; missing
    without) each with _low and _high, examples, pareto (nothing else is both faster and cheaper),
    allowed (within `hours_at_most` and `cost_at_most`), k_star (K by the law). Steps, and what
    follows from them, are those of one run where `one_run` says what it needs, else K. Limits are
    95 %; those of K, of a run and of the step time are taken to be independent. Combinations of
    which K or the step time is not known are left out.
    """
    every = [int(b) for b in batch_sizes]
    more = (
        one_run if one_run is not None and one_run.ratio < math.inf else None
    )  # else than anybody knows
    table = _table(law, step_time, every, devices, price, checks, more)
    table["allowed"] = True
    for column, most in (("hours", hours_at_most), ("cost", cost_at_most)):
        if most is not None:
            table["allowed"] &= table[column] <= most
    table["pareto"] = _pareto(table)
    table["k_star"] = table.pop("k_star")  # behind those that there were
    allowed = table[table["allowed"]]
    assumed = _assumed(law, table, step_time, checks, price, more)
    if not len(allowed):
        return Answer(
            law,
            step_time,
            table,
            None,
            None,
            None,
            None,
            (False, False),
            (),
            assumed,
            rate,
            price,
            one_run,
        )
    fastest = allowed.loc[allowed["hours"].idxmin()]
    near = allowed[allowed["hours"] <= NEAR * fastest["hours"]]
    best = near.loc[near["device_hours"].idxmin()]
    cheapest = allowed.loc[allowed["device_hours"].idxmin()]
    interval, cut = _interval(law, step_time, every, int(fastest["devices"]), checks, table)
    changes = _changes(law, step_time, best, every, near)
    rows = (row.to_dict() for row in (best, fastest, cheapest))
    return Answer(
        law, step_time, table, *rows, interval, cut, changes, assumed, rate, price, one_run
    )


def hours_text(hours: float) -> str:
    """A time for reading, as `lit_dps.analysis.tables.seconds_text` has it."""
    return seconds_text(HOUR * hours)


def _table(law, step_time, batch_sizes, devices, price, checks, one_run=None) -> pd.DataFrame:
    rows = []
    for k in law.predict(batch_sizes).to_dict("records"):
        if k["known"] == "refused":
            continue
        k["k_star"] = k["steps"]
        if one_run is not None:
            k |= _of_one(one_run, k)
        for n in sorted(devices):
            if (step := step_time.at(k["batch_size"], n)) is None:
                continue
            extra = 0.0 if checks is None else checks.seconds / checks.interval
            hours = k["steps"] * (step.value + extra) / HOUR
            below = math.hypot(math.log(k["steps"] / k["low"]), math.log(step.value / step.low))
            above = math.hypot(math.log(k["high"] / k["steps"]), math.log(step.high / step.value))
            row = {"batch_size": int(k["batch_size"]), "devices": n, "steps": k["steps"]}
            row |= {"steps_low": k["low"], "steps_high": k["high"], "steps_known": k["known"]}
            row |= {
                "step_seconds": step.value,
                "step_known": step.known,
                "examples": k["steps"] * k["batch_size"],
            }
            for name, factor in (
                ("hours", 1.0),
                ("device_hours", n),
                ("cost", None if price is None else n * price),
            ):
                value = math.nan if factor is None else hours * factor
                row |= {
                    name: value,
                    f"{name}_low": value * math.exp(-below),
                    f"{name}_high": value * math.exp(above),
                }
            rows.append(row | {"k_star": k["k_star"]})
    columns = [
        "batch_size",
        "devices",
        "steps",
        "steps_low",
        "steps_high",
        "steps_known",
        "step_seconds",
        "step_known",
    ]
    columns += [
        "examples",
        *(f"{n}{end}" for n in ("hours", "device_hours", "cost") for end in ("", "_low", "_high")),
    ]
    return pd.DataFrame(rows, columns=[*columns, "k_star"])


def _of_one(one_run: OneRun, k) -> dict[str, float]:
    """Steps of one run and their limits, from K and its limits; where runs were made K is not asked
    any more."""
    steps, known = k["steps"] * one_run.ratio, one_run.batch_size == k["batch_size"]
    below, above = (
        (0.0, 0.0) if known else (math.log(k["steps"] / k["low"]), math.log(k["high"] / k["steps"]))
    )
    below, above = (math.hypot(x, 1.96 * one_run.spread) for x in (below, above))
    return {"steps": steps, "low": steps * math.exp(-below), "high": steps * math.exp(above)}


def _pareto(table: pd.DataFrame) -> np.ndarray:
    """(n,): whether nothing else takes no more hours and no more device-hours, and less of one."""
    hours, cost = table["hours"].to_numpy(float), table["device_hours"].to_numpy(float)
    worse = (
        (hours[:, None] >= hours)
        & (cost[:, None] >= cost)
        & ((hours[:, None] > hours) | (cost[:, None] > cost))
    )
    return ~worse.any(axis=1) if len(table) else np.zeros(0, bool)


def _interval(
    law, step_time, batch_sizes, devices, checks, table
) -> tuple[tuple[float, float], tuple[bool, bool]]:
    """Batch sizes on so many devices whose time is within 10 % of the least there, and whether the
    ends cut it off."""
    ends = min(batch_sizes), max(batch_sizes)
    fine = np.unique(np.round(np.geomspace(*ends, FINE)).astype(int))
    if math.isnan(law.reach[0]):  # only what was measured
        fine = table.loc[table["devices"] == devices, "batch_size"].to_numpy(int)
    found = _table(law, step_time, fine, [devices], None, checks)
    hours = found["hours"].to_numpy(float)
    best, near = int(hours.argmin()), hours <= NEAR * hours.min()
    low = high = best
    while low > 0 and near[low - 1]:
        low -= 1
    while high < len(near) - 1 and near[high + 1]:
        high += 1
    sizes = found["batch_size"].to_numpy(float)
    return (sizes[low], sizes[high]), (low == 0, high == len(near) - 1)


def _changes(
    law: Law, step_time: StepTime, best, batch_sizes, near: pd.DataFrame
) -> tuple[str, ...]:
    """Which measurement narrows the time of the best configuration most, then what is uncertain of
    it."""
    lines = []
    if len(law.draws):

        def seconds(b):
            step = step_time.at(b, int(best["devices"])) or step_time.at(b, 1)
            return step.value

        table = probes(law, batch_sizes, sorted(set(near["batch_size"])), seconds)
        first = table.iloc[0]
        lines.append(
            f"a run at B = {first['batch_size']:g} ({hours_text(first['cost'] / HOUR)} to goal): "
            "it should take "
            f"{first['share']:.0%} of the variance of log K at the batch sizes near the best"
        )
    if best["step_known"] != "fitted":
        lines.append(
            f"the step time of B = {best['batch_size']:.0f} on {best['devices']:.0f} devices is "
            f"{best['step_known']}, "
            "not timed: time some steps there"
        )
    if best["steps_known"] == "extrapolated":
        lines.append(
            f"K at B = {best['batch_size']:.0f} is extrapolated; K was too small in two of three "
            "such cases"
        )
    return tuple(lines)


def _assumed(law, table, step_time: StepTime, checks, price, one_run) -> tuple[str, ...]:
    if not len(table):
        return ()
    lines = ["the learning rate is tuned at each batch size, as it was where K was measured"]
    if isinstance(law, Branched):
        lines = list(law.assumed)
    elif one_run is None:
        lines.append(
            "steps are K, the least of several trials: one run usually needs more, how many is "
            "not known"
        )
    else:
        lines.append("what one run needs beside K is the same at all batch sizes")
    if (table["steps_known"] == "measured").any():
        lines.append(
            "K without a law is that of each batch size by itself: the fastest row is in part the "
            "luckiest one"
        )
    if (table["step_known"] == "predicted").any():
        lines.append(f"step times marked predicted: {step_time.link}")
    if checks is None:
        lines.append(
            "no time for validation, checkpoints, or waiting for data beyond what was timed"
        )
    if price is not None:
        lines.append(f"a device costs {price:g} an hour, all alike")
    if not isinstance(law, Branched):
        lines.append(
            f"the law's own error is taken from public curves: {law.error:.0%} within the range, "
            "more beyond"
        )
    return tuple(lines)
