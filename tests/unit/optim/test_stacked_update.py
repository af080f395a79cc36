"""Rules by tensor: the shape of a parameter reaches the update, alone and in a stack."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lit_dps.optim import ADAMW, RULES, Rule, RuleOptimizer, StackedUpdate, rule_of
from tests.support.errors import raises_about
from tests.support.tensor_rules import SHAMPOO

SHAPES = {"weight": (4, 3), "bias": (4,), "filter": (2, 3, 2, 2), "slope": ()}
NUMBERS = {"momentum": 0.9, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6, "weight_decay": 0.05}
ELEMENTWISE = {name: rule for name, rule in RULES.items() if rule.elementwise}


def parameters(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in SHAPES.items():
        tensors[name] = nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
    return tensors


def train_alone(optimizer: torch.optim.Optimizer, of: dict[str, nn.Parameter], gradients) -> None:
    for step in gradients:
        for name, gradient in step.items():
            of[name].grad = gradient.clone()
        optimizer.step()


def train_stack(rule: Rule, networks: list, gradients: list, rates: list[float]):
    """Return weights and state of networks that a stack trains, flat."""
    update = StackedUpdate(rule, networks[0])
    weights = torch.stack([update.weights.flatten(each).detach() for each in networks])
    states = [update.flat_state(each, {}) for each in networks]
    state = {key: torch.stack([each[key] for each in states]) for key in states[0]}
    hyperparameters = {}
    for name in rule.hyperparameters:
        hyperparameters[name] = weights.new_full((len(networks), 1), NUMBERS[name])
    for step, of_networks in enumerate(zip(*gradients, strict=True), start=1):
        flat = torch.stack([update.weights.flatten(each) for each in of_networks])
        steps = weights.new_full((len(networks), 1), step)
        update(weights, flat, state, weights.new_tensor(rates)[:, None], hyperparameters, steps)
    return update, weights, state


@pytest.mark.parametrize("rule", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_one_call_for_all_parameters_equals_a_call_for_each_to_the_bit(rule):
    networks = [parameters(seed, torch.float32) for seed in range(3)]
    gradients = [[{n: p.detach() for n, p in each.items()} for each in networks[::-1]]] * 3
    rates = [0.1, 0.02, 0.5]
    _, flat, flat_state = train_stack(rule, networks, gradients, rates)
    by_tensor = replace(rule, elementwise=False)
    _, weights, state = train_stack(by_tensor, networks, gradients, rates)
    assert torch.equal(flat, weights)
    assert all(torch.equal(flat_state[key], state[key]) for key in rule.state)


def rule_without_optimizer(of: Rule) -> Rule:
    return Rule(of.name, of.hyperparameters, of.state, of.update_)


def test_the_optimizer_of_a_rule_equals_torch():
    rule = rule_without_optimizer(ADAMW)
    ours, theirs = parameters(0), parameters(0)
    gradients = [{n: p.detach() for n, p in parameters(step).items()} for step in range(1, 9)]
    optimizer = rule.make(ours.values(), 0.05, NUMBERS)
    train_alone(optimizer, ours, gradients)
    reference = torch.optim.AdamW(
        theirs.values(), lr=0.05, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.05
    )
    train_alone(reference, theirs, gradients)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-12, atol=1e-12)
        assert optimizer.state[parameter]["step"] == 8


def test_the_optimizer_of_a_rule_is_recognized_also_as_a_copy(monkeypatch):
    monkeypatch.setitem(RULES, "shampoo", SHAMPOO)
    optimizer = SHAMPOO.make(parameters(0).values(), 0.1, NUMBERS)
    assert isinstance(optimizer, RuleOptimizer)
    assert rule_of(optimizer) is SHAMPOO and rule_of(copy.deepcopy(optimizer)) is SHAMPOO
    assert not rule_without_optimizer(SHAMPOO).is_of(optimizer)


def test_parameters_without_a_gradient_keep_their_weights_and_get_no_state():
    of = parameters(0)
    before = of["bias"].detach().clone()
    optimizer = SHAMPOO.make(of.values(), 0.1, NUMBERS)
    of["weight"].grad = torch.ones_like(of["weight"])
    optimizer.step()
    assert torch.equal(of["bias"].detach(), before) and set(optimizer.state) == {of["weight"]}


def test_an_update_may_replace_a_tensor_of_its_state():
    def replacing(weights, gradients, state, rate, hyperparameters, step):
        state["momentum_buffer"] = state["momentum_buffer"] * hyperparameters["momentum"]
        state["momentum_buffer"] = state["momentum_buffer"] + gradients
        weights.sub_(rate * state["momentum_buffer"])

    rule = Rule("replacing", ("momentum",), ("momentum_buffer",), replacing)
    ours, theirs = parameters(0), parameters(0)
    gradients = [{n: p.detach() for n, p in parameters(step).items()} for step in range(1, 4)]
    train_alone(rule.make(ours.values(), 0.05, NUMBERS), ours, gradients)
    train_alone(RULES["momentum"].make(theirs.values(), 0.05, NUMBERS), theirs, gradients)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-12, atol=1e-12)


def test_half_of_an_optimizer_and_unknown_states_are_refused():
    with raises_about(TypeError, "make", "is_of"):
        replace(rule_without_optimizer(ADAMW), is_of=None)
    with raises_about(TypeError, "step"):
        Rule("counts", (), ("step",), ADAMW.update_)
    other = Rule("other", (), (), ADAMW.update_, make_state=lambda p: {"mean": p.mean()})
    with raises_about(TypeError, "mean"):
        StackedUpdate(other, parameters(0))
