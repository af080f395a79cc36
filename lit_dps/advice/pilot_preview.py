"""What is known before any run: times relative to the user's run, by public runs of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lit_dps.advice.pilot_plan import PilotPlan
from lit_dps.analysis.answer import NEAR
from lit_dps.analysis.intervals import PERCENTILES
from lit_dps.analysis.law import relative_law
from lit_dps.analysis.tables import aligned, three_digits

# A batch size may be the best one if it is near the best with at least this probability.
MIN_PROBABILITY = 0.05


def preview(
    plan: PilotPlan,
    batch_sizes: Sequence[int],
    step_seconds: Mapping[int, Callable[[float], float]],
) -> list[str]:
    """Return a table of relative times, and the batch sizes that may be best, as lines.

    Args:
        plan: The user's run.
        batch_sizes: Batch sizes to answer for, in examples.
        step_seconds: By number of devices, the seconds of a step at a batch size with its share of
            validation; infinite where they are unknown.
    """
    law = relative_law(plan.batch_size)
    low, high = law.reach
    sizes = [b for b in batch_sizes if low <= b <= high]
    steps = law.samples(np.array(sizes, float))
    steps = steps / steps[:, [sizes.index(plan.batch_size)]]
    of_pilot = next(iter(step_seconds.values()))(plan.batch_size)
    columns = {}
    lines = []
    for devices, seconds in step_seconds.items():
        of_step = np.array(list(map(seconds, sizes)))
        if not np.isfinite(of_step).any():
            continue
        # An unknown step time is infinite, so that it is never the best.
        times = steps * of_step / of_pilot
        columns[devices] = times
        is_near = times <= NEAR * times.min(axis=1, keepdims=True)
        likely = [b for b, p in zip(sizes, is_near.mean(axis=0), strict=True) if _is_likely(p)]
        sizes_text = f"from {likely[0]} to {likely[-1]}"
        if len(likely) == 1:
            sizes_text = f"= {likely[0]}"
        lines.append(f"So far, on {_devices(devices)}: B {sizes_text}.")
    rows = []
    for i, batch_size in enumerate(sizes):
        row = {"B": str(batch_size), "steps": _with_limits(steps[:, i])}
        for devices, times in columns.items():
            row[f"time on {_devices(devices)}"] = _with_limits(times[:, i])
        rows.append(row)
    head = f"before any run, relative to yours at B = {plan.batch_size}, by public runs of others:"
    return [head, *aligned(rows), *lines]


def _is_likely(probability: float) -> bool:
    return probability >= MIN_PROBABILITY


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _with_limits(draws: np.ndarray) -> str:
    """Return the median of some draws with its 95 % limits."""
    if not np.isfinite(draws).all():
        return "?"
    low, high = np.percentile(draws, PERCENTILES)
    middle = float(np.median(draws))
    if math.isclose(low, high):
        return three_digits(middle)
    return f"{three_digits(middle)} [{three_digits(low)}, {three_digits(high)}]"
