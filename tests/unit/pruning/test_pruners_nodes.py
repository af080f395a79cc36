"""Pruning of whole nodes: as if they were cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_dps.models import MLP, ResNet8, SimpleCNN
from lit_dps.pruning.snap import best_nodes, hidden_layers, mask_of, node_scores
from tests.support.errors import refuses
from tests.support.pruners import images, mask, network, small


@pytest.mark.parametrize("norm", [False, True])
def test_a_masked_node_is_one_that_is_cut(norm):
    module = small(norm=norm).eval()
    x, y = images()
    if norm:
        (
            module[1].weight.data.uniform_(0.5, 2),
            module[1].bias.data.normal_(),
            module[1].running_mean.normal_(),
        )
    last = len(module) - 3
    kept_nodes = {"0": torch.tensor([1, 0, 1, 1]).bool(), str(last): torch.arange(20) % 3 != 0}
    cut = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        *([nn.BatchNorm2d(3)] if norm else []),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 13),
        nn.ReLU(),
        nn.Linear(13, 3),
    ).eval()
    keep = kept_nodes["0"]
    with torch.no_grad():
        cut[0].weight.copy_(module[0].weight[keep]), cut[0].bias.copy_(module[0].bias[keep])
        if norm:
            for name in ("weight", "bias", "running_mean", "running_var"):
                getattr(cut[1], name).copy_(getattr(module[1], name)[keep])
        columns, rows = keep.repeat_interleave(9), kept_nodes[str(last)]
        (
            cut[last].weight.copy_(module[last].weight[rows][:, columns]),
            cut[last].bias.copy_(module[last].bias[rows]),
        )
        cut[-1].weight.copy_(module[-1].weight[:, rows]), cut[-1].bias.copy_(module[-1].bias)
        expected = cut(x)
        found = mask_of(module, hidden_layers(module), kept_nodes)
        found.apply_to_weights(module)
        torch.testing.assert_close(module(x), expected)
    assert found["0.weight"].sum() == 27 and found["0.bias"].sum() == 3
    assert found[f"{last}.weight"].sum() == 13 * 27 and found[f"{last + 2}.weight"].sum() == 13 * 3


def test_the_score_of_a_node_is_its_output_times_the_gradient_there():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = images()
    net = network(module, (x, y))
    found = node_scores(net, ["1"], net.batches())["1"]
    total = torch.zeros(6).double()
    for a, b in zip(x.split(8), y.split(8), strict=True):
        out = (
            (a.flatten(1).double() @ module[1].weight.T + module[1].bias).detach().requires_grad_()
        )
        F.cross_entropy(module[3](F.relu(out)), b).backward()
        total += (out.grad * out).sum(0)
    torch.testing.assert_close(found, total.abs().detach(), rtol=1e-10, atol=1e-14)


def test_every_layer_keeps_a_node_and_the_count_is_that_of_nodes():
    chosen = best_nodes({"a": torch.tensor([0.1, 0.2]), "b": torch.tensor([3.0, 4.0, 5.0])}, 5, 0.4)
    assert chosen["a"].tolist() == [False, True] and chosen["b"].tolist() == [False, True, True]
    for method in ("snap", "snap_it"):
        found = mask(method, network(small()), 0.75)
        nodes = [int(found[name].flatten(1).any(1).sum()) for name in ("0.weight", "4.weight")]
        assert sum(nodes) == 6 and min(nodes) >= 1


class Bare(nn.Module):
    """Uses a layer twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.last(self.layer(self.layer(x.flatten(1))))


def test_what_cannot_be_cut_is_refused():
    with refuses("pruning.method", "snap") as refused:
        hidden_layers(ResNet8())
    assert "ResNet8" in refused.value.allowed
    with refuses("pruning.method", "snap_it") as refused:
        mask("snap_it", network(Bare()), 0.5)
    assert "Bare" in refused.value.allowed
    with refuses("pruning.method", "snap"):
        hidden_layers(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    assert [layer.name for layer in hidden_layers(SimpleCNN())] == ["conv1", "conv2"]
    assert [layer.name for layer in hidden_layers(MLP())] == ["layers.1", "layers.3"]
