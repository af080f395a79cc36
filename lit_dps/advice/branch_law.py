"""How many steps other batch sizes take, from critical batch sizes along one run
(`lit_dps.readings.branching`)."""

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

ADAPTIVE, PLAIN = (
    0.5,
    1.0,
)  # the power of B that the rate of the branches grows with, like Adam and of SGD


class Critical(NamedTuple):
    """The critical batch size at a step of the run lies between two batch sizes; `high` is infinite
    where all held."""

    step: int
    low: float
    high: float


@dataclass(frozen=True)
class Branched:
    """Steps that make as much progress as a run of `steps` steps at `batch_size`, in place of
    `lit_dps.analysis.law.Law`.

    From one fork to the next, n steps of the run at B0 are n B0 / min(B, C) of a batch size B whose
    critical one is C: up to C a batch loses no progress per example (Merrill et al. 2025, arXiv
    2505.23971), beyond it each step makes at least as much as one of C. C is known between two of
    the branches; their geometric mean stands for it, the lower one gives the most steps, and a
    perfect speed-up, n B0 / B, the fewest. What comes before the first fork is taken to be as it
    was there, which is hopeful: critical batch sizes begin low.

    Attributes:
        batch_size: B0, of the run that was forked, in examples.
        steps: Of it.
        forks: At least one, by step.
        largest: The largest batch size of a branch.
        met: Whether the run met its goal after so many steps; else they are the budget.
    """

    batch_size: int
    steps: int
    forks: Sequence[Critical]
    largest: int
    met: bool
    observations: tuple[Observation, ...] = field(default=(), init=False)
    draws: np.ndarray = field(
        default_factory=lambda: np.empty((0, 3)), init=False, repr=False, compare=False
    )

    def __post_init__(self):
        if not self.forks or self.steps < 1:
            raise ValueError("a fork and a step are needed")

    @property
    def reach(self) -> tuple[float, float]:
        """Batch sizes between which it answers."""
        return float(self.batch_size), float(self.largest)

    def predict(self, batch_sizes: Iterable[float]) -> pd.DataFrame:
        """As of `Law`: batch_size, steps, low, high, known ("branched"; "refused" beyond the
        branches)."""
        rows = []
        for b in map(float, batch_sizes):
            row = {
                "batch_size": b,
                "steps": math.nan,
                "low": math.nan,
                "high": math.nan,
                "known": "refused",
            }
            if self.batch_size <= b <= self.largest:
                expected = self._steps(b, [math.sqrt(fork.low * fork.high) for fork in self.forks])
                most = self._steps(b, [fork.low for fork in self.forks])
                fewest = self.steps * self.batch_size / b
                row |= {"steps": expected, "low": fewest, "high": most, "known": "branched"}
            rows.append(row)
        return pd.DataFrame(rows)

    def _steps(self, batch_size: float, critical: Sequence[float]) -> float:
        """With so large a critical batch size from each fork to the next."""
        edges = np.minimum([0, *(fork.step for fork in self.forks[1:]), self.steps], self.steps)
        own = np.diff(edges)
        return float((own * self.batch_size / np.minimum(batch_size, critical)).sum())

    def rate(self, key: str, rate: float, adaptive: bool) -> RateLaw:
        """The rate of the branches, which was scaled and not searched."""
        power = ADAPTIVE if adaptive else PLAIN
        return RateLaw(rate / self.batch_size**power, power, math.nan, math.nan, self.reach, key)

    @property
    def critical(self) -> Critical:
        """That of the last fork."""
        return self.forks[-1]

    @property
    def notes(self) -> list[str]:
        """What to know of it, a line each."""
        lines = []
        if not self.met:
            lines.append(
                f"the forked run, at B = {self.batch_size}, was not followed to its goal: steps "
                "and times are those of "
                f"as much progress as its {self.steps} steps make"
            )
        if len(self.forks) > 1 and (early := self.forks[0]).low < (late := self.critical).low:
            lines.append(
                f"the critical batch size grew from {three_digits(early.low)} after step "
                f"{early.step} to "
                f"{three_digits(late.low)} after step {late.step}: begin small and grow the batch "
                "to lose nothing"
            )
        if math.isinf(self.critical.high):
            lines.append(
                f"no branch lost anything after step {self.critical.step}: larger batches may "
                "serve as well"
            )
        return lines

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was not measured, a line each."""
        return (
            "the rate grows with B as in the branches, and with the same schedule; it was not "
            "searched",
            "between two forks, and before the first one, the critical batch size is that of the "
            "fork",
            "beyond the critical batch size a step makes at least as much progress as one of it, "
            "at most in proportion",
        )
