"""SOAP: against the authors' steps and a second one in loops; dead inputs, masks and divergence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_dps.optim import RULES, StackedUpdate, soap
from lit_dps.pruning.mask_changes import mask_optimizer_state
from lit_dps.testing import check_rule
from lit_dps.training.optimizer_groups import group_rule

BETA1, BETA2, EPSILON, RATE, EVERY, STEPS = 0.9, 0.95, 1e-8, 0.03, 3, 11
NUMBERS = {
    "beta1": BETA1,
    "beta2": BETA2,
    "epsilon": EPSILON,
    "weight_decay": 0.0,
    "refresh_steps": EVERY,
}


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gradients_of(*shape: int) -> list[Tensor]:
    return [random(*shape, seed=1 + step) for step in range(STEPS)]


def train(start: Tensor, gradients: list[Tensor], decay: float = 0.0) -> nn.Parameter:
    parameter = nn.Parameter(start.clone())
    numbers = {**NUMBERS, "weight_decay": decay}
    optimizer = RULES["soap"].make([parameter], RATE, numbers)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter


def authors(start: Tensor, gradients: list[Tensor]) -> Tensor:
    """The steps of nikhilvyas/SOAP a1e5535, of a matrix without weight decay."""
    weights = start.clone()
    average, second = torch.zeros_like(start), torch.zeros_like(start)
    factors = [torch.zeros(size, size, dtype=start.dtype) for size in start.shape]
    bases: list[Tensor] = []
    for step, gradient in enumerate(gradients):
        if step:
            rotated = bases[0].T @ gradient @ bases[1]
            average = BETA1 * average + (1 - BETA1) * gradient
            second = BETA2 * second + (1 - BETA2) * rotated**2
            direction = (bases[0].T @ average @ bases[1]) / (second.sqrt() + EPSILON)
            size = RATE * math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
            weights = weights - size * bases[0] @ direction @ bases[1].T
        for side, product in enumerate((gradient @ gradient.T, gradient.T @ gradient)):
            factors[side] = BETA2 * factors[side] + (1 - BETA2) * product
        if not step:
            for factor in factors:
                bases.append(torch.linalg.eigh(factor)[1].flip(1))
        elif step % EVERY == 0:
            for side in range(2):
                values = (bases[side].T @ factors[side] @ bases[side]).diagonal()
                order = values.argsort(descending=True)
                second = second.index_select(side, order)
                bases[side] = torch.linalg.qr(factors[side] @ bases[side][:, order])[0]
    return weights


def orthonormalized(matrix: np.ndarray) -> np.ndarray:
    """The columns of a matrix, orthonormalized by Gram and Schmidt."""
    result = np.zeros_like(matrix)
    for column in range(matrix.shape[1]):
        rest = matrix[:, column].copy()
        for _ in range(3):  # rounding leaves a part after one pass
            for before in range(column):
                rest = rest - (result[:, before] @ rest) * result[:, before]
        result[:, column] = rest / np.linalg.norm(rest)
    return result


def in_loops(start: Tensor, gradients: list[Tensor], decay: float) -> np.ndarray:
    """SOAP as the page of the rule describes it, in numpy."""
    weights = start.numpy().copy()
    average, second = np.zeros_like(weights), np.zeros_like(weights)
    factors = [np.zeros((size, size)) for size in weights.shape]
    bases = [np.eye(size) for size in weights.shape]
    for step, tensor in enumerate(gradients):
        gradient = tensor.numpy()
        if step:
            rotated = bases[0].T @ gradient @ bases[1]
            average = BETA1 * average + (1 - BETA1) * gradient
            second = BETA2 * second + (1 - BETA2) * rotated**2
            direction = (bases[0].T @ average @ bases[1]) / (np.sqrt(second) + EPSILON)
            size = RATE * math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
            weights = (1 - RATE * decay) * weights - size * bases[0] @ direction @ bases[1].T
        for side, product in enumerate((gradient @ gradient.T, gradient.T @ gradient)):
            factors[side] = BETA2 * factors[side] + (1 - BETA2) * product
        iterations = 10 if step == 0 else int(step % EVERY == 0)
        for side in range(2):
            for _ in range(iterations):
                basis, factor = bases[side], factors[side]
                order = np.argsort(-(basis.T @ factor @ basis).diagonal(), kind="stable")
                second = second.take(order, axis=side)
                shifted = factor @ basis / np.trace(factor) + 1e-5 * basis
                bases[side] = orthonormalized(shifted[:, order])
    return weights


def test_it_conforms():
    check_rule(RULES["soap"])


def test_with_an_exact_first_basis_and_no_shift_it_is_that_of_the_authors(monkeypatch):
    monkeypatch.setattr(soap, "SHIFT", 0.0)
    monkeypatch.setattr(soap, "START_ITERATIONS", 200)
    left, _, right = torch.linalg.svd(random(5, 5))
    first = left @ torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.5, 1.0]).double()) @ right
    start, gradients = random(5, 5, seed=99), [first, *gradients_of(5, 5)]
    moved = train(start, gradients).detach()
    assert float((moved - start).abs().max()) > RATE
    torch.testing.assert_close(moved, authors(start, gradients), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (1, 6)])
def test_it_is_that_of_loops(shape):
    start, gradients = random(*shape, seed=99), gradients_of(*shape)
    moved = train(start, gradients, decay=0.3).detach().numpy()
    np.testing.assert_allclose(moved, in_loops(start, gradients, 0.3), rtol=1e-9, atol=1e-9)


def test_the_first_step_moves_no_matrix():
    start = random(4, 3)
    assert torch.equal(train(start, gradients_of(4, 3)[:1], decay=0.3).detach(), start)


def test_a_filter_is_a_row():
    start, gradients = random(4, 2, 3), gradients_of(4, 2, 3)
    as_matrix = train(start.view(4, 6), [each.view(4, 6) for each in gradients])
    torch.testing.assert_close(train(start, gradients).view(4, 6), as_matrix)


def test_a_vector_is_trained_by_adamw():
    theirs = nn.Parameter(random(7))
    adamw = torch.optim.AdamW([theirs], RATE, betas=(BETA1, BETA2), eps=EPSILON, weight_decay=0.3)
    for gradient in gradients_of(7):
        theirs.grad = gradient.clone()
        adamw.step()
    ours = train(random(7), gradients_of(7), decay=0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_large_side_has_no_factor(monkeypatch):
    monkeypatch.setattr(soap, "LARGEST_SIDE", 4)
    state = RULES["soap"].initial_state(random(5, 3))
    assert set(state) == {"exp_avg", "rotated_exp_avg_sq", "right", "right_basis"}
    monkeypatch.setattr(soap, "LARGEST_SIDE", 2)
    # Without both factors, it is Adam one step later, with another place of epsilon.
    theirs = nn.Parameter(random(5, 3))
    adam = torch.optim.Adam([theirs], RATE, betas=(BETA1, BETA2), eps=1e-12)
    for gradient in gradients_of(5, 3)[1:]:
        theirs.grad = gradient.clone()
        adam.step()
    ours = train(random(5, 3), gradients_of(5, 3))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_inputs_and_outputs_without_gradients_do_not_move():
    start, gradients = random(6, 8), gradients_of(6, 8)
    for gradient in gradients:
        gradient[2] = 0
        gradient[:, [0, 3, 7]] = 0
    moved = (train(start, gradients).detach() - start).abs()
    assert float(moved.max()) > RATE
    assert float(moved[2].max()) < 1e-6 * RATE
    assert float(moved[:, [0, 3, 7]].max()) < 1e-6 * RATE


def test_bases_stay_orthogonal_and_come_near_the_eigenvectors():
    gradient = random(6, 4) @ torch.diag(torch.tensor([1.0, 0.6, 0.3, 0.1]).double())
    parameter = nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    optimizer = RULES["soap"].make([parameter], RATE, {**NUMBERS, "refresh_steps": 1})
    for _ in range(60):
        parameter.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    for side, size in (("left", 6), ("right", 4)):
        basis = state[f"{side}_basis"]
        torch.testing.assert_close(basis.T @ basis, torch.eye(size, dtype=torch.float64))
        rotated = basis.T @ state[side] @ basis
        off_diagonal = rotated - torch.diag(rotated.diagonal())
        assert float(off_diagonal.norm()) < 1e-6 * float(rotated.norm())


def test_a_moving_mask_sets_the_average_to_zero_and_nothing_else():
    parameter = nn.Parameter(random(4, 4))
    optimizer = RULES["soap"].make([parameter], RATE, NUMBERS)
    for gradient in gradients_of(4, 4):
        parameter.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    before = {name: tensor.clone() for name, tensor in state.items()}
    mask_optimizer_state(optimizer, [(parameter, torch.eye(4, dtype=torch.float64))])
    changed = [name for name, tensor in state.items() if not torch.equal(tensor, before[name])]
    assert changed == ["exp_avg"]
    torch.testing.assert_close(state["exp_avg"], before["exp_avg"].diagonal().diag())


@pytest.mark.parametrize("shape", [(3, 3), (3,)])
def test_a_network_that_diverges_does_not_stop_the_others(shape):
    start = torch.stack([random(*shape), random(*shape, seed=1)])
    gradients = gradients_of(*shape)
    update = StackedUpdate(RULES["soap"], {"w": start[0]})
    state = update.flat_state({"w": start[0]}, {})
    state = {name: tensor.repeat(2, 1) for name, tensor in state.items()}
    weights = start.flatten(1).clone()
    ones = torch.ones(2, 1, dtype=torch.float64)
    numbers = {name: value * ones for name, value in NUMBERS.items()}
    for step, gradient in enumerate(gradients, 1):
        of_rows = torch.stack([gradient, torch.full(shape, torch.nan).double()]).flatten(1)
        update(weights, of_rows, state, RATE * ones, numbers, step * ones)
    torch.testing.assert_close(weights[0].view(shape), train(start[0], gradients).detach())
    assert weights[1].isnan().all()
    assert train(start[1], [torch.full(shape, torch.nan).double()] * 2).isnan().all()


def test_networks_of_a_stack_refresh_at_their_own_steps():
    start, gradients = random(4, 3), gradients_of(4, 3)
    update = StackedUpdate(RULES["soap"], {"w": start})
    state = update.flat_state({"w": start}, {})
    state = {name: tensor.repeat(2, 1) for name, tensor in state.items()}
    weights = start.flatten().repeat(2, 1)
    ones = torch.ones(2, 1, dtype=torch.float64)
    numbers = {name: value * ones for name, value in NUMBERS.items()}
    numbers["refresh_steps"] = torch.tensor([[EVERY], [2.0]]).double()
    # The second network begins four steps later, with the gradients of the beginning.
    late = update.flat_state({"w": start}, {})
    for step, gradient in enumerate(gradients, 1):
        if step == 5:
            weights[1] = start.flatten()
            for name, tensor in state.items():
                tensor[1] = late[name]
        of_rows = torch.stack([gradient, gradients[max(step - 5, 0)]]).flatten(1)
        steps = torch.tensor([[step], [max(step - 4, 1)]]).double()
        update(weights, of_rows, state, RATE * ones, numbers, steps)
    torch.testing.assert_close(weights[0].view(4, 3), train(start, gradients).detach())
    parameter = nn.Parameter(start.clone())
    optimizer = RULES["soap"].make([parameter], RATE, {**NUMBERS, "refresh_steps": 2})
    for gradient in gradients[: STEPS - 4]:
        parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(weights[1].view(4, 3), parameter.detach())


def test_its_weight_decay_is_decoupled_and_its_second_moment_known():
    parameter = nn.Parameter(random(4, 4))
    optimizer = RULES["soap"].make([parameter], RATE, {**NUMBERS, "weight_decay": 0.1})
    rule = group_rule(optimizer, optimizer.param_groups[0])
    assert rule.is_listed and rule.scales_decay
    assert rule.second_moment is not None and rule.second_moment.name == "beta2"
