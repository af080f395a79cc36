"""Which batch size to run next: the one that removes most expected loss of time per second.

The loss is the time that the recommendation takes beyond the best batch size, as a share. It is
expected over the posterior of K. A further run changes the posterior, and so the recommendation;
the expected fall of the loss is the value of the run (Raiffa and Schlaifer 1961, the expected value
of sample information). Numbers only, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lit_dps.advice.next_probe import SEED_SPREAD
from lit_dps.analysis.law import Law

# Outcomes of a run over which its value is averaged.
OUTCOMES = 64
# A run has to remove at least this share of the time of a training.
MIN_VALUE = 0.01


class Worth(NamedTuple):
    """What a run at a batch size is worth.

    Attributes:
        batch_size: Examples of a step.
        steps: Its expected steps to the goal.
        cost: Its expected seconds.
        value: Expected fall of the loss, as a share of the time of a training.
    """

    batch_size: int
    steps: float
    cost: float
    value: float


def worth_of_runs(
    law: Law,
    candidates: Sequence[int],
    targets: Sequence[int],
    step_seconds: Mapping[int, Callable[[float], float]],
    run_seconds: Callable[[float], float],
    runs: float = 1.0,
) -> list[Worth]:
    """Return what a run at each candidate is worth, the most value per second first.

    Args:
        law: The law of all runs so far, with at least one K.
        candidates: Batch sizes that could be run, in examples.
        targets: Batch sizes that are asked for.
        step_seconds: By number of devices that is asked for, the seconds of a step at a batch size;
            infinite where they are unknown.
        run_seconds: The seconds of a step at a batch size on the devices that are here.
        runs: The number of runs that a K takes.
    """
    low, high = law.reach
    targets = [b for b in targets if low <= b <= high]
    candidates = [b for b in candidates if low <= b <= high]
    if not targets or not candidates:
        return []
    losses = []
    for seconds in step_seconds.values():
        of_step = np.array(list(map(seconds, targets)))
        is_known = np.isfinite(of_step)
        if is_known.any():
            times = law.samples(np.array(targets, float)[is_known]) * of_step[is_known]
            losses.append(times / times.min(axis=1, keepdims=True) - 1)
    if not losses:
        return []
    log_steps = np.log(law.samples(np.array(candidates, float)))
    worths = []
    for i, batch_size in enumerate(candidates):
        steps = float(np.exp(log_steps[:, i]).mean())
        cost = steps * run_seconds(batch_size) * runs
        value = np.mean([_expected_fall(log_steps[:, i], loss) for loss in losses])
        worths.append(Worth(batch_size, steps, cost, float(value)))
    return sorted(worths, key=lambda worth: worth.value / worth.cost, reverse=True)


def _expected_fall(log_steps: np.ndarray, loss: np.ndarray) -> float:
    """Return the expected fall of the least expected loss by a run with uncertain log K.

    Args:
        log_steps: (draws,), log K of the run.
        loss: (draws, n), the loss of each batch size.
    """
    outcomes = np.quantile(log_steps, (np.arange(OUTCOMES) + 0.5) / OUTCOMES)
    distance = (log_steps[None, :] - outcomes[:, None]) / SEED_SPREAD
    weights = np.exp(-0.5 * distance**2)
    after = (weights @ loss) / weights.sum(axis=1, keepdims=True)
    # Outcomes are weighted equally, so their mean need not be the prior mean exactly.
    before = after.mean(axis=0).min()
    return float(before - after.min(axis=1).mean())


def best_run(worths: Sequence[Worth], seconds: float) -> Worth | None:
    """Return the run with most value per second that is worth it and ends within some seconds."""
    for worth in worths:
        if worth.value >= MIN_VALUE and worth.cost <= seconds:
            return worth
    return None
