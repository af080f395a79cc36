"""What is known before any run: times relative to the user's run, by public runs of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lit_dps.advice.pilot_plan import PilotPlan
from lit_dps.advice.text import devices_text
from lit_dps.analysis.answer import NEAR
from lit_dps.analysis.intervals import PERCENTILES, Interval, estimate
from lit_dps.analysis.law import relative_law
from lit_dps.analysis.tables import aligned, in_parts

# A batch size may be the best one if it is near the best with at least this probability.
MIN_PROBABILITY = 0.05


@dataclass(frozen=True)
class Preview:
    """Times relative to the user's run.

    Attributes:
        plan: The user's run.
        sizes: Batch sizes, in examples.
        steps: (draws, n), steps over those of the user's run.
        times: By number of devices, (draws, n), the time over the time of the user's run.
    """

    plan: PilotPlan
    sizes: Sequence[int]
    steps: np.ndarray
    times: Mapping[int, np.ndarray]

    @classmethod
    def of(
        cls,
        plan: PilotPlan,
        batch_sizes: Sequence[int],
        step_seconds: Mapping[int, Callable[[float], float]],
        seconds_of_user: float,
    ) -> Preview:
        """Return the preview of some batch sizes.

        Args:
            plan: The user's run.
            batch_sizes: Batch sizes to answer for, in examples.
            step_seconds: By number of devices, the seconds of a step at a batch size with its share
                of validation; infinite where they are unknown.
            seconds_of_user: Like `step_seconds`, of the user's run on its devices.
        """
        law = relative_law(plan.batch_size)
        low, high = law.reach
        sizes = [b for b in batch_sizes if low <= b <= high]
        steps = law.samples(np.array(sizes, float))
        steps = steps / steps[:, [sizes.index(plan.batch_size)]]
        times = {}
        for devices, seconds in step_seconds.items():
            of_step = np.array(list(map(seconds, sizes)))
            if np.isfinite(of_step).any():
                # An unknown step time is infinite, so that it is never the best.
                times[devices] = steps * of_step / seconds_of_user
        return cls(plan, sizes, steps, times)

    def likely_best(self, devices: int) -> list[int]:
        """Return the batch sizes that may be the best on some devices."""
        times = self.times[devices]
        is_near = times <= NEAR * times.min(axis=1, keepdims=True)
        is_likely = is_near.mean(axis=0) >= MIN_PROBABILITY
        return [b for b, likely in zip(self.sizes, is_likely, strict=True) if likely]

    def head(self) -> str:
        """Return the sentence above the table."""
        return (
            f"before any run, relative to yours at B = {self.plan.batch_size}, by public runs of "
            "others:"
        )

    def table(self, width: int) -> list[str]:
        """Return the lines of a table of relative times; a narrow one has no limits.

        If columns still do not fit, they follow in further tables.
        """
        lines = aligned(self._rows(has_limits=True))
        if max(map(len, lines)) <= width:
            return lines
        return in_parts(self._rows(has_limits=False), 1, width)

    def _rows(self, has_limits: bool) -> list[dict[str, str]]:
        """Return the rows of the table, by column."""
        rows = []
        for i, batch_size in enumerate(self.sizes):
            row = {"B": str(batch_size), "steps": _text_of(self.steps[:, i], has_limits)}
            for devices, times in self.times.items():
                row[f"time on {devices_text(devices)}"] = _text_of(times[:, i], has_limits)
            rows.append(row)
        return rows

    def likely_batch_sizes(self) -> list[str]:
        """Return the batch sizes that may be the best, a line for each number of devices."""
        lines = []
        for devices in self.times:
            lines.append(
                f"So far, on {devices_text(devices)}: B {_range(self.likely_best(devices))}."
            )
        return lines

    def best_guess(self) -> list[str]:
        """Return the best guess without any run that met its goal, a line for each devices."""
        lines = []
        for devices, times in self.times.items():
            i = int(times.mean(axis=0).argmin())
            lines.append(
                f"Best guess on {devices_text(devices)}, by public runs of others: B "
                f"{_range(self.likely_best(devices))}. B = {self.sizes[i]} takes "
                f"{_text_of(times[:, i])} times as long as your run at B = {self.plan.batch_size}."
            )
        return lines


def _range(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return f"= {sizes[0]}"
    return f"from {sizes[0]} to {sizes[-1]}"


def _text_of(draws: np.ndarray, has_limits: bool = True) -> str:
    """Return the median of some draws, with its 95 % limits or without."""
    if not np.isfinite(draws).all():
        return "?"
    interval = Interval(*np.percentile(draws, PERCENTILES))
    if math.isclose(*interval) or not has_limits:
        interval = None
    return estimate(float(np.median(draws)), interval)
