"""Steps of one run, where K is that of the best of several trials.

K is the least of some trials, lucky in its seed as well as good in its metaparameters: in
docs/studies/repeats.md it is 0.85 of the median of its own point over seeds. Whoever trains once,
at a smoothed learning rate and another seed, usually needs more steps. How many more is read from
runs that did just that, or else from the trials near that rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_dps.analysis.tables import three_digits, times

# Standard deviation of log K of one point over seeds where nothing else is known, worth so many
# runs: about that of the quartiles in docs/studies/repeats.md.
TYPICAL_SPREAD, WORTH = 0.2, 2.0
# trials at rates within this factor of the recommended one train nearly as a run at it does
NEAR = 2.0
FEWEST = 3  # of them that say something


@dataclass(frozen=True)
class OneRun:
    """Steps of one run over K at its batch size.

    Attributes:
        ratio: The median.
        spread: Standard deviation of its log, of one more run.
        ratios: What it is the median of, ascending; infinite of runs that did not meet the goal in
            their time.
        of: "runs" of the recommended configuration on fresh seeds, or "trials" of the probes at
            rates near it.
        batch_size: Of the runs; None of trials.
        steps: Of each run, ascending, as in `ratios`.
    """

    ratio: float
    spread: float
    ratios: tuple[float, ...]
    of: Literal["runs", "trials"]
    batch_size: int | None = None
    steps: tuple[float, ...] = ()

    def describe(self) -> str:
        """Where it comes from, in a line."""
        least = "K is the least of a probe's trials; one run takes "
        if self.of == "trials":
            return (
                f"{least}{times(self.ratio)} as many steps, the median of {len(self.ratios)} "
                "trials at rates near"
            )
        took = ", ".join(
            "none in its time" if math.isinf(k) else three_digits(k) for k in self.steps
        )
        runs = f"{len(self.steps)} on fresh seeds at B = {self.batch_size} took {took}"
        if math.isinf(self.ratio):
            return f"{least}more steps than that, most did not meet the goal in their time: {runs}"
        return f"{least}{times(self.ratio)} as many steps: {runs}"


def of_runs(batch_size: int, k: float, steps: Sequence[float]) -> OneRun | None:
    """From runs of a recommended configuration, where the law has K = `k`; None without any.

    Args:
        batch_size: Theirs, in examples.
        k: Steps.
        steps: To the goal, of each; infinite where it was not met in the time given.
    """
    if not len(steps):
        return None
    ascending = sorted(map(float, steps))
    return _of([x / k for x in ascending], "runs", batch_size, tuple(ascending))


def of_trials(
    trials: Mapping[float, Sequence[tuple[float, float]]], rates: Mapping[float, float]
) -> OneRun | None:
    """From the trials of probes at rates within `NEAR` of the recommended one, each over the K of
    its batch size.

    The best trials are among them. None for fewer than `FEWEST`, or where most of them did not meet
    the goal.

    Args:
        trials: By batch size, the rate and the steps of each trial; infinite of one that did not
            meet the goal, or was stopped because it could not beat the best.
        rates: The recommended rate by batch size.
    """
    ratios = []
    for batch_size, found in trials.items():
        k = min((steps for _, steps in found), default=math.inf)
        if k < math.inf and batch_size in rates:
            near = (
                steps
                for rate, steps in found
                if abs(math.log(rate / rates[batch_size])) <= math.log(NEAR)
            )
            ratios += [steps / k for steps in near]
    found = _of(sorted(ratios), "trials") if len(ratios) >= FEWEST else None
    return None if found is None or math.isinf(found.ratio) else found


def _of(
    ratios: Sequence[float], of: str, batch_size: int | None = None, steps: tuple[float, ...] = ()
) -> OneRun:
    """`ratios` ascending."""
    n = len(ratios)
    low, high = ratios[(n - 1) // 2], ratios[n // 2]
    middle = math.sqrt(low * high) if high < math.inf else math.inf
    met = np.log([x for x in ratios if x < math.inf])
    squares = float(((met - met.mean()) ** 2).sum()) if len(met) else 0.0
    deviation = math.sqrt((WORTH * TYPICAL_SPREAD**2 + squares) / (WORTH + max(len(met) - 1, 0)))
    return OneRun(middle, deviation * math.sqrt(1 + 1 / n), tuple(ratios), of, batch_size, steps)
