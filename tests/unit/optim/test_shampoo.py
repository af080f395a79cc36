"""Shampoo: closed forms of its first step, of diagonal gradients and of vectors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_dps.optim import RULES, StackedUpdate
from lit_dps.pruning.mask_changes import mask_optimizer_state
from lit_dps.testing import check_rule

EPSILON, RATE, STEPS = 1e-6, 0.1, 5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def train(start: torch.Tensor, gradients: list[torch.Tensor], decay: float = 0.0) -> torch.Tensor:
    parameter = nn.Parameter(start.clone())
    numbers = {"epsilon": EPSILON, "weight_decay": decay}
    optimizer = RULES["shampoo"].make([parameter], RATE, numbers)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_it_conforms():
    check_rule(RULES["shampoo"])


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_the_first_step_has_singular_values_of_nearly_1(shape):
    gradient = random(*shape)
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    expected = left * (values / (values.square() + EPSILON).sqrt()) @ right
    moved = train(torch.zeros(shape, dtype=torch.float64), [gradient])
    torch.testing.assert_close(moved, -RATE * expected, rtol=1e-9, atol=1e-9)


def test_with_diagonal_gradients_it_is_adagrad():
    diagonals = [random(4, seed=step) for step in range(STEPS)]
    moved = train(torch.zeros(4, 4, dtype=torch.float64), [each.diag() for each in diagonals])
    expected, total = torch.zeros(4, dtype=torch.float64), EPSILON
    for diagonal in diagonals:
        total = total + diagonal.square()
        expected = expected - RATE * diagonal / total.sqrt()
    torch.testing.assert_close(moved, expected.diag(), rtol=1e-9, atol=1e-9)


def test_a_vector_has_one_full_matrix():
    gradients = [random(3, seed=step) for step in range(STEPS)]
    moved = train(torch.ones(3, dtype=torch.float64), gradients, decay=0.3)
    expected, total = torch.ones(3, dtype=torch.float64), EPSILON * torch.eye(3)
    for gradient in gradients:
        total = total + torch.outer(gradient, gradient)
        # The root of a matrix, by Denman and Beavers.
        root, inverse = total, torch.eye(3, dtype=torch.float64)
        for _ in range(60):
            root, inverse = (root + inverse.inverse()) / 2, (inverse + root.inverse()) / 2
        expected = expected * (1 - RATE * 0.3) - RATE * inverse @ gradient
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-6)


def test_a_filter_is_a_row():
    start, gradient = random(4, 2, 3), random(4, 2, 3, seed=1)
    as_matrix = train(start.view(4, 6), [gradient.view(4, 6)])
    torch.testing.assert_close(train(start, [gradient]).view(4, 6), as_matrix)


def test_a_moving_mask_leaves_the_matrices_of_a_square_layer():
    parameter = nn.Parameter(random(4, 4))
    optimizer = RULES["shampoo"].make([parameter], RATE, {"epsilon": EPSILON, "weight_decay": 0.0})
    gradient = random(4, 4, seed=1)
    parameter.grad = gradient.clone()
    optimizer.step()
    mask_optimizer_state(optimizer, [(parameter, torch.eye(4, dtype=torch.float64))])
    state = optimizer.state[parameter]
    torch.testing.assert_close(state["left"], gradient @ gradient.T)
    torch.testing.assert_close(state["right"], gradient.T @ gradient)


def test_the_state_of_single_weights_is_known():
    for dimensions in (1, 2, 4):
        assert RULES["shampoo"].elementwise_state(dimensions) == set()
        assert RULES["momentum"].elementwise_state(dimensions) == {"momentum_buffer"}
    assert RULES["muon"].elementwise_state(2) == {"momentum_buffer"}


@pytest.mark.parametrize("shape", [(3, 3), (3,)])
def test_a_network_that_diverges_does_not_stop_the_others(shape):
    start = torch.stack([random(*shape), random(*shape, seed=1)])
    gradients = torch.stack([random(*shape, seed=2), torch.full(shape, torch.nan).double()])
    update = StackedUpdate(RULES["shampoo"], {"w": start[0]})
    state = update.flat_state({"w": start[0]}, {})
    state = {name: tensor.repeat(2, 1) for name, tensor in state.items()}
    weights = start.flatten(1).clone()
    numbers = {}
    for name, value in (("epsilon", EPSILON), ("weight_decay", 0.0)):
        numbers[name] = torch.full((2, 1), value, dtype=torch.float64)
    ones = torch.ones(2, 1, dtype=torch.float64)
    update(weights, gradients.flatten(1).clone(), state, RATE * ones, numbers, ones)
    alone = train(start[0], [gradients[0]])
    torch.testing.assert_close(weights[0].view(shape), alone)
    assert weights[1].isnan().all()
    assert train(start[1], [gradients[1]]).isnan().all()
