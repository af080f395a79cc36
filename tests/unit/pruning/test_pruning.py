"""Scores against finite differences, the global top-k, what is prunable, and the mask."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_dps.core.errors import ConfigError
from lit_dps.pruning import (
    PRUNERS,
    Mask,
    Network,
    OneShot,
    gradient_sum,
    prunable,
    pruner_of,
    saliency,
    top_k,
)
from tests.support.errors import raises_about, refuses
from tests.support.tiny import points, two_layers

X, Y = points(10).tensors
GENERATOR = torch.Generator()
ONE_SHOT = [method for method, kind in PRUNERS.items() if issubclass(kind, OneShot)]


def scores_of(method, network, sizes=(10,), forward=None, generator=GENERATOR):
    """The scores of a method, over one pass of batches of these sizes."""

    def passes():
        x, y = X.double().split(list(sizes)), Y.split(list(sizes))
        return ((batch, len(batch[1])) for batch in zip(x, y, strict=True))

    def loss(batch, i):
        return F.cross_entropy((forward or network)(batch[0]), batch[1])

    return pruner_of(method).scores(
        Network(network, prunable(network), sizes[0], lambda: len(sizes), passes, loss), generator
    )


def batches(network, sizes):
    x, y = X.double().split(sizes), Y.split(sizes)
    return ((F.cross_entropy(network(a), b), len(b) / sizes[0]) for a, b in zip(x, y, strict=True))


def masked_loss(network, name: str, element: int, c: float) -> float:
    """The summed loss with one element of the mask at c: L(c * w)."""
    masked = {key: value.detach().clone() for key, value in network.named_parameters()}
    masked[name].view(-1)[element] *= c
    logits = torch.func.functional_call(network, masked, (X.double(),))
    return float(F.cross_entropy(logits, Y, reduction="sum"))


@pytest.mark.parametrize("sizes", [[10], [5, 5], [4, 4, 2]], ids=str)
def test_the_saliency_is_the_derivative_of_the_loss_by_the_mask(sizes):
    """Of the loss summed over the examples, per `sizes[0]` of them, so a short last batch weighs by
    its share."""
    network, h = two_layers().double(), 1e-5
    parameters = prunable(network)
    ours = saliency(gradient_sum(parameters, batches(network, sizes)), parameters)
    for name, parameter in network.named_parameters():
        theirs = [
            (masked_loss(network, name, i, 1 + h) - masked_loss(network, name, i, 1 - h))
            / (2 * h)
            / sizes[0]
            for i in range(parameter.numel())
        ]
        # central differences: h^2 of truncation, 1e-15 / h of rounding on a loss of about 10
        np.testing.assert_allclose(
            ours[name].flatten().numpy(), theirs, rtol=0, atol=1e-8, err_msg=name
        )
        assert np.abs(theirs).max() > 1e-3


def test_the_saliency_of_16_bit_weights_is_not_rounded_to_16_bits():
    """In bfloat16 all four scores would be 1, and the first two weights would be kept."""
    gradients = {"w": torch.tensor([1.0, 1.001, 1.002, 1.003], dtype=torch.float64)}
    weights = {"w": torch.ones(4, dtype=torch.bfloat16)}
    mask = top_k(saliency(gradients, weights), 0.5)
    assert mask["w"].tolist() == [False, False, True, True]


def test_snip_sums_over_the_batches_before_it_takes_the_absolute_value():
    network = two_layers().double()
    one = scores_of("snip", network)
    two = scores_of("snip", network, (5, 5))
    parameters = prunable(network)
    parts = [
        saliency(gradient_sum(parameters, [part]), parameters) for part in batches(network, [5, 5])
    ]
    for name in one:
        assert (one[name] >= 0).all()
        torch.testing.assert_close(two[name], 2 * one[name], rtol=1e-10, atol=1e-14)
    summed_later = sum((a[name].abs() + b[name].abs()).sum() for a, b in [parts] for name in a)
    assert summed_later > 1.1 * sum(
        two[name].sum() for name in two
    )  # the order matters on these data


def test_snip_is_zero_for_biases_that_are_zero_and_leaves_out_parameters_that_the_loss_does_not_use():
    network = two_layers().double()
    network.register_parameter("unused", nn.Parameter(torch.ones(2, 2).double()))
    nn.init.zeros_(network[0].bias)
    scores = scores_of("snip", network, forward=_first(network))
    assert not scores["0.bias"].any() and "unused" not in scores
    assert scores["2.bias"].all()


def _first(network):
    return lambda x: network[2](network[1](network[0](x)))


def test_scoring_changes_no_weight_and_leaves_no_gradient():
    network = two_layers().double()
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for method in ONE_SHOT:
        scores_of(method, network, generator=torch.Generator().manual_seed(0))
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None


def test_magnitude_is_the_absolute_weight():
    network = two_layers()
    scores = scores_of("magnitude", network)
    for name, parameter in network.named_parameters():
        np.testing.assert_array_equal(scores[name], np.abs(parameter.detach().numpy()))


def test_random_scores_come_from_the_generator_alone():
    drawn = []
    for global_seed, seed in ((0, 5), (1, 5), (1, 6)):
        torch.manual_seed(global_seed)
        scores = scores_of("random", two_layers(), generator=torch.Generator().manual_seed(seed))
        drawn.append(torch.cat([score.flatten() for score in scores.values()]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
    assert drawn[0].min() >= 0 and drawn[0].max() < 1 and len(drawn[0].unique()) == len(drawn[0])


@pytest.mark.parametrize(
    ("m", "sparsity", "keep"),
    [
        (10, 0.0, 10),
        (10, 0.9, 1),
        (10, 0.7, 3),
        (5, 0.5, 2),  # 2.5, half to even
        (7, 0.5, 4),  # 3.5
        (9, 0.5, 4),  # 4.5
        (11, 0.5, 6),  # 5.5
        (62_346, 0.9, 6235),  # Simple-CNN: 6234.6
        (62_346, 0.5, 31_173),
    ],
)
def test_top_k_keeps_the_rounded_count_of_the_highest_over_all_tensors(m, sparsity, keep):
    scores = torch.randperm(m, generator=torch.Generator().manual_seed(0)).float()
    mask = top_k({"a": scores[: m // 2], "b": scores[m // 2 :]}, sparsity)
    kept = torch.cat([mask["a"], mask["b"]])
    assert torch.equal(kept, scores >= m - keep)
    assert mask.sparsity == pytest.approx(1 - keep / m, abs=1e-12)


def test_ties_go_to_the_lower_index_in_the_order_of_the_scores():
    scores = {"b": torch.tensor([[1.0, 2.0], [1.0, 0.0]]), "a": torch.tensor([1.0, 1.0, 3.0, 0.0])}
    mask = top_k(scores, 0.5)
    assert mask["b"].tolist() == [[True, True], [True, False]]
    assert mask["a"].tolist() == [False, False, True, False]
    many = top_k(
        {"z": torch.zeros(5000), "y": torch.zeros(5000)}, 0.3
    )  # long enough for a sort that is not stable
    assert many["z"].all() and many["y"].tolist() == [True] * 2000 + [False] * 3000


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, math.nan])
def test_top_k_refuses_a_sparsity_outside_its_range(sparsity):
    with pytest.raises(ConfigError) as caught:
        top_k({"w": torch.rand(4)}, sparsity)
    assert caught.value.key == "pruning.sparsity"


def test_top_k_refuses_to_prune_everything():
    assert top_k({"w": torch.rand(10)}, 0.9).kept() == {"w": (1, 10)}
    with refuses("pruning.sparsity", 0.96) as refused:
        top_k({"w": torch.rand(10)}, 0.96)
    assert "10" in refused.value.allowed


def network_of_everything() -> nn.Module:
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(1, 2)
    )
    network.add_module("last", nn.Linear(4, 2))
    network.register_parameter("scale", nn.Parameter(torch.ones(())))
    network[2].weight.requires_grad_(False)
    return network


def test_prunable_gives_weights_then_biases_without_norms_and_frozen_ones():
    weights, others = ["0.weight", "last.weight"], ["0.bias", "2.bias", "last.bias"]
    assert list(prunable(network_of_everything())) == weights + others
    assert list(prunable(network_of_everything(), "keep")) == weights


class Scales(nn.Module):
    """Stands for the layers of other libraries that scale and shift, under names that tell
    nothing."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))


