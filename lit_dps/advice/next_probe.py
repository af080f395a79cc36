"""Which batch size to probe next: the one that narrows the answer most per second.

The rule is by Li et al. 2026 ("Spend less, fit better", arXiv 2604.22753): the expected fall of the
variance at the batch sizes that are asked for, over cost^0.4. Here it is exact on draws of the
law's constants, instead of linearised at one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from lit_dps.analysis.answer import NEAR
from lit_dps.analysis.critical_prior import default_prior, noise_scale_prior
from lit_dps.analysis.law import Law, fit_law
from lit_dps.analysis.law_verdict import Refusal
from lit_dps.analysis.observations import Observation, exact
from lit_dps.core.noise_scale import NoiseScale

COST_EXPONENT = 0.4
# Standard deviation of log K of a run between repetitions of seed and search, if it is unknown.
TYPICAL_NOISE = 0.1
MIN_SHARE = 0.05  # the share of the variance that a probe has to remove
# A batch size is asked for if it is among the best with at least this probability.
MIN_PROBABILITY = 0.05
MIN_PROBE_RATIO = 8  # between the batch sizes of the first two probes


@dataclass(frozen=True)
class ProbeTerms:
    """What probes are for, and what they cost.

    Attributes:
        step_seconds: Returns the seconds of a step with its share of validation, for a batch size
            and a number of devices; infinite if they are unknown.
        batch_sizes: Batch sizes to answer for.
        devices: Numbers of devices to answer for.
        ranks: The number of devices that run a probe.
        trials: The number of trials of a probe.
        seconds: The time that remains for probes.
    """

    step_seconds: Callable[[float, int], float]
    batch_sizes: Sequence[int]
    devices: Sequence[int]
    ranks: int
    trials: int
    seconds: float


def law_with_prior(
    observations: Sequence[Observation],
    noise: NoiseScale | None = None,
    is_adaptive: bool | None = None,
) -> Law:
    """Return the law of some observations, with a prior of B_crit where K needs one.

    A prior of public runs is used for one or two K, relative to the smaller batch size, and above
    the largest batch size if the law does not fit.

    Args:
        observations: Of K.
        noise: The noise scale of the second half of a run to the goal, which is a better prior.
        is_adaptive: Whether the optimizer is like Adam; None if that is unknown.
    """
    observations = sorted(observations)
    prior = None
    if noise is not None:
        prior = noise_scale_prior(noise, is_adaptive)
    law = fit_law(observations, prior)
    measured = exact(observations)
    if prior is not None or law.describes_k or not measured:
        return law
    reference = measured[0].batch_size
    if law.verdict.refusal is Refusal.EXTRAPOLATION:
        reference = measured[-1].batch_size
    return fit_law(observations, default_prior(reference))


def choose_next_batch_size(
    candidates: Sequence[int],
    observations: Sequence[Observation],
    law: Law,
    preferred: int,
    terms: ProbeTerms,
) -> int | None:
    """Return the batch size to probe next, or None if no probe is worth its time.

    The first probe is at the user's batch size, the second at least `MIN_PROBE_RATIO` away. Later
    probes reduce the expected variance of the answer most, for their cost (Li et al. 2026).

    Args:
        candidates: Batch sizes that can be probed, ascending.
        observations: The results of earlier probes.
        law: The law of the observations.
        preferred: The batch size of the first probe.
        terms: What probes are for, and what they cost.
    """
    if not candidates:
        return None
    if not observations:
        if preferred in candidates:
            return preferred
        return candidates[len(candidates) // 2]
    if len(observations) == 1:
        # Two distant points constrain the law better than two neighbours.
        return _distant(candidates, observations[0].batch_size)
    if not len(law.draws):
        # Only bounds are known so far, so the other end of the range is more informative.
        return _opposite_end(candidates, observations)
    return _most_informative(candidates, law, terms)


def _distant(candidates: Sequence[int], probed: float) -> int:
    """Return the nearest candidate at least `MIN_PROBE_RATIO` above a batch size, else below it."""
    above = [b for b in candidates if b >= MIN_PROBE_RATIO * probed]
    below = [b for b in candidates if b <= probed / MIN_PROBE_RATIO]
    distant = above or below
    if not distant:
        return candidates[-1]
    return min(distant, key=lambda b: abs(math.log(b / probed)))


def _opposite_end(candidates: Sequence[int], observations: Sequence[Observation]) -> int:
    """Return the largest candidate, or the smallest one if a larger batch size was probed."""
    largest = max(o.batch_size for o in observations)
    if largest < candidates[-1]:
        return candidates[-1]
    return candidates[0]


def _most_informative(candidates: Sequence[int], law: Law, terms: ProbeTerms) -> int | None:
    """Return the candidate whose probe is worth most, or None if none is worth its time."""
    targets: set[float] = set()
    for devices in terms.devices:
        seconds = partial(_step_seconds, terms, devices)
        answered = [b for b in terms.batch_sizes if seconds(b) < math.inf]
        if answered:
            targets.update(contenders(law, answered, seconds))
    table = rank_probes(
        law,
        candidates,
        sorted(targets) or terms.batch_sizes,
        partial(_step_seconds, terms, terms.ranks),
        # Racing stops many trials early, so count half of them.
        trials=max(2, terms.trials // 2),
    )
    best = best_probe(table, terms.seconds)
    if best is not None:
        return int(best)
    if law.is_b_crit_known or terms.seconds <= 0:
        return None
    # A refused law has no answer yet, so that a probe of little information is run too.
    affordable = table[table["cost"] <= terms.seconds]
    if not len(affordable):
        return None
    return int(affordable.iloc[0]["batch_size"])


def _step_seconds(terms: ProbeTerms, devices: int, batch_size: float) -> float:
    return terms.step_seconds(batch_size, devices)


def rank_probes(
    law: Law,
    candidates: Sequence[float],
    targets: Sequence[float],
    seconds: Callable[[float], float],
    trials: int = 1,
) -> pd.DataFrame:
    """Return what a run at each candidate is worth, the best first.

    With theta = (log c1, log c2) and J(B) = d log K / d theta, a run at x lowers the
    variance of log K(t) by (J_t S J_x)^2 / (sigma^2 + J_x S J_x), where S is the covariance of
    theta. Both terms are moments of log K over the posterior's draws, J S J' = cov(log K(t),
    log K(x)), which hold for a c2 near 0 too. The draws include the error of extrapolation, which
    grows with the distance from the measured batch sizes: a probe far away removes it.

    Args:
        law: A law with a K at one batch size or more.
        candidates: Batch sizes that could be run, in examples.
        targets: Batch sizes that are asked for.
        seconds: Returns the seconds (or price) of a step at a batch size.
        trials: The number of runs that a K takes, because the rate is tuned.

    Returns:
        Columns batch_size, steps, cost (steps x seconds x trials), gain (the expected fall of the
        mean variance of log K at the targets), share (gain over this variance) and worth (gain /
        cost^0.4).

    Raises:
        ValueError: for a law without any K.
    """
    if not len(law.draws):
        raise ValueError(f"no K is known yet: {law.verdict}")
    candidates = list(candidates)
    log_steps = np.log(law.reducible_samples([*candidates, *targets]))
    centred = log_steps - log_steps.mean(axis=0)
    covariance = centred.T @ centred / len(log_steps)
    variance = np.diag(covariance)
    n = len(candidates)
    sigma_squared = TYPICAL_NOISE**2 + law.error**2
    gain = (covariance[:n, n:] ** 2).mean(axis=1) / (sigma_squared + variance[:n])
    steps = np.exp(log_steps[:, :n].mean(axis=0))
    cost = steps * np.array(list(map(seconds, candidates))) * trials
    table = pd.DataFrame({"batch_size": candidates, "steps": steps, "cost": cost, "gain": gain})
    table["share"] = table["gain"] / variance[n:].mean()
    table["worth"] = table["gain"] / table["cost"] ** COST_EXPONENT
    return table.sort_values("worth", ascending=False, ignore_index=True)


def contenders(
    law: Law, candidates: Sequence[float], seconds: Callable[[float], float]
) -> list[float]:
    """Return the batch sizes that may be among the best, on whose K the answer depends.

    By the law's posterior, they are within `NEAR` times the least time with a probability of at
    least `MIN_PROBABILITY`.

    Args:
        law, candidates, seconds: Like in `rank_probes`.
    """
    times = law.reducible_samples(candidates) * np.array(list(map(seconds, candidates)))
    is_near = times <= NEAR * times.min(axis=1, keepdims=True)
    probabilities = is_near.mean(axis=0)
    return [b for b, p in zip(candidates, probabilities, strict=True) if p >= MIN_PROBABILITY]


def best_probe(table: pd.DataFrame, budget: float) -> float | None:
    """Return the batch size of the best probe that the budget allows.

    Args:
        table: The result of `rank_probes`.
        budget: The most that the probe may cost.

    Returns:
        None if the budget allows none, or if none removes a share of `MIN_SHARE` of the variance.
    """
    allowed = table[(table["cost"] <= budget) & (table["share"] >= MIN_SHARE)]
    if not len(allowed):
        return None
    return float(allowed.iloc[0]["batch_size"])
