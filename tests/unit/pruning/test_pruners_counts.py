"""SynFlow, random masks, shuffles and smart ratios: conservation laws and counts by layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lit_dps.models import MLP, SimpleCNN
from lit_dps.pruning import Network, prunable, pruner_of
from lit_dps.pruning.layerwise import SmartRatio, rounded, water_filled
from lit_dps.pruning.synflow import flow
from tests.support.errors import refuses
from tests.support.pruners import equal, images, mask, network, small


def test_synflow_is_conserved_from_layer_to_layer():
    module = nn.Sequential(*(m for m in small() if not isinstance(m, nn.MaxPool2d)))
    module[3] = nn.Linear(144, 20)
    for layer in (0, 3, 5):
        nn.init.zeros_(module[layer].bias)
    total, found = flow(network(module))
    for name, score in found.items():
        if name.endswith("weight"):
            assert float(score.sum()) == pytest.approx(total, rel=1e-12)
    incoming = found["3.weight"].sum(1)
    outgoing = found["5.weight"].sum(0)
    torch.testing.assert_close(incoming, outgoing, rtol=1e-12, atol=0)


def test_synflow_knows_neither_data_nor_signs():
    module = small()
    once = mask("synflow", network(module), 0.9)
    assert equal(once, mask("synflow", network(module, images(seed=7)), 0.9))
    flipped = copy.deepcopy(module)
    with torch.no_grad():
        for p in flipped.parameters():
            p.mul_(torch.where(torch.rand_like(p) < 0.5, -1.0, 1.0))
    assert equal(once, mask("synflow", network(flipped), 0.9))


def test_synflow_in_rounds_leaves_no_layer_empty_where_one_round_does():
    torch.manual_seed(0)
    widths = [64, 100, 100, 100, 100, 10]
    layers = [
        m
        for a, b in zip(widths, widths[1:], strict=False)
        for m in (nn.Linear(a, b, bias=False), nn.ReLU())
    ]
    module, data = nn.Sequential(*layers), images(8, shape=(64,))
    least = {
        rounds: min(
            n
            for n, _ in mask("synflow", network(module, data), 0.998, rounds=rounds).kept().values()
        )
        for rounds in (1, 100)
    }
    assert least[1] == 0 and least[100] > 0


def test_synflow_refuses_inputs_that_are_no_real_numbers():
    module = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3))
    data = torch.randint(0, 5, (8, 3)), torch.randint(0, 3, (8,))
    net = Network(module, prunable(module), 8, lambda: 1, lambda: iter([(data, 8)]), None)
    with refuses("pruning.method", "synflow"):
        mask("synflow", net, 0.5)


def test_random_densities_are_those_of_chance_and_layerwise_ones_exact():
    module = MLP(hidden=(100, 50))
    net = Network(module, prunable(module, "keep"), 1, lambda: 1, None, None)
    for name, (n, total) in mask("random", net, 0.9).kept().items():
        assert abs(n - 0.1 * total) < 3 * (0.09 * total) ** 0.5 + 1, name
    for n, total in mask("random_layerwise", net, 0.9).kept().values():
        assert abs(n - 0.1 * total) < 1


@pytest.mark.parametrize("of", ["snip", "synflow", "magnitude"])
def test_shuffle_keeps_the_counts_of_each_tensor_and_moves_the_rest(of):
    plain, shuffled = mask(of, network(small()), 0.9), mask("shuffle", network(small()), 0.9, of=of)
    assert shuffled.kept() == plain.kept() and not equal(shuffled, plain)
    assert equal(shuffled, mask("shuffle", network(small()), 0.9, of=of))
    assert not equal(shuffled, mask("shuffle", network(small()), 0.9, seed=1, of=of))
    assert pruner_of("shuffle", {"of": "grasp"}).passes == 2


def test_smart_ratios_fall_as_they_should_and_are_filled_up():
    module = SimpleCNN()
    net = Network(module, prunable(module), 1, lambda: 1, None, None)
    sizes = {name: p.numel() for name, p in net.parameters.items()}
    keep = round(0.1 * sum(sizes.values()))
    shares = SmartRatio().shares(net, keep)
    assert sum(shares.values()) == pytest.approx(keep)
    assert shares["linear.weight"] == pytest.approx(0.3 * sizes["linear.weight"])
    density = {name: share / sizes[name] for name, share in shares.items()}
    # (3^2 + 3) / 1 over (2^2 + 2) / 4
    assert density["conv1.weight"] / density["conv2.weight"] == pytest.approx(8)
    assert SmartRatio(residual=True).shares(net, keep)["conv1.weight"] / sizes[
        "conv1.weight"
    ] == pytest.approx(
        2 * SmartRatio(residual=True).shares(net, keep)["conv2.weight"] / sizes["conv2.weight"]
    )
    found = mask("smart_ratio", net, 0.9).kept()
    assert found == {name: (pytest.approx(shares[name], abs=1), sizes[name]) for name in sizes}


def test_what_does_not_fit_is_handed_on():
    assert water_filled({"a": 10, "b": 1}, {"a": 10, "b": 90}, 50) == pytest.approx(
        {"a": 10, "b": 40}
    )
    assert water_filled({"a": 1, "b": 1}, {"a": 10, "b": 30}, 20) == pytest.approx(
        {"a": 5, "b": 15}
    )
    assert water_filled({"a": 1, "b": 3}, {"a": 10, "b": 30}, 40) == pytest.approx(
        {"a": 10, "b": 30}
    )
    assert rounded({"a": 1.6, "b": 1.7, "c": 0.7}, {"a": 5, "b": 5, "c": 5}, 4) == {
        "a": 1,
        "b": 2,
        "c": 1,
    }
