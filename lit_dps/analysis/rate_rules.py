"""What a rule for the learning rate costs: K at the rule's rate over K*, at each batch size.

A rule takes the best rate of the smallest batch size and scales it with the batch size, or with its
square root. No trial has exactly that rate: K is that of the best trial whose rate lies within a
factor `WINDOW` of it, at whatever other metaparameters. So the price is that of fixing the rate
alone, momentum and all else tuned anew. It rests on a few trials, and the best of few is worse than
the best of many: it leans upward by what the table's `near` tells. Shallue et al. (2019) draw the
rules beside the best rates, without a price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from lit_dps.analysis.law_bootstrap import PERCENTILES
from lit_dps.analysis.rates import EFFECTIVE, RULES, RateCurve
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Status, TrialResult


def steps_of(trials: Sequence[TrialResult]) -> np.ndarray:
    """Steps to result (n,), infinite of a trial that is not complete."""
    return np.array([math.inf if r.steps is None else r.steps for r in trials], float)


def draws(count: int, replicates: int, batch_size: int) -> np.ndarray:
    """Trials of resamples of a cell, with replacement, (R, n): the draws of `scaling.resample`."""
    return np.random.default_rng((0, batch_size)).integers(count, size=(replicates, count))


def best_of(drawn: np.ndarray, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of each resample the value (R,) of its best trial, the first drawn one among equals; nan
    without one."""
    i = drawn[np.arange(len(drawn)), steps[drawn].argmin(axis=1)]
    return np.where(np.isfinite(steps[i]), values[i], np.nan)


# how far from the rule's rate, as a factor, a trial may lie: rules differ by 1.4 after one doubling
# of B
WINDOW = 1.25


# What a price is.
MEASURED, AT_LEAST, AT_MOST = "measured", "at least", "at most"


NOBODY, OUTSIDE, DIVERGED = "no trial near", "outside the search space", "all near diverged"


def price_rows(record: StudyRecord, curves: Sequence[RateCurve]) -> pd.DataFrame:
    """One row a cell beyond the smallest batch size, kind of rate and rule, in this order.

    Args:
        record: The study.
        curves: Its best rates.

    Returns:
        Columns: sparsity and further axes, batch_size [examples], rate ("effective_rate", and where
            momentum is
        searched too "learning_rate"), rule ("linear" or "square_root"), scaled_from, the batch size
        whose best rate it scales, rule_rate, best_rate (of the K* trial), near, the number of
        trials within `WINDOW`, complete, those of them that met the goal, steps, the fewest that
        any of them needed, k_star [steps], price, their quotient,
        price_low and price_high, its 95 % limits over resampled trials, which move the rule's rate
        too, and verdict: "measured", "at least" or "at most" where the price is a bound, else why
        there is none.
    """
    rows = [row for curve in curves for row in _of_curve(record, curve)]
    columns = [
        "batch_size",
        "rate",
        "rule",
        "scaled_from",
        "rule_rate",
        "best_rate",
        "near",
        "complete",
        "steps",
    ]
    columns += ["k_star", "price", "price_low", "price_high", "verdict"]
    return frame(rows, [*columns_of(record.series[0]), *columns])


def _of_curve(record: StudyRecord, curve: RateCurve) -> Iterator[dict[str, object]]:
    first, kinds = curve.first, curve.source.kinds
    if first is None:
        return
    for batch_size, cell in curve.cells.items():
        if batch_size <= first:
            continue
        for kind, rate in kinds.items():
            rates = np.array([rate(result) for result in cell.trials])
            first_rates = np.array([rate(result) for result in curve.cells[first].trials])
            for rule, power in RULES.items():
                scaled = rate(curve.cells[first].best) * (batch_size / first) ** power
                there = [r for r, x in zip(cell.trials, rates, strict=True) if _near(x, scaled)]
                price, verdict = priced(there, cell.k_star, cell.at_first_check)
                if verdict == NOBODY and not _reachable(record, curve, kind, scaled):
                    verdict = OUTSIDE
                low = high = None
                if verdict == MEASURED:
                    own = draws(len(cell.trials), curve.replicates, batch_size)
                    of_first = draws(len(first_rates), curve.replicates, first)
                    moved = best_of(of_first, steps_of(curve.cells[first].trials), first_rates)
                    moved *= (batch_size / first) ** power
                    low, high = _limits(own, rates, steps_of(cell.trials), moved, price)
                met = [r.steps for r in there if r.steps is not None]
                yield {
                    **columns_of(curve.series),
                    "batch_size": batch_size,
                    "rate": kind,
                    "rule": rule,
                    "scaled_from": first,
                    "rule_rate": scaled,
                    "best_rate": rate(cell.best),
                    "near": len(there),
                    "complete": len(met),
                    "steps": min(met, default=None),
                    "k_star": cell.k_star,
                    "price": price,
                    "price_low": low,
                    "price_high": high,
                    "verdict": verdict,
                }


def _near(rate, scaled):
    return np.abs(np.log(rate / scaled)) <= math.log(WINDOW) * (1 + 1e-9)


def priced(
    near: Sequence[TrialResult], k_star: int, at_first_check: bool
) -> tuple[float | None, str]:
    """K of the best of some trials over K*, or what it is at least, and which of these (a verdict).

    Trials that did not meet the goal need more steps than they ran, those that diverged no number
    of them. Where K* is at the first check it is an upper bound, and so the price a lower one.
    """
    if not near:
        return None, NOBODY
    met = min((r.steps for r in near if r.steps is not None), default=math.inf)
    ran = min(
        (r.steps_run for r in near if r.steps is None and r.status is not Status.INFEASIBLE),
        default=math.inf,
    )
    if math.isinf(met) and math.isinf(ran):
        return None, DIVERGED
    if math.isinf(met):
        return max(ran / k_star, 1.0), AT_LEAST
    if ran < met:  # it was stopped, and might have met the goal sooner
        return met / k_star, AT_MOST
    return met / k_star, AT_LEAST if at_first_check else MEASURED


def _reachable(record: StudyRecord, curve: RateCurve, kind: str, rate: float) -> bool:
    """Whether a trial of the search space could lie near a rate."""
    source, rates = curve.source, record.space[curve.source.rate].extremes
    momenta = (
        record.space[source.momentum].extremes
        if isinstance(source.momentum, str)
        else [source.momentum]
    )
    low, high = (1 - min(momenta), 1 - max(momenta)) if kind == EFFECTIVE else (1.0, 1.0)
    return min(rates) / low / WINDOW <= rate <= max(rates) / high * WINDOW


def _limits(
    drawn: np.ndarray, rates: np.ndarray, steps: np.ndarray, scaled: np.ndarray, price: float
) -> tuple[float | None, float | None]:
    """The 95 % limits of a price, over resamples of its cell (R, n) and of the rule's rate (R,);
    widened to hold it.

    Resamples with no trial near the rule's rate, or without a K*, drop out; where those near did
    not meet the goal the price is infinite.
    """
    best = steps[drawn].min(axis=1)
    near = _near(rates[drawn], scaled[:, None])
    at_rule = np.where(near, steps[drawn], math.inf).min(axis=1)
    counts = near.any(axis=1) & np.isfinite(best) & np.isfinite(scaled)
    if not counts.any():
        return None, None
    prices = at_rule[counts] / best[counts]
    low, high = np.percentile(prices, PERCENTILES, method="inverted_cdf")
    return float(min(low, price)), float(max(high, price))
