"""Objects of the user are compared with new ones that trials make."""

from __future__ import annotations

import functools
import random
import threading
import time
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from lit_dps.training.user_objects import config_of
from tests.support.errors import refuses


class Mode(Enum):
    A = 1
    B = 2


class Scale:
    def __init__(self, factor: float):
        self.factor = factor

    def apply(self, x):
        return self.factor * x


def smooth_loss(share: float):
    def loss(x, y):
        return nn.functional.cross_entropy(x, y, label_smoothing=share)

    return loss


class AttrDict(dict):
    __getattr__ = dict.__getitem__


# The name of a class that PyTorch has too.
Tanh = type("Tanh", (nn.Module,), {})


class Parts(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(2, 2)
        self.criterion = nn.MSELoss()
        self.active = nn.Tanh()
        self.gate = nn.functional.relu
        self.noise = torch.rand(2)
        self.steps = [Scale(0.5), nn.functional.dropout]
        self.mode = Mode.A
        self.loss_of_class = smooth_loss(0.1)
        self.partial = functools.partial(smooth_loss(0.1), y=0)
        self.settings = AttrDict(width=3)
        self.method = self.refresh
        self.scale = Scale(0.5).apply
        self.layer.register_forward_hook(print)

    def refresh(self) -> None:
        """A method that the object keeps, with weights that training changes."""

    @rank_zero_only
    def on_train_start(self) -> None:
        self.started = 1

    @torch.no_grad()
    def on_fit_start(self) -> None:
        setattr(self, "fold_1", 1)  # noqa: B010
        self.metric = nn.ModuleDict({"mean": MeanMetric()})
        self.add_module("loss", nn.HuberLoss(delta=2.0))

    @functools.cached_property
    def classes(self) -> int:
        return 10

    @property
    def size(self) -> int:
        self.times = 1
        return 3

    @property
    def temperature(self) -> float:
        return self.temp

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.temp = value


class Transformed(LightningDataModule):
    def __init__(self, bs: int = 8):
        super().__init__()
        self.bs = bs
        self.transform = Scale(0.5)
        self.shape = torch.Size([2, 2])
        self.apply = Scale(0.5).apply


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: setattr(net, "criterion", nn.L1Loss()), "the class of criterion"),
        (lambda net: setattr(net, "active", nn.Sigmoid()), "the class of active"),
        (lambda net: setattr(net, "gate", nn.functional.gelu), "gate"),
        (lambda net: setattr(net, "noise", torch.rand(3)), "the shape of noise"),
        (lambda net: setattr(net, "cooling", 2.0), "cooling"),
        (lambda net: setattr(net, "temperature", 2.0), "temp"),
        (lambda net: setattr(net, "added", 2.0), "added"),
        (lambda net: setattr(net.layer, "temperature", 2.0), "layer.temperature"),
        (lambda net: setattr(net, "other", nn.Tanh()), "the class of other"),
        (lambda net: setattr(net, "mode", Mode.B), "mode"),
        (lambda net: setattr(net, "steps", [Scale(0.7), nn.functional.dropout]), "steps"),
        (lambda net: setattr(net, "steps", [Scale(0.5)]), "steps"),
        (lambda net: setattr(net, "loss_of_class", smooth_loss(0.3)), "loss_of_class"),
        (
            lambda net: setattr(net, "partial", functools.partial(smooth_loss(0.3), y=0)),
            "partial",
        ),
        (lambda net: setattr(net, "scale", Scale(0.7).apply), "scale"),
        (lambda net: setattr(net, "method", net.on_fit_start), "method"),
        (lambda net: setattr(net, "active", Tanh()), "the class of active"),
        (lambda net: setattr(net, "settings", AttrDict(width=4)), "settings"),
        (lambda net: net.layer.requires_grad_(False), "layer.weight"),
        (lambda net: net.double(), "layer.weight"),
        (lambda net: net.layer.register_forward_hook(print), "the hooks of layer"),
        (lambda net: net.layer.weight.register_hook(abs), "the hooks of layer"),
    ],
)
def test_an_object_with_replaced_parts_is_refused(change, name):
    net = Parts()
    # Attributes that its methods set may be added.
    net.on_train_start()
    net.on_fit_start()
    assert (net.classes, net.size, net.fold_1) == (10, 3, 1)
    assert config_of("model", net).config["init_args"] == {"lr": 0.1}
    change(net)
    with refuses("model", "Parts") as refused:
        config_of("model", net)
    assert f"but {name} of the object is" in refused.value.allowed


