"""The conformance tests of lit_dps.testing: parts of lit_dps pass, and broken plug-ins do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.core.goal import GoalRule, MeanOfChecks, SingleCheck, StaysBelow
from lit_dps.data import Digits
from lit_dps.optim import ADAM, MOMENTUM, OURS, Rule
from lit_dps.pruning import Mask, Pruner, Random, top_k
from lit_dps.testing import ConformanceError, check_data, check_goal, check_pruner, check_rule
from tests.support.pruners import GENERAL
from tests.support.tensor_rules import LARS, SHAMPOO


def failure(check, *arguments, **options) -> str:
    """Return the requirement that a plug-in fails."""
    with pytest.raises(ConformanceError) as caught:
        check(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert all((caught.value.what, caught.value.expected, caught.value.shown_by))
    return caught.value.requirement


@pytest.mark.parametrize("rule", [*OURS, LARS, SHAMPOO], ids=lambda rule: rule.name)
def test_our_rules_conform(rule):
    check_rule(rule)
    check_rule(rule, quick=True)


@pytest.mark.parametrize("method", GENERAL)
def test_our_pruners_conform(method):
    check_pruner(method)
    check_pruner(method, quick=True)


@pytest.mark.parametrize("rule", [SingleCheck, MeanOfChecks(3), StaysBelow(2)], ids=str)
def test_our_goals_conform(rule):
    check_goal(rule)


def test_our_data_conform():
    check_data(lambda batch_size: Digits(batch_size=batch_size))
    check_data(lambda batch_size: Digits(batch_size=batch_size, order="per_trial"))


def with_update(update_, **changes) -> Rule:
    """A rule of an update alone, with momentum."""
    return replace(Rule("broken", ("momentum",), ("momentum_buffer",), update_), **changes)


def _mixing(weights, gradients, state, rate, given, step):
    MOMENTUM.update_(weights, gradients - 1e-3 * gradients.mean(0), state, rate, given, step)


def _first_momentum(weights, gradients, state, rate, given, step):
    first = {"momentum": given["momentum"][:1]}
    MOMENTUM.update_(weights, gradients, state, rate, first, step)


calls: list[int] = []


def _counting(weights, gradients, state, rate, given, step):
    calls.append(1)
    weights.sub_(rate * gradients / len(calls))


def _divided(weights, gradients, state, rate, given, step):
    norm = gradients.square().sum(tuple(range(1, gradients.ndim)), keepdim=True).sqrt()
    weights.sub_(rate * gradients / norm)


def _at_least(weights, gradients, state, rate, given, step):
    weights.sub_(rate.clamp(min=0.01) * gradients)


class Hidden(torch.optim.SGD):
    """Keeps its momentum outside of its state."""

    @torch.no_grad()
    def step(self, closure=None):
        kept = vars(self).setdefault("kept", {})
        for place, p in enumerate(self.param_groups[0]["params"]):
            if p.grad is not None:
                kept[place] = 0.9 * kept.get(place, 0.0) + p.grad
                p.sub_(self.param_groups[0]["lr"] * kept[place])


class Decaying(torch.optim.SGD):
    """Decays also weights without a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.mul_(1 - self.param_groups[0]["lr"])


def of_optimizer(kind: type) -> Rule:
    return replace(
        MOMENTUM,
        make=lambda parameters, rate, given: kind(parameters, lr=rate, momentum=given["momentum"]),
        is_of=lambda optimizer: type(optimizer) is kind,
    )


BROKEN_RULES = {
    "stacked": with_update(_mixing),
    "stacked by another momentum": with_update(_first_momentum),
    "state": replace(MOMENTUM, state=("momentum_buffer", "other")),
    "stacked unlike its optimizer": replace(
        ADAM, update_=lambda *args: ADAM.update_(*args[:5], torch.ones_like(args[5]))
    ),
    "repeated": with_update(_counting),
    "state_type": Rule(
        "float",
        ("momentum",),
        ("momentum_buffer",),
        MOMENTUM.update_,
        make_state=lambda parameter: {"momentum_buffer": torch.zeros(parameter.shape)},
    ),
    "resumed": of_optimizer(Hidden),
    "frozen": of_optimizer(Decaying),
    "zeros": with_update(_divided, elementwise=False),
    "rate": with_update(_at_least),
    "recognized": replace(MOMENTUM, is_of=lambda optimizer: False),
    "hyperparameters": replace(MOMENTUM, hyperparameters_of=lambda group: (0.5,)),
}
OF_THE_STACK = ("stacked", "state", "rate")


