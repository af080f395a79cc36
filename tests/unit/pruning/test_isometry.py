"""Approximate isometry after pruning, and the singular values of the Jacobian."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_dps.models import MLP
from lit_dps.pruning import prunable, top_k
from lit_dps.pruning.isometry import jacobian_singular_values, restore_isometry


def test_dense_rows_become_orthonormal():
    torch.manual_seed(0)
    layer = nn.Linear(40, 10).double()
    mask = {
        "weight": torch.ones(10, 40, dtype=torch.bool),
        "bias": torch.ones(10, dtype=torch.bool),
    }
    bias = layer.bias.detach().clone()
    found = restore_isometry(dict(layer.named_parameters()), mask, rate=0.01)
    assert list(found) == ["weight"] and found["weight"] < 0.1 and torch.equal(layer.bias, bias)
    gram = layer.weight.detach() @ layer.weight.detach().T
    torch.testing.assert_close(gram, torch.eye(10).double(), rtol=0, atol=0.03)


@pytest.mark.long
def test_pruned_weights_stay_zero_and_signal_comes_back():
    torch.manual_seed(0)
    network, x = MLP(hidden=(100, 100)), torch.randn(20, 1, 28, 28)
    parameters = prunable(network)
    mask = top_k(
        {
            name: torch.rand(p.shape) if p.ndim > 1 else torch.zeros(p.shape)
            for name, p in parameters.items()
        },
        0.95,
    )
    mask.apply_to_weights(network)
    before = jacobian_singular_values(network, x)
    distance = {
        name: float((p.flatten(1) @ p.flatten(1).T - torch.eye(len(p))).norm())
        for name, p in parameters.items()
        if p.ndim > 1
    }
    found = restore_isometry(parameters, mask)
    assert all(found[name] < 0.6 * distance[name] for name in found)
    assert all(not p.detach()[~mask[name]].any() for name, p in parameters.items())
    assert jacobian_singular_values(network, x).mean() > 2 * before.mean()


def test_the_singular_values_of_a_linear_network_are_those_of_its_matrix():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)).double()
    found = jacobian_singular_values(network, torch.randn(4, 6).double())
    expected = torch.linalg.svdvals((network[1].weight @ network[0].weight).detach())
    assert found.shape == (4, 3)
    torch.testing.assert_close(found, expected.expand(4, 3), rtol=1e-10, atol=1e-12)
