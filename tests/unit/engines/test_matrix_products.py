"""Convolutions as matrix products: equal to PyTorch's, also stacked, and the same training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell
from lit_dps.engines.matrix_products import ConvolutionsAsProducts
from lit_dps.engines.stack import StackedNetworks
from tests.support.conformance import assert_conform
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import EXAMPLES, GOAL, RESNET, both, trials, workload

OTHERS = [{}, {"stride": 2, "padding": 1}, {"stride": (1, 2), "padding": (0, 2)}, {"padding": (1,)}]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    ).requires_grad_()


@pytest.mark.parametrize("others", OTHERS, ids=str)
@pytest.mark.parametrize("own_images", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_of_stacked_convolutions(others, own_images, biased):
    x = drawn(3, 5, 4, 9, 11) if own_images else drawn(5, 4, 9, 11)
    given = [x, drawn(3, 6, 4, 3, 2), *([drawn(3, 6)] if biased else [])]
    call = vmap(
        lambda *each: F.conv2d(*each, **others), (0 if own_images else None, 0, 0)[: len(given)]
    )
    weights = torch.randn(call(*given).shape, dtype=torch.float64)

    def found() -> tuple[torch.Tensor, ...]:
        out = call(*given)
        return out, *torch.autograd.grad((out * weights).sum(), given)

    plain = found()
    with ConvolutionsAsProducts():
        ours = found()
    for theirs, mine in zip(plain, ours, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("others", [{"groups": 2}, {"dilation": 2}, {"padding": "same"}], ids=str)
def test_others_are_left_to_pytorch(others):
    x, w = drawn(2, 4, 8, 8), drawn(6, 4 // others.get("groups", 1), 3, 3)
    with ConvolutionsAsProducts():
        ours = F.conv2d(x, w, **others)
    assert torch.equal(ours, F.conv2d(x, w, **others))


def test_a_module_is_the_same_by_products():
    module, x = torch.nn.Conv2d(3, 5, 3, stride=2, padding=1), torch.randn(2, 3, 8, 8)
    with ConvolutionsAsProducts():
        ours = module(x)
    torch.testing.assert_close(ours, module(x))


@pytest.mark.parametrize(
    ("products", "at_all"), [(20, True), pytest.param(19, False, marks=pytest.mark.long)]
)
def test_trials_end_as_alone_where_batches_are_small_enough_for_products(
    monkeypatch, products, at_all
):
    taken = []
    make = StackedNetworks.__init__

    def make_with_limit(networks, runs):
        make(networks, runs)
        networks._matmul_limit = products  # 0 on a CPU

    monkeypatch.setattr(StackedNetworks, "__init__", make_with_limit)
    monkeypatch.setattr(
        ConvolutionsAsProducts,
        "__enter__",
        lambda self, was=ConvolutionsAsProducts.__enter__: taken.append(1) or was(self),
    )
    asked = trials(Cell(20, 0.0), Cell(20, 0.9), rates=[0.05], momentum=0.8)
    ours, reference = both(
        workload(network=RESNET, optimizer="nesterov"), asked, {**GOAL, "max_steps": 4}
    )
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []
    assert bool(taken) is at_all
