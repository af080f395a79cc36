"""From an object, a class or a function to a configuration that makes another one."""

from __future__ import annotations

import functools
from enum import IntEnum, StrEnum

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

import lit_dps
from lit_dps.advice import run as advising_run
from lit_dps.core.environment import SOURCES, changed_parts
from lit_dps.core.registry import class_at
from lit_dps.core.trial import Cell, Trial
from lit_dps.study.script_code import hashes_of_paths
from lit_dps.training.user_objects import OBJECTS, batch_size_key, config_of
from lit_dps.training.workload import Workload
from tests.e2e import advised_user
from tests.support.errors import refuses

HERE = __name__


class Saved(LightningModule):
    def __init__(self, width: int = 4, lr: float = 0.1, names: tuple[str, ...] = ("a",)):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 2)


class ByAttribute(LightningModule):
    def __init__(self, width: int, lr: float = 0.1):
        super().__init__()
        self.width = width
        self.lr = lr
        self.layer = nn.Linear(width, 2)


class Doubled(LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.width = 2 * width


class Forgets(LightningModule):
    def __init__(self, width: int = 4, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(width, 2)


class Holds(LightningModule):
    def __init__(self, network: nn.Module, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters(ignore=["network"])
        self.network = network


class Data(LightningDataModule):
    def __init__(self, table: torch.Tensor, bs: int = 8):
        super().__init__()
        self.table = table
        self.bs = bs


class Plain(LightningDataModule):
    def __init__(self, batch: int = 8):
        super().__init__()
        self.batch = batch

    def setup(self, stage: str) -> None:
        self.examples = 100


def made(config: dict, lr: float) -> LightningModule:
    """The module of a trial with a learning rate."""
    workload = Workload(config, {"class_path": f"{HERE}.Plain"}, {}, "data.batch")
    return workload.module(Trial(Cell(4), 0, {"model.lr": lr}))


def test_an_object_with_hyperparameters_is_made_again_with_them():
    given = config_of("model", Saved(width=6, lr=0.5))
    assert given.config == {
        "class_path": f"{HERE}.Saved",
        "init_args": {"width": 6, "lr": 0.5, "names": ("a",)},
    }
    assert "Saved(width=6, lr=0.5" in given.note and "weights" in given.note
    again = made(given.config, 0.25)
    assert again.layer.weight.shape == (2, 6) and again.hparams.lr == 0.25


def test_hyperparameters_that_were_changed_later_count():
    module = Saved()
    module.hparams.lr = 0.7
    assert config_of("model", module).config["init_args"]["lr"] == 0.7


def test_equal_attributes_are_arguments():
    assert config_of("model", ByAttribute(3)).config["init_args"] == {"width": 3, "lr": 0.1}
    data = Plain(16)
    data.setup("fit")
    assert config_of("data", data).config == {
        "class_path": f"{HERE}.Plain",
        "init_args": {"batch": 16},
    }


def test_what_cannot_be_made_again_is_refused_with_what_to_do():
    changed = ByAttribute(3)
    changed.layer = nn.Linear(3, 5)
    grown = ByAttribute(3)
    grown.head = nn.Linear(2, 2)
    other = ByAttribute(3)
    other.dropout = nn.Dropout(0.5)
    for module, reason in (
        (Doubled(), "width of the object is 4"),
        (Forgets(5), "its argument width is unknown"),
        (Holds(nn.Linear(2, 2)), "its argument network is a Linear"),
        (changed, "layer.weight of the object is (5, 3)"),
        (grown, "head.weight of a new ByAttribute is missing"),
        (other, "the class of dropout of the object is Dropout"),
    ):
        with refuses("model", type(module).__name__) as refused:
            config_of("model", module)
        assert reason in str(refused.value) and "model=lambda" in str(refused.value)
        assert "\n" not in str(refused.value)
    with refuses("data", "Data"):
        config_of("data", Data(torch.ones(2)))
    for given in (3, nn.Linear(2, 2).weight, nn.Linear, lambda lr: Holds(nn.Linear(2, 2), lr)):
        with refuses("model"):
            config_of("model", given)


class AnyArguments(Saved):
    def __init__(self, lr: float = 0.1, **more):
        super().__init__(lr=lr, **more)


class Size(IntEnum):
    SMALL = 4


class Colour(StrEnum):
    RED = "red"


def test_members_of_an_enum_are_no_arguments_because_a_file_has_none():
    for value in (Size.SMALL, Colour.RED, [Size.SMALL], {"a": Colour.RED}):
        for given in (functools.partial(Saved, width=value), lambda lr=value: Saved(lr=lr)):
            with refuses("model"):
                config_of("model", given)
    with refuses("model"):
        config_of("model", ByAttribute(Size.SMALL))


def test_classes_and_partials():
    assert config_of("model", Saved).config == {"class_path": f"{HERE}.Saved"}
    given = config_of("model", functools.partial(Saved, 5, lr=0.3)).config
    assert given["init_args"] == {"width": 5, "lr": 0.3}
    given = config_of("model", functools.partial(AnyArguments, lr=0.3, width=5)).config
    assert given["init_args"] == {"width": 5, "lr": 0.3}
    assert made(given, 0.2).layer.in_features == 5
    with refuses("model", "Holds"):
        config_of("model", functools.partial(Holds, nn.Linear(2, 2)))
    assert config_of("model", "a.B").config == {"class_path": "a.B"}

    class Local(Saved):
        pass

    path = config_of("model", Local).config["class_path"]
    assert path == f"{OBJECTS}.model_Local"
    model = Local
    path_of_data = config_of("data", type("Local", (Plain,), {})).config["class_path"]
    assert path_of_data == f"{OBJECTS}.data_Local"
    assert isinstance(made({"class_path": path}, 0.2), model)


def test_a_function_makes_a_new_object_with_the_values_of_the_trial():
    width = 7
    given = config_of("model", lambda lr=0.1: Holds(nn.Linear(width, 2), lr)).config
    one, other = made(given, 0.25), made(given, 0.5)
    assert type(one) is Holds and one.hparams.lr == 0.25 and other.hparams.lr == 0.5
    assert one.network is not other.network and one.network.in_features == 7
    # Another value in the function is other code, which stored advice refuses.
    before = hashes_of_paths([given["class_path"]])
    width = 8
    again = config_of("model", lambda lr=0.1: Holds(nn.Linear(width, 2), lr)).config
    after = hashes_of_paths([again["class_path"]])
    assert again == given == {"class_path": f"{OBJECTS}.model"}
    assert changed_parts([{SOURCES: before}], {SOURCES: after}, SOURCES) == ["model.width"]
    wrong = config_of("model", lambda lr=0.1: nn.Linear(2, 2)).config
    with refuses("model"):
        made(wrong, 0.1)


class Maker:
    @functools.cache  # noqa: B019
    def make(self, lr: float = 0.1) -> Saved:
        return Saved(lr=lr)


@functools.cache
def width_of_table() -> int:
    return 7


NET = Saved()


def test_a_function_that_returns_an_object_again_is_refused():
    cached = functools.cache(lambda lr=0.1: Saved(lr=lr))
    for section, factory in (
        ("model", cached),
        ("model", functools.partial(cached, lr=0.2)),
        ("model", Maker().make),
        ("model", functools.cache(Saved)),
        ("model", lambda lr=0.1: NET),
        ("data", functools.cache(lambda bs=8: Plain(bs))),
    ):
        make = class_at(config_of(section, factory).config["class_path"])
        first = make()
        with refuses(section):
            make()
        assert first is not None
    # A value that a function reads may be cached.
    config = config_of("model", lambda lr=0.1: Saved(width_of_table(), lr=lr)).config
    one, other = made(config, 0.1), made(config, 0.1)
    assert one is not other and one.layer.in_features == 7


def test_the_key_of_the_batch_size_is_guessed_by_its_name():
    assert batch_size_key({"class_path": f"{HERE}.Plain"}) == "data.batch"
    assert batch_size_key({"class_path": f"{HERE}.Data"}) == "data.bs"
    assert batch_size_key({"class_path": f"{HERE}.Saved"}) is None


def test_advice_for_objects_is_that_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(advising_run, "MIN_MEASURING_SECONDS", -1e3)
    goal = {"error": 0.05, "check_interval": 5, "max_steps": 400}
    advice = lit_dps.advise(
        lambda lr=0.1: advised_user.Module(lr),
        advised_user.Data(),
        goal=goal,
        budget="1s",
        trainer={"accelerator": "cpu"},
        name="objects",
    )
    assert advice.name == "objects" and advice.source == "measured" and advice.exit_code == 3
    assert not len(advice.table) and advice.to_dict()["goal"] == "goal error 0.05"
    assert "Only this script or notebook knows lit_dps_objects.model." in capsys.readouterr().err
    with refuses("--budget"):
        lit_dps.advise(advised_user.Module, advised_user.Data, goal=goal, method="branch")
    with refuses("foo"):
        lit_dps.advise(advised_user.Module, advised_user.Data, goal=goal, budget="1s", foo=3)
    with refuses("data"):
        lit_dps.advise(advised_user.Module, goal=goal, budget="1s")


def test_a_study_takes_objects_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = {
        "model": lambda lr=0.1: advised_user.Module(lr),
        "data": advised_user.Data(16),
        "trainer": {"accelerator": "cpu"},
        "goal": {"error": 0.05, "check_interval": 5, "max_steps": 400},
        "study": {"name": "s", "batch_sizes": [64], "sparsities": [0.0], "trials": 1},
    }
    config["study"]["space"] = {"model.lr": {"low": 0.09, "high": 0.11}}
    with refuses("study.workers", 2):
        lit_dps.run({**config, "study": {**config["study"], "workers": 2}})
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    with refuses("trainer.devices", 2):
        lit_dps.run({**config, "trainer": trainer})
    study = lit_dps.run(config)
    [note] = [line for line in capsys.readouterr().err.splitlines() if "worker" in line]
    assert "lit_dps_objects.model" in note and "lit-dps fit --of s" in note
    assert study.cells["k_star"].tolist() == [50]  # 0.95 (1600 / 64 + 25) = 47.5, checked every 5


def test_a_compiled_model_is_its_model_and_another_module_is_refused():
    compiled = torch.compile(Saved(width=5))
    model = Saved(width=6)
    model.compile()
    for given, width in ((compiled, 5), (model, 6)):
        made = config_of("model", given)
        assert made.config["init_args"]["width"] == width and "not compile" in made.note
    assert "compile" not in config_of("model", Saved(width=5)).note
    with refuses("model", "Linear"):
        config_of("model", nn.Linear(2, 2))
