"""check_reading, check_statistic, check_schedule: broken classes fail the requirement that they break."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
import torch

from lit_dps.core.statistic import Statistic, median_of_best
from lit_dps.readings import Reading
from lit_dps.readings.spent import PeakMemory
from lit_dps.testing import check_reading, check_schedule, check_statistic
from tests.support.plug_ins import Counted, Drawn, Half, Square
from tests.support.user_readings import (
    Disturbing,
    FinalNorm,
    Norm,
    Sharpness,
    Text,
    norm_of,
)
from tests.unit.core.test_statistic import (
    STATISTICS,
    First,
    GeometricMeanOfBestTwo,
    MeanOfAll,
    NeverKnown,
    RacesToBest,
)
from tests.unit.testing.test_testing import failure


def name_of(value: object) -> str:
    """Return the class of a plug-in as the name of its test: equal in all processes of xdist."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__name__


@pytest.mark.parametrize(
    "reading", [Sharpness(5), Norm(4), FinalNorm, PeakMemory, Disturbing], ids=name_of
)
def test_readings_conform(reading):
    before = torch.get_rng_state()
    check_reading(reading)
    assert torch.equal(before, torch.get_rng_state())


class AllGradients(Reading):
    """Takes the gradient by all parameters, also by untrained ones."""

    name = "all_gradients"

    def read(self, moment):
        (loss, _) = next(moment.losses(8, 8))
        torch.autograd.grad(loss, list(moment.module.parameters()))
        return {"all_gradients": 1.0}


def test_a_gradient_by_an_untrained_parameter_fails():
    with pytest.raises(RuntimeError, match="does not require grad"):
        check_reading(AllGradients)


class Quantity(Reading):
    """A reading of the sum of the weights."""

    name = "quantity"

    def read(self, moment):
        return {"quantity": norm_of(moment)}


class Clock(Quantity):
    """The time, of a reading that may be taken in a stack."""

    def read(self, moment):
        return {"clock": time.perf_counter()}


class ClockAlone(Clock):
    stacked = False


class Counting(Quantity):
    """Counts its calls over all trials."""

    calls = 0

    def read(self, moment):
        Counting.calls += 1
        return {"calls": Counting.calls}


class OwnGenerator(Quantity):
    """Has a generator, which no checkpoint contains."""

    def __init__(self):
        self.random = random.Random(0)

    def read(self, moment):
        return {"drawn": self.random.random()}


class Iterating(Quantity):
    """Has an iterator, which cannot be saved."""

    def __init__(self):
        self.numbers = iter(range(100))

    def read(self, moment):
        return {"number": next(self.numbers)}


class OfMasks(Quantity):
    """Divides by the number of masks."""

    def read(self, moment):
        kept = sum(float(mask.float().mean()) for mask in moment.masks.values())
        return {"kept": kept / len(moment.masks)}


class ColumnOfEachMask(Quantity):
    def read(self, moment):
        return {"norm": 1.0, **{name: float(mask.sum()) for name, mask in moment.masks.items()}}


class OfData(Quantity):
    """Reads the data in larger batches."""

    def read(self, moment):
        moment.data.batch_size = 16
        return {"size": 16}


class WithoutName(Quantity):
    name = ""


class Sometimes(Quantity):
    when = "sometimes"


BROKEN_READINGS = {
    Clock: "repeated",
    Counting: "repeated",
    OwnGenerator: "resumed",
    Iterating: "resumed",
    OfMasks: "dense",
    ColumnOfEachMask: "columns",
    OfData: "data",
    Text: "valid",
    WithoutName: "attributes",
    Sometimes: "attributes",
}


@pytest.mark.parametrize("kind", BROKEN_READINGS, ids=lambda kind: kind.__name__)
def test_a_broken_reading_fails(kind):
    assert failure(check_reading, kind) == BROKEN_READINGS[kind]
    check_reading(ClockAlone)


@pytest.mark.parametrize("statistic", STATISTICS, ids=name_of)
def test_statistics_conform(statistic):
    check_statistic(statistic)
    check_statistic(GeometricMeanOfBestTwo)


class Second(Statistic):
    """Fails where only one trial is complete."""

    def value(self, steps):
        return sorted(k for k in steps if k is not None)[1]


class OtherDraws(Statistic):
    """The minimum, and the maximum of draws."""

    def value(self, steps):
        return min((k for k in steps if k is not None), default=None)

    def of_draws(self, steps):
        return np.max(steps, axis=-1)


class Removing(OtherDraws):
    """Removes the trials that missed the goal from the list of the caller."""

    def value(self, steps):
        while None in steps:
            steps.remove(None)
        return min(steps, default=None)

    of_draws = Statistic.of_draws


class Negative(Statistic):
    def value(self, steps):
        return -1.0


class Earlier(Statistic):
    """Stops trials earlier at a larger race factor."""

    def value(self, steps):
        return median_of_best(1).value(steps)

    def race_limit(self, steps, factor):
        return median_of_best(1).race_limit(steps, 1.0) if factor == 1 else 1 / factor


class Shrinking(Statistic):
    """Is larger if a trial needs fewer steps."""

    def value(self, steps):
        complete = [k for k in steps if k is not None]
        return 10 / math.prod(complete) if complete else None


class Undescribed(GeometricMeanOfBestTwo):
    """Returns no text as its description."""

    def describe(self):
        return None


BROKEN_STATISTICS = {
    Undescribed: "description",
    MeanOfAll: "another_trial",
    RacesToBest: "race_limit",
    First: "order",
    NeverKnown: "has_value",
    Second: "raises",
    OtherDraws: "of_draws",
    Removing: "only_read",
    Negative: "positive",
    Earlier: "race_factor",
    Shrinking: "fewer_steps",
}


@pytest.mark.parametrize("kind", BROKEN_STATISTICS, ids=lambda kind: kind.__name__)
def test_a_broken_statistic_fails(kind):
    assert failure(check_statistic, kind) == BROKEN_STATISTICS[kind]


@pytest.mark.parametrize(
    ("kind", "requirement"), [(Drawn, "repeated"), (Counted, "repeated"), (Half, "valid")]
)
def test_a_broken_schedule_fails(kind, requirement):
    assert failure(check_schedule, kind) == requirement
    check_schedule(Square)


def test_a_statistic_describes_itself():
    assert "RacesToBest" in RacesToBest().describe()
