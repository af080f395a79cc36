"""The axes of Shallue et al. (2019): the size of the data set, width and depth of networks,
smoothed labels."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Choices, Range
from lit_dps.core.trial import STACKED, Cell, Trial
from lit_dps.data import Digits
from lit_dps.models import MLP, ResNet, ResNet8, SimpleCNN
from lit_dps.module import ImageClassifier
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.runs import train
from tests.support.setups import setup_of
from tests.support.texts import numbers_in
from tests.support.tiny import assert_equal, weights
from tests.unit.engines.test_engine import DATA, GOAL, MODEL, PARAMS, WORKLOAD, quiet  # noqa: F401


def digits(**arguments) -> Digits:
    data = Digits(**arguments)
    data.setup("fit")
    return data


def test_a_smaller_training_set_is_part_of_a_larger_one():
    whole, half = digits(), digits(train_examples=600)
    assert (half.training_size, whole.training_size) == (600, 1350)
    seen = torch.cat(
        [batch.index for batch in islice(half.train_dataloader(), 10)]
    )  # two epochs and more of 128
    assert sorted(set(seen.tolist())) == list(range(600))
    epochs = list(islice(half.epochs(), 2))
    assert all(np.array_equal(np.sort(epoch), np.arange(600)) for epoch in epochs)
    assert not np.array_equal(*epochs)
    assert half.digest == whole.digest and half.validation_size == whole.validation_size
    assert all(
        map(
            np.array_equal,
            islice(digits(train_examples=1350).epochs(), 2),
            islice(whole.epochs(), 2),
        )
    )


def test_the_pruning_pass_is_over_the_smaller_set_in_the_same_order():
    both = digits(), digits(train_examples=9, batch_size=9)
    whole, part = (
        torch.cat([batch.index for batch in data.pruning_dataloader(100)]) for data in both
    )
    assert part.tolist() == [i for i in whole.tolist() if i < 9] and len(part) == 9


@pytest.mark.parametrize(
    ("arguments", "key", "value", "largest"),
    [
        ({"train_examples": 0}, "data.train_examples", 0, 1350),
        ({"train_examples": 1351}, "data.train_examples", 1351, 1350),
        ({"train_examples": 64, "batch_size": 65}, "data.batch_size", 65, 64),
    ],
)
def test_sizes_that_are_not_there_are_refused(arguments, key, value, largest):
    with refuses(key, value) as refused:
        digits(**arguments)
    # The least and the largest size.
    assert numbers_in(refused.value.allowed) == [1, largest]


@pytest.mark.parametrize("order", ["authors", "per_trial"])
def test_an_axis_of_sizes_trains_alike_in_both_engines_up_to_the_whole_set(order):
    asked = [
        Trial(Cell(b, 0.5, (("data.train_examples", n),)), 0, PARAMS)
        for n in (64, 200)
        for b in (10, 64)
    ]
    used = Workload(MODEL, {**DATA, "init_args": {"order": order}}, {"accelerator": "cpu"})
    one, other = (
        train(asked, used, {**GOAL, "max_steps": 20}, lean=lean) for lean in (True, False)
    )
    assert [(r.status, r.curve, r.kept) for r in one] == [
        (r.status, r.curve, r.kept) for r in other
    ]
    assert len({str(r.curve) for r in one}) == 4


def made(kind, **arguments):
    torch.manual_seed(0)
    return kind(**arguments)


def test_the_base_networks_are_to_the_bit_what_they_were():
    known = {
        SimpleCNN: (62_346, 1875.3819241603182),
        ResNet8: (75_050, 3369.8192582002994),
    }  # of commit f7c310f
    for kind, (elements, total) in known.items():
        network = made(kind)
        found = [p.detach().double() for p in network.parameters()]
        assert sum(p.numel() for p in found) == elements
        assert float(sum(p.abs().sum() for p in found)) == pytest.approx(total, rel=1e-9)
    assert_equal(weights(made(SimpleCNN, width=1.0, depth=2)), weights(made(SimpleCNN)))
    assert_equal(weights(made(ResNet, depth=8)), weights(made(ResNet8)))
    assert_equal(weights(made(MLP, width=20, depth=3)), weights(made(MLP, hidden=(20, 20, 20))))
    assert_equal(weights(made(MLP, width=7)), weights(made(MLP, hidden=(7, 7))))


@pytest.mark.parametrize(("width", "filters"), [(0.5, (16, 32)), (2, (64, 128)), (0.1, (3, 6))])
def test_width_scales_the_filters(width, filters):
    network = made(SimpleCNN, width=width)
    assert (network.conv1.out_channels, network.conv2.out_channels) == filters
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    wide = made(ResNet, width=width)
    assert wide.conv.out_channels == round(16 * width) and wide.linear.in_features == round(
        64 * width
    )
    assert wide(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("depth", [8, 20, 32])
def test_a_resnet_has_as_many_layers_as_it_says(depth):
    network = made(ResNet, depth=depth)
    layers = [m for m in network.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == depth
    out = network(torch.randn(4, 3, 32, 32))
    assert out.shape == (4, 10) and out.isfinite().all()


def test_a_deeper_simple_cnn_has_further_convolutions():
    network = made(SimpleCNN, depth=4)
    assert len([m for m in network.modules() if isinstance(m, torch.nn.Conv2d)]) == 4
    x = torch.randn(2, 1, 28, 28)
    for layer in network.further:
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.dirac_(layer.weight)  # the identity on what ReLU left
    shallow = made(SimpleCNN)
    shallow.load_state_dict(
        {k: v for k, v in network.state_dict().items() if not k.startswith("further")}
    )
    torch.testing.assert_close(network(x), shallow(x))


@pytest.mark.parametrize("width", [0.04, 0.045, 1.0])
def test_each_stage_after_the_first_halves_the_resolution(width):
    network = made(ResNet, width=width, depth=14)
    x, sizes = network.conv(torch.randn(1, 3, 32, 32)), []
    for block in network.blocks:
        x = block(x)
        sizes.append(tuple(x.shape[2:]))
    assert sizes == [(32, 32)] * 2 + [(16, 16)] * 2 + [(8, 8)] * 2


@pytest.mark.parametrize(
    ("kind", "arguments", "key", "value"),
    [
        (SimpleCNN, {"width": 0.01}, "model.network.width", 0.01),
        (SimpleCNN, {"width": math.nan}, "model.network.width", math.nan),
        (SimpleCNN, {"depth": 1}, "model.network.depth", 1),
        (ResNet, {"depth": 10}, "model.network.depth", 10),
        (ResNet, {"width": -1}, "model.network.width", -1),
        (MLP, {"width": 0}, "model.network.width", 0),
        (MLP, {"depth": 2}, "model.network.depth", 2),
    ],
)
def test_shapes_that_cannot_be_are_refused(kind, arguments, key, value):
    with refuses(key, value):
        kind(**arguments)


def test_smoothed_labels_are_in_the_training_loss_alone():
    x, y = torch.randn(8, 1, 28, 28), torch.arange(8)
    plain, smooth = (
        made(lambda s=s: ImageClassifier(MLP(hidden=[5]), label_smoothing=s)) for s in (0.0, 0.1)
    )
    logp = F.log_softmax(plain(x), 1)
    expected = -(0.9 * logp[torch.arange(8), y] + 0.1 * logp.mean(1)).mean()
    assert smooth.loss((x, y)).item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(plain.loss((x, y)), F.cross_entropy(plain(x), y))
    assert torch.equal(smooth.per_example_error((x, y)), plain.per_example_error((x, y)))
    with refuses("model.label_smoothing", 1):
        ImageClassifier(MLP(), label_smoothing=1)


def test_stacked_trials_have_each_its_own_smoothing():
    """The losses of smoothed and plain labels are close where a network knows nothing yet."""
    asked = [
        Trial(Cell(16, 0.5), i, {**PARAMS, "model.label_smoothing": (0.0, 1e-5, 0.3)[i % 3]})
        for i in range(6)
    ]
    goal = {**GOAL, "max_steps": 20}
    stacked, alone = (
        {r.trial.point: r for r in train(asked, WORKLOAD, goal, **options)}
        for options in ({"size": 6}, {"lean": False})
    )
    for point, result in alone.items():
        assert stacked[point].curve["train_loss"] == pytest.approx(
            result.curve["train_loss"], rel=1e-3
        )
    assert any(r.flags.get(STACKED) for r in stacked.values())


def identity(model: dict, data: dict, space: dict | None = None) -> dict:
    study = StudyConfig(space={"model.learning_rate": Range(1e-3, 1.0), **(space or {})})
    pruning = {"method": "snip", "biases": "paper", "batch_size": 100}
    workload = Workload(model, data, {"accelerator": "cpu"})
    return setup_of(study, StorageConfig(), workload, GOAL, pruning, {"interval": None}).identity(
        None
    )


def test_the_identity_of_earlier_studies_knows_nothing_of_them():
    def model(network=None, **arguments):
        base = {
            "class_path": "lit_dps.models.SimpleCNN",
            "init_args": {"num_classes": 10, **(network or {})},
        }
        return {**MODEL, "init_args": {**MODEL["init_args"], "network": base, **arguments}}

    before = identity(model(), DATA)
    now = identity(
        model({"width": 1.0, "depth": 2}, label_smoothing=0.0),
        {**DATA, "init_args": {"train_examples": None}},
    )
    assert {**now, "data": DATA} == {**before, "data": DATA} and not now["data"].get("init_args")
    assert identity(model({"width": 0.5}), DATA) != before
    assert (
        identity(model(label_smoothing=0.1), DATA)["model"]["init_args"]["label_smoothing"] == 0.1
    )
    assert identity(model(), {**DATA, "init_args": {"train_examples": 64}}) != before
    searched = identity(
        model(label_smoothing=0.1), DATA, {"model.label_smoothing": Choices([0.0, 0.1])}
    )
    assert "label_smoothing" not in searched["model"]["init_args"]