class Lazy(LightningModule):
    def __init__(self, width: int = 3):
        super().__init__()
        self.width = width
        self.layer = nn.LazyLinear(width)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_is_compared_as_long_as_it_has_no_shape():
    net = Lazy(4)
    assert config_of("model", net).config["init_args"] == {"width": 4}
    net.layer(torch.ones(1, 2))
    with refuses("model", "Lazy") as refused:
        config_of("model", net)
    assert "layer.weight of the object is (4, 2)" in refused.value.allowed


class Builtin(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.act = torch.relu
        self.ratio = float("nan")
        self.files = [3, 1, 2, 4, 5, 6, 7, 8]
        random.shuffle(self.files)
        self.start = time.perf_counter()
        self._scale = 1.0


def test_a_compiled_function_and_a_private_attribute_are_compared_and_random_values_are_not():
    net = Builtin()
    note = config_of("model", net).note
    assert "not use these attributes of the object: weights, files, start." in note
    for name, value in (("act", torch.tanh), ("_scale", 2.0), ("ratio", 1.0)):
        net = Builtin()
        setattr(net, name, value)
        with refuses("model", "Builtin") as refused:
            config_of("model", net)
        assert f"{name} of the object is" in refused.value.allowed


class Trained(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(2, 2)
        self.losses = []
        self.best = 0.0
        self.counts = {}
        self.temperature = 1.0
        self.skip = []

    def configure_model(self) -> None:
        self.head = nn.Linear(2, 1)

    def setup(self, stage: str) -> None:
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        return self.layer(x) / self.temperature * len(self.skip)

    def training_step(self, batch, batch_idx):
        self._count(batch)
        self.losses.append(1.0)

    def _count(self, batch):
        self.counts["batches"] = 1

    def on_validation_epoch_end(self) -> None:
        self.best = 0.9

    def heat(self, temperature: float) -> None:
        self.temperature = temperature
        self.extra = 1


def test_values_that_training_stores_are_no_difference_and_those_of_the_user_are():
    net = Trained()
    net.configure_model()
    net.setup("fit")
    net.training_step(None, 0)
    net.on_validation_epoch_end()
    note = config_of("model", net).note
    assert note.endswith("attributes of the object: weights, best, mean, head, losses, counts.")
    for change, name in (
        (lambda net: net.heat(2.0), "temperature"),
        (lambda net: net.skip.append(1), "skip"),
        (lambda net: setattr(net, "lr", 0.2) or setattr(net, "extra", 1), "extra"),
    ):
        net = Trained()
        change(net)
        with refuses("model", "Trained") as refused:
            config_of("model", net)
        assert f"{name} of the object is" in refused.value.allowed


class PrivateScale:
    def __init__(self, factor: float):
        self._factor = factor
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return self._factor * x


class Prepared(LightningDataModule):
    def __init__(self, bs: int = 8):
        super().__init__()
        self.bs = bs
        self.data_train = None
        self.transform = PrivateScale(0.5)

    def setup(self, stage: str) -> None:
        self.data_train = TensorDataset(torch.ones(3))
        self.transform(1)


def test_a_data_module_that_was_used_is_taken_and_its_private_factor_is_compared():
    data = Prepared()
    assert "does not use" not in config_of("data", data).note
    data.setup("fit")
    note = config_of("data", data).note
    assert (
        "new Prepared(bs=8)" in note
        and "does not use these attributes of the object: data_train." in note
    )
    assert "a new one: transform.calls." in note
    data.transform = PrivateScale(0.7)
    with refuses("data", "Prepared") as refused:
        config_of("data", data)
    assert "but transform of the object" in refused.value.allowed


def test_a_data_module_with_another_transform_is_refused():
    data = Transformed()
    assert config_of("data", data).config["init_args"] == {"bs": 8}
    for transform in (Scale(0.7), nn.Identity(), None):
        data.transform = transform
        with refuses("data", "Transformed") as refused:
            config_of("data", data)
        assert "but transform" in refused.value.allowed
    data.transform = Scale(0.5)
    data.apply = Scale(0.7).apply
    with refuses("data", "Transformed") as refused:
        config_of("data", data)
    assert "but apply of the object" in refused.value.allowed
    data.apply = Scale(0.5).apply
    assert config_of("data", data).config["init_args"] == {"bs": 8}
    data.folds = 3
    with refuses("data", "Transformed"):
        config_of("data", data)


class Locked(LightningDataModule):
    """A data module with an attribute that has no text form of its content."""

    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size
        self.lock = threading.Lock()
        self.graph = torch.eye(2).to_sparse()
        self.none = type("Stateless", (), {"__module__": __name__})()
        self.factor = 1.0


def test_attributes_that_cannot_be_compared_are_named():
    note = config_of("data", Locked()).note
    assert "a new one: lock, graph." in note


class Normalized(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.backbone = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.seen.add_(1)
        return self.loss(self.head(self.backbone(batch - self.mean)), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: net.backbone.eval(), "the mode of backbone"),
        (lambda net: net.mean.copy_(torch.ones(2)), "mean"),
        (
            lambda net: setattr(net, "loss", nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))),
            "loss.weight",
        ),
        (lambda net: setattr(net.head, "weight", net.backbone[0].weight), "head.weight"),
        (lambda net: net.backbone[0].requires_grad_(False), "backbone.0.weight"),
    ],
)
def test_modes_buffers_and_tied_weights_of_a_trained_object_are_compared(change, name):
    net = Normalized()
    with refuses("model", "Normalized"):
        change(net)
        config_of("model", net)
    net = Normalized()
    net.training_step(torch.rand(2, 2), 0)
    net.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert config_of("model", net).note.endswith("attributes of the object: weights, seen.")
    assert config_of("model", net.eval()).config["init_args"] == {"lr": 0.1}
    change(net.train())
    if name == "mean":  # training may have changed it
        assert config_of("model", net).note.endswith("weights, mean, seen.")
        return
    with refuses("model", "Normalized") as refused:
        config_of("model", net)
    assert f"but {name} of the object is" in refused.value.allowed


