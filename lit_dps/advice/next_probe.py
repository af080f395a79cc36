"""Which run to make next: the one by which the answer becomes more certain, for what it costs.

The rule of Li et al. 2026 ("Spend less, fit better", arXiv 2604.22753): the expected fall of the
variance of what is asked, over cost^0.4. Here it is exact on draws of the law's constants instead
of linearised at one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.answer import NEAR
from lit_dps.analysis.law import Law

CHEAP = 0.4  # exponent of the cost
NOISE = (
    0.1  # standard deviation of log K of a run whose repetitions are not known (seed and search)
)
LEAST = 0.05  # share of the variance by which a run has to lower it
LIKELY = 0.05  # the probability to be near the best, above which a batch size is asked for


@dataclass(frozen=True)
class Probe:
    """A run that could be made.

    Attributes:
        batch_size: B, in examples.
        cost: What it costs, in the unit of `next_probe`'s costs.
        gain: Expected fall of the mean variance of log K at the targets.
        share: Of that variance.
    """

    batch_size: float
    cost: float
    gain: float
    share: float


def probes(
    law: Law,
    candidates: Sequence[float],
    targets: Sequence[float],
    seconds: Callable[[float], float],
    trials: int = 1,
) -> pd.DataFrame:
    """What each candidate run would be worth, the best first.

    With theta = (log c1, log c2[, log c3]) and J(B) = d log K / d theta, a run at x lowers the
    variance of log K(t) by (J_t S J_x)^2 / (sigma^2 + J_x S J_x), S being the covariance of theta.
    Both are moments of log K over the posterior's draws, J S J' = cov(log K(t), log K(x)), which
    hold for a c2 near 0 too; both forms of the law count by their probability, and how they
    disagree is part of the covariance.

    Args:
        law: With a K at one batch size at least.
        candidates: Batch sizes that could be run, in examples.
        targets: Batch sizes that are asked for.
        seconds: Seconds (or price) of a step of a batch size.
        trials: Runs that a K takes, by tuning the rate.

    Returns:
        Columns batch_size, steps, cost (steps x seconds x trials), gain, share, worth (gain /
        cost^0.4).

    Raises:
        ValueError: for a law without any K.
    """
    if not len(law.draws):
        raise ValueError(f"nothing is known of K yet: {law.refused}")
    candidates, targets = list(candidates), list(targets)
    draws = np.log(_steps(law, [*candidates, *targets]))
    centred = draws - draws.mean(axis=0)
    covariance = centred.T @ centred / len(draws)
    n = len(candidates)
    sigma = NOISE**2 + law.error**2
    variance = np.diag(covariance)
    gain = (covariance[:n, n:] ** 2).mean(axis=1) / (sigma + variance[:n])
    steps = np.exp(draws[:, :n].mean(axis=0))
    cost = steps * np.array([seconds(b) for b in candidates]) * trials
    table = pd.DataFrame({"batch_size": candidates, "steps": steps, "cost": cost, "gain": gain})
    table["share"] = table["gain"] / variance[n:].mean()
    table["worth"] = table["gain"] / table["cost"] ** CHEAP
    return table.sort_values("worth", ascending=False, ignore_index=True)


def contenders(
    law: Law, candidates: Sequence[float], seconds: Callable[[float], float]
) -> list[float]:
    """The batch sizes that may be among the best: those whose K the answer hangs on.

    They are within `NEAR` times the least time of all with a probability of at least `LIKELY`, by
    the law's posterior.

    Args:
        law, candidates, seconds: As of `probes`.
    """
    times = _steps(law, candidates) * np.array([seconds(b) for b in candidates])
    share = (times <= NEAR * times.min(axis=1, keepdims=True)).mean(axis=0)
    return [b for b, often in zip(candidates, share, strict=True) if often >= LIKELY]


def next_probe(table: pd.DataFrame, budget: float) -> Probe | None:
    """The best run that the budget allows; None where none does or none lowers the variance by a
    share of `LEAST`."""
    allowed = table[(table["cost"] <= budget) & (table["share"] >= LEAST)]
    if not len(allowed):
        return None
    row = allowed.iloc[0]
    return Probe(*(float(row[key]) for key in ("batch_size", "cost", "gain", "share")))


def _steps(law: Law, batch_sizes: Sequence[float]) -> np.ndarray:
    """(draws, n) steps by the posterior, both forms of the law by their probability, without the
    law's error."""
    batch, c = np.asarray(batch_sizes, float), law.mixed
    return c[:, :1] / batch + c[:, 1:2] + c[:, 2:] / batch**2
