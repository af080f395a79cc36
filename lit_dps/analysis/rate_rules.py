"""What a rule for the learning rate costs: K at the rule's rate over K*, at each batch size.

A rule takes the best rate of the smallest batch size and scales it with the batch size, or with its
square root. No trial has exactly that rate: K is that of the best trial whose rate lies within a
factor `WINDOW` of it, at whatever other metaparameters. So the price is that of fixing the rate
alone, with momentum and all else tuned again. It rests on a few trials, and the best of few is
worse than the best of many: it is biased upward, the more the smaller the table's `near`. Shallue
et al. (2019) draw the rules beside the best rates, without a price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import PERCENTILES, resampling_rng
from lit_dps.analysis.rates import EFFECTIVE, RULES, RateCurve
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Status, TrialResult

# How far from the rule's rate, as a factor, a trial may lie. Rules differ by 1.4 after one doubling
# of B.
WINDOW = 1.25
# Verdicts: what a price is, or why there is none.
MEASURED = "measured"
AT_LEAST = "at least"
AT_MOST = "at most"
NO_TRIAL = "no trial near"
OUTSIDE = "outside the search space"
DIVERGED = "all near diverged"


def price_rows(record: StudyRecord, curves: Sequence[RateCurve]) -> pd.DataFrame:
    """Return one row a cell beyond the smallest batch size, kind of rate and rule, in this order.

    Columns: sparsity and further axes, batch_size [examples], rate ("effective_rate", and where
    momentum is searched too "learning_rate"), rule ("linear" or "square_root"), scaled_from, the
    batch size whose best rate it scales, rule_rate, best_rate (of the K* trial), near, the number
    of trials within `WINDOW`, complete, those of them that met the goal, steps, the fewest that any
    of them needed, k_star [steps], price, their quotient, price_low and price_high, its 95 % limits
    over resampled trials, which move the rule's rate too, and verdict: "measured", "at least" or
    "at most" where the price is a bound, else why there is none.
    """
    rows = [row for curve in curves for row in _rows_of_curve(record, curve)]
    columns = [*columns_of(record.series[0]), "batch_size", "rate", "rule", "scaled_from"]
    columns += ["rule_rate", "best_rate", "near", "complete", "steps", "k_star", "price"]
    return frame(rows, [*columns, "price_low", "price_high", "verdict"])


def _rows_of_curve(record: StudyRecord, curve: RateCurve) -> Iterator[dict[str, object]]:
    """Yield the rows of one series."""
    first = curve.first
    if first is None:
        return
    for batch_size in curve.cells:
        if batch_size <= first:
            continue
        for kind, rate in curve.source.kinds.items():
            for rule in RULES:
                row = {**columns_of(curve.series), "batch_size": batch_size, "rate": kind}
                row |= {"rule": rule, "scaled_from": first}
                row |= _price_columns(record, curve, batch_size, kind, rate, rule)
                yield row


def _price_columns(
    record: StudyRecord,
    curve: RateCurve,
    batch_size: int,
    kind: str,
    rate: Callable[[TrialResult], float],
    rule: str,
) -> dict[str, object]:
    """Return the columns of `price_rows` from rule_rate on, of one cell, kind of rate and rule."""
    first = curve.first
    cell = curve.cells[batch_size]
    assert first is not None and cell.k_star is not None
    growth = (batch_size / first) ** RULES[rule]
    rule_rate = rate(curve.best_trial(first)) * growth
    near = [result for result in cell.trials if _is_near(rate(result), rule_rate)]
    price, verdict = priced(near, cell.k_star, cell.is_upper_bound)
    if verdict == NO_TRIAL and not _is_reachable(record, curve, kind, rule_rate):
        verdict = OUTSIDE
    low, high = None, None
    if price is not None and verdict == MEASURED:
        resampled_rates = _best_rates(curve, first, rate) * growth
        low, high = _limits(cell, curve.replicates, rate, resampled_rates, price)
    met = [result.steps for result in near if result.steps is not None]
    return {
        "rule_rate": rule_rate,
        "best_rate": rate(curve.best_trial(batch_size)),
        "near": len(near),
        "complete": len(met),
        "steps": min(met, default=None),
        "k_star": cell.k_star,
        "price": price,
        "price_low": low,
        "price_high": high,
        "verdict": verdict,
    }


def _is_near(rates: Any, rule_rate: Any) -> Any:
    """Return whether rates lie within `WINDOW` of that of a rule (numbers or arrays)."""
    return np.abs(np.log(rates / rule_rate)) <= math.log(WINDOW) * (1 + 1e-9)


def priced(
    near: Sequence[TrialResult], k_star: int, at_first_check: bool
) -> tuple[float | None, str]:
    """Return K of the best of some trials over K*, or a bound of it, and the verdict.

    Trials that did not meet the goal need more steps than they ran; diverged ones never meet it.
    Where K* is at the first check it is an upper bound, and so the price a lower one.
    """
    if not near:
        return None, NO_TRIAL
    met, ran = math.inf, math.inf
    for result in near:
        if result.steps is not None:
            met = min(met, result.steps)
        elif result.status is not Status.INFEASIBLE:
            ran = min(ran, result.steps_run)
    if math.isinf(met) and math.isinf(ran):
        return None, DIVERGED
    if math.isinf(met):
        return max(ran / k_star, 1.0), AT_LEAST
    if ran < met:
        # This trial was stopped, and might have met the goal sooner.
        return met / k_star, AT_MOST
    return met / k_star, AT_LEAST if at_first_check else MEASURED


def _is_reachable(record: StudyRecord, curve: RateCurve, kind: str, rate: float) -> bool:
    """Return True if a trial of the search space could lie near a rate."""
    source = curve.source
    rates: Any = record.space[source.rate].extremes
    low, high = min(rates), max(rates)
    if kind == EFFECTIVE:
        if isinstance(source.momentum, str):
            momenta: Any = record.space[source.momentum].extremes
        else:
            momenta = [source.momentum]
        low, high = low / (1 - min(momenta)), high / (1 - max(momenta))
    return low / WINDOW <= rate <= high * WINDOW


def _steps_of(trials: Sequence[TrialResult]) -> np.ndarray:
    """Return steps to result (n,), infinite for a trial that is not complete."""
    return np.array([math.inf if r.steps is None else r.steps for r in trials], float)


def _resamples(count: int, replicates: int, batch_size: int) -> np.ndarray:
    """Return indices (R, n) of resampled trials, drawn with replacement."""
    return resampling_rng(0, batch_size).integers(count, size=(replicates, count))


def _best_rates(
    curve: RateCurve, batch_size: int, rate: Callable[[TrialResult], float]
) -> np.ndarray:
    """Return the rate (R,) of the best trial in resamples of a cell; nan without a complete one."""
    trials = curve.cells[batch_size].trials
    steps = _steps_of(trials)
    chosen = _resamples(len(trials), curve.replicates, batch_size)
    # The first drawn one among equals.
    best = chosen[np.arange(len(chosen)), steps[chosen].argmin(axis=1)]
    rates = np.array([rate(result) for result in trials])
    return np.where(np.isfinite(steps[best]), rates[best], np.nan)


def _limits(
    cell: CellSummary,
    replicates: int,
    rate: Callable[[TrialResult], float],
    rule_rates: np.ndarray,
    price: float,
) -> tuple[float | None, float | None]:
    """Return the 95 % limits of a price, widened to hold it.

    They are percentiles over resamples of its cell and of the rule's rate (R,). Resamples with no
    trial near the rule's rate, or without a K*, drop out; where those near did not meet the goal
    the price is infinite.
    """
    steps = _steps_of(cell.trials)
    rates = np.array([rate(result) for result in cell.trials])
    chosen = _resamples(len(steps), replicates, cell.cell.batch_size)
    best = steps[chosen].min(axis=1)
    near = _is_near(rates[chosen], rule_rates[:, None])
    at_rule = np.where(near, steps[chosen], math.inf).min(axis=1)
    counts = near.any(axis=1) & np.isfinite(best) & np.isfinite(rule_rates)
    if not counts.any():
        return None, None
    prices = at_rule[counts] / best[counts]
    low, high = np.percentile(prices, PERCENTILES, method="inverted_cdf")
    return float(min(low, price)), float(max(high, price))
