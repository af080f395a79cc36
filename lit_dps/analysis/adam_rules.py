"""The cost of a rule instead of tuning Adam at each batch size: K by the rule over tuned K.

A rule scales the best values of the smallest batch size B0 to the batch size B = k B0:

- "fixed" changes nothing.
- "linear" multiplies the rate by k (Goyal et al. 2017, arXiv 1706.02677, for SGD).
- "square_root" multiplies the rate by sqrt(k), and 1 - beta1 and 1 - beta2 by k (Malladi et al.
  2022, arXiv 2205.10287).
- "beta2" keeps the half-life of the second moment in examples, beta2^k, and changes nothing else
  (Marek et al. 2025, arXiv 2507.07101).

No rule sets beta2 below the floor of `lit_dps.core.batch_scaling.scaled_beta2`. Only searched
metaparameters can follow a rule. `lit_dps.analysis.rate_rules` has the price of a rule for the rate
if the other metaparameters are tuned again.

K at some values is the median over the trials within a factor of 1.25, in the rate and in 1 - beta.
Tuned K is the least K at the values of any trial. If the values are choices, and each combination
has the same number of trials, both K are medians over the same number of trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import Interval, percentile_interval, resampling_rng
from lit_dps.analysis.rate_rules import (
    DIVERGED,
    LOWER_BOUND,
    MEASURED,
    NO_TRIAL,
    UPPER_BOUND,
    WINDOW,
)
from lit_dps.analysis.rates import RateSource, rate_source
from lit_dps.analysis.summary import CellSummary, by_series
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.batch_scaling import BETA2_FLOOR, scaled_beta2
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Series, Status, TrialResult

FIXED = "fixed"
LINEAR = "linear"
SQUARE_ROOT = "square_root"
BETA2 = "beta2"
RULES: tuple[str, ...] = (FIXED, LINEAR, SQUARE_ROOT, BETA2)
RULE_NAMES: dict[str, str] = {
    FIXED: "nothing",
    LINEAR: "rate x k",
    SQUARE_ROOT: "rate x sqrt k, 1 - beta x k",
    BETA2: "beta2^k alone",
}
RATE_POWERS: dict[str, float] = {FIXED: 0.0, LINEAR: 1.0, SQUARE_ROOT: 0.5, BETA2: 0.0}
NO_VALUE = "no valid beta1"
MISSED = "half of the trials missed"
# Resamples for the limits of a price: each needs the medians of all neighbourhoods.
RESAMPLES = 400


@dataclass(frozen=True)
class AdamSettings:
    """The searched values of Adam that a rule may change.

    Attributes:
        rate: Learning rate.
        beta1, beta2: Decay of the averages; None if it is not searched.
    """

    rate: float
    beta1: float | None = None
    beta2: float | None = None

    def scaled(self, rule: str, factor: float) -> AdamSettings | None:
        """Return the values of a rule at B = factor B0; None if 1 - beta1 would be 1 or more."""
        beta1 = self.beta1
        beta2 = self.beta2
        if rule == SQUARE_ROOT and beta1 is not None:
            beta1 = 1 - (1 - beta1) * factor
            if beta1 <= 0:
                return None
        if beta2 is not None:
            if rule == SQUARE_ROOT:
                beta2 = max(1 - (1 - beta2) * factor, min(beta2, BETA2_FLOOR))
            elif rule == BETA2:
                beta2 = scaled_beta2(beta2, factor)
        return AdamSettings(self.rate * factor ** RATE_POWERS[rule], beta1, beta2)

    def is_near(self, other: AdamSettings) -> bool:
        """Return True if all values are within `WINDOW` of other values."""
        ratios = [self.rate / other.rate]
        for mine, theirs in ((self.beta1, other.beta1), (self.beta2, other.beta2)):
            if mine is not None and theirs is not None:
                ratios.append((1 - mine) / (1 - theirs))
        limit = math.log(WINDOW) * (1 + 1e-9)
        return all(abs(math.log(ratio)) <= limit for ratio in ratios)


@dataclass(frozen=True)
class _Source:
    """How to read the values of Adam from a trial of a series."""

    rate_key: str
    beta1_key: str | None
    beta2_key: str | None

    def settings(self, result: TrialResult) -> AdamSettings:
        """Return the values of a trial."""
        values: dict[str, float | None] = {}
        params = result.trial.params
        for name, key in (("beta1", self.beta1_key), ("beta2", self.beta2_key)):
            values[name] = None if key is None else float(params[key])
        return AdamSettings(float(params[self.rate_key]), **values)


class _Cell:
    """The trials of a cell, and K at their values.

    Args:
        summary: The cell.
        source: How to read the values.
    """

    def __init__(self, summary: CellSummary, source: _Source):
        self.summary = summary
        self.batch_size = summary.cell.batch_size
        self.trials = [r for r in summary.trials if r.status is not Status.FAILED]
        self.settings = [source.settings(result) for result in self.trials]
        self.distinct = list(dict.fromkeys(self.settings))
        costs = [math.inf if r.cost is None else float(r.cost) for r in self.trials]
        self.costs = np.array(costs)
        self.least_costs = np.array([result.least_cost for result in self.trials])
        shape = (RESAMPLES, len(self.trials))
        chosen = resampling_rng(0, self.batch_size).integers(len(self.trials), size=shape)
        self._chosen = chosen
        near = [self.near(settings) for settings in self.distinct]
        self.medians = np.array([np.median(self.costs[is_near]) for is_near in near])
        self.resampled = np.stack([self.resampled_median(is_near) for is_near in near], axis=1)

    def near(self, settings: AdamSettings) -> np.ndarray:
        """Return (n,) whether each trial is near some values."""
        return np.array([each.is_near(settings) for each in self.settings], bool)

    def least_median(self, is_near: np.ndarray) -> float:
        """Return the least median cost of some trials, if each stopped one meets the goal next."""
        return float(np.median(self.least_costs[is_near]))

    def resampled_median(self, is_near: np.ndarray) -> np.ndarray:
        """Return the median cost (R,) of the trials near some values; nan without a trial."""
        costs = np.where(is_near, self.costs, np.nan)[self._chosen]
        medians = np.full(RESAMPLES, np.nan)
        for i, of_resample in enumerate(costs):
            known = of_resample[~np.isnan(of_resample)]
            if len(known):
                medians[i] = np.median(known)
        return medians

    @property
    def best(self) -> int:
        """The number of the distinct values with the least K."""
        return int(np.argmin(self.medians))

    def resampled_best(self) -> np.ndarray:
        """Return the number (R,) of the distinct values with the least K in each resample."""
        return np.where(np.isnan(self.resampled), np.inf, self.resampled).argmin(axis=1)


def adam_rule_rows(record: StudyRecord, cells: Iterable[CellSummary]) -> pd.DataFrame:
    """Return one row per cell and rule of each series of Adam or AdamW that searches the rate.

    Columns: sparsity and further axes, batch_size [examples], rule, scaled_from (B0), rule_rate,
    rule_beta1 and rule_beta2 (missing if they are not searched, or if the rule has no valid value),
    near (number of trials near these values), steps (K at these values, or a bound of it),
    best_rate, best_beta1 and best_beta2 (of tuned K), tuned (tuned K), price (steps / tuned) with
    price_low and price_high (95 % limits over resampled trials of both cells), and verdict:
    "measured"; "at least" or "at most" if the price is a bound; else why there is no price.
    """
    rows = []
    measured = by_series(summary for summary in cells if summary.has_exact_k_star)
    for series, summaries in measured.items():
        source = _source(record, series)
        if source is None or len(summaries) < 2 or not record.batch_schedule(series).is_constant:
            continue
        ordered = sorted(summaries, key=lambda each: each.cell.batch_size)
        of_cells = [_Cell(summary, source) for summary in ordered]
        for cell in of_cells:
            for rule in RULES:
                row = {**columns_of(series), "batch_size": cell.batch_size, "rule": rule}
                rows.append(row | _rule_columns(of_cells[0], cell, rule))
    columns = [*columns_of(record.series[0]), "batch_size", "rule", "scaled_from", "rule_rate"]
    columns += ["rule_beta1", "rule_beta2", "near", "steps", "best_rate", "best_beta1"]
    columns += ["best_beta2", "tuned", "price", "price_low", "price_high", "verdict"]
    return frame(rows, columns)


def _source(record: StudyRecord, series: Series) -> _Source | None:
    """Return how to read the values of Adam of a series; None for another optimizer."""
    rates: RateSource | None = rate_source(record, series)
    if rates is None or rates.optimizer is None:
        return None
    if rates.optimizer.rpartition(".")[2].lower() not in ("adam", "adamw"):
        return None
    keys = {key.rpartition(".")[2]: key for key in record.space}
    return _Source(rates.rate_key, keys.get("beta1"), keys.get("beta2"))


def _rule_columns(start: _Cell, cell: _Cell, rule: str) -> dict[str, Any]:
    """Return the columns of `adam_rule_rows` from scaled_from on."""
    factor = cell.batch_size / start.batch_size
    tuned = float(cell.medians[cell.best])
    if math.isinf(tuned) or math.isinf(start.medians[start.best]):
        # Half of the trials or more missed the goal near all values, so none of them is the best.
        return {"scaled_from": start.batch_size, "near": 0, "verdict": MISSED}
    at_rule = start.distinct[start.best].scaled(rule, factor)
    best = cell.distinct[cell.best]
    columns: dict[str, Any] = {
        "scaled_from": start.batch_size,
        "best_rate": best.rate,
        "best_beta1": best.beta1,
        "best_beta2": best.beta2,
        "tuned": tuned,
        "near": 0,
    }
    if at_rule is None:
        return columns | {"verdict": NO_VALUE}
    columns |= {"rule_rate": at_rule.rate, "rule_beta1": at_rule.beta1, "rule_beta2": at_rule.beta2}
    is_near = cell.near(at_rule)
    columns["near"] = int(is_near.sum())
    if not is_near.any():
        return columns | {"verdict": NO_TRIAL}
    steps = float(np.median(cell.costs[is_near]))
    if math.isinf(steps):
        return columns | _bound(cell, is_near, tuned)
    if cell.least_median(is_near) < steps:
        return columns | {"steps": steps, "price": steps / tuned, "verdict": UPPER_BOUND}
    low, high = _limits(start, cell, rule, steps / tuned)
    return columns | {
        "steps": steps,
        "price": steps / tuned,
        "price_low": low,
        "price_high": high,
        "verdict": MEASURED,
    }


def _bound(cell: _Cell, is_near: np.ndarray, tuned: float) -> dict[str, Any]:
    """Return the columns of a price if half of the trials near a rule missed the goal."""
    least = cell.least_median(is_near)
    if math.isinf(cell.least_costs[is_near].min()):
        return {"verdict": DIVERGED}
    if math.isinf(least):
        return {"verdict": MISSED}
    return {"steps": least, "price": max(1.0, least / tuned), "verdict": LOWER_BOUND}


def _limits(start: _Cell, cell: _Cell, rule: str, price: float) -> Interval:
    """Return the 95 % limits of a price, widened to hold it.

    In each resample of both cells the rule starts from the best values of B0 there. Resamples
    without a trial near the rule's values do not count. A price may be infinite.
    """
    factor = cell.batch_size / start.batch_size
    tuned = np.nanmin(cell.resampled, axis=1)
    starts = start.resampled_best()
    prices: list[np.ndarray] = []
    for number in np.unique(starts):
        at_rule = start.distinct[number].scaled(rule, factor)
        if at_rule is None:
            continue
        is_near = cell.near(at_rule)
        if is_near.any():
            of_start = starts == number
            at_rule_steps = cell.resampled_median(is_near)[of_start]
            # A resample in which no trial met the goal has no price: infinity over infinity is nan.
            with np.errstate(invalid="ignore"):
                prices.append(at_rule_steps / tuned[of_start])
    known = np.concatenate(prices)
    return percentile_interval(known[~np.isnan(known)], price, method="inverted_cdf")
