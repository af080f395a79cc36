"""The user's own run as the first measurement, and the learning rates of the runs that follow it.

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

from lit_dps.analysis.rates import RateLaw
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Value
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload, locate

# The space of the rate is the user's rate divided and multiplied by this. It only has to contain
# every rate that is tried.
SPACE_FACTOR = 2.0**10
# Below B0 the answer is for B0 / 2 and B0 / 4.
HALVINGS = 2
# The rates of the first two runs at a batch size, over the rate by the rule.
FIRST_FACTORS = (1.0, 2.0)
# The rate if the first two do not meet the goal.
SMALLER_FACTOR = 0.5
MAX_RUNS = 6  # at a batch size
# A rate is better by far if it needs at most this share of the steps.
CLEARLY_FEWER = 0.9
# If the best rate is this many times the rate by the rule, the user's rate is too small at B0 too.
TOO_SMALL = 4.0


@dataclass(frozen=True)
class PilotPlan:
    """The user's own run, and how the learning rate follows the batch size.

    Attributes:
        batch_size: B0, in examples of an optimizer step.
        rate_key: The configuration key of the learning rate.
        rate: eta0, its value at B0.
        power: The power of B by which the rate grows.
        is_adaptive: Whether the update does not grow with the gradient, as in Adam.
        params: The other metaparameters of `study.space` by key, at the user's values.
    """

    batch_size: int
    rate_key: str
    rate: float
    power: float
    is_adaptive: bool
    params: Mapping[str, Value] = field(default_factory=dict)

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
            workload = _with_values(workload, self.params)
        study = dataclasses.replace(setup.study, space=self.space(), race_factor=1.0, workers=1)
        return dataclasses.replace(setup, study=study, workload=workload)


def _with_values(workload: Workload, params: Mapping[str, Value]) -> Workload:
    """Return a workload whose configuration has some values by key."""
    specs = copy.deepcopy({"model": dict(workload.model), "data": dict(workload.data)})
    for key, value in params.items():
        node, name = locate(specs, key, "study.space")
        node[name] = value
    return dataclasses.replace(workload, model=specs["model"], data=specs["data"])


def next_factor(tried: Mapping[float, float | None]) -> float | None:
    """Return the rate of one more run at a batch size, over the rate by the rule.

    A rate beyond the largest one is tried as long as the largest is the best by far. Such runs are
    short, because the race stops them at the fewest steps so far. If no rate has met the goal, half
    of the rate by the rule is tried.

    Args:
        tried: Steps to the goal by factor; None without the goal.

    Returns:
        None if no further run is needed.
    """
    for factor in FIRST_FACTORS:
        if factor not in tried:
            return factor
    met = {factor: steps for factor, steps in tried.items() if steps is not None}
    if not met:
        return None if SMALLER_FACTOR in tried else SMALLER_FACTOR
    largest = max(tried)
    best = min(met, key=lambda factor: (met[factor], factor))
    if best != largest or len(tried) >= MAX_RUNS:
        return None
    others = [steps for factor, steps in met.items() if factor != best]
    if others and met[best] > CLEARLY_FEWER * min(others):
        return None
    return 2 * largest


@dataclass(frozen=True)
class RuledRate(RateLaw):
    """The best rates of the runs so far, moved to other batch sizes by the rule.

    Attributes:
        best: The best rate by batch size.
    """

    best: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: PilotPlan, best: Mapping[int, float], reach: tuple[float, float]):
        """Return the rates of a plan; without any run, from the user's rate."""
        scale = plan.rate / plan.batch_size**plan.power
        best = best or {plan.batch_size: plan.rate}
        return cls(scale, plan.power, math.nan, math.nan, reach, plan.rate_key, dict(best))

    is_searched = False

    @property
    def assumed(self) -> tuple[str, ...]:
        """What an answer assumes of the rates, a line each."""
        return (
            "Steps are of one run at the best of one to three rates. Another seed may need 10 % "
            "more or fewer.",
            "Where nothing was run, the rate follows the rule from the nearest batch size.",
        )

    def at(self, batch_size: float) -> float | None:
        """Return the rate by the rule from the nearest batch size that was run."""
        nearest = min(self.best, key=lambda b: abs(math.log(b / batch_size)))
        return self.best[nearest] * (batch_size / nearest) ** self.exponent

    def describe(self) -> str:
        """Return the rule in a line."""
        rule = "B" if self.exponent == 1 else "sqrt(B)"
        sizes = ", ".join(map(str, sorted(self.best)))
        return f"{self.name} grows with {rule} from the best rate at the nearest of B = {sizes}"
