"""First steps differ if a script trains something else, whatever decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.environment import (
    COMPUTED,
    DATA,
    HALF,
    UNKNOWN,
    changed_parts,
    changes_since,
    is_same_computed,
    versions_of,
)
from lit_dps.core.search_space import Choices, Range
from lit_dps.pruning import Magnitude
from lit_dps.study.first_steps import _context
from lit_dps.study.first_steps import first_steps as steps_in
from lit_dps.training.user_objects import config_of
from lit_dps.training.workload import Workload
from tests.support.setups import setup_of
from tests.unit.engines.test_engine import quiet  # noqa: F401

PLAIN = {"width": 4, "scale": 1.0, "momentum": 0.9, "steps": 30, "dropout": 0.1, "share": 1.0}
CONFIG = dict(PLAIN)


class Net(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.first = nn.Linear(784, CONFIG["width"])
        self.last = nn.Linear(CONFIG["width"], 10)
        self.register_buffer("visible", torch.ones(2, 2).tril().bool())
        with torch.no_grad():
            self.first.weight *= CONFIG["scale"]

    def forward(self, x):
        hidden = nn.functional.dropout(self.first(x.flatten(1)), CONFIG["dropout"], self.training)
        return self.last(hidden.relu())

    def training_step(self, batch, i):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, i):
        x, y = batch
        error = (self(x).argmax(1) != y).float().mean()
        self.log("val_error", CONFIG["share"] * error)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr, CONFIG["momentum"])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, CONFIG["steps"])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Net):
    """As a GAN: it steps two optimizers itself."""

    def __init__(self, lr: float = 0.1):
        super().__init__(lr)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), self.lr) for each in (self.first, self.last)]

    def training_step(self, batch, i):
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(x), y))
            optimizer.step()


def setup(model=lambda lr=0.1: Net(lr), method="snip", arguments=None, **study):
    """A study whose model only this process can make; with arguments of the data."""
    config = StudyConfig(
        name="s",
        **{
            "batch_sizes": [32],
            "sparsities": [0.0],
            "trials": 2,
            "space": {"model.lr": Range(0.05, 0.2)},
            **study,
        },
    )
    model = config_of("model", model).config
    data = {"class_path": "lit_dps.data.Digits", "init_args": arguments or {}}
    workload = Workload(model, data, {"accelerator": "cpu"})
    goal = {"error": 0.05, "check_interval": 5, "max_steps": 100}
    return setup_of(config, StorageConfig(), workload, goal, pruning={"method": method})


def first_steps(study, stored=(), **environment):
    """The first steps in an environment, such as hardware="A"."""
    return steps_in(study, {"version.torch": "1", **environment}, stored)


@pytest.fixture(autouse=True)
def plain():
    yield
    CONFIG.update(PLAIN)


def test_first_steps_are_equal_in_two_runs_and_empty_if_all_can_import_the_classes():
    computed = first_steps(setup())
    assert list(computed) == [
        *("parameters", "norm of the initial weights", "optimizer"),
        *("mean learning rate of the schedule", "norm of the trained weights"),
        *("training loss", "val_error"),
    ]
    assert computed["parameters"][0].startswith(f"{784 * 4 + 4 + 40 + 10} ")
    assert "momentum = 0.9" in computed["optimizer"][0] and "StepLR" in computed["optimizer"][0]
    assert UNKNOWN not in computed.values() and first_steps(setup()) == computed
    assert first_steps(setup(Net)) == {}
    manual = first_steps(setup(lambda lr=0.1: Manual(lr)))
    assert "training loss" not in manual and UNKNOWN not in manual.values()


@pytest.mark.parametrize(
    ("key", "value", "first"),
    [
        ("width", 5, "parameters"),
        ("scale", 2.0, "norm of the initial weights"),
        ("momentum", 0.8, "optimizer"),
        ("steps", 31, "optimizer"),
        ("dropout", 0.2, "norm of the trained weights"),
        ("share", 0.5, "val_error"),
    ],
)
def test_other_first_steps_are_named_with_their_values(key, value, first):
    before = {COMPUTED: first_steps(setup())}
    CONFIG[key] = value
    now = {COMPUTED: first_steps(setup(), [before])}
    names = changed_parts([before], now, COMPUTED)
    assert names[0] == first
    [words] = changes_since([before], now)
    for name in names:
        assert f"{now[COMPUTED][name][0]}, was {before[COMPUTED][name][0]}" in words


def test_a_study_with_more_cells_trains_the_stored_trial_again():
    before = {COMPUTED: first_steps(setup())}
    wider = {"batch_sizes": [8, 32], "space": {"model.lr": Range(0.01, 1.0)}}
    now = first_steps(setup(**wider), [before])
    assert {name: now[name] for name in before[COMPUTED]} == before[COMPUTED]
    assert "training loss at B=32" in now
    other = {COMPUTED: first_steps(setup(**wider))}
    assert other[COMPUTED]["training loss"] != before[COMPUTED]["training loss"]
    assert changes_since([before], other) == []  # another trial


def test_arguments_of_the_data_that_change_no_result_hide_no_other_width():
    before = {COMPUTED: first_steps(setup(arguments={"root": "disk", "eval_batch_size": 64}))}
    CONFIG["width"] = 5
    drawn = ["norm of the trained weights", "training loss", "val_error"]
    for arguments, is_drawn in (
        ({"root": "other", "eval_batch_size": 64}, True),
        ({"root": "disk", "eval_batch_size": 32}, False),
    ):
        now = {COMPUTED: first_steps(setup(arguments=arguments), [before])}
        changed = changed_parts([before], now, COMPUTED)
        assert changed == ["parameters", "norm of the initial weights", *(drawn * is_drawn)]


def test_another_processor_compares_no_metric_of_the_goal(monkeypatch):
    before = {COMPUTED: first_steps(setup(), hardware="A")}
    CONFIG["share"] = 0.5
    for hardware, changed in (("A", ["val_error"]), ("B", [])):
        now = {COMPUTED: first_steps(setup(), [before], hardware=hardware)}
        assert changed_parts([before], now, COMPUTED) == changed


def test_each_value_of_an_axis_of_the_model_has_first_steps():
    def make(lr: float = 0.1, width: int = 4):
        CONFIG["width"] = width
        return Net(lr)

    computed = first_steps(setup(make, grid={"model.width": [4, 6], "optim.delay": [0, 1]}))
    parameters = {}
    for name, version in computed.items():
        if "parameters" in name:
            parameters[name] = int(version[0].split()[0])
    assert parameters == {
        "parameters at model.width=4": 784 * 4 + 4 + 40 + 10,
        "parameters at model.width=6": 784 * 6 + 6 + 60 + 10,
    }


RATES = {32: 1.0, 512: 1.0, "sgd": 1.0, "adam": 1.0}


class Looked(Net):
    """Its rate depends on the batch size and on a choice, its schedule on the CONFIG."""

    def __init__(self, lr: float = 0.1, kind: str = "sgd"):
        super().__init__(lr)
        self.kind = kind

    def training_step(self, batch, i):
        factor = RATES[len(batch[0])] * RATES[self.kind]
        return factor * super().training_step(batch, i)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [CONFIG["steps"], 60])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize(
    ("values", "key", "place"),
    [
        (RATES, 512, " at B=512"),
        (RATES, "adam", " at model.kind=adam"),
        (CONFIG, "steps", " at model.kind=sgd"),
        (CONFIG, "power", " at S=0.9"),
    ],
)
def test_values_for_other_batch_sizes_choices_and_late_steps_count(values, key, place, monkeypatch):
    monkeypatch.setitem(CONFIG, "power", 1.0)

    def make(lr: float = 0.1, kind: str = "sgd"):
        return Looked(lr, kind)

    space = {"model.lr": Range(0.05, 0.2), "model.kind": Choices(["sgd", "adam"])}
    grid = {"batch_sizes": [32, 512], "sparsities": [0.0, 0.9], "space": space}
    method = f"{__name__}.Dampened"
    before = {COMPUTED: first_steps(setup(make, method=method, **grid))}
    monkeypatch.setitem(values, key, 31 if key == "steps" else -values[key])
    now = {COMPUTED: first_steps(setup(make, method=method, **grid), [before])}
    changed = changed_parts([before], now, COMPUTED)
    assert any(name.endswith(place) for name in changed)
    if key in RATES or key == "power":
        assert all(name.endswith(place) for name in changed)


class Dampened(Magnitude):
    """Prunes the smallest weights, or the largest ones."""

    def scores(self, network, generator):
        scores = super().scores(network, generator)
        return {name: each ** CONFIG["power"] for name, each in scores.items()}


def test_numbers_without_a_seed_are_unknown():
    generator = torch.Generator()

    def make(lr: float = 0.1):
        net = Net(lr)
        nn.init.uniform_(net.last.bias, generator=generator)
        return net

    computed = first_steps(setup(make))
    assert computed["norm of the initial weights"] == computed["training loss"] == UNKNOWN
    assert UNKNOWN not in (computed["parameters"], computed["optimizer"])

    def fail(lr: float = 0.1):
        raise ValueError

    assert first_steps(setup(fail)) == {"first steps": UNKNOWN}


def test_another_processor_may_round_differently():
    loss = ["2.30512", "2.305123", "trial", "processor"]
    assert is_same_computed(loss, list(loss)) and is_same_computed(loss, UNKNOWN)
    close, far = "2.3055", "2.31"
    for value, processor, is_same in (
        (close, "processor", False),
        (close, "other", True),
        (far, "other", False),
    ):
        assert is_same_computed(loss, [value, value, "trial", processor]) == is_same
    assert is_same_computed(loss, [far, far, "another trial", "processor"])
    for precision, is_same in (("", False), (", half precision", True)):
        half = [far, far, "trial", f"other{precision}"]
        assert is_same_computed([*loss[:3], f"processor{precision}"], half) == is_same
    study = setup()
    for precision, is_half in (("32-true", False), ("bf16-mixed", True)):
        workload = replace(study.workload, trainer={"precision": precision})
        assert (HALF in _context(replace(study, workload=workload), {})) == is_half
    norm = ["nan", "a hash", "trial", "processor"]
    assert is_same_computed(norm, ["nan", "another", "trial", "other"])
    assert not is_same_computed(norm, ["2.3", "another", "trial", "other"])
    parameters = ["1000 (shapes a)", "a", "trial", "processor"]
    assert not is_same_computed(parameters, ["1001 (shapes b)", "b", "trial", "other"])
    texts = ['{"lr": 1, "beta": 2}', '{"lr": 1, "new": 2}', '{"lr": 2}']
    options = [[text, text, "trial", text] for text in texts]
    assert is_same_computed(options[0], options[1]) and not is_same_computed(options[1], options[2])
    on_gpu = ["2.3", "2.3001", "trial", "inexact: H200"]
    assert is_same_computed(on_gpu, ["2.3", "2.3002", *on_gpu[2:]])


def test_a_rough_comparison_hides_no_change_since_an_exact_one():
    def content(value, processor, trial="trial"):
        return {COMPUTED: {"training loss": [value, value, trial, processor]}}

    stored = [content("2.3", "A"), content("2.3001", "B"), {COMPUTED: {"training loss": UNKNOWN}}]
    now = content("2.3002", "A")
    assert changed_parts(stored, now, COMPUTED) == ["training loss"]
    assert changed_parts(stored[1:], now, COMPUTED) == []
    assert changed_parts([content("9", "A", "another trial")], now, COMPUTED) == []
    assert len(versions_of([*stored, now], COMPUTED, "training loss")) == 2
    data = [{DATA: {"": ["1", floats, context]}} for floats, context in (("a", "A"), ("b", "B"))]
    assert changed_parts(data, {DATA: {"": ["1", "c", "A"]}}, DATA) == [""]
    assert changed_parts(data[1:], {DATA: {"": ["1", "c", "A"]}}, DATA) == []
