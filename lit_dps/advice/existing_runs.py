"""Advice from runs that exist, without any training: `advise_on_runs`.

At each batch size the best learning rate counts, by the median over its seeds. Runs that missed the
goal are bounds. Step times are from the runs, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.advice.answer import answer
from lit_dps.advice.costs import Costs
from lit_dps.advice.next_probe import law_with_prior, next_run, with_rate
from lit_dps.advice.result import Advice
from lit_dps.advice.run_table import RunTable
from lit_dps.advice.step_time import Seconds, StepTime, Timed, fit_step_time
from lit_dps.analysis.observations import (
    AT_LEAST,
    AT_MOST,
    Observation,
    check_interval,
    medians,
    noise_of_minimum,
    note_on_boundaries,
)
from lit_dps.analysis.rates import RateLaw, rate_law, spacing_of
from lit_dps.analysis.tables import listed_numbers
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import number_text

# Without a choice of the user, the answer has batch sizes up to this factor beyond the runs.
BEYOND = 4
MIN_TIMED_BATCH_SIZES = 2


class Evidence(NamedTuple):
    """K by batch size, as runs show it.

    Attributes:
        observations: K by batch size, bounds among them.
        best_rates: The best learning rate by batch size, where rates are known and one met the
            goal.
        tried: The learning rates by batch size; nan for runs without one.
        uses_medians: Whether a batch size has several seeds of its best rate.
        notes: What a reader should know, a sentence each.
    """

    observations: list[Observation]
    best_rates: dict[float, float]
    tried: dict[float, list[float]]
    uses_medians: bool
    notes: list[str]


@dataclass(frozen=True)
class GroupStepTime(StepTime):
    """The seconds of a step on a fixed number of devices, which are timed as one.

    Attributes:
        count: The number of devices.
    """

    count: int = 1

    def at(self, batch_size: float, devices: int = 1) -> Seconds | None:
        """Return the seconds of a step of a global batch; None on another number of devices."""
        if devices != self.count:
            return None
        return super().at(batch_size / devices, 1)


def advise_on_runs(
    table: RunTable,
    batch_sizes: Sequence[int] | None = None,
    devices: Sequence[int] | None = None,
    price: float | None = None,
    name: str = "runs",
) -> Advice:
    """Return advice from the table of `read_runs`.

    Args:
        table: The runs.
        batch_sizes: Batch sizes to answer for; by default the measured ones, and powers of 2 up to
            `BEYOND` times beyond them.
        devices: Numbers of devices to answer for; by default those of the timed runs.
        price: Price of a device-hour; None answers in device-hours.
        name: The name of the runs.

    Raises:
        ConfigError: for batch sizes and devices that are not allowed.
    """
    if price is not None and not 0 < price < math.inf:
        raise ConfigError("--price", price, "a finite number above 0")
    if devices is not None:
        devices = _whole_numbers("--devices", devices, "numbers of devices such as 1,2,4,8")
    evidence = observe(table.runs)
    # One or two K are answers too, with a prior of B_crit by public runs.
    law = replace(law_with_prior(evidence.observations), uses_medians=evidence.uses_medians)
    sizes = _sizes_to_answer(table.runs, batch_sizes)
    notes = [*table.notes, *evidence.notes]
    step_time = step_time_of(table.runs, notes)
    rate = _rate_law(evidence)
    costs = Costs(price, steps_include_checks=table.times_include_checks)
    result = None
    if isinstance(step_time, GroupStepTime):
        # Each device needs an example.
        sizes = [size for size in sizes if size >= step_time.count]
    if step_time is not None:
        if devices is None:
            devices = _timed_devices(table.runs, step_time)
        result = answer(law, step_time, sizes, devices, costs, rate)
        unknown = sorted(set(devices) - set(result.table["devices"]))
        if unknown and len(result.table):
            notes.append(f"There are no step times of {listed_numbers(unknown)} devices.")
    run = next_run(law, sizes, sizes) if result is None else result.next_run
    boundaries = note_on_boundaries(law.observations)
    if boundaries is not None and (result is None or boundaries not in result.assumed):
        notes.append(boundaries)
    return Advice(
        name=name,
        source="runs",
        goal=None if table.goal is None else str(table.goal),
        law=law,
        answer=result,
        steps=law.predict(sizes),
        best_rates=evidence.best_rates,
        next_run=with_rate(run, evidence.best_rates),
        notes=tuple(notes),
    )


def observe(runs: pd.DataFrame) -> Evidence:
    """Return K of each batch size: of the best learning rate, by the median over its runs.

    The noise of K is that of the least of several rates (`noise_of_minimum`) or of seeds, whichever
    is larger. If a run of another rate was stopped before the best K, that K is an upper bound.
    """
    evidence = Evidence([], {}, {}, False, [])
    best_runs = []
    searches = {}
    for size, of_size in runs.groupby("batch_size"):
        batch_size = float(str(size))
        by_rate = _runs_by_rate(of_size)
        evidence.tried[batch_size] = list(by_rate)
        costs = {rate: _median_steps(group) for rate, group in by_rate.items()}
        best = min(by_rate, key=lambda rate: (costs[rate], -_reach(by_rate[rate])))
        if math.isfinite(costs[best]) and not math.isnan(best):
            evidence.best_rates[batch_size] = best
        searches[batch_size] = _Search(best, costs, by_rate)
        best_runs.append(by_rate[best])
    table = pd.concat(best_runs)
    uses_medians = bool((table.groupby("batch_size").size() > 1).any())
    by_size = {o.batch_size: o for o in medians(table)}
    for batch_size, search in searches.items():
        observation = search.observation(by_size.get(batch_size), evidence.notes, batch_size)
        if observation is not None:
            evidence.observations.append(observation)
    evidence.notes[:0] = _notes_on_rates(evidence, searches)
    if uses_medians:
        evidence.notes.append("K is the median over the runs of the best rate.")
    return evidence._replace(uses_medians=uses_medians)


class _Search(NamedTuple):
    """The runs of one batch size by learning rate."""

    best: float
    costs: dict[float, float]  # the median steps of each rate; infinite if it missed the goal
    by_rate: dict[float, pd.DataFrame]

    def observation(
        self, of_best: Observation | None, notes: list[str], batch_size: float
    ) -> Observation | None:
        """Return K of the batch size; None if every run diverged.

        Args:
            of_best: K by the runs of the best rate.
            notes: Where a note on a bound is added.
            batch_size: The batch size.
        """
        if math.isinf(self.costs[self.best]):
            return self._lower_bound(notes, batch_size)
        if of_best is not None and of_best.k <= check_interval(self.by_rate[self.best]):
            notes.append(
                f"At B = {batch_size:g} the first validation met the goal, so K is an upper bound."
            )
        elif of_best is not None and of_best.bound == AT_MOST:
            notes.append(_note_on_stopped("runs of the best rate", of_best))
        if of_best is None or of_best.bound or len(self.by_rate) == 1:
            return of_best
        stopped = []
        for rate, group in self.by_rate.items():
            if rate != self.best and _reach(group) < of_best.k:
                stopped.append(rate)
        if stopped:
            who = f"runs with the rate {listed_numbers(sorted(stopped))}"
            notes.append(_note_on_stopped(who, of_best))
            return replace(of_best, bound=AT_MOST, resolution=0.0)
        finite = [None if math.isinf(cost) else cost for cost in self.costs.values()]
        noise = max(of_best.noise, noise_of_minimum(finite, 1))
        return replace(of_best, noise=noise, boundary=self._boundary())

    def _lower_bound(self, notes: list[str], batch_size: float) -> Observation | None:
        """Return the lower bound of K if no rate has a median; None if every run diverged."""
        limits = []
        has_met = False
        for group in self.by_rate.values():
            limits += [each.k for each in medians(group)]
            has_met |= not group["censored"].to_numpy(bool).all()
        if not limits:
            notes.append(f"At B = {batch_size:g} every run diverged; it is left out.")
            return None
        who = "no run met the goal"
        if has_met:
            who = "half of the runs of each rate, or more, missed the goal"
        notes.append(f"At B = {batch_size:g} {who}; K is a lower bound.")
        return Observation(batch_size, min(limits), bound=AT_LEAST)

    def _boundary(self) -> str:
        """Return at which end of the rates that were tried the best one is; else empty."""
        rates = [rate for rate in self.by_rate if not math.isnan(rate)]
        if len(rates) < len(self.by_rate):
            return ""
        if self.best == max(rates):
            return "learning_rate high"
        if self.best == min(rates):
            return "learning_rate low"
        return ""


def _note_on_stopped(who: str, of_best: Observation) -> str:
    """Return a note on runs that ended before the best K, and might have met the goal first."""
    return (
        f"At B = {of_best.batch_size:g} {who} were stopped before step {of_best.k:g}, so K is an "
        "upper bound. Leave steps of diverged runs empty."
    )


def _runs_by_rate(runs: pd.DataFrame) -> dict[float, pd.DataFrame]:
    """Return the runs of each learning rate; nan is the key of runs without one."""
    if "learning_rate" not in runs:
        return {math.nan: runs}
    by_rate = {}
    for rate, group in runs.groupby("learning_rate"):
        by_rate[float(str(rate))] = group
    without = runs[runs["learning_rate"].isna()]
    if len(without):
        by_rate[math.nan] = without
    return by_rate


def _median_steps(runs: pd.DataFrame) -> float:
    """Return the median steps to the goal of some runs; a run that missed it counts as infinite."""
    return float(np.median(np.where(runs["censored"], math.inf, runs["steps"])))


def _reach(runs: pd.DataFrame) -> float:
    """Return the least steps that the median of some runs can have; infinite if all diverged."""
    steps = runs["steps"].to_numpy(float)
    return float(np.median(np.where(np.isnan(steps), math.inf, steps)))


def _notes_on_rates(evidence: Evidence, searches: dict[float, _Search]) -> list[str]:
    """Return sentences on the learning rates behind each K."""
    single = [size for size, tried in evidence.tried.items() if len(tried) == 1]
    several = [size for size, tried in evidence.tried.items() if len(tried) > 1]
    notes = []
    rates = [rate for search in searches.values() for rate in search.by_rate]
    if all(map(math.isnan, rates)):
        return [
            "No learning rates are given. K is read as if the rate were tuned at each batch size."
        ]
    if several:
        parts = []
        for size in several:
            if size in evidence.best_rates:
                rate = number_text(evidence.best_rates[size])
                parts.append(f"{rate} of {len(evidence.tried[size])} at B = {size:g}")
        if parts:
            listed = ", ".join(parts)
            notes.append(f"The best learning rate of each batch size counts: {listed}.")
    if single:
        notes.append(
            f"One learning rate was tried at B = {listed_numbers(single)}. K may be smaller "
            "there with another rate."
        )
    return notes


def _rate_law(evidence: Evidence) -> RateLaw | None:
    """Return the law of the best rates where several were tried; None for fewer than 2 sizes.

    Like `RateCurve.law`, it omits bounds and best rates at an end of the rates that were tried.
    """
    sizes = []
    all_rates = []
    for o in evidence.observations:
        rates = evidence.tried[o.batch_size]
        if o.bound or o.boundary or len(rates) == 1 or o.batch_size not in evidence.best_rates:
            continue
        sizes.append(o.batch_size)
        all_rates += rates
    best_rates = [evidence.best_rates[size] for size in sizes]
    return rate_law(sizes, best_rates, spacing=spacing_of(all_rates))


# ---- Step times ----


def step_time_of(runs: pd.DataFrame, notes: list[str]) -> StepTime | None:
    """Return the model of the step times of runs; None, with a note, if they do not suffice."""
    timed = _timed(runs)
    if not timed:
        notes.append("There are no times, because no run has step_seconds.")
        return None
    if "devices" in runs:
        has_devices = runs.dropna(subset=["step_seconds"])["devices"].notna().to_numpy(bool)
        unknown = int((~has_devices).sum())
        if unknown and has_devices.any():
            notes.append(f"Timed runs without devices count as runs on 1 device ({unknown}).")
    sizes: dict[int, set[float]] = {}
    for step in timed:
        sizes.setdefault(step.devices, set()).add(step.local_batch)
    if len(sizes.get(1, ())) >= MIN_TIMED_BATCH_SIZES:
        return fit_step_time(timed)
    count = max(sizes, key=lambda devices: len(sizes[devices]))
    if len(sizes[count]) < MIN_TIMED_BATCH_SIZES:
        notes.append(
            "There are no times, because no number of devices has steps at two batch sizes "
            f"(devices: {listed_numbers(sorted(sizes))})."
        )
        return None
    others = sorted(set(sizes) - {count})
    if others:
        notes.append(
            f"Step times are those of {count} devices. The steps on {listed_numbers(others)} are "
            "not used: their relation needs two batch sizes on 1 device."
        )
    # The exchange between these devices is a part of each step, so they are timed as one device.
    group = [step._replace(devices=1) for step in timed if step.devices == count]
    model = fit_step_time(group)
    return GroupStepTime(**vars(model), count=count)


def _timed(runs: pd.DataFrame) -> list[Timed]:
    """Return the median step time of each batch size and number of devices."""
    if "step_seconds" not in runs:
        return []
    rows = runs.dropna(subset=["step_seconds"]).copy()
    if "devices" not in rows:
        rows["devices"] = 1
    rows["devices"] = rows["devices"].fillna(1).astype(int)
    timed = []
    for key, group in rows.groupby(["batch_size", "devices"]):
        batch_size, devices = map(float, key)  # pyright: ignore
        seconds = float(np.median(group["step_seconds"].to_numpy(float)))
        timed.append(Timed(batch_size / devices, seconds, int(devices)))
    return timed


def _timed_devices(runs: pd.DataFrame, step_time: StepTime) -> list[int]:
    """Return the numbers of devices whose step times are known."""
    if isinstance(step_time, GroupStepTime):
        return [step_time.count]
    return sorted({step.devices for step in _timed(runs)})


# ---- What to answer ----


def _sizes_to_answer(runs: pd.DataFrame, asked: Sequence[int] | None) -> list[int]:
    """Return the batch sizes to answer for, ascending."""
    if asked is not None:
        return _whole_numbers("study.batch_sizes", asked, "different batch sizes such as 32,64")
    sizes = {round(size) for size in runs["batch_size"]}
    low, high = min(sizes) / BEYOND, max(sizes) * BEYOND
    powers = [2**i for i in range(high.bit_length())]
    return sorted({*sizes, *(power for power in powers if power >= low)})


def _whole_numbers(key: str, given: Sequence[int], allowed: str) -> list[int]:
    """Return whole numbers of at least 1, ascending; also of an array.

    Raises:
        ConfigError: for other numbers, no number, and a number that occurs twice.
    """
    try:
        numbers = sorted(map(float, given))
    except (TypeError, ValueError):
        raise ConfigError(key, given, allowed) from None
    is_whole = all(number >= 1 and number % 1 == 0 for number in numbers)
    if not numbers or not is_whole or len(set(numbers)) < len(numbers):
        raise ConfigError(key, list(given), allowed)
    return [int(number) for number in numbers]
