"""Lion and Muon: values by hand and by torch's own code, and under masks."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.optim import _muon

from lit_dps.optim import RULES
from lit_dps.optim.muon import orthogonalize
from lit_dps.testing import check_rule

NUMBERS = {
    "momentum": 0.9,
    "adamw_ratio": 0.5,
    "beta1": 0.8,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
}
RATE = 0.03
STEPS = 6


def train_with(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        shape = parameter.shape
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    return parameter.detach()


def parameter(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))


def numbers_of(name: str) -> dict[str, float]:
    return {key: NUMBERS[key] for key in RULES[name].hyperparameters}


def make(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return RULES[name].make(parameters, RATE, numbers_of(name))


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_they_conform(name):
    check_rule(RULES[name])


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_muon_is_that_of_torch(shape, monkeypatch):
    ours, theirs, rounded = parameter(*shape), parameter(*shape), parameter(*shape)
    train_with(make("muon", [ours]), ours)
    train_with(torch.optim.Muon([rounded], RATE, weight_decay=0.1, momentum=0.9), rounded)
    # Torch's own code, in double precision in place of bfloat16.
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    exact: dict = {"torch": torch, "Tensor": torch.Tensor}
    exec(source.replace("torch.bfloat16", "torch.float64"), exact)
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", exact["_zeropower_via_newtonschulz"])
    train_with(torch.optim.Muon([theirs], RATE, weight_decay=0.1, momentum=0.9), theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    # Six steps of rate 0.03, each rounded to 8 bits.
    torch.testing.assert_close(ours, rounded, rtol=0, atol=STEPS * RATE * 2**-6)


def test_muon_takes_a_filter_as_a_row():
    filters, matrix = parameter(4, 2, 3, 3), parameter(4, 18)
    for each in (filters, matrix):
        train_with(make("muon", [each]), each)
    torch.testing.assert_close(filters.view_as(matrix), matrix, rtol=1e-12, atol=1e-12)


def test_muon_trains_a_bias_by_adamw_with_its_own_rate():
    ours, theirs = parameter(7), parameter(7)
    train_with(make("muon", [ours]), ours)
    adamw = torch.optim.AdamW([theirs], 0.5 * RATE, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)
    train_with(adamw, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_orthogonal_matrices_have_singular_values_near_1():
    values = torch.linalg.svdvals(orthogonalize(parameter(3, 20, 8).detach()))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_lion_by_hand():
    ours, generator = parameter(7), torch.Generator().manual_seed(1)
    weights, average = ours.detach().clone(), torch.zeros(7, dtype=torch.float64)
    train_with(make("lion", [ours]), ours)
    for _ in range(STEPS):
        gradient = torch.randn(7, generator=generator, dtype=torch.float64)
        direction = torch.sign(0.8 * average + 0.2 * gradient)
        weights = weights - RATE * (direction + 0.1 * weights)
        average = 0.95 * average + 0.05 * gradient
    torch.testing.assert_close(ours.detach(), weights, rtol=1e-12, atol=1e-12)
