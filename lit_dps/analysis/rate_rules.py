"""The price of a scaling rule: K at the rule's learning rate over K*, at each batch size.

A rule scales the best rate of the smallest batch size with the batch size or with its square root.
No trial has exactly that rate. So K is the K of the best trial within a factor `WINDOW` of it, with
any other metaparameters. This is the price of a fixed rate if momentum and the other metaparameters
are tuned again. The best of few trials is worse than the best of many. So the price is biased
upward, most where `near` in the table is small. Shallue et al. (2019) draw the rules and the best
rates, without a price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import percentile_interval, resampling_rng
from lit_dps.analysis.rates import EFFECTIVE, RULES, RateCurve
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.record import StudyRecord
from lit_dps.core.statistic import Statistic
from lit_dps.core.trial import Status, TrialResult
from lit_dps.core.unit import Cost

# A trial counts within this factor of the rule's rate. After one doubling of B the rules differ by
# a factor of 1.4.
WINDOW = 1.25
# Verdicts: whether a price is exact or a bound, or why it is unknown.
MEASURED = "measured"
LOWER_BOUND = "at least"
UPPER_BOUND = "at most"
NO_TRIAL = "no trial near"
TOO_FEW = "too few trials near"
OUTSIDE = "outside the search space"
DIVERGED = "all near diverged"
TWO_BOUNDS = "both K are upper bounds"


def price_rows(record: StudyRecord, curves: Iterable[RateCurve]) -> pd.DataFrame:
    """Return one row per cell beyond the smallest batch size, kind of rate and rule.

    Columns: sparsity and further axes, batch_size [examples], rate ("effective_rate", and if
    momentum is searched also "learning_rate"), rule ("linear" or "square_root"), scaled_from (the
    batch size whose best rate is scaled), rule_rate, best_rate (of the K* trial), near (number of
    trials within `WINDOW` of rule_rate), complete (number of these that met the goal), steps (the
    fewest of these, or their `study.statistic`), k_star [steps], price (steps / k_star), price_low
    and price_high (its 95 % limits over resampled trials, which also change the rule's rate), and
    verdict: "measured"; "at least" or "at most" if the price is a bound; else why there is no
    price.
    """
    rows = []
    for curve in curves:
        for batch_size in curve.cells:
            if curve.first is None or batch_size <= curve.first:
                continue
            for kind, rule in product(curve.source.kinds, RULES):
                row = {**columns_of(curve.series), "batch_size": batch_size, "rate": kind}
                row |= {"rule": rule, "scaled_from": curve.first}
                rows.append(row | _price_columns(record, curve, batch_size, kind, rule))
    columns = [*columns_of(record.series[0]), "batch_size", "rate", "rule", "scaled_from"]
    columns += ["rule_rate", "best_rate", "near", "complete", "steps", "k_star", "price"]
    return frame(rows, [*columns, "price_low", "price_high", "verdict"])


def _price_columns(
    record: StudyRecord, curve: RateCurve, batch_size: int, kind: str, rule: str
) -> dict[str, object]:
    """Return the columns of `price_rows` from rule_rate on."""
    cell = curve.cells[batch_size]
    rule_rate = curve.rule_rate(rule, batch_size, kind)
    assert rule_rate is not None and cell.k_star is not None
    near = []
    for result in cell.trials:
        if _is_near(curve.source.rate(result, kind), rule_rate):
            near.append(result)
    complete_costs = [result.cost for result in near if result.cost is not None]
    statistic = record.statistic
    price = _price(near, cell, statistic)
    if price.verdict == NO_TRIAL and not _is_reachable(record, curve, kind, rule_rate):
        price = Price(None, OUTSIDE)
    low = None
    high = None
    if price.value is not None and price.verdict == MEASURED:
        low, high = _limits(curve, batch_size, kind, rule, price.value, statistic)
    return {
        "rule_rate": rule_rate,
        "best_rate": curve.best(batch_size, kind),
        "near": len(near),
        "complete": len(complete_costs),
        "steps": statistic.k_star(complete_costs),
        "k_star": cell.k_star,
        "price": price.value,
        "price_low": low,
        "price_high": high,
        "verdict": price.verdict,
    }


def _is_near(rates: Any, rule_rate: Any) -> Any:
    """Return whether rates are within `WINDOW` of the rate of a rule (numbers or arrays)."""
    return np.abs(np.log(rates / rule_rate)) <= math.log(WINDOW) * (1 + 1e-9)


class Price(NamedTuple):
    """K of the best of some trials over K*.

    Attributes:
        value: The quotient or a bound of it; None if it is unknown.
        verdict: Which of these it is, or why it is unknown.
    """

    value: float | None
    verdict: str


def _price(near: Sequence[TrialResult], cell: CellSummary, statistic: Statistic) -> Price:
    """Return the price of a rule with some trials of a cell near its rate.

    Trials that missed the goal need more than they spent; diverged ones never meet it. If K* is
    an upper bound, the price is a lower bound. The quotient of two upper bounds is no bound.
    """
    assert cell.k_star is not None
    if len(near) < statistic.needed_trials:
        return Price(None, TOO_FEW if near else NO_TRIAL)
    costs = [result.cost for result in near]
    earliest: list[Cost | None] = []
    stopped_at = math.inf
    for result in near:
        earliest.append(result.cost)
        if result.cost is None and result.status is not Status.INFEASIBLE:
            earliest[-1] = result.cost_run
            stopped_at = min(stopped_at, result.cost_run)
    k_at_rule = statistic.k_star(costs)
    if k_at_rule is not None:
        # A trial that stopped early might have met the goal before the others.
        is_lower = stopped_at < statistic.race_limit([k for k in costs if k is not None], 1.0)
        if is_lower and cell.is_upper_bound:
            return Price(None, TWO_BOUNDS)
        if is_lower:
            return Price(k_at_rule / cell.k_star, UPPER_BOUND)
        verdict = LOWER_BOUND if cell.is_upper_bound else MEASURED
        return Price(k_at_rule / cell.k_star, verdict)
    least = statistic.k_star(earliest)
    if least is None:
        return Price(None, DIVERGED)
    return Price(max(least / cell.k_star, 1.0), LOWER_BOUND)


def _is_reachable(record: StudyRecord, curve: RateCurve, kind: str, rate: float) -> bool:
    """Return True if a trial of the search space could be near a rate."""
    source = curve.source
    rates: Any = record.space[source.rate_key].extremes
    momenta: Any = (source.fixed_momentum,)
    if source.momentum_key is not None:
        momenta = record.space[source.momentum_key].extremes
    low = min(rates)
    high = max(rates)
    if kind == EFFECTIVE:
        low = low / (1 - min(momenta))
        high = high / (1 - max(momenta))
    return low / WINDOW <= rate <= high * WINDOW


class _Resamples(NamedTuple):
    """Trials of a cell, resampled with replacement.

    Attributes:
        steps: (R, n), costs; infinite for a trial that is not complete.
        rates: (R, n).
    """

    steps: np.ndarray
    rates: np.ndarray

    @classmethod
    def of(cls, curve: RateCurve, batch_size: int, kind: str) -> _Resamples:
        """Return the resamples of the cell at a batch size, with their rates of a kind."""
        steps = []
        rates = []
        for result in curve.cells[batch_size].trials:
            steps.append(math.inf if result.cost is None else result.cost)
            rates.append(curve.source.rate(result, kind))
        shape = (curve.replicates, len(steps))
        chosen = resampling_rng(0, batch_size).integers(len(steps), size=shape)
        return cls(np.array(steps, float)[chosen], np.array(rates)[chosen])

    def best_rates(self, statistic: Statistic) -> np.ndarray:
        """Return the rate (R,) of the trial of K*, the first drawn one among equals; else nan."""
        rows = np.arange(len(self.steps))
        k_star = statistic.of_draws(self.steps)
        later = np.where(self.steps >= k_star[:, None], self.steps, math.inf)
        best = later.argmin(axis=1)
        return np.where(np.isfinite(k_star), self.rates[rows, best], np.nan)


def _limits(
    curve: RateCurve, batch_size: int, kind: str, rule: str, price: float, statistic: Statistic
) -> tuple[float | None, float | None]:
    """Return the 95 % limits of a price, widened to hold it.

    They are percentiles over resamples of its cell and of the cell that the rule starts from.
    Resamples with no trial near the rule's rate, or without a K*, do not count. If no trial near
    the rate met the goal, the price is infinite.
    """
    assert curve.first is not None
    growth = (batch_size / curve.first) ** RULES[rule]
    rule_rates = _Resamples.of(curve, curve.first, kind).best_rates(statistic) * growth
    resamples = _Resamples.of(curve, batch_size, kind)
    k_star = statistic.of_draws(resamples.steps)
    is_near = _is_near(resamples.rates, rule_rates[:, None])
    steps_at_rule = statistic.of_draws(np.where(is_near, resamples.steps, math.inf))
    counts = is_near.any(axis=1) & np.isfinite(k_star) & np.isfinite(rule_rates)
    if not counts.any():
        return None, None
    prices = steps_at_rule[counts] / k_star[counts]
    return percentile_interval(prices, price, method="inverted_cdf")
