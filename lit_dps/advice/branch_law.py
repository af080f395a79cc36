"""Steps at other batch sizes, from critical batch sizes along one run.

`lit_dps.readings.branching` measures these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.observations import Observation
from lit_dps.analysis.rates import RateLaw
from lit_dps.analysis.tables import three_digits

# The learning rate of the branches grows with this power of B.
ADAPTIVE_EXPONENT = 0.5  # for optimizers like Adam
PLAIN_EXPONENT = 1.0  # for SGD


class CriticalRange(NamedTuple):
    """The limits of the critical batch size at a step of the run.

    `high` is infinite if no branch surely lost progress.
    """

    step: int
    low: float
    high: float


@dataclass(frozen=True)
class Branched:
    """Steps that make as much progress as `steps` steps at `batch_size`; used in place of a `Law`.

    Between two forks, n steps of the run at B0 equal n B0 / min(B, C) steps at a batch size B,
    where C is the critical batch size. Up to C a batch loses no progress per example (Merrill et
    al. 2025, arXiv 2505.23971); beyond C a step makes at least as much progress as one at C.

    The lower limit of C is the largest branch that is shown to lose nothing, and gives the most
    steps. The upper limit is the smallest branch that surely loses, or the largest branch if none
    does. The geometric mean of both gives the expected steps; a perfect speed-up gives the fewest
    steps, n B0 / B. Before the first fork C is between B0 and C of this fork, because critical
    batch sizes begin low.

    Attributes:
        batch_size: B0, the batch size of the run, in examples.
        steps: The steps of the run.
        forks: One or more critical batch sizes, by step.
        largest: The largest batch size of a branch.
        met: Whether the run met its goal after `steps` steps; otherwise they are its budget.
    """

    batch_size: int
    steps: int
    forks: Sequence[CriticalRange]
    largest: int
    met: bool
    observations: tuple[Observation, ...] = field(default=(), init=False)

    def __post_init__(self):
        if not self.forks or self.steps < 1:
            raise ValueError(
                f"{len(self.forks)} forks and {self.steps} steps; there must be 1 or more of each"
            )

    @property
    def reach(self) -> tuple[float, float]:
        """The batch sizes between which there is an answer."""
        return float(self.batch_size), float(self.largest)

    def predict(self, batch_sizes: Iterable[float]) -> pd.DataFrame:
        """Return steps at some batch sizes, with the columns of `Law.predict`.

        Column known is "branched", or "refused" beyond the branches.
        """
        expected = []
        smallest = []
        for fork in self.forks:
            expected.append(math.sqrt(fork.low * min(fork.high, self.largest)))
            smallest.append(fork.low)
        expected.insert(0, math.sqrt(self.batch_size * expected[0]))
        smallest.insert(0, self.batch_size)
        rows = []
        for batch_size in map(float, batch_sizes):
            row = {
                "batch_size": batch_size,
                "steps": math.nan,
                "low": math.nan,
                "high": math.nan,
                "known": "refused",
            }
            if self.batch_size <= batch_size <= self.largest:
                row["steps"] = self._steps(batch_size, expected)
                row["low"] = self.steps * self.batch_size / batch_size
                row["high"] = self._steps(batch_size, smallest)
                row["known"] = "branched"
            rows.append(row)
        return pd.DataFrame(rows)

    def _steps(self, batch_size: float, critical: Sequence[float]) -> float:
        """Return the steps at a batch size.

        Args:
            batch_size: B, in examples.
            critical: The critical batch size before the first fork, and from each fork on.
        """
        edges = np.minimum([0, *(fork.step for fork in self.forks), self.steps], self.steps)
        steps_of_run = np.diff(edges)
        return float((steps_of_run * self.batch_size / np.minimum(batch_size, critical)).sum())

    def rate(self, key: str, rate: float, adaptive: bool) -> RateLaw:
        """Return the rate of the branches, which was scaled and not searched.

        Args:
            key: The metaparameter that is the rate.
            rate: Its value in the run.
            adaptive: Whether the optimizer is like Adam.
        """
        exponent = PLAIN_EXPONENT
        if adaptive:
            exponent = ADAPTIVE_EXPONENT
        scale = rate / self.batch_size**exponent
        return RateLaw(scale, exponent, math.nan, math.nan, self.reach, key)

    @property
    def critical(self) -> CriticalRange:
        """The critical batch size at the last fork."""
        return self.forks[-1]

    @property
    def notes(self) -> list[str]:
        """Notes for a reader, a line each."""
        lines = []
        if not self.met:
            lines.append(
                f"The forked run at B = {self.batch_size} did not meet its goal. Steps and times "
                f"are for as much progress as its {self.steps} steps make."
            )
        first, last = self.forks[0], self.critical
        if first.high <= last.low:
            lines.append(
                f"The critical batch size grew: it was below {three_digits(first.high)} at step "
                f"{first.step}, and {three_digits(last.low)} or more at step {last.step}. Begin "
                "with a small batch size and increase it to lose nothing."
            )
        if last.low == self.largest:
            lines.append(
                f"No branch lost progress after step {last.step}; larger batch sizes may do as "
                "well."
            )
        return lines

    @property
    def assumed(self) -> tuple[str, ...]:
        """What is assumed without a measurement, a line each."""
        return (
            "The learning rate grows with B as in the branches, with the same schedule; it was not "
            "searched.",
            "Between two forks the critical batch size equals its value at the first of them. "
            "Before the first fork it is between B0 and its value there.",
            "Beyond the critical batch size a step makes at least as much progress as one at it, "
            "and at most proportionally more.",
        )
