"""The pattern 2:4, as a method by name."""

from __future__ import annotations

import torch
from torch import nn

from lit_dps.core.trial import Cell, Trial
from lit_dps.testing import check_pruner
from lit_dps.testing.toy import toy_network
from tests.support.errors import refuses
from tests.support.pruners import mask, network
from tests.support.runs import train_one
from tests.unit.pruning.test_pruners_engines import GOAL, WORKLOAD


def test_two_of_each_four_weights_along_the_input_are_kept():
    check_pruner("two_four", sparsities=[0.5])
    module = toy_network(4, 20)
    masks = mask("two_four", network(module), 0.5)
    # The filters have 1 input channel.
    assert {*masks} == {"4.weight", "6.weight"}
    for name, keep in masks.items():
        groups = keep.view(keep.shape[0], keep.shape[1] // 4, 4)
        sizes = module.get_parameter(name).detach().abs().view(groups.shape)
        assert (groups.sum(-1) == 2).all()
        smallest_kept = sizes.masked_fill(~groups, torch.inf).amin(-1)
        assert (smallest_kept >= sizes.masked_fill(groups, 0).amax(-1)).all()
    kept, total = masks.count()
    assert (kept, total) == (390, 780)


def test_another_sparsity_and_a_network_without_groups_are_refused():
    with refuses("study.sparsities", 0.9):
        mask("two_four", network(toy_network(4, 20)), 0.9)
    with refuses("pruning.method", "two_four"):
        mask("two_four", network(nn.Linear(3, 3)), 0.5)


def test_the_loops_train_it_to_the_same_result():
    trial = Trial(Cell(16, 0.5), 0, {"model.learning_rate": 0.1})
    results = [
        train_one(trial, WORKLOAD, GOAL, lean=lean, pruning={"method": "two_four"})
        for lean in (True, False)
    ]
    assert not results[0].failure
    assert results[0].curve == results[1].curve
    kept = [2 * kept == total for kept, total in results[0].kept.values()]
    assert kept and all(kept)
    assert torch.tensor(results[0].curve["train_loss"]).isfinite().all()


def test_a_group_of_a_convolution_is_4_input_channels():
    module = nn.Conv2d(8, 3, 3, bias=False)
    keep = mask("two_four", network(module), 0.5)["weight"]
    groups = keep.view(3, 2, 4, 3, 3)
    assert (groups.sum(2) == 2).all()
    sizes = module.weight.detach().abs().view(groups.shape)
    largest = sizes.topk(2, dim=2).values.amin(2, keepdim=True)
    assert torch.equal(groups, sizes >= largest)
    # 2 input channels with 2 x 2 filters have 8 inputs, but no group of 4 channels.
    with refuses("pruning.method", "two_four"):
        mask("two_four", network(nn.Conv2d(2, 3, 2)), 0.5)
