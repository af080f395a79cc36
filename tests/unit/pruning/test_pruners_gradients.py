"""SNIP, its rounds and GraSP against closed forms and differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_dps.pruning import PRUNERS, Network
from tests.support.errors import refuses
from tests.support.pruners import equal, images, kept, mask, network, scores, small


def test_snip_of_a_linear_layer_is_error_times_input_times_weight():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3)).double()
    x, y = torch.randn(1, 4).double(), torch.tensor([1])
    found = scores("snip", network(module, (x, y), 1))
    error = module(x).softmax(1) - F.one_hot(y, 3)
    torch.testing.assert_close(
        found["0.weight"], (error.T @ x * module[0].weight).abs(), rtol=1e-12, atol=0
    )


def test_snip_does_not_depend_on_the_scale_of_the_loss():
    once = mask("snip", network(small()), 0.9)
    assert equal(
        once, mask("snip", network(small(), loss=lambda z, y: 16 * F.cross_entropy(z, y)), 0.9)
    )


def test_snip_of_the_first_batches_and_of_absolute_values_a_batch():
    x, y = images()
    first, whole = network(small(), (x[:8], y[:8])), network(small())
    for name, score in scores("snip", whole, batches=1).items():
        torch.testing.assert_close(score, scores("snip", first)[name])
    by_batch = [
        scores("snip", network(small(), (a, b)))
        for a, b in zip(x.split(8), y.split(8), strict=True)
    ]
    for name, score in scores("snip", whole, abs_per_batch=True).items():
        torch.testing.assert_close(score, sum(part[name] for part in by_batch))
        assert (score >= scores("snip", whole)[name] - 1e-6).all()
    opposed = (torch.cat([x[:8], -x[:8]]), torch.cat([y[:8], y[:8]]))
    line = lambda z, y: z.sum()  # noqa: E731 - its gradients by the weights of one layer are opposed
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Flatten(), nn.Linear(64, 1, bias=False))
    assert scores("snip", network(layer, opposed, loss=line))["1.weight"].max() < 1e-5
    assert (
        scores("snip", network(layer, opposed, loss=line), abs_per_batch=True)["1.weight"].min()
        > 1e-4
    )


@pytest.mark.parametrize("method", ["iterative_snip", "force"])
def test_one_round_is_snip(method):
    for batches in (1, 3):
        once = mask("snip", network(small()), 0.9, batches=batches)
        assert equal(mask(method, network(small()), 0.9, rounds=1, batches=batches), once)


def test_snip_it_below_a_half_is_one_round():
    assert equal(
        mask("snip_it", network(small()), 0.4, batches=2),
        mask("snip", network(small()), 0.4, batches=2),
    )


def test_rounds_do_not_matter_where_the_gradient_does_not_depend_on_the_weights():
    data = images(8, shape=(12,))
    module = nn.Sequential(nn.Linear(12, 3, bias=False))
    minus_target = lambda z, y: -z.gather(1, y[:, None]).mean()  # noqa: E731
    once = mask("snip", network(module, data, loss=minus_target), 0.75)
    for method in ("snip_it", "iterative_snip"):
        assert equal(mask(method, network(module, data, loss=minus_target), 0.75, rounds=7), once)


@pytest.mark.parametrize("method", ["snip_it", "iterative_snip", "force", "snap", "snap_it"])
def test_the_loss_of_the_reference_codes_is_minus_the_logit_of_the_label(method):
    x, y = images()
    minus_target = lambda z, y: -z.gather(1, y[:, None]).mean()  # noqa: E731
    theirs = mask(method, network(small(), (x, y)), 0.8, loss="nll_on_logits")
    assert equal(theirs, mask(method, network(small(), (x, y), loss=minus_target), 0.8))
    assert not equal(theirs, mask(method, network(small(), (x, y)), 0.8))
    with refuses("pruning.options.loss", "nll"):
        mask(method, network(small()), 0.8, loss="nll")


class Noted(PRUNERS["iterative_snip"]):
    """Notes the mask after each round."""

    def mask(self, network, sparsity, generator):
        self.noted = []
        under = network.under

        class Watched(Network):
            def under(own, mask):
                self.noted.append(mask)
                return under(mask)

        return super().mask(Watched(**vars(network)), sparsity, generator)


@pytest.mark.parametrize("method", ["iterative_snip", "snip_it"])
def test_rounds_keep_their_counts_and_masks_are_nested(method):
    pruner = type("NotedToo", (Noted, PRUNERS[method]), {"schedule": PRUNERS[method].schedule})(
        6, 1
    )
    net = network(small())
    last = pruner.mask(net, 0.9, torch.Generator())
    total, masks = sum(p.numel() for p in net.parameters.values()), [*pruner.noted[1:], last]
    sparsities = list(pruner.schedule(0.9))
    assert [kept(m) for m in masks] == [round(total * (1 - s)) for s in sparsities]
    if method == "snip_it":
        assert sparsities == pytest.approx([0.5, 0.7, 0.8, 0.85, 0.875, 0.8875, 0.9])
    for earlier, later in zip(masks, masks[1:], strict=False):
        assert all(bool((later[name] <= earlier[name]).all()) for name in later)


def test_force_lets_weights_return():
    returned = mask("force", network(small()), 0.9, rounds=6)
    assert not equal(returned, mask("iterative_snip", network(small()), 0.9, rounds=6))


class Quadratic(nn.Module):
    """Half of w' H w, whatever the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 4).double())
        a = torch.randn(12, 12).double()
        self.h = a @ a.T

    def forward(self, x):
        return self.w.flatten() @ self.h @ self.w.flatten() / 2 + 0 * x.sum()