class LlamaRMSNorm(Scales):
    pass


class LayerNorm2d(Scales):
    pass


def test_what_scales_is_never_pruned_by_whatever_name():
    network = nn.ModuleDict(
        {
            "rms": LlamaRMSNorm(weight=4),
            "map": LayerNorm2d(weight=(4, 1, 1), bias=(4, 1, 1)),
            "affine": Scales(gamma=4, bias=4),
            "slope": nn.PReLU(4),
            "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "gru": nn.GRU(4, 4),
            "own": Scales(w=(4, 4), b=4, temperature=1, scalar=()),
        }
    )
    assert set(prunable(network)) == {
        *(
            "attention.in_proj_weight",
            "attention.out_proj.weight",
            "attention.bias_k",
            "attention.bias_v",
        ),
        *("attention.in_proj_bias", "attention.out_proj.bias", "own.w", "own.b"),
        *(f"gru.{kind}_{which}_l0" for kind in ("weight", "bias") for which in ("ih", "hh")),
    }


def test_patterns_and_what_no_optimizer_holds_are_left_out():
    network = nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    assert list(prunable(network, exclude=["head.*"])) == ["body.weight", "body.bias"]
    assert list(prunable(network, exclude=["*.bias", "head.w*"])) == ["body.weight"]
    held = {id(p) for p in network["head"].parameters()}
    assert list(prunable(network, held=held)) == ["head.weight", "head.bias"]


def test_prunable_gives_the_parameters_themselves_and_shared_ones_once():
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    found = prunable(network)
    assert (
        list(found) == ["0.weight", "0.bias", "1.bias"] and found["0.weight"] is network[0].weight
    )


def test_a_mask_is_bool_and_fits_its_network():
    with raises_about(ValueError, "w", "torch.float32"):
        Mask({"w": torch.ones(3)})
    network = nn.Linear(3, 2)
    for name, shape in (("weight", (3, 2)), ("other", (2, 3))):
        with raises_about(ValueError, name):
            Mask({name: torch.ones(shape, dtype=torch.bool)}).apply_to_weights(network)


def test_a_mask_counts_what_it_keeps_and_zeroes_the_rest():
    network = nn.Linear(3, 2)
    keep = torch.tensor([[True, False, True], [False, False, True]])
    expected = network.weight.detach().numpy() * keep.numpy()
    bias = network.bias.detach().clone()
    mask = Mask({"weight": keep})
    mask.apply_to_weights(network)
    np.testing.assert_array_equal(network.weight.detach().numpy(), expected)
    assert torch.equal(network.bias, bias)
    assert (
        mask.kept() == {"weight": (3, 6)}
        and mask.sparsity == 0.5
        and list(mask) == ["weight"]
        and len(mask) == 1
    )
