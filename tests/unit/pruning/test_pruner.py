"""Pruning methods of other people: in several passes, by class path, alike in both engines; and
what is refused."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lit_dps.core.trial import Cell, Trial
from lit_dps.pruning import Mask, Network, OneShot, Pruner, prunable, prune, pruner_of, top_k
from lit_dps.pruning.mask_changes import MaskChanges
from tests.support.errors import refuses
from tests.support.runs import train_one
from tests.support.tiny import points, two_layers
from tests.unit.engines.test_engine import PARAMS, WORKLOAD

HERE = __name__
GOAL = {"error": 0.05, "check_interval": 4, "max_steps": 8}


class Twice(Pruner):
    """Half of the way by SNIP, then the rest on what is left."""

    passes = 2

    def __init__(self, first: float = 0.5):
        self.first = first

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        mask = top_k(self._scores(network), sparsity * self.first)
        with network.under(mask):
            scores = self._scores(network)
        return top_k(
            {name: score.masked_fill(~mask[name], -1) for name, score in scores.items()}, sparsity
        )

    def _scores(self, network: Network):
        return {
            name: (g * network.parameters[name]).detach().abs()
            for name, g in network.gradients().items()
        }


class NoMask(Pruner):
    def mask(self, network, sparsity, generator):
        return Mask({})


class KeepsAll(Pruner):
    def mask(self, network, sparsity, generator):
        return Mask(
            {name: torch.ones_like(p, dtype=torch.bool) for name, p in network.parameters.items()}
        )


class OfAnother(Pruner):
    def mask(self, network, sparsity, generator):
        return Mask({"none": torch.ones(3, dtype=torch.bool)})


def loss_of(network: nn.Module):
    return lambda batch, i: nn.functional.cross_entropy(network(batch[0]), batch[1])


@pytest.fixture
def network():
    """A copy of a network, and its data in batches of 4, 4 and 2."""
    module, (x, y) = two_layers(), points(10).tensors
    batches = [((a, b), len(b)) for a, b in zip(x.split(4), y.split(4), strict=True)]
    return Network(module, prunable(module), 4, lambda: 3, lambda: iter(batches), loss_of(module))


def given(network: Network):
    return lambda: nullcontext(network)


def test_each_pass_gives_all_batches_by_their_share(network):
    for _ in range(2):
        assert [weight for _, weight in network.losses()] == [1.0, 1.0, 0.5]
    x, y = points(10).tensors
    total = nn.functional.cross_entropy(network.forward(x), y, reduction="sum") / 4
    exact = torch.autograd.grad(total, list(network.parameters.values()))
    for ours, theirs in zip(network.gradients().values(), exact, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-7)


def test_under_a_mask_pruned_weights_are_zero_and_have_a_gradient_and_come_back(network):
    before = {name: p.detach().clone() for name, p in network.parameters.items()}
    mask = top_k({name: p.detach().abs() for name, p in network.parameters.items()}, 0.5)
    with network.under(mask):
        for name, keep in mask.items():
            assert torch.equal(network.parameters[name].detach(), before[name] * keep)
        assert all(
            g[~mask[name]].any()
            for name, g in network.gradients().items()
            if name.endswith("weight")
        )
    for name, parameter in network.parameters.items():
        assert torch.equal(parameter.detach(), before[name])


def test_a_method_of_two_passes_prunes_in_both_engines_alike():
    pruning = {"method": f"{HERE}.Twice"}
    trial = Trial(Cell(16, 0.9), 1, PARAMS)
    ours, theirs = (
        train_one(trial, WORKLOAD, GOAL, lean=lean, pruning=pruning) for lean in (True, False)
    )
    assert dataclasses.replace(ours, seconds=0.0) == dataclasses.replace(theirs, seconds=0.0)
    kept, total = (sum(counts) for counts in zip(*ours.kept.values(), strict=True))
    assert kept == round(total * 0.1)
    assert ours.kept != train_one(trial, WORKLOAD, GOAL).kept  # of SNIP


def test_once_pruned_never_return_and_options_reach_the_constructor(network):
    first = top_k(pruner_of(f"{HERE}.Twice")._scores(network), 0.8)
    mask, scores = prune(
        pruner_of(f"{HERE}.Twice", {"first": 1.0}), given(network), 0.8, 0, "Module"
    )
    assert scores is None
    assert all(torch.equal(mask[name], first[name]) for name in mask)


class Counted(OneShot):
    taken = 0

    def scores(self, network, generator):
        type(self).taken += 1
        return {
            name: torch.rand(p.shape, generator=generator) for name, p in network.parameters.items()
        }


def test_scores_that_serve_every_sparsity_are_taken_once(network):
    method = pruner_of(f"{HERE}.Counted")
    loose, scores = prune(method, given(network), 0.5, 7, "Module")
    tight, again = prune(method, given(network), 0.8, 7, "Module", scores)
    assert Counted.taken == 1 and again is scores
    assert all(bool((tight[name] <= loose[name]).all()) for name in loose)


@pytest.mark.parametrize(
    ("method", "options", "key", "value"),
    [
        ("grasp2", None, "pruning.method", "grasp2"),
        (f"{HERE}.Nothing", None, "pruning.method", "tests.unit.pruning.test_pruner.Nothing"),
        ("no_such_module.Pruner", None, "pruning.method", "no_such_module.Pruner"),
        ("torch.nn.Linear", None, "pruning.method", "torch.nn.Linear"),
        ("snip", {"rounds": 3}, "pruning.options.rounds", 3),
        (f"{HERE}.Twice", {"second": 3}, "pruning.options.second", 3),
    ],
)
def test_a_method_that_is_none_is_refused(method, options, key, value):
    with refuses(key, value):
        pruner_of(method, options)


@pytest.mark.parametrize(
    ("method", "facts"),
    [
        ("NoMask", ["at least one weight"]),
        ("KeepsAll", ["4", "43"]),
        ("OfAnother", ["prunable", "none"]),
    ],
)
def test_a_mask_that_does_not_keep_what_it_should_is_refused(network, method, facts):
    with refuses("pruning.method", method) as refused:
        prune(pruner_of(f"{HERE}.{method}"), given(network), 0.9, 0, "Module")
    assert all(fact in refused.value.allowed for fact in facts)


def test_earlier_names_of_attributes_work_with_a_warning():
    with pytest.warns(FutureWarning, match="hits_count") as warned:

        class Channels(Pruner):
            exact = False
            counts = "channels"

            def mask(self, network, sparsity, generator):
                raise NotImplementedError

    assert len(warned) == 1 and not Channels().hits_count
    pruner = Channels()
    with pytest.warns(FutureWarning, match="batch_invariant"):
        pruner.sums = True
    assert pruner.batch_invariant and not Channels().batch_invariant


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_the_top_k_are_the_first_ones_of_a_stable_sort(kind):
    generator = torch.Generator().manual_seed(0)
    for case in range(60):
        scores = torch.randn(97, generator=generator).to(kind)
        if case % 2:
            scores = scores.round()  # many ties
        if case % 3 == 0:
            scores[case + 9] = torch.inf
        keep = 1 + case
        expected = torch.zeros(97, dtype=torch.bool)
        expected[torch.sort(scores, descending=True, stable=True).indices[:keep]] = True
        assert torch.equal(top_k({"w": scores}, 1 - keep / 97)["w"], expected)


class Undefined(OneShot):
    """Its scores are nan at one weight."""

    passes = 0

    def scores(self, network, generator):
        scores = {name: weight.detach().abs() for name, weight in network.parameters.items()}
        next(iter(scores.values()))[0, 0] = torch.nan
        return scores


class UndefinedRounds(Pruner):
    """Its scores are nan at one weight, in rounds, and in changes of its mask."""

    passes = 0
    every = 1

    def mask(self, network, sparsity, generator):
        return top_k(Undefined().scores(network, generator), sparsity)

    def next_mask(self, update):
        return top_k({name: weight / weight for name, weight in update.weights.items()}, 0.5)


def network_with(loss_factor: float) -> Network:
    module = two_layers()
    batch = torch.ones(4, next(module.parameters()).shape[1])
    return Network(
        module,
        prunable(module),
        4,
        lambda: 1,
        lambda: iter([(batch, 4)]),
        lambda batch, i: module(batch).square().mean() * loss_factor,
    )


@pytest.mark.parametrize("are_stored", [False, True])
def test_scores_that_are_nan_are_refused(are_stored):
    network = network_with(1.0)
    scores = Undefined().scores(network, torch.Generator()) if are_stored else None
    with refuses("pruning.method", "Undefined") as refused:
        prune(Undefined(), lambda: nullcontext(network), 0.5, 0, "module", scores)
    name, weight = next(iter(network.parameters.items()))
    assert f"{name} has 1 nan among {weight.numel()}" in refused.value.allowed
    with refuses("pruning.method", "UndefinedRounds"):
        prune(UndefinedRounds(), lambda: nullcontext(network), 0.5, 0, "module")


@pytest.mark.parametrize("method", ["snip", "iterative_snip", "force", "snip_it"])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_network_that_diverged_before_training_is_pruned_by_position(method, factor):
    network = network_with(factor)
    mask, _ = prune(pruner_of(method), lambda: nullcontext(network), 0.5, 0, "module")
    total = sum(weight.numel() for weight in network.parameters.values())
    assert mask.count() == (round(total / 2), total)
    assert torch.cat([kept.flatten() for kept in mask.values()])[: round(total / 2)].all()


@pytest.mark.parametrize(
    ("weight", "gradient", "is_refused"),
    [(0.0, 1.0, True), (math.nan, 1.0, False), (0.0, math.inf, False)],
)
def test_nan_in_a_change_of_the_mask_is_refused_unless_training_diverged(
    weight, gradient, is_refused
):
    changes = MaskChanges.of(UndefinedRounds(), 0.5, 0, 10)
    mask = Mask({"w": torch.tensor([True, True, False, False])})
    tensors = {"w": torch.tensor([1.0, weight, 0.0, 0.0])}, {"w": torch.full((4,), gradient)}
    if is_refused:
        with refuses("pruning.method", "UndefinedRounds"):
            changes.next_mask(1, mask, *tensors)
    else:
        assert changes.next_mask(1, mask, *tensors)["w"].tolist() == [True, True, False, False]
