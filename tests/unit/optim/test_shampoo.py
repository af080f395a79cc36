"""Shampoo: closed forms of its first step, of diagonal gradients and of vectors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_dps.optim import RULES
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
