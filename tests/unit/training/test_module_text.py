"""Modules have equal texts only if they train in the same way."""

from __future__ import annotations

from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torchmetrics import MeanMetric

from lit_dps.training.object_text import code_hashes, describe
from tests.unit.training.test_object_text import Make, reader_of, texts_of


class Body(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        vars(self).update(settings)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x


class Private(nn.Module):
    def __init__(self, value):
        super().__init__()
        self._value = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.functional.relu, nn.functional.gelu),
        (torch.relu, torch.tanh),
        ({"rate": 1}, {"rate": 2}),
        (Enum("Mode", {"A": 1}).A, Enum("Mode", {"A": 2}).A),
        (Make(1), Make(2)),
        (nn.BCELoss(torch.tensor(1.0)), nn.BCELoss(torch.tensor(2.0))),
        (torch.tensor([1.0, 9.0]), torch.tensor([9.0, 1.0])),
        (np.ones(2), np.zeros(2)),
        (np.float32(1), np.float32(2)),
        ({"a"}, {"b"}),
        (torch.float32, torch.float16),
        (torch.device("cpu"), torch.device("meta")),
    ],
)
def test_a_module_is_described_by_its_settings(one, other):
    text = texts_of(reader_of(Body(act=one)), "model")
    assert texts_of(reader_of(Body(act=one)), "model") == text
    assert texts_of(reader_of(Body(act=other)), "model") != text
    assert texts_of(reader_of(Private(one))) == texts_of(reader_of(Private(one)))
    assert texts_of(reader_of(Private(one))) != texts_of(reader_of(Private(other)))
    used = Body(act=one)
    used(1)
    described = describe(reader_of(used), "model")
    assert described[:2] == text and described.opaque == ("model.value.calls",)


def test_a_pruned_weight_is_no_setting():
    layers = [prune.identity(nn.Linear(2, 2), "weight") for _ in range(2)]
    assert texts_of(reader_of(layers[0])) == texts_of(reader_of(layers[1]))
    described = describe(reader_of(layers[0]), "model")
    hooks = "model.value.hooks[0]"
    assert described.opaque == (hooks, "model.value.weight", "model.value.parameters")


def test_states_of_a_metric_are_no_settings():
    metric = MeanMetric()
    before = texts_of(reader_of(metric))
    metric.update(3.0)
    assert texts_of(reader_of(metric)) == before


def test_buffers_are_compared_and_weights_are_named():
    loss = [reader_of(nn.BCEWithLogitsLoss(pos_weight=torch.tensor(x))) for x in (1.0, 1.0, 2.0)]
    assert texts_of(loss[0]) == texts_of(loss[1]) != texts_of(loss[2])
    norm = nn.BatchNorm1d(2)
    before = texts_of(reader_of(norm))
    norm(torch.randn(4, 2))
    assert texts_of(reader_of(norm)) == before
    assert describe(reader_of(norm), "model").opaque == ("model.value.parameters",)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[0].requires_grad_(False),
        lambda net: net[1].eval(),
        lambda net: net.eval(),
        lambda net: net.double(),
        lambda net: setattr(net[2], "weight", net[0].weight),
    ],
)
def test_a_module_is_described_by_its_mode_and_by_what_it_trains(change):
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    factory = reader_of(network)
    before = code_hashes(factory, "model")
    change(network)
    assert code_hashes(factory, "model") != before