@pytest.mark.parametrize("name", BROKEN_RULES)
def test_a_broken_rule_fails(name):
    requirement = failure(check_rule, BROKEN_RULES[name])
    assert requirement == name.split()[0]
    if requirement in OF_THE_STACK:
        check_rule(BROKEN_RULES[name], quick=True)
    else:
        assert failure(check_rule, BROKEN_RULES[name], quick=True) == requirement


def test_a_rule_of_some_shapes_is_tested_with_them():
    def make(parameters, rate, given):
        return torch.optim.Muon(parameters, lr=rate, momentum=given["momentum"])

    rule = Rule(
        "matrices",
        ("momentum",),
        ("momentum_buffer",),
        MOMENTUM.update_,
        make,
        lambda optimizer: type(optimizer) is torch.optim.Muon,
    )
    assert failure(check_rule, rule, shapes={"matrix": (4, 3)}) == "stacked"


class Ordered(Pruner):
    """Scores by the last example of a pass."""

    batch_invariant = True

    def mask(self, network, sparsity, generator):
        *_, (batch, size) = network.batches()
        loss = network.loss_of(batch, 0)
        gradients = torch.autograd.grad(loss, list(network.parameters.values()))
        return top_k(
            dict(zip(network.parameters, map(torch.abs, gradients), strict=True)), sparsity
        )


def uniform(network, generator=None):
    scores = {}
    for name, parameter in network.parameters.items():
        scores[name] = torch.rand(parameter.shape, generator=generator)
    return scores


class Global(Pruner):
    def mask(self, network, sparsity, generator):
        return top_k(uniform(network), sparsity)


class Growing(Pruner):
    """Prunes more with each call."""

    hits_count = False
    calls = 0

    def mask(self, network, sparsity, generator):
        self.calls += 1
        return top_k(uniform(network, generator), 1 - (1 - sparsity) / self.calls)


class Inexact(Pruner):
    def mask(self, network, sparsity, generator):
        return top_k(uniform(network, generator), sparsity / 2)


class Unknown(Pruner):
    def mask(self, network, sparsity, generator):
        return Mask({"none": torch.ones(3, dtype=torch.bool)})


class Partial(Pruner):
    """Prunes the weights of the last layer alone."""

    def mask(self, network, sparsity, generator):
        scores = uniform(network, generator)
        return top_k({"6.weight": scores["6.weight"]}, sparsity)


class Evaluating(Pruner):
    def mask(self, network, sparsity, generator):
        network.module.eval()
        return top_k(uniform(network, generator), sparsity)


class Shrinking(Random):
    every = 5

    def next_mask(self, update):
        return Mask({name: mask & (update.weights[name] > 0) for name, mask in update.mask.items()})


class Writing(Random):
    every = 5

    def next_mask(self, update):
        for gradient in update.gradients.values():
            gradient.abs_()
        return update.mask


class Storing(Random):
    """Changes the mask by a sparsity that only `mask` has stored."""

    every = 5
    hits_count = False

    def mask(self, network, sparsity, generator):
        self.final = sparsity
        return super().mask(network, sparsity, generator)

    def next_mask(self, update):
        scores = {name: weights.abs() for name, weights in update.weights.items()}
        return top_k(scores, (1 + self.final) / 2)


class Defaulting(Storing):
    final = 0.0


BROKEN_PRUNERS = {
    Ordered: "batches",
    Global: "global_random",
    Growing: "repeated",
    Inexact: "count",
    Unknown: "parameters",
    Partial: "covers",
    Evaluating: "mode",
    Shrinking: "next_count",
    Writing: "only_read",
    Storing: "next_resumed",
    Defaulting: "next_resumed",
}


@pytest.mark.parametrize("kind", BROKEN_PRUNERS, ids=lambda kind: kind.__name__)
def test_a_broken_pruner_fails(kind):
    assert failure(check_pruner, kind()) == BROKEN_PRUNERS[kind]
    if kind in (Storing, Defaulting):
        # A study runs the quick part, and its resumed trials would have another mask.
        assert failure(check_pruner, kind(), quick=True) == BROKEN_PRUNERS[kind]


