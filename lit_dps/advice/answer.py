"""Which batch size, on how many devices, for how long, at what cost.

`answer` combines a law of steps, a model of the step time and prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_dps.advice.branch_law import Branched
from lit_dps.advice.costs import NO_COSTS, Costs
from lit_dps.advice.next_probe import NextRun, next_run
from lit_dps.advice.step_time import Seconds, StepTime
from lit_dps.advice.time_draws import draw_step_seconds, draw_steps, near_probability
from lit_dps.analysis.answer import NEAR
from lit_dps.analysis.intervals import NORMAL_95
from lit_dps.analysis.law import Law
from lit_dps.analysis.rates import RATE_IS_TUNED, RateLaw
from lit_dps.analysis.tables import listed_numbers
from lit_dps.core.batch_schedule import CONSTANT_BATCH
from lit_dps.core.text import format_duration

HOUR = 3600.0
# Share of validation in the time of a row, from which the answer mentions it.
SHARE_TO_MENTION = 0.05
# Why the interval of batch sizes ends: no other ones were asked for, or their times are unknown.
ASKED = "asked for"
KNOWN = "with a known time"
GRID_SIZE = 97  # batch sizes between the ends of the range, from which the interval is read
COLUMNS = [
    "batch_size",
    "devices",
    "steps",
    "steps_low",
    "steps_high",
    "steps_known",
    "step_seconds",
    "step_known",
    "examples",
    "hours",
    "hours_low",
    "hours_high",
    "hours_mean",
    "device_hours",
    "device_hours_low",
    "device_hours_high",
    "cost",
    "cost_low",
    "cost_high",
]


@dataclass(frozen=True)
class Answer:
    """What to run.

    Attributes:
        law, step_time, rate, price, seed_spread, check_interval: What the answer was made from.
            Without checks, the interval is 0. K of a row is at least one interval.
        table: One row per batch size and number of devices (`answer`).
        best: The row to run: the cheapest one within 10 % of the least mean time; None without a
            row. Its near_probability is the probability to be within 10 % of the least time.
        fastest, cheapest: The rows of least mean time, and of least cost (device-hours without a
            price).
        interval: Batch sizes within 10 % of the least mean time, on the devices of `fastest`, in
            examples.
        cut: Why the interval ends at its lower and at its upper end: `ASKED`, `KNOWN`, or "" if
            batch sizes beyond it are slower.
        next_run: The run that narrows the answer most for its cost; None if no K is known.
        changes: Which measurements would change the answer most, a line each.
        assumed: What the answer assumes without a measurement, the notes of its law, and the law of
            its rates, a line each.
    """

    law: Law | Branched
    step_time: StepTime
    table: pd.DataFrame
    best: dict[str, Any] | None = None
    fastest: dict[str, Any] | None = None
    cheapest: dict[str, Any] | None = None
    interval: tuple[float, float] | None = None
    cut: tuple[str, str] = ("", "")
    next_run: NextRun | None = None
    changes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    rate: RateLaw | None = None
    price: float | None = None
    seed_spread: float = 0.0
    check_interval: float = 0.0


class Steps(NamedTuple):
    """Steps to the goal with 95 % limits."""

    value: float
    low: float
    high: float


def answer(
    law: Law | Branched,
    step_time: StepTime,
    batch_sizes: Sequence[int],
    devices: Sequence[int] = (1,),
    costs: Costs = NO_COSTS,
    rate: RateLaw | None = None,
    seed_spread: float = 0.0,
) -> Answer:
    """Return the answer over all batch sizes (ascending, in examples) and numbers of devices.

    Columns of its table: batch_size [examples]; devices; steps with steps_low and steps_high;
    steps_known (`Prediction.known`, or "branched"); step_seconds; step_known ("fitted",
    "extrapolated", "predicted"); examples; hours, device_hours and cost (missing without a price),
    each with _low and _high; hours_mean (over draws of K and of the step time); near_probability
    (to be within 10 % of the least time); allowed (always true); pareto (no row is both faster and
    cheaper).

    The recommendation minimises the mean time. So a row that is extrapolated can be recommended,
    and counts with its uncertainty.

    Limits are 95 %; the errors of K, of a seed and of the step time are taken to be independent.
    `seed_spread` is the standard deviation of log K between seeds, if K is of single runs; else 0.
    Combinations without a K or a step time have no row.
    """
    sizes = list(map(int, batch_sizes))
    table, hours = _make_table(law, step_time, sizes, devices, costs, seed_spread)
    table["batch_size"] = table["batch_size"].astype(int)
    # Files and JSON of earlier versions have this column too.
    table["allowed"] = True
    table["near_probability"] = 0.0
    if len(table):
        table["near_probability"] = near_probability(hours)
    table["pareto"] = _is_pareto(table)
    without_best = Answer(
        law,
        step_time,
        table,
        rate=rate,
        price=costs.price,
        seed_spread=seed_spread,
        check_interval=0.0 if costs.checks is None else costs.checks.interval,
    )
    without_best = replace(without_best, assumed=_assumptions(without_best, costs))
    if not len(table):
        return replace(without_best, next_run=next_run(law, sizes, sizes, step_time))
    fastest = _row_of_least(table, "hours_mean")
    near = rows_where(table, table["hours_mean"] <= NEAR * fastest["hours_mean"])
    best = _row_of_least(near, "device_hours")
    near_sizes = sorted(set(near["batch_size"]))
    run = next_run(law, sizes, near_sizes, step_time, int(best["devices"]))
    interval, cut = _interval(without_best, int(fastest["devices"]), costs, sizes)
    return replace(
        without_best,
        best=best,
        fastest=fastest,
        cheapest=_row_of_least(table, "device_hours"),
        interval=interval,
        cut=cut,
        next_run=run,
        changes=_changes(without_best, best, run),
    )


def rows_where(table: pd.DataFrame, condition: Any) -> pd.DataFrame:
    """Return the rows of a table that fulfil a condition."""
    rows: Any = table[condition]
    return rows


def _row_of_least(table: pd.DataFrame, column: str) -> dict[str, Any]:
    return table.loc[table[column].idxmin()].to_dict()


def _make_table(
    law: Law | Branched,
    step_time: StepTime,
    batch_sizes: Sequence[int],
    devices: Sequence[int],
    costs: Costs,
    seed_spread: float = 0.0,
) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the table of `answer` up to its costs, and draws (DRAWS, n) of hours of its n rows."""
    rows = []
    hours = []
    predictions = law.predict(batch_sizes)
    predictions = rows_where(predictions, predictions["known"] != "refused")
    # A run ends at a check, so it takes at least one check interval.
    fewest = 0.0 if costs.checks is None else costs.checks.interval
    k_draws = np.maximum(draw_steps(law, predictions), fewest)
    for i, prediction in enumerate(predictions.to_dict("records")):
        batch_size = prediction["batch_size"]
        k = Steps(prediction["steps"], prediction["low"], prediction["high"])
        steps = Steps(*(max(each, fewest) for each in _steps_of_one_seed(k, seed_spread)))
        for count in sorted(devices):
            step = step_time.at(batch_size, count)
            if step is None:
                continue
            row = {
                "batch_size": batch_size,
                "devices": count,
                "steps": steps.value,
                "steps_low": steps.low,
                "steps_high": steps.high,
                "steps_known": prediction["known"],
                "step_seconds": step.value,
                "step_known": step.source,
                "examples": CONSTANT_BATCH.examples_of(steps.value, batch_size),
            }
            seconds = draw_step_seconds((step.value, step.low, step.high), count)
            checking = costs.check_seconds_per_step(batch_size, count)
            seconds = seconds + checking
            hours.append(k_draws[:, i] * seconds / HOUR)
            row["hours_mean"] = float(hours[-1].mean())
            rows.append(row | _costs(steps, step, checking, count, costs.price))
    return pd.DataFrame(rows, columns=COLUMNS), np.array(hours).T


