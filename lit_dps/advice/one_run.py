"""Steps of one run, relative to K, which is the least of several trials.

The trial of K had luck with its seed besides good metaparameters: in docs/studies/repeats.md K is
0.85 of the median of the same point over seeds. One training at a smoothed learning rate and
another seed usually needs more steps. How many more is read from such runs, or from the trials near
that rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rates import RateLaw
from lit_dps.analysis.tables import three_digits, times
from lit_dps.core.record import StudyRecord

# Prior of the standard deviation of log K of one point over seeds, and the number of runs that it
# is worth: about the quartiles in docs/studies/repeats.md.
TYPICAL_SPREAD = 0.2
PRIOR_RUNS = 2.0
# Trials at rates within this factor of the recommended one train nearly like a run at it.
MAX_RATE_RATIO = 2.0
MIN_TRIALS = 3  # near the rate


@dataclass(frozen=True)
class OneRun:
    """Steps of one run over K at its batch size.

    Attributes:
        ratio: The median of `ratios`.
        spread: Standard deviation of the log of the ratio of one more run.
        ratios: Steps over K, ascending; infinite for runs that did not meet the goal in their time.
        source: "runs" of the recommended configuration on fresh seeds, "trials" of the probes at
            rates near it, or "prior" if K is of single runs.
        batch_size: The batch size of the runs; None for trials.
        steps: The steps of each run, ascending; infinite like `ratios`.
    """

    ratio: float
    spread: float
    ratios: tuple[float, ...]
    source: Literal["runs", "trials", "prior"]
    batch_size: int | None = None
    steps: tuple[float, ...] = ()

    def describe(self) -> str:
        """Return the ratio and its source in a line."""
        if self.source == "prior":
            return (
                f"Steps are of single runs. Another seed may need {self.spread:.0%} more or fewer, "
                "the typical standard deviation; the limits include it."
            )
        intro = "K is the least of a probe's trials. One run needs"
        if self.source == "trials":
            return (
                f"{intro} {times(self.ratio)} as many steps (median of {len(self.ratios)} trials "
                "at rates near the recommended one)."
            )
        needed = []
        for steps in self.steps:
            needed.append("no goal in its time" if math.isinf(steps) else three_digits(steps))
        runs = f"{len(self.steps)} on fresh seeds at B = {self.batch_size}: {', '.join(needed)}"
        if math.isinf(self.ratio):
            return f"{intro} more steps; most runs did not meet the goal in their time ({runs})."
        return f"{intro} {times(self.ratio)} as many steps ({runs})."


# A further run, if K is of single runs at rates that were hardly searched.
LIKE_K = OneRun(1.0, TYPICAL_SPREAD, (), "prior")


def ratio_of_one_run(
    stored_runs: list[dict[str, Any]],
    k_of: Mapping[int, float],
    record: StudyRecord | None,
    rate: RateLaw | None,
    rate_key: str,
) -> OneRun | None:
    """Return the steps of one run over K: by the last configuration that was run, else by trials.

    Args:
        stored_runs: Stored runs of recommended configurations.
        k_of: K by batch size.
        record: The study of the probes.
        rate: The recommended rate by batch size.
        rate_key: The metaparameter that is the rate. Trials are only used if no other one is
            searched; otherwise trials near in the rate may be far in others.
    """
    if stored_runs:
        size = stored_runs[-1]["batch_size"]
        if size in k_of:
            runs = runs_of_configuration(stored_runs, size, stored_runs[-1]["params"])
            return of_runs(size, k_of[size], [run["steps"] or math.inf for run in runs])
    if record is None or rate is None or list(record.space) != [rate_key]:
        return None
    trials = {}
    rates = {}
    for cell in Analysis(record).cells:
        if cell.is_upper_bound:
            continue
        size = cell.cell.batch_size
        trials[size] = []
        for result in cell.trials:
            steps = math.inf
            if result.steps is not None:
                steps = result.steps
            trials[size].append((result.trial.params[rate_key], steps))
        recommended = rate.at(size)
        if recommended is not None:
            rates[size] = recommended
    return of_trials(trials, rates)


def runs_of_configuration(
    stored_runs: list[dict[str, Any]], batch_size: int, params: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the stored runs with a batch size and metaparameters."""
    runs = []
    for run in stored_runs:
        if run["batch_size"] == batch_size and run["params"] == dict(params):
            runs.append(run)
    return runs


def of_runs(batch_size: int, k: float, steps: Sequence[float]) -> OneRun | None:
    """Return the steps of one run from runs of a recommended configuration; None without any.

    Args:
        batch_size: The batch size of the runs, in examples.
        k: K at this batch size by the law, in steps.
        steps: Steps to the goal of each run; infinite if it was not met in the time.
    """
    if not len(steps):
        return None
    ascending = np.sort(np.asarray(steps, float))
    ratios = (ascending / k).tolist()
    ratio, spread = _median_and_spread(ratios)
    return OneRun(ratio, spread, tuple(ratios), "runs", batch_size, tuple(ascending.tolist()))


def of_trials(
    trials: Mapping[float, Sequence[tuple[float, float]]], rates: Mapping[float, float]
) -> OneRun | None:
    """Return the steps of one run from trials at rates near the recommended one.

    The trials include the trials of K.

    Args:
        trials: By batch size, the rate and the steps of each trial; infinite if it did not meet the
            goal, or was stopped because it could not be the best.
        rates: The recommended rate by batch size.

    Returns:
        None for fewer than `MIN_TRIALS`, or if most of them did not meet the goal.
    """
    ratios = []
    for batch_size, of_size in trials.items():
        k = min((steps for _, steps in of_size), default=math.inf)
        if math.isinf(k) or batch_size not in rates:
            continue
        for rate, steps in of_size:
            if abs(math.log(rate / rates[batch_size])) <= math.log(MAX_RATE_RATIO):
                ratios.append(steps / k)
    if len(ratios) < MIN_TRIALS:
        return None
    ratios.sort()
    ratio, spread = _median_and_spread(ratios)
    if math.isinf(ratio):
        return None
    return OneRun(ratio, spread, tuple(ratios), "trials")


def _median_and_spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the median of ascending ratios, and the standard deviation of log of one more."""
    n = len(ratios)
    low = ratios[(n - 1) // 2]
    high = ratios[n // 2]
    median = math.inf
    if high < math.inf:
        median = math.sqrt(low * high)
    finite_logs = np.log([x for x in ratios if x < math.inf])
    squares = 0.0
    if len(finite_logs):
        squares = float(((finite_logs - finite_logs.mean()) ** 2).sum())
    degrees_of_freedom = PRIOR_RUNS + max(len(finite_logs) - 1, 0)
    deviation = math.sqrt((PRIOR_RUNS * TYPICAL_SPREAD**2 + squares) / degrees_of_freedom)
    return median, deviation * math.sqrt(1 + 1 / n)
