"""The terms of the theory against functions whose constants are known, and against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from lit_dps.readings.lipschitz import (
    flatten,
    gammas,
    gradient_moments,
    local_lipschitz,
    mean_gradient,
    unflatten,
)
from tests.support.errors import raises_about
from tests.support.tiny import points, two_layers


def test_gammas_of_the_paper_and_of_its_code():
    assert gammas() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert gammas(last=0.9) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert gammas(1.0) == [1.0]
    assert gammas(0.3) == pytest.approx([0.3, 0.6, 0.9])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_along_an_axis_of_a_quadratic_it_is_that_eigenvalue(axis):
    """f = 1/2 sum a_i w_i^2 has the gradient a w, whose constant along axis i is a_i, wherever one
    stands."""
    eigenvalues = torch.tensor([0.5, 3.0, 40.0], dtype=torch.float64)
    before = torch.tensor([1.0, -2.0, 0.3], dtype=torch.float64)
    after = before.clone()
    after[axis] += 0.01
    found = local_lipschitz(lambda w: eigenvalues * w, before, after, gammas())
    assert found.lipschitz == pytest.approx(float(eigenvalues[axis]), rel=1e-9)
    assert found.squared_gradient == pytest.approx(0.5**2 + 6**2 + 12**2)


def test_it_is_the_largest_over_the_gammas():
    """f' = w^2: between 1 and 2 the quotient at gamma is ((1 + gamma)^2 - 1) / gamma = 2 +
    gamma."""
    one, two = torch.ones(1, dtype=torch.float64), 2 * torch.ones(1, dtype=torch.float64)
    assert local_lipschitz(torch.square, one, two, gammas()).lipschitz == pytest.approx(3.0)
    assert local_lipschitz(torch.square, one, two, gammas(last=0.9)).lipschitz == pytest.approx(2.9)
    # the other way the gradient changes less the further one goes
    assert local_lipschitz(torch.square, two, one, gammas()).lipschitz == pytest.approx(3.9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_weights_have_the_constant_of_the_function(dtype):
    """A step of two units in the last place: weights at gamma = 0.3 round to 0.5."""
    before = torch.ones(3, dtype=dtype)
    after = before * (1 + 2 * torch.finfo(dtype).eps)
    found = local_lipschitz(lambda w: 3 * w.double(), before, after, gammas())
    assert found.lipschitz == pytest.approx(3, rel=1e-9)


def test_weights_that_do_not_move_have_no_constant_and_a_nan_is_kept():
    w = torch.ones(3)
    still = local_lipschitz(lambda w: 2 * w, w, w.clone(), gammas())
    assert math.isnan(still.lipschitz)
    assert still.squared_gradient == pytest.approx(12.0)
    broken = local_lipschitz(lambda w: torch.where(w > 1.45, torch.nan, w), w, w + 1, gammas())
    assert math.isnan(broken.lipschitz)


def test_mean_gradient_weighs_batches_by_their_size():
    network, (x, y) = two_layers(), points(20).tensors
    parameters = list(network.parameters())
    whole = flatten(torch.autograd.grad(F.cross_entropy(network(x), y), parameters)).double()
    losses = (
        (F.cross_entropy(network(x[a:b]), y[a:b]), b - a) for a, b in ((0, 8), (8, 13), (13, 20))
    )
    torch.testing.assert_close(mean_gradient(parameters, losses), whole, rtol=1e-5, atol=1e-8)
    with raises_about(ValueError, "batch"):
        mean_gradient(parameters, iter(()))


def test_flatten_and_unflatten_are_inverse():
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(1, 2, 2)]
    for was, now in zip(tensors, unflatten(flatten(tensors), tensors), strict=True):
        torch.testing.assert_close(was, now, rtol=0, atol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk_elements", [2**22, 100])
def test_moments_equal_a_loop_over_examples(masked, chunk_elements, monkeypatch):
    monkeypatch.setattr("lit_dps.readings.lipschitz._CHUNK_ELEMENTS", chunk_elements)
    network, (x, y) = two_layers(), points(20).tensors
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    keep = (
        {"0.weight": torch.rand(5, 4, generator=torch.Generator().manual_seed(1)) < 0.5}
        if masked
        else {}
    )

    def loss(parameters, example):
        features, target = example
        return F.cross_entropy(
            functional_call(network, parameters, (features[None],)), target[None]
        )

    found = gradient_moments(loss, parameters, [(x[:7], y[:7]), (x[7:], y[7:])], keep)

    rows = []
    for i in range(20):
        gradients = torch.autograd.grad(
            F.cross_entropy(network(x[i : i + 1]), y[i : i + 1]), network.parameters()
        )
        named = dict(zip(parameters, gradients, strict=True))
        rows.append(
            flatten(
                named[name] * keep[name] if name in keep else named[name] for name in named
            ).double()
        )
    rows = torch.stack(rows)
    covariance = torch.cov(rows.T, correction=0)
    assert found.variance == pytest.approx(float(covariance.trace()), rel=1e-5)
    assert found.squared_gradient == pytest.approx(float(rows.mean(0).square().sum()), rel=1e-5)
    assert found.loss == pytest.approx(float(F.cross_entropy(network(x), y)), rel=1e-6)


def test_moments_need_an_example():
    with raises_about(ValueError, "example"):
        gradient_moments(lambda p, x: x.sum(), {"w": torch.ones(1)}, iter(()))