def _steps_of_one_seed(k: Steps, seed_spread: float) -> Steps:
    """Return K with the limits of one run on another seed."""
    below = math.hypot(math.log(k.value / k.low), NORMAL_95 * seed_spread)
    above = math.hypot(math.log(k.high / k.value), NORMAL_95 * seed_spread)
    return Steps(k.value, k.value * math.exp(-below), k.value * math.exp(above))


def _costs(
    steps: Steps, step: Seconds, checking: float, devices: int, price: float | None
) -> dict[str, float]:
    """Return hours, device-hours and cost of a run, each with 95 % limits.

    Args:
        steps, step: Steps to the goal, and seconds of a step.
        checking: Seconds of validation for each step.
        devices: The number of devices.
        price: Price of a device-hour; None if it is unknown.
    """
    hours = steps.value * (step.value + checking) / HOUR
    below = math.hypot(math.log(steps.value / steps.low), math.log(step.value / step.low))
    above = math.hypot(math.log(steps.high / steps.value), math.log(step.high / step.value))
    factors = {"hours": 1.0, "device_hours": devices, "cost": math.nan}
    if price is not None:
        factors["cost"] = devices * price
    costs = {}
    for name, factor in factors.items():
        value = hours * factor
        costs[name] = value
        costs[f"{name}_low"] = value * math.exp(-below)
        costs[f"{name}_high"] = value * math.exp(above)
    return costs


def _is_pareto(table: pd.DataFrame) -> Any:
    """Return (n,): whether no row has fewer hours or device-hours and not more of the other."""
    if not len(table):
        return np.zeros(0, bool)
    hours = table["hours"].to_numpy(float)
    cost = table["device_hours"].to_numpy(float)
    is_not_better = (hours[:, None] >= hours) & (cost[:, None] >= cost)
    is_worse = (hours[:, None] > hours) | (cost[:, None] > cost)
    return ~(is_not_better & is_worse).any(axis=1)