def test_grasp_of_a_quadratic_is_w_times_h_squared_w():
    module = Quadratic()
    found = scores("grasp", network(module, loss=lambda z, y: z), temperature=None)
    w = module.w.detach().flatten()
    expected = (w * (module.h @ module.h @ w)).view(3, 4) * 9  # three batches, in both factors
    torch.testing.assert_close(found["w"], expected, rtol=1e-10, atol=1e-10)


def test_grasp_is_half_of_the_change_of_the_squared_gradient():
    """w_i d/dw_i (|g|^2 / 2) by central differences."""
    module = small().double()
    net = network(module)
    found = scores("grasp", net, temperature=None)

    def half_square() -> float:
        return sum(float(g.square().sum()) for g in net.gradients().values()) / 2

    for name, i in (("0.weight", 3), ("4.weight", 17), ("6.weight", 5), ("6.bias", 1)):
        weight, h = module.get_parameter(name).data.view(-1), 1e-6
        start = float(weight[i])
        weight[i] = start + h
        above = half_square()
        weight[i] = start - h
        below = half_square()
        weight[i] = start
        assert float(found[name].view(-1)[i]) == pytest.approx(
            start * (above - below) / (2 * h), rel=1e-4, abs=1e-9
        )


def test_grasp_takes_the_cross_entropy_of_logits_over_its_temperature():
    cooled = scores(
        "grasp", network(small(), loss=lambda z, y: F.cross_entropy(z / 200, y)), temperature=None
    )
    for name, score in scores("grasp", network(small(), loss=None)).items():
        torch.testing.assert_close(score, cooled[name])


def test_grasp_of_some_examples_a_class_takes_the_first_ones():
    x, y = images()
    first = torch.cat([(y == c).nonzero()[:4, 0] for c in range(3)]).sort().values
    ours = scores("grasp", network(small()), per_class=4)
    theirs = scores("grasp", network(small(), (x[first], y[first]), len(first)))
    for name, score in ours.items():  # 12 examples weigh 12 / 8 of a batch, in both factors
        torch.testing.assert_close(score / 1.5**2, theirs[name], rtol=1e-4, atol=1e-12)


def test_grasp_of_what_is_no_classifier_says_what_to_do():
    net = network(nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Unflatten(1, (3, 1))), loss=None)
    with refuses("pruning.method", "grasp") as refused:
        scores("grasp", net)
    assert "{temperature: null}" in refused.value.allowed
