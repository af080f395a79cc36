"""Convolutions that skip pruned weights compute what dense ones do, up to rounding, and trials
train by them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import SPARSE_KERNELS, Cell, Status, Trial
from lit_dps.engines import sparse
from lit_dps.engines.sparse import DENSEST, skip_pruned
from lit_dps.models import SimpleCNN
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.workload import Workload
from tests.support.runs import train
from tests.unit.engines.test_engine import DATA, GOAL, PARAMS, quiet  # noqa: F401

pytest.importorskip("numba", reason="lit_dps[sparse] is not installed")


def pruned(layer: nn.Conv2d, share: float = 0.1, seed: int = 0) -> torch.Tensor:
    """A mask of a layer that keeps about a share of its weights; the others are set to zero."""
    keep = torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(seed)) < share
    with torch.no_grad():
        layer.weight.mul_(keep)
    return keep


def gradients(layer: nn.Conv2d, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy.to(y.dtype))
    return {
        "y": y.detach(),
        "x": x.grad,
        **{name: p.grad.clone() for name, p in layer.named_parameters()},
    }


@pytest.mark.parametrize("batch", [1, 3, 16, 37])
@pytest.mark.parametrize(
    "channels, filters, kernel, padding, size, bias",
    [
        (3, 5, (5, 5), 0, (12, 12), True),
        (4, 6, (3, 2), (1, 2), (7, 9), True),
        (8, 2, (1, 1), 0, (4, 5), False),
    ],
)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_values_and_gradients_are_those_of_a_dense_convolution(
    batch, channels, filters, kernel, padding, size, bias, memory
):
    torch.manual_seed(batch)
    layer = nn.Conv2d(channels, filters, kernel, padding=padding, bias=bias).to(
        memory_format=memory
    )
    keep = pruned(layer)
    exact = nn.Conv2d(channels, filters, kernel, padding=padding, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(batch, channels, *size).contiguous(memory_format=memory)
    dy = torch.randn(exact(x.double()).shape)
    expected = gradients(exact, x.double(), dy)
    expected["weight"] = expected["weight"] * keep
    assert skip_pruned(layer, {"weight": keep}) == [""]
    for name, value in gradients(layer, x, dy).items():
        torch.testing.assert_close(
            value.double(), expected[name], rtol=1e-5, atol=1e-5 * batch, msg=name
        )
        assert value.dtype is torch.float32


def test_filters_without_a_weight_give_their_bias_and_what_is_not_finite_stays_so():
    layer = nn.Conv2d(2, 3, 3)
    keep = pruned(layer, share=0.0)
    keep[1, 0, 1, 1] = True
    skip_pruned(layer, {"weight": keep})
    x = torch.randn(4, 2, 6, 6)
    x[2, 0, 3, 3] = torch.nan
    y = layer(x)
    assert torch.equal(y[:, 0], layer.bias[0].expand(4, 4, 4))
    assert y[2, 1].isnan().any() and y[[0, 1, 3]].isfinite().all()


def test_a_second_derivative_is_refused():
    layer = nn.Conv2d(2, 3, 3)
    skip_pruned(layer, {"weight": pruned(layer)})
    x = torch.randn(4, 2, 6, 6, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class Odd(nn.Conv2d):
    """A convolution of somebody's own."""


def test_layers_that_cannot_or_need_not_skip_stay_as_they_are():
    layers = {
        "few": nn.Conv2d(4, 4, 3),
        "stride": nn.Conv2d(4, 4, 3, stride=2),
        "dilation": nn.Conv2d(4, 4, 3, dilation=2),
        "groups": nn.Conv2d(4, 4, 3, groups=2),
        "same": nn.Conv2d(4, 4, 3, padding="same"),
        "circular": nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        "own": Odd(4, 4, 3),
        "linear": nn.Linear(4, 4),
        "many": nn.Conv2d(4, 4, 3),
        "unpruned": nn.Conv2d(4, 4, 3),
    }
    mask = {
        f"{n}.weight": pruned(m) if isinstance(m, nn.Conv2d) else m.weight > 0
        for n, m in layers.items()
    }
    mask["many.weight"] = torch.rand(4, 4, 3, 3) < 2 * DENSEST
    del mask["unpruned.weight"]
    assert skip_pruned(nn.ModuleDict(layers), mask) == ["few"]


def test_doubles_are_convolved_as_they_were():
    layer = nn.Conv2d(2, 3, 3)
    keep = pruned(layer)
    skip_pruned(layer, {"weight": keep})
    layer.double()
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    assert torch.equal(layer(x), F.conv2d(x, layer.weight, layer.bias))


MODEL = {
    "class_path": "lit_dps.module.ImageClassifier",
    "init_args": {
        "network": {
            "class_path": "lit_dps.models.SimpleCNN",
            "init_args": {"image_shape": [1, 28, 28]},
        },
        "optimizer": "momentum",
    },
}
WORKLOAD = Workload(MODEL, DATA, {"accelerator": "cpu"})
SPARSEST = Trial(Cell(16, 0.9), 1, PARAMS)
STEPS = {**GOAL, "error": 1e-6, "check_interval": 4, "max_steps": 24}


def test_a_trial_trains_by_them_and_says_so():
    (ours,), (dense,) = (train([SPARSEST], WORKLOAD, STEPS, skips=skips) for skips in (True, False))
    assert (
        ours.observed == {**dense.observed, SPARSE_KERNELS: 1}
        and SPARSE_KERNELS not in dense.observed
    )
    assert ours.curve["step"] == dense.curve["step"] and ours.kept == dense.kept
    # six checks after four steps each: rounding moves an example of 179 at most
    assert ours.curve["val_error"] == pytest.approx(dense.curve["val_error"], abs=2 / 179)
    assert not ours.timed and dense.timed  # a dense network does not take these seconds


def test_a_dense_trial_is_the_same_to_the_bit():
    trial = Trial(Cell(16, 0.0), 1, PARAMS)
    ours, dense = (
        dataclasses.replace(*train([trial], WORKLOAD, STEPS, skips=skips), seconds=0.0, timed={})
        for skips in (True, False)
    )
    assert ours == dense


def test_a_trial_that_paused_goes_on_as_an_unbroken_one(tmp_path):
    found = Checkpoints(tmp_path, "uid", 0)
    (whole,) = train([SPARSEST], WORKLOAD, STEPS, skips=True)
    (paused,) = train(
        [SPARSEST], WORKLOAD, STEPS, skips=True, pause=lambda cell: 12, checkpoints=found
    )
    assert paused.status is Status.PAUSED and paused.steps_run == 12
    (gone_on,) = train([SPARSEST], WORKLOAD, STEPS, skips=True, checkpoints=found)
    assert gone_on.curve == whole.curve and gone_on.observed == whole.observed


def test_without_numba_the_engine_is_refused(monkeypatch):
    monkeypatch.setattr(sparse, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"study.engine: 'sparse' is not allowed; .*Numba"):
        sparse.check_sparse()


def test_the_network_of_the_paper_skips_in_its_large_convolution_alone():
    network = SimpleCNN()
    mask = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in network.named_parameters()}
    mask["conv1.weight"][:, :, :3] = True
    assert skip_pruned(network, mask) == ["conv2"]
