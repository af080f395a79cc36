"""Pruning methods at their limits: nothing pruned, fewer elements than layers, ties, scores that
are numbers."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

import lit_dps.pruning.iterative as iterative
import lit_dps.pruning.synflow as synflow
from lit_dps.core.trial import Cell, Trial
from lit_dps.parallel import ranks
from lit_dps.pruning import PRUNERS, Network, OneShot, pruner_of
from lit_dps.pruning.start import initialize_pruned
from tests.support.pruners import (
    AT_START,
    GENERAL,
    equal,
    images,
    kept,
    mask,
    network,
    scores,
    small,
)
from tests.support.ranks import same_on_ranks
from tests.support.runs import train_one
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.pruning.test_pruners_engines import GOAL, PARAMS, WORKLOAD

RANDOM_BY_LAYER = ("random_layerwise", "smart_ratio", "shuffle", "rigl", "set")
EXACT = [method for method in GENERAL if PRUNERS[method].hits_count]


@contextmanager
def watched_scores():
    """Gives all that the methods in rounds rank."""
    seen = []

    def noting(top_k):
        return lambda found, sparsity: seen.append(found) or top_k(found, sparsity)

    patches = [
        mock.patch.object(module, "top_k", noting(module.top_k)) for module in (iterative, synflow)
    ]
    with patches[0], patches[1]:
        yield seen


@pytest.mark.parametrize("method", [m for m in AT_START if m not in RANDOM_BY_LAYER])
def test_all_scores_are_finite_in_float32(method):
    torch.manual_seed(0)
    deep = nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(30)), nn.Linear(64, 3))
    for module in (small(norm=True), deep):
        net = network(module)
        if issubclass(PRUNERS[method], OneShot):
            every = [scores(method, net)]
        elif method.startswith("snap"):
            every = [] if module is deep else [mask(method, net, 0.5)]
        else:
            with watched_scores() as every:
                mask(method, net, 0.9)
            assert len(every) >= pruner_of(method).rounds
        for found in every:
            assert all(score.isfinite().all() for score in found.values())


@pytest.mark.parametrize("method", GENERAL)
def test_at_sparsity_0_all_is_kept(method):
    found = mask(method, network(small()), 0.0)
    assert all(keep.all() for keep in found.values())


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("keep", [1, 2])
def test_fewer_elements_than_layers_are_kept_to_the_number(method, keep):
    total = sum(p.numel() for p in network(small()).parameters.values())
    found = mask(method, network(small()), 1 - keep / total)
    assert kept(found) == keep and equal(found, mask(method, network(small()), 1 - keep / total))


@pytest.mark.parametrize("method", EXACT)
def test_ties_give_the_exact_count_and_the_same_mask_again(method):
    module = small()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.1)
    x, y = images()
    data = torch.ones_like(x), y
    total = sum(p.numel() for p in module.parameters())
    found = [mask(method, network(module, data), 0.7) for _ in range(2)]
    assert kept(found[0]) == round(0.3 * total) and equal(*found)


@pytest.mark.parametrize("method", GENERAL)
def test_the_weights_that_are_scored_are_those_that_are_trained(method):
    module = small(norm=True)
    before = copy.deepcopy(module.state_dict())
    net = network(copy.deepcopy(module))
    found = mask(method, net, 0.6)
    initialize_pruned("original", module, found, None)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name] * found[name] if name in found else before[name]), (
            name
        )


def shared(module: nn.Module, data, size: int) -> Network:
    """A network whose batches the ranks take in turn."""
    whole = network(module, data, size)
    own = [batch for i, batch in enumerate(whole.batches()) if ranks.is_mine(i)]
    return Network(**{**vars(whole), "batches": lambda: iter(own)})


def grasp_scores(size: int, per_class: int) -> list:
    x, y = images()
    found = scores("grasp", shared(small(), (x, y), size), per_class=per_class)
    return [score.tolist() for score in found.values()]


@pytest.mark.parametrize(("size", "per_class"), [(4, 3), (5, 4), (24, 2), (8, 100)])
def test_grasp_of_some_examples_a_class_takes_the_same_ones_on_two_ranks(size, per_class):
    alone, together = grasp_scores(size, per_class), same_on_ranks(2, grasp_scores, size, per_class)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-6, atol=1e-12)


def grasp_in_a_trial() -> tuple:
    pruning = {"method": "grasp", "options": {"per_class": 5}}
    result = train_one(Trial(Cell(16, 0.8), 1, PARAMS), WORKLOAD, GOAL, lean=False, pruning=pruning)
    return result.kept, result.curve["train_loss"]


def test_a_trial_of_two_ranks_is_pruned_by_grasp_of_some_examples_a_class_as_one_of_one_process():
    counts, losses = same_on_ranks(2, grasp_in_a_trial)
    alone = grasp_in_a_trial()
    assert counts == alone[0] and losses == pytest.approx(alone[1], rel=1e-4)