def _interval(
    made: Answer, devices: int, costs: Costs, batch_sizes: Sequence[int]
) -> tuple[tuple[float, float], tuple[str, str]]:
    """Return the batch sizes within 10 % of the least time on some devices.

    Returns:
        The ends of the interval, and `Answer.cut`.
    """
    if math.isnan(made.law.reach[0]):
        # Only measured K are answers.
        grid = made.table.loc[made.table["devices"] == devices, "batch_size"].to_numpy(int)
    else:
        # Fractions in between, because a whole number of examples may need more parts to be
        # accumulated.
        grid = np.geomspace(min(batch_sizes), max(batch_sizes), GRID_SIZE)
        grid = np.union1d(grid, batch_sizes)
    of_grid = Costs(checks=costs.checks)
    fine, _ = _make_table(made.law, made.step_time, list(grid), [devices], of_grid)
    hours = fine["hours_mean"].to_numpy(float)
    is_near = hours <= NEAR * hours.min()
    low = high = int(hours.argmin())
    while low > 0 and is_near[low - 1]:
        low -= 1
    while high < len(hours) - 1 and is_near[high + 1]:
        high += 1
    smallest = float(math.ceil(fine["batch_size"].iloc[low]))
    largest = max(smallest, float(math.floor(fine["batch_size"].iloc[high])))
    below = above = ""
    if low == 0:
        below = ASKED if smallest <= min(batch_sizes) else KNOWN
    if high == len(hours) - 1:
        above = ASKED if largest >= max(batch_sizes) else KNOWN
    return (smallest, largest), (below, above)


def _changes(made: Answer, best: Mapping[str, Any], run: NextRun | None) -> tuple[str, ...]:
    """Return which measurements would narrow the time of the best row most, a line each."""
    size = best["batch_size"]
    lines = []
    if run is not None:
        lines.append(
            f"One more run at B = {run.batch_size} ({format_duration(run.seconds)} to the goal) "
            f"should remove {100 * run.share:.0f} % of the variance of log K."
        )
    if best["step_known"] != "fitted":
        lines.append(f"Its step time is {best['step_known']}: time some steps at B = {size:.0f}.")
    if best["steps_known"] == "extrapolated":
        lines.append(
            f"K at B = {size:.0f} is extrapolated. Half of such K on public runs were off by more "
            "than 12 %."
        )
    measured = [each.batch_size for each in made.law.observations if not each.bound]
    if best["steps_known"] == "prior" and size not in measured:
        lines.append(f"K at B = {size:.0f} rests on a prior. A run there replaces it.")
    return tuple(lines)


def _assumptions(made: Answer, costs: Costs) -> tuple[str, ...]:
    """Return what the rows assume, the notes of the law, and the law of the rates, a line each."""
    law, table, rate = made.law, made.table, made.rate
    if not len(table):
        return ()
    lines = []
    if isinstance(law, Branched):
        lines += law.assumed
    else:
        lines += RATE_IS_TUNED if rate is None else rate.assumed
        if made.seed_spread:
            lines.append(
                "Steps are of single runs. Between seeds they differ by "
                f"{100 * made.seed_spread:.0f} %, which the limits include."
            )
        elif rate is not None and rate.is_searched and not law.uses_medians:
            lines.append("Steps are K, the least of several trials. One run usually needs more.")
    lucky = [each for each in law.observations if each.luck]
    if lucky:
        sizes = listed_numbers(each.batch_size for each in lucky)
        most = 100 * math.expm1(max(each.luck for each in lucky))
        lines.append(
            f"K at B = {sizes} is the least of several learning rates. A further run usually needs "
            f"more steps, so predictions use K plus up to {most:.0f} %."
        )
    if "measured" in set(table["steps_known"]):
        lines.append("Without a law, the fastest row is partly the luckiest one.")
    if isinstance(law, Law) and law.prior is not None and (law.describes_k or law.beyond):
        of_prior = "^ rests" if "prior" in set(table["steps_known"]) else "K rests"
        lines.append(f"{of_prior} on the measured K and {law.prior.source}.")
    if "predicted" in set(table["step_known"]):
        lines.append(f"Predicted step times assume {made.step_time.link}.")
    is_for_several = len(set(table["devices"])) > 1
    if is_for_several and _share_of_checks(table, costs) >= SHARE_TO_MENTION:
        lines.append(
            "Times assume that a validation takes the same time on every number of devices."
        )
    if costs.checks is None and not costs.steps_include_checks:
        lines.append(
            "Times exclude validation, checkpoints and slower data loading than was timed."
        )
    # If the law rests on a prior, a line above has the prior, which the notes repeat.
    if isinstance(law, Branched) or not law.rests_on_prior:
        lines += law.notes
    # The rates of the method "pilot" describe themselves in `rate.assumed`.
    if rate is not None and rate.is_searched:
        lines.append(rate.describe())
    return tuple(lines)


def _share_of_checks(table: pd.DataFrame, costs: Costs) -> float:
    """Return the largest share of validation in the time of a row."""
    shares = []
    for row in table.to_dict("records"):
        checking = costs.check_seconds_per_step(row["batch_size"], row["devices"])
        shares.append(checking / (checking + row["step_seconds"]))
    return max(shares)
