"""A stack's arithmetic: its updates, gradients and checks are those of each network alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from lit_dps.core.attempt import Attempt
from lit_dps.core.goal import Goal
from lit_dps.engines.network_run import NetworkRun
from lit_dps.engines.single_network import SingleNetwork
from lit_dps.engines.stack import StackedNetworks
from lit_dps.models import MLP, ResNet8
from lit_dps.module import ImageClassifier
from lit_dps.optim import RULES, rule_of
from lit_dps.pruning import Mask
from lit_dps.training.early_validation import HardestFirst, MistakeCount
from tests.support.errors import raises_about
from tests.support.tensor_rules import LARS, SHAMPOO

GIVEN = {"momentum": 0.9, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6, "weight_decay": 0.05}
GIVEN |= {"adamw_ratio": 0.5, "refresh_steps": 2}


def module(seed: int = 0, network=lambda: MLP((1, 8, 8), (16,))) -> ImageClassifier:
    torch.manual_seed(seed)
    return ImageClassifier(network())


def flat(network: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def member(
    network: ImageClassifier,
    share: float = 0.0,
    rule: str = "momentum",
    rate: float = 0.1,
    momentum: float = 0.9,
) -> NetworkRun:
    """A copy of a network in the loop, a share of it pruned."""
    one, generator = copy.deepcopy(network), torch.Generator().manual_seed(1)
    mask = Mask(
        {
            name: torch.rand(p.shape, generator=generator) >= share
            for name, p in one.named_parameters()
        }
    )
    mask.apply_to_weights(one)
    optimizer = RULES[rule].make(one.parameters(), rate, {**GIVEN, "momentum": momentum})
    return NetworkRun(Attempt(None, Goal(0.1)), one, None, optimizer, None, mask, None, iter(()))


def images(n: int = 60, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n, 1, size, size, generator=generator), torch.randint(
        10, (n,), generator=generator
    )


def test_the_rule_of_an_optimizer():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert [rule_of(rule.make(parameters, 0.1, GIVEN)) for rule in RULES.values()] == list(
        RULES.values()
    )
    for name in ("momentum", "nesterov"):
        assert rule_of(RULES[name].make(parameters, 0.1, {"momentum": 0.0})).name == "sgd"
    others = [{"momentum": 0.9, "dampening": 0.5}, {"maximize": True}]
    assert {rule_of(torch.optim.SGD(parameters, lr=0.1, **other)) for other in others} == {None}
    assert (
        rule_of(torch.optim.Adam(parameters, amsgrad=True))
        is rule_of(torch.optim.Adagrad(parameters))
        is None
    )
    assert (
        rule_of(torch.optim.Adam(parameters, weight_decay=0.1, decoupled_weight_decay=True)).name
        == "adamw"
    )


@pytest.mark.parametrize(
    "network", [lambda: MLP((1, 8, 8), (16,)), lambda: ResNet8(1)], ids=["mlp", "resnet"]
)
@pytest.mark.parametrize("part", [60, 7])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_are_those_of_each_network(network, part, shared):
    modules, (x, y) = [module(seed, network) for seed in range(3)], images()
    stack = StackedNetworks([member(m, rule="sgd") for m in modules], part)
    index = torch.randperm(60, generator=torch.Generator().manual_seed(2))[:20]
    rows = [index] * 3 if shared else [index, index + 1 - index // 59 * 60, index.flip(0)]
    losses, gradients = stack.gradients(x, y, index if shared else torch.stack(rows))
    for row, one in enumerate(modules):
        loss = one.loss((x[rows[row]], y[rows[row]]))
        expected = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(one.parameters()))]
        )
        torch.testing.assert_close(gradients[row], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(losses[row], loss.detach(), rtol=1e-5, atol=1e-6)


def like(kind: type, network: ImageClassifier) -> ImageClassifier:
    """The same network as a module of another class."""
    other = kind(MLP((1, 8, 8), (16,)))
    other.load_state_dict(network.state_dict())
    return other


class Cramped(ImageClassifier):
    def loss(self, batch):
        if len(batch[1]) > 6:
            raise torch.OutOfMemoryError("no room for more than 6 examples")
        return super().loss(batch)


def test_what_does_not_fit_is_taken_in_smaller_parts():
    (x, y), index = images(), torch.arange(20)
    roomy, cramped = (
        StackedNetworks([member(like(kind, module()))], 60) for kind in (ImageClassifier, Cramped)
    )
    for ours, theirs in zip(
        cramped.gradients(x, y, index), roomy.gradients(x, y, index), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert cramped.microbatch == 5


class Prototype(Cramped):
    """Moves an untrained parameter at each call of the loss."""

    def __init__(self, network):
        super().__init__(network)
        self.calls = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def loss(self, batch):
        self.calls.add_(1)
        return super().loss(batch)


def test_a_batch_that_moves_an_untrained_parameter_is_not_divided():
    (x, y), index = images(), torch.arange(20)
    stack = StackedNetworks([member(Prototype(MLP((1, 8, 8), (16,))))], 60)
    with raises_about(torch.OutOfMemoryError, "no room for more than 6 examples"):
        stack.gradients(x, y, index)


class NarrowCheck(ImageClassifier):
    def per_example_error(self, batch):
        if len(batch[1]) > 6:
            raise torch.OutOfMemoryError("no room for more than 6 examples")
        return super().per_example_error(batch)


class NoCheck(ImageClassifier):
    def per_example_error(self, batch):
        raise torch.OutOfMemoryError("no room at all")


def test_a_check_that_does_not_fit_is_taken_in_smaller_parts():
    (x, y), index = images(), torch.arange(20)[None]
    found = {}
    for kind in (ImageClassifier, NarrowCheck):
        stack = StackedNetworks([member(like(kind, module()))], 60)
        found[kind] = stack.snapshots.per_example_error(torch.tensor([0]), x, y, index)
    assert 0 < (found[ImageClassifier] >= 1).sum() <= 20
    torch.testing.assert_close(*found.values())
    assert stack.snapshots.microbatch == 5
    with raises_about(torch.OutOfMemoryError, "no room at all"):
        StackedNetworks([member(like(NoCheck, module()))], 60).snapshots.per_example_error(
            torch.tensor([0]), x, y, index
        )


def test_pruned_weights_stay_zero_and_rows_come_and_go():
    modules, (x, y) = [module(seed) for seed in range(3)], images()
    stack = StackedNetworks([member(m, 0.8, "nesterov") for m in modules], 60)
    index = torch.arange(60).view(3, 20)
    stack.train(x, y, index)
    assert (stack.weights[stack.tensors.mask == 0] == 0).all() and (
        stack.weights[stack.tensors.mask == 1] != 0
    ).any()
    trained = stack.weights[2].clone()
    stack.put(0, member(modules[1], 0.8, "nesterov"))
    stack.take([2, 0])
    assert (
        stack.live == [0, 1]
        and torch.equal(stack.weights[0], trained)
        and stack.tensors.state["momentum_buffer"][1].abs().sum() == 0
    )
    stack.train(x, y, index)
    fresh = StackedNetworks([member(modules[1], 0.8, "nesterov")], 60)
    fresh.train(x, y, index)
    torch.testing.assert_close(stack.weights[1], fresh.weights[0], rtol=1e-4, atol=1e-6)


def test_a_network_that_diverges_leaves_the_others_alone():
    modules, (x, y) = [module(seed) for seed in range(2)], images()
    stack = StackedNetworks(
        [member(m, rule="sgd", rate=rate) for m, rate in zip(modules, (1e20, 0.1), strict=True)], 60
    )
    stack.train(x, y, torch.arange(60).view(3, 20))
    assert stack.snapshots.are_finite() == [False, True]


class Scaled(MLP):
    """A network with a parameter without dimensions."""

    def __init__(self):
        super().__init__((1, 8, 8), (16,))
        self.scale = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.scale * super().forward(x)


@pytest.mark.parametrize("rule", list(RULES))
def test_a_row_that_is_written_back_and_put_again_goes_on_to_the_bit(rule):
    assert_written_back_to_the_bit(rule)


@pytest.mark.parametrize("rule", [LARS, SHAMPOO], ids=["lars", "shampoo"])
def test_a_rule_by_tensor_is_written_back_to_the_bit(rule, monkeypatch):
    monkeypatch.setitem(RULES, rule.name, rule)
    assert_written_back_to_the_bit(rule.name)


def assert_written_back_to_the_bit(rule):
    modules, (x, y), index = (
        [module(seed, Scaled) for seed in range(2)],
        images(),
        torch.arange(60).view(3, 20),
    )
    stack = StackedNetworks(
        [member(m, 0.5, rule, rate) for m, rate in zip(modules, (0.05, 0.1), strict=True)], 60
    )
    stack.train(x, y, index)
    for row in stack.live:
        stack.write_back(row)
    saved = copy.deepcopy(stack.runs)
    again = StackedNetworks(saved[::-1], 60)
    again.take([1, 0])
    for each in (stack, again):
        each.train(x, y, index.flip(0))
    assert torch.equal(stack.weights, again.weights)
    assert all(
        torch.equal(tensor, again.tensors.state[name])
        for name, tensor in stack.tensors.state.items()
    )


@pytest.mark.parametrize("rule", ["adam", "shampoo"])
def test_a_row_of_delayed_gradients_counts_its_updates_as_the_optimizer_does(rule, monkeypatch):
    monkeypatch.setitem(RULES, "shampoo", SHAMPOO)
    (x, y), index = images(), torch.arange(60).view(3, 20)
    counts = []
    for kind in (lambda run: StackedNetworks([run]), SingleNetwork):
        run = member(module(), rule=rule)
        run.delay = 2
        networks = kind(run)
        networks.train(x, y, index)
        run.steps = 3
        networks.write_back(0)
        counts += [
            float(state["step"])
            for key, state in run.optimizer.state.items()
            if key in set(run.module.parameters())
        ]
    assert counts == [1.0] * len(counts) and len(counts) == 8


@pytest.mark.parametrize("allowed", [0, 20, 150, 600, 10_000])
def test_a_check_decides_as_a_full_one(allowed):
    modules, (x, y) = [module(seed) for seed in range(4)], images(700)
    stack = StackedNetworks([member(m) for m in modules], 60)
    check = HardestFirst(700, 4)
    true = [int((one.per_example_error((x, y)) >= 1).sum()) for one in modules]
    rows, limits = [0, 2, 3, 2], [allowed, allowed, 10_000, allowed]  # one network twice
    counts = []
    for _ in range(2):  # the second time the hardest come first
        seen = [0] * len(rows)

        def score(networks: Tensor, index: Tensor, seen=seen) -> Tensor:
            for network in networks.tolist():
                seen[network] += index.shape[1]
            return stack.snapshots.per_example_error(torch.tensor(rows)[networks], x, y, index)

        found = check(score, rows, limits)
        counts.append(sum(seen))
        for row, limit, each, evaluated in zip(rows, limits, found, seen, strict=True):
            if true[row] <= limit or limit >= 699:
                assert each == (true[row], True) and evaluated == 700
            else:
                assert each == (limit + 1, False), "whatever the order of the examples"
    if allowed == 20:
        assert counts[0] < 4 * 700, "some networks are decided early"
    assert counts[1] <= counts[0]


def test_a_result_is_bounded_by_a_smaller_limit():
    assert MistakeCount.of(5, 7, 1000) == (5, True) and MistakeCount.of(8, 7, 1000) == (8, False)
    assert MistakeCount.of(900, 7, 1000) == (8, False)
    assert MistakeCount.of(900, 999, 1000) == (900, True)
    assert MistakeCount.of(200, 7, 256) == (200, True), "one chunk is the entire split"
