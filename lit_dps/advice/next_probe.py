"""The law of few runs, and what a further run at each batch size is worth.

The rule is by Li et al. 2026 ("Spend less, fit better", arXiv 2604.22753): the expected fall of the
variance at the batch sizes that are asked for, over cost^0.4. Here it is exact on draws of the
law's constants, instead of linearised at one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.advice.branch_law import Branched
from lit_dps.advice.step_time import StepTime
from lit_dps.analysis.critical_prior import default_prior, noise_scale_prior
from lit_dps.analysis.law import Law, fit_law
from lit_dps.analysis.law_verdict import Trust
from lit_dps.analysis.observations import Observation, exact
from lit_dps.analysis.tables import three_digits
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.text import format_duration

COST_EXPONENT = 0.4
# Standard deviation of log K of a run between repetitions of seed and search, if it is unknown.
TYPICAL_NOISE = 0.1
# Standard deviation of log K of one run between seeds, about the quartiles in
# docs/results.md#repeats.
SEED_SPREAD = 0.2


class NextRun(NamedTuple):
    """The run to do next.

    Attributes:
        batch_size: Examples of a step.
        steps: Expected steps to the goal.
        seconds: Expected seconds; None without step times.
        share: The share of the variance of log K at the batch sizes near the best that it removes.
        learning_rate: The best rate of earlier runs at this batch size; None without one.
    """

    batch_size: int
    steps: float
    seconds: float | None
    share: float
    learning_rate: float | None = None

    def describe(self) -> str:
        """Return the run as a sentence."""
        duration = ""
        if self.seconds is not None:
            duration = f", {format_duration(self.seconds, 2)}"
        return (
            f"next run: B = {self.batch_size} (about {three_digits(self.steps)} steps{duration}); "
            f"it should remove {self.share:.0%} of the variance of log K"
        )


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
    if law.verdict.trust is Trust.INTERPOLATED:
        reference = measured[-1].batch_size
    return fit_law(observations, default_prior(reference))


def rank_probes(
    law: Law,
    candidates: Sequence[float],
    targets: Sequence[float],
    seconds: Callable[[float], float],
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

    Returns:
        Columns batch_size, steps, cost (steps x seconds), gain (the expected fall of the
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
    cost = steps * np.array(list(map(seconds, candidates)))
    table = pd.DataFrame({"batch_size": candidates, "steps": steps, "cost": cost, "gain": gain})
    table["share"] = table["gain"] / variance[n:].mean()
    table["worth"] = table["gain"] / table["cost"] ** COST_EXPONENT
    return table.sort_values("worth", ascending=False, ignore_index=True)


def next_run(
    law: Law | Branched,
    sizes: Sequence[int],
    targets: Sequence[float],
    step_time: StepTime | None = None,
    devices: int = 1,
) -> NextRun | None:
    """Return the run that narrows the answer most for its cost; None if no K is known.

    The cost is the time of the run, or its examples without step times.

    Args:
        law: The law of all runs so far.
        sizes: Batch sizes that could be run, in examples.
        targets: Batch sizes that are asked for.
        step_time: The model of the step time; None if no step was timed.
        devices: The number of devices of the run.
    """
    if isinstance(law, Branched) or not len(law.draws):
        return None

    def cost(batch_size: float) -> float:
        if step_time is None:
            return batch_size
        step = step_time.at(batch_size, devices)
        return math.inf if step is None else step.value

    known = [size for size in sizes if math.isfinite(cost(size))]
    measured = exact(law.observations)
    if len(measured) == 1:
        # Below a measured batch size K grows about as 1 / B; above it, it is open.
        known = [size for size in known if size > measured[0].batch_size] or known
    if not known:
        return None
    first = rank_probes(law, known, targets, cost).iloc[0]
    seconds = None
    if step_time is not None:
        seconds = float(first["cost"])
    return NextRun(int(first["batch_size"]), float(first["steps"]), seconds, float(first["share"]))


def with_rate(run: NextRun | None, best_rates: Mapping[float, float]) -> NextRun | None:
    """Return a run with the best rate at its batch size so far."""
    if run is None:
        return None
    return run._replace(learning_rate=best_rates.get(run.batch_size))