class Sample:
    def __init__(self, data: Samples, vocabulary: dict, label: int):
        self.data = data
        self.vocabulary = vocabulary
        self.label = label


class Samples(LightningDataModule):
    """Samples that refer to each other, and that share a vocabulary."""

    def __init__(self, bs: int = 8):
        super().__init__()
        self.bs = bs
        vocabulary = {f"word {i}": i for i in range(10_000)}
        self.samples = [Sample(self, vocabulary, i) for i in range(1_000)]
        self.first = None
        self.circle = SimpleNamespace(samples=[])
        for i in range(100):
            self.circle.samples.append(Sample(self.circle, vocabulary, i))

    def setup(self, stage: str) -> None:
        self.first = self.circle.samples[0]


def test_each_of_many_samples_is_described_once():
    # Without the texts of earlier samples, this takes exponential time.
    assert config_of("data", Samples()).note == ""
    for change, name in (
        (lambda data: setattr(data.samples[999], "label", 1), "samples"),
        (lambda data: data.samples[0].vocabulary.update({"word 9999": 0}), "samples"),
        (lambda data: setattr(data.circle.samples[99], "label", 1), "circle"),
        (lambda data: setattr(data.circle.samples[99], "data", data.circle.samples[0]), "circle"),
    ):
        data = Samples()
        change(data)
        with refuses("data", "Samples") as refused:
            config_of("data", data)
        assert f"but {name} of the object is" in refused.value.allowed


def test_a_stored_sample_changes_no_text_of_its_circle():
    data = Samples()
    data.setup("fit")
    assert config_of("data", data).note.endswith("attributes of the object: first.")
