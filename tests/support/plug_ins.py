"""Plug-ins with arguments, as users write them: one of each kind conforms, and one is broken."""

from __future__ import annotations

import random

import torch

from lit_dps.core.batch_schedule import BatchSchedule
from lit_dps.core.goal import GoalRule
from lit_dps.core.statistic import Statistic
from lit_dps.optim import Rule
from lit_dps.pruning import Pruner, top_k
from lit_dps.readings import Reading
from tests.support.user_readings import norm_of


class Powers(Pruner):
    """Prunes weights by a power of their size."""

    def __init__(self, power: float = 1.0):
        self.power = power

    def mask(self, network, sparsity, generator):
        scores = {}
        for name, parameter in network.parameters.items():
            scores[name] = parameter.detach().abs() ** self.power + self.drawn(parameter)
        return top_k(scores, sparsity)

    def drawn(self, parameter):
        return 0


class Drawing(Powers):
    """Adds global random numbers to the scores."""

    def drawn(self, parameter):
        return torch.rand_like(parameter)


class ForText(Powers):
    """Needs a network with an embedding."""

    def mask(self, network, sparsity, generator):
        return top_k({"embedding": network.parameters["embedding"]}, sparsity)


def _sign(weights, gradients, state, rate, hyperparameters, step):
    average = state["momentum_buffer"].mul_(hyperparameters["momentum"]).add_(gradients)
    weights.sub_(rate * average.sign())


SIGN = Rule("sign", ("momentum",), ("momentum_buffer",), _sign, elementwise=True)
calls: list[int] = []


def _counting(weights, gradients, state, rate, hyperparameters, step):
    calls.append(1)
    _sign(weights, gradients, state, rate / len(calls), hyperparameters, step)


COUNTING = Rule("counting", ("momentum",), ("momentum_buffer",), _counting, elementwise=True)


class Twice(GoalRule):
    """Meets the goal at the n-th check that reaches it."""

    def __init__(self, checks: int):
        self.checks = checks
        self.min_checks = checks

    def is_met(self, values, goal):
        return sum(map(goal.is_reached, values)) >= self.checks


class Remembering(Twice):
    """Counts in an attribute, over all runs."""

    window = 1
    count = 0

    def is_met(self, values, goal):
        self.count += goal.is_reached(values[-1])
        return self.count >= self.checks


class Unspeakable(Twice):
    """Describes itself by itself, without an end."""

    def describe(self):
        return f"{self}, twice"


class LargestOfBestTwo(Statistic):
    """The cost of the second best trial."""

    def value(self, costs):
        best = sorted(k for k in costs if k is not None)[:2]
        return best[1] if len(best) == 2 else None


class InLines(LargestOfBestTwo):
    """Has a description of two lines."""

    def describe(self):
        return "the steps of the\nsecond best trial"


class NamedByItself(LargestOfBestTwo):
    """Uses its own text in its description."""

    def describe(self):
        return f"the steps by {self}"


class Scaled(Reading):
    """The norm of the weights, times a factor."""

    name = "scaled"

    def __init__(self, factor: float):
        self.factor = factor

    def read(self, moment):
        return {"scaled": self.factor * norm_of(moment)}


class Growing(Scaled):
    """Has a factor that grows with each call over all trials."""

    readings = 0

    def read(self, moment):
        Growing.readings += 1
        return {"scaled": Growing.readings * norm_of(moment)}


class Drawn(BatchSchedule):
    """Draws each size."""

    def size(self, step, examples, batch_size):
        return random.randint(1, batch_size)


class Counted(BatchSchedule):
    """Grows with each question."""

    asked = 0

    def size(self, step, examples, batch_size):
        self.asked += 1
        return min(self.asked, batch_size)


class Half(BatchSchedule):
    """Grows beyond the batch size of the cell."""

    def size(self, step, examples, batch_size):
        return batch_size // 2 if step < 50 else batch_size + 1


class Square(BatchSchedule):
    """Grows as the root of the examples, up to the batch size of the cell."""

    def size(self, step, examples, batch_size):
        return min(batch_size, 1 + int(examples**0.5))
