"""A stack's arithmetic: its updates, gradients and checks are those of each network alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_dps.engines.room import Room
from lit_dps.engines.stack import Member, Stack
from lit_dps.engines.stacked_check import StackedCheck
from lit_dps.models import MLP, ResNet8
from lit_dps.module import ImageClassifier
from lit_dps.optim import make_optimizer, rule_of, update_

RULES = ["sgd", "momentum", "nesterov"]


def module(seed: int = 0, network=lambda: MLP((1, 8, 8), (16,))) -> ImageClassifier:
    torch.manual_seed(seed)
    return ImageClassifier(network())


def flat(network: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def member(network: ImageClassifier, share: float = 0.0, momentum: float = 0.9) -> Member:
    weights = flat(network)
    keep = torch.rand(len(weights), generator=torch.Generator().manual_seed(1)) >= share
    return Member(weights * keep, keep, momentum, {})


def images(n: int = 60, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n, 1, size, size, generator=generator), torch.randint(10, (n,), generator=generator)


@pytest.mark.parametrize("rule", RULES)
def test_the_update_is_that_of_torch(rule):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    gradients = torch.randn(20, 3, 5, generator=generator, dtype=torch.float64)
    rates, momenta = [0.1, 0.5, 0.02], [0.9, 0.5, 0.0 if rule != "nesterov" else 0.1]
    ours, accumulators = start.clone(), torch.zeros_like(start)
    for step, g in enumerate(gradients):
        rate = torch.tensor(rates, dtype=torch.float64)[:, None] / (1 + step)
        update_(rule, ours, g.clone(), accumulators, rate, torch.tensor(momenta, dtype=torch.float64)[:, None])
    for row in range(3):
        parameter = torch.nn.Parameter(start[row].clone())
        optimizer = make_optimizer([parameter], rule, rates[row], momenta[row])
        for step, g in enumerate(gradients):
            optimizer.param_groups[0]["lr"] = rates[row] / (1 + step)
            parameter.grad = g[row].clone()
            optimizer.step()
        torch.testing.assert_close(ours[row], parameter.detach(), rtol=1e-13, atol=1e-13)


def test_the_rule_of_an_optimizer():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert [rule_of(make_optimizer(parameters, rule, 0.1, 0.9)) for rule in RULES] == RULES
    assert rule_of(make_optimizer(parameters, "momentum", 0.1, 0.0)) == "sgd"
    others = [{"weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.5}, {"maximize": True}]
    assert {rule_of(torch.optim.SGD(parameters, lr=0.1, **other)) for other in others} == {None}
    assert rule_of(torch.optim.Adam(parameters)) is None
    groups = [{"params": parameters}, {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0}]
    assert rule_of(torch.optim.SGD(groups, lr=0.1)) is None


@pytest.mark.parametrize("network", [lambda: MLP((1, 8, 8), (16,)), lambda: ResNet8(1)], ids=["mlp", "resnet"])
@pytest.mark.parametrize("part", [60, 7])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_are_those_of_each_network(network, part, shared):
    modules, (x, y) = [module(seed, network) for seed in range(3)], images()
    stack = Stack(modules[0], "sgd", [member(m) for m in modules], part)
    index = torch.randperm(60, generator=torch.Generator().manual_seed(2))[:20]
    rows = [index] * 3 if shared else [index, index + 1 - index // 59 * 60, index.flip(0)]
    losses, gradients = stack.gradients(x, y, index if shared else torch.stack(rows))
    for row, one in enumerate(modules):
        loss = one.loss((x[rows[row]], y[rows[row]]))
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(one.parameters()))])
        torch.testing.assert_close(gradients[row], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(losses[row], loss.detach(), rtol=1e-5, atol=1e-6)


class Cramped(ImageClassifier):
    def loss(self, batch):
        if len(batch[1]) > 6:
            raise torch.OutOfMemoryError("no room for more than 6 examples")
        return super().loss(batch)


def test_what_does_not_fit_is_taken_in_smaller_parts():
    (x, y), index = images(), torch.arange(20)
    roomy, cramped = (
        Stack(kind(MLP((1, 8, 8), (16,))), "sgd", [member(module())], 60) for kind in (ImageClassifier, Cramped)
    )
    for ours, theirs in zip(cramped.gradients(x, y, index), roomy.gradients(x, y, index), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert cramped.part == 5


class NarrowCheck(ImageClassifier):
    def wrongness(self, batch):
        if len(batch[1]) > 6:
            raise torch.OutOfMemoryError("no room for more than 6 examples")
        return super().wrongness(batch)


class NoCheck(ImageClassifier):
    def wrongness(self, batch):
        raise torch.OutOfMemoryError("no room at all")


def test_a_check_that_does_not_fit_is_taken_in_smaller_parts():
    (x, y), index = images(), torch.arange(20)[None]
    found = {}
    for kind in (ImageClassifier, NarrowCheck):
        stack = Stack(kind(MLP((1, 8, 8), (16,))), "sgd", [member(module())], 60)
        found[kind] = stack.wrongness(torch.tensor([0]), x, y, index)
    assert 0 < (found[ImageClassifier] >= 1).sum() <= 20
    torch.testing.assert_close(*found.values())
    assert stack.checked == 5
    with pytest.raises(torch.OutOfMemoryError, match="no room at all"):
        Stack(NoCheck(MLP((1, 8, 8), (16,))), "sgd", [member(module())], 60).wrongness(torch.tensor([0]), x, y, index)


def test_pruned_weights_stay_zero_and_rows_come_and_go():
    modules, (x, y) = [module(seed) for seed in range(3)], images()
    stack = Stack(modules[0], "nesterov", [member(m, 0.8) for m in modules], 60)
    index, rates = torch.arange(60).view(3, 20), torch.full((3, 3), 0.1)
    stack.train(x, y, index, rates)
    assert (stack.weights[stack.keep == 0] == 0).all() and (stack.weights[stack.keep == 1] != 0).any()
    trained = stack.weights[2].clone()
    stack.put(0, member(modules[1], 0.8))
    stack.take(torch.tensor([2, 0]))
    assert len(stack) == 2 and torch.equal(stack.weights[0], trained) and stack.accumulators[1].abs().sum() == 0
    stack.train(x, y, index, rates[:, :2])
    fresh = Stack(modules[0], "nesterov", [member(modules[1], 0.8)], 60)
    fresh.train(x, y, index, rates[:, :1])
    torch.testing.assert_close(stack.weights[1], fresh.weights[0], rtol=1e-4, atol=1e-6)


def test_a_network_that_diverges_leaves_the_others_alone():
    modules, (x, y) = [module(seed) for seed in range(2)], images()
    stack = Stack(modules[0], "sgd", [member(m) for m in modules], 60)
    stack.train(x, y, torch.arange(60).view(3, 20), torch.tensor([[1e20, 0.1]] * 3))
    assert stack.finite().tolist() == [False, True]


@pytest.mark.parametrize("allowed", [0, 20, 150, 600, 10_000])
def test_a_check_decides_as_a_full_one(allowed):
    modules, (x, y) = [module(seed) for seed in range(4)], images(700)
    stack = Stack(modules[0], "sgd", [member(m) for m in modules], 60)
    check = StackedCheck(x, y, 4)
    looked = [0]
    counted = stack.wrongness
    stack.wrongness = lambda rows, x, y, index: looked.append(index.numel()) or counted(rows, x, y, index)
    for _ in range(2):  # the second time the hardest come first
        found = check(stack, [0, 2, 3], [allowed, allowed, 10_000])
        for row, (mistakes, exact) in zip((0, 2, 3), found, strict=True):
            true = int((modules[row].wrongness((x, y)) >= 1).sum())
            assert (mistakes <= (allowed if row != 3 else 10_000)) == (true <= (allowed if row != 3 else 10_000))
            assert mistakes == true if exact else allowed < mistakes <= true
    if allowed == 20:
        assert looked[-1] + sum(looked[:-1]) < 2 * 3 * 700


def test_room_is_what_memory_holds():
    room = Room(free=1e6, state=1000, example=100, batch_size=50, most=None)
    assert room.slots == 1_000_000 // 6000
    assert [room.part(slots) for slots in (1, 166, 500, 10_000)] == [50, 50, 10, 1]
    assert Room(1e6, 1000, 100, 50, most=16).slots == 16
    assert Room(10, 1000, 100, 50, most=None).slots == 1
    big = Room(free=1e6, state=1000, example=100, batch_size=16384, most=None)
    assert big.slots == 1_000_000 // (1000 + 256 * 100) and big.part(big.slots) < 16384


def test_room_is_measured():
    one = module()
    x, y = images()
    room = Room.of(one, x, y, 32)
    state, activations = 6 * 4 * flat(one).numel(), (64 + 2 * 16 + 10) * 4
    assert room.state == state and room.free > 0
    assert activations / 2 < room.example - 2 * 64 * 4 < 6 * activations
    shared = Room.of(one, x, y, 32, workers=2)
    assert shared.free == pytest.approx(room.free / 2, rel=0.2)
