"""The user's run as the first measurement, and the learning rates of the runs that follow it.

The pilot trains at the user's batch size B0 and learning rate eta0, to the goal. A run at another
batch size B takes eta0 (B / B0)^p, where p is 1 for SGD-like optimizers and 1/2 for others
(`lit_dps.core.optimizer_kind`), and multiples of it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_dps.analysis.rates import RateLaw
from lit_dps.core.search_space import Range
from lit_dps.core.trial import LIGHTNING, Value
from lit_dps.study.setup import StudySetup
from lit_dps.training.trainer_rules import as_list
from lit_dps.training.workload import Workload, locate

# The space of the rate is the user's rate divided and multiplied by this. It only has to contain
# every rate that is tried.
SPACE_FACTOR = 2.0**10
# Below B0 the answer is for B0 / 2 and B0 / 4.
HALVINGS = 2
# The rates of the first two runs at a batch size, over the rate by the rule. The linear rule is an
# upper end of what works, the square root a lower one (Shallue et al. 2019, Section 4.7).
FIRST_FACTORS = {1.0: (0.5, 1.0), 0.5: (1.0, 2.0)}
MAX_RUNS = 5  # at a batch size
NOISE_INTERVAL = 10  # steps of the pilot between two readings of the noise scale
NOISE_CALLBACK = "lit_dps.readings.NoiseScaleCallback"
CHECKPOINT_CALLBACK = "lit_dps.training.GoalCheckpointCallback"
MET, MISSED, DIVERGED = 0, 1, 2  # ranks of outcomes
# A rate is better by far if it needs at most this share of the steps.
CLEARLY_FEWER = 0.9
# If the best rate at a larger batch size is this many times the rate by the rule, the user's rate
# is too small at B0 too. If it is below this share of the user's rate, that is too large.
TOO_SMALL = 4.0
TOO_LARGE = 0.5


@dataclass(frozen=True)
class PilotPlan:
    """The user's run, and how the learning rate follows the batch size.

    Attributes:
        batch_size: B0, in examples of an optimizer step.
        rate_key: The configuration key of the learning rate.
        rate: eta0, its value at B0.
        power: The power of B by which the rate grows.
        is_adaptive: Whether the update does not grow with the gradient, as in Adam; None if the
            optimizer could not be read.
        params: The other metaparameters of `study.space` by key, at the user's values.
    """

    batch_size: int
    rate_key: str
    rate: float
    power: float
    is_adaptive: bool | None
    params: Mapping[str, Value] = field(default_factory=dict)

    @property
    def first_factors(self) -> tuple[float, float]:
        """The rates of the first two runs at a batch size, over the rate by the rule."""
        return FIRST_FACTORS[self.power]

    def factor_at_user_size(self, batch_size: int, factor: float) -> float | None:
        """Return the rate to run B0 again with, over the user's; None if his rate is not far off.

        Args:
            batch_size: A larger batch size.
            factor: The best rate there, over the rate by the rule.
        """
        share = factor * self.rate_by_rule(batch_size) / self.rate
        if factor >= TOO_SMALL:
            return factor
        if share < TOO_LARGE:
            return share
        return None

    def rate_by_rule(self, batch_size: float) -> float:
        """Return the rate at a batch size by the rule, from the user's rate."""
        return self.rate * (batch_size / self.batch_size) ** self.power

    def points(self, batch_size: int, factors: Sequence[float]) -> tuple[dict[str, Value], ...]:
        """Return the metaparameters of runs at a batch size.

        Args:
            batch_size: The batch size, in examples.
            factors: The rate of each run, over the rate by the rule.
        """
        rate = self.rate_by_rule(batch_size)
        return tuple({self.rate_key: rate * factor} for factor in factors)

    def batch_sizes(self, parts: int, most: int) -> list[int]:
        """Return the batch sizes to answer for, ascending: B0 times powers of 2.

        Args:
            parts: The number of batches that make a step; they divide every batch size.
            most: The largest batch size.
        """
        sizes = [self.batch_size]
        for _ in range(HALVINGS):
            if sizes[0] % (2 * parts):
                break
            sizes.insert(0, sizes[0] // 2)
        while 2 * sizes[-1] <= most:
            sizes.append(2 * sizes[-1])
        return sizes

    def space(self) -> dict[str, Range]:
        """Return a space that contains every rate that is tried, with the user's in its middle."""
        low, high = self.rate / SPACE_FACTOR, self.rate * SPACE_FACTOR
        return {self.rate_key: Range(low, high, "log")}

    def setup(self, setup: StudySetup) -> StudySetup:
        """Return a study that searches the rate alone, one run at a time."""
        workload = setup.workload
        if self.params:
            workload = with_values(workload, self.params)
        study = dataclasses.replace(setup.study, space=self.space(), race_factor=1.0, workers=1)
        return dataclasses.replace(setup, study=study, workload=workload)


def pilot_setup(setup: StudySetup, reads_noise: bool, file: Path) -> StudySetup:
    """Return the study of the pilot: Lightning's loop, as in `fit`, with what is read along it."""
    callbacks = as_list(setup.workload.trainer.get("callbacks"))
    if reads_noise:
        noise = {"class_path": NOISE_CALLBACK, "init_args": {"interval": NOISE_INTERVAL}}
        callbacks.append(noise)
    callbacks.append({"class_path": CHECKPOINT_CALLBACK, "init_args": {"path": str(file)}})
    trainer = {**setup.workload.trainer, "callbacks": callbacks}
    return dataclasses.replace(
        setup,
        workload=dataclasses.replace(setup.workload, trainer=trainer),
        # There is no other run that could stop it.
        study=dataclasses.replace(setup.study, engine=LIGHTNING, race_factor=None),
    )


def with_values(workload: Workload, params: Mapping[str, Value]) -> Workload:
    """Return a workload whose configuration has some values by key."""
    specs = copy.deepcopy({"model": dict(workload.model), "data": dict(workload.data)})
    for key, value in params.items():
        node, name = locate(specs, key, "study.space")
        node[name] = value
    return dataclasses.replace(workload, model=specs["model"], data=specs["data"])


class Outcome(NamedTuple):
    """How a run at a rate ended. The least one is the best.

    Attributes:
        rank: 0 if it met the goal, 1 if it did not, 2 if it diverged or failed.
        value: Steps to the goal; else the best value of the goal's metric, negative if it rises, or
            the training loss at the end if validations stopped early.
    """

    rank: int
    value: float

    @property
    def steps(self) -> int | None:
        """Steps to the goal; None without it."""
        return int(self.value) if self.rank == MET else None


def next_factor(tried: Mapping[float, Outcome], first: Sequence[float]) -> float | None:
    """Return the rate of one more run at a batch size, over the rate by the rule.

    After two first rates, the search goes on by factors of 2 beyond the better one, as long as that
    is the best by far. Such runs are short, because the race stops them at the fewest steps so far.

    Args:
        tried: The outcome of each factor so far.
        first: The first two factors.

    Returns:
        None if no further run is needed.
    """
    for factor in first:
        if factor not in tried:
            return factor
    best = min(tried, key=lambda factor: (tried[factor], factor))
    if len(tried) >= MAX_RUNS or min(tried) < best < max(tried):
        return None
    neighbour, beyond = best / 2, best * 2
    if best == min(tried):
        neighbour, beyond = best * 2, best / 2
    met = tried[best].steps
    before = tried[neighbour].steps
    if met is not None and before is not None and met > CLEARLY_FEWER * before:
        return None
    return beyond


@dataclass(frozen=True)
class RuledRate(RateLaw):
    """The best rates of the runs so far, moved to other batch sizes by the rule.

    Attributes:
        best: The best rate by batch size.
        unsearched: B0, if the user's rate is the best one there. It was not searched.
    """

    best: Mapping[int, float] = field(default_factory=dict)
    unsearched: int | None = None

    @classmethod
    def of(cls, plan: PilotPlan, best: Mapping[int, float], reach: tuple[float, float]):
        """Return the rates of a plan; without any run, from the user's rate."""
        scale = plan.rate / plan.batch_size**plan.power
        best = best or {plan.batch_size: plan.rate}
        unsearched = None
        if best.get(plan.batch_size) == plan.rate:
            unsearched = plan.batch_size
        nan = math.nan
        return cls(scale, plan.power, nan, nan, reach, plan.rate_key, dict(best), unsearched)

    is_searched = False

    @property
    def assumed(self) -> tuple[str, ...]:
        """What an answer assumes of the rates, a line each."""
        return (f"{self.describe()}.",)

    def at(self, batch_size: float) -> float | None:
        """Return the rate at a batch size.

        It is interpolated between batch sizes that were run, on a line in the logarithms. Beyond
        them it follows the last such line, if that rises less than the rule, else the rule. So it
        does next to B0 if the rate was not searched there: the other end of the line was.
        """
        x = np.log(sorted(self.best))
        y = np.log([self.best[size] for size in sorted(self.best)])
        at = math.log(batch_size)
        end, inner = (0, 1) if at < x[0] else (-1, -2)
        # All runs are at B0 or above.
        if self.unsearched is not None and len(x) > 1 and x[0] < at < x[1]:
            end, inner = 1, 0
        elif x[0] <= at <= x[-1]:
            return float(np.exp(np.interp(at, x, y)))
        exponent = self.exponent
        if len(x) > 1:
            slope = (y[end] - y[inner]) / (x[end] - x[inner])
            exponent = min(max(slope, 0.0), self.exponent)
        return float(np.exp(y[end] + exponent * (at - x[end])))

    def describe(self) -> str:
        """Return the rule in a line."""
        rule = "B" if self.exponent == 1 else "sqrt(B)"
        sizes = ", ".join(map(str, sorted(self.best)))
        if len(self.best) == 1:
            return f"{self.name} grows with {rule} from its value at B = {sizes}"
        return (
            f"{self.name} is interpolated between B = {sizes}; beyond, it grows at most with {rule}"
        )
