"""Pruning methods: what all of them keep to, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from lit_dps.pruning import PRUNERS, prunable, pruner_of
from tests.support.errors import refuses
from tests.support.pruners import GENERAL, equal, kept, mask, network, small

EXACT = [method for method in GENERAL if PRUNERS[method].hits_count]


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.9, 0.995])
def test_a_mask_keeps_the_exact_count_and_is_the_same_again(method, sparsity):
    total = sum(p.numel() for p in prunable(small()).values())
    found = mask(method, network(small()), sparsity)
    assert kept(found) == round(total * (1 - sparsity))
    assert equal(found, mask(method, network(small()), sparsity))


@pytest.mark.parametrize("method", GENERAL)
def test_nothing_of_the_network_and_no_global_generator_is_moved(method):
    module = small(norm=True)
    module[-1].bias.requires_grad_(False)
    module[1].eval()
    before, modes = copy.deepcopy(module.state_dict()), [m.training for m in module.modules()]
    trained = [p.requires_grad for p in module.parameters()]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    mask(method, network(module), 0.8)
    assert torch.equal(torch.rand(1), expected)
    assert [m.training for m in module.modules()] == modes
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert [p.requires_grad for p in module.parameters()] == trained and not all(trained)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("method", "options", "key", "value"),
    [
        ("snip", {"batches": 0}, "pruning.options.batches", 0),
        ("iterative_snip", {"rounds": 0}, "pruning.options.rounds", 0),
        ("grasp", {"temperature": 0}, "pruning.options.temperature", 0),
        ("synflow", {"rounds": -1}, "pruning.options.rounds", -1),
        ("snap_it", {"rounds": 0}, "pruning.options.rounds", 0),
        ("shuffle", {"of": "snipp"}, "pruning.options.of", "snipp"),
        ("shuffle", {"of": None}, "pruning.options.of", None),
        ("shuffle", {"of": "shuffle"}, "pruning.options.of", "shuffle"),
        ("shuffle", {"of": "rigl"}, "pruning.options.of", "rigl"),
        ("snipp", {}, "pruning.method", "snipp"),
    ],
)
def test_options_out_of_their_range_are_refused(method, options, key, value):
    with refuses(key, value):
        pruner_of(method, options)