class Remembering(GoalRule):
    """Meets the goal once any question was about a value that reached it."""

    window = 1

    def __init__(self):
        self.was_met = False

    def is_met(self, values, goal):
        self.was_met = self.was_met or goal.is_reached(values[-1])
        return self.was_met


class Best(GoalRule):
    """Needs more checks than it says, or fewer."""

    min_checks = 3

    def is_met(self, values, goal):
        return any(map(goal.is_reached, values))


class Close(GoalRule):
    """Meets the goal only within a distance."""

    window = 1

    def is_met(self, values, goal):
        return goal.is_reached(values[-1]) and abs(values[-1] - goal.value) < 0.05


class Mean(GoalRule):
    window = 2
    pointwise = True

    def is_met(self, values, goal):
        return goal.is_reached(sum(values) / len(values))


class Sorting(GoalRule):
    def is_met(self, values, goal):
        values.sort()
        return goal.is_reached(values[0])


class Rounding(GoalRule):
    def is_met(self, values, goal):
        return goal.is_reached(round(values[-1] * 100) / 100)


class TwoLines(GoalRule):
    """Describes itself in two lines."""

    def is_met(self, values, goal):
        return goal.is_reached(values[-1])

    def describe(self):
        return "a check\nof two"


class Unnamed(TwoLines):
    """Returns no text as its description."""

    def __str__(self):
        return 3

    describe = GoalRule.describe


BROKEN_GOALS = {
    TwoLines: "description",
    Unnamed: "description",
    Remembering: "order",
    Best: "min_checks",
    Close: "easier",
    Mean: "pointwise",
    Sorting: "values",
    Rounding: "raises",
}


@pytest.mark.parametrize("kind", BROKEN_GOALS, ids=lambda kind: kind.__name__)
def test_a_broken_goal_fails(kind):
    assert failure(check_goal, kind) == BROKEN_GOALS[kind]


class Points(LightningDataModule):
    """Some training and 10 validation examples."""

    def __init__(self, batch_size: int, shuffle=False, drop=False, factor=1, examples=300):
        super().__init__()
        self.batch_size, self.shuffle, self.drop = batch_size, shuffle, drop
        self.factor, self.examples = factor, examples

    def train_dataloader(self):
        data = TensorDataset(torch.arange(self.examples))
        return DataLoader(data, self.factor * self.batch_size, shuffle=True)

    def val_dataloader(self):
        data = TensorDataset(torch.arange(10))
        return DataLoader(data, self.batch_size, shuffle=self.shuffle, drop_last=self.drop)


class ShortSecond(Points):
    """The second batch of an epoch is smaller than the others."""

    def train_dataloader(self):
        sizes = [self.batch_size] * (self.examples // self.batch_size)
        sizes[1] -= 1
        return [torch.zeros(size) for size in sizes]


class Unseeded(Points):
    generators = 0

    def train_dataloader(self):
        Unseeded.generators += 1
        generator = torch.Generator().manual_seed(Unseeded.generators)
        return DataLoader(
            TensorDataset(torch.arange(self.examples)),
            self.batch_size,
            shuffle=True,
            generator=generator,
        )


def test_data_that_conform_pass_and_others_fail():
    check_data(Points)
    assert failure(check_data, Unseeded) == "same_order"
    broken = {"validation_order": {"shuffle": True}, "complete": {"drop": True}}
    broken["batch_size"] = {"factor": 2}
    for requirement, options in broken.items():
        assert failure(check_data, lambda size, o=options: Points(size, **o)) == requirement


def test_the_last_batch_of_twelve_may_be_short_and_few_batches_are_compared():
    check_data(lambda size: Points(size, examples=12 * size - 2))
    assert failure(check_data, lambda size: Unseeded(size, examples=4 * size)) == "same_order"
    for batches in (12, 13):
        short = lambda size, n=batches: ShortSecond(size, examples=n * size)  # noqa: E731
        assert failure(check_data, short) == "batch_size"


def test_global_generators_are_as_before():
    before = torch.get_rng_state()
    check_rule(MOMENTUM)
    check_pruner("snip")
    check_data(Points)
    assert torch.equal(before, torch.get_rng_state())
