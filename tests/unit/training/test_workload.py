"""Objects of a configuration: those that jsonargparse would make, with fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_dps.core.trial import Cell, Trial
from lit_dps.training import workload as workload_module
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.workload import Workload
from tests.support.errors import raises_about

DATA = {"class_path": "lit_dps.data.Digits"}
TRIAL = Trial(Cell(16), 3, {"model.learning_rate": 0.25})


@dataclass
class Shape:
    width: int = 2


class Part(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (2, 3), name: str = "part"):
        super().__init__()
        self.sizes, self.name = sizes, name
        self.weight = nn.Parameter(torch.randn(sizes))


class Plain(LightningModule):
    def __init__(
        self,
        part: nn.Module,
        other: Part | None = None,
        learning_rate: float = 0.1,
        steps: int | None = None,
        kind: Literal["a", "b"] = "a",
        names: list[str] | None = None,
        flag: bool = False,
    ):
        super().__init__()
        if learning_rate > 1:
            raise ValueError("the rate is too large")
        self.arguments = (learning_rate, steps, kind, names, flag)
        self.part, self.other = part, other


class WithFunction(Plain):
    def __init__(self, part: nn.Module, call: Callable = len, learning_rate: float = 0.1):
        super().__init__(part, learning_rate=learning_rate)
        self.call = call


class WithType(Plain):
    def __init__(self, part: nn.Module, layer: type = nn.Linear, learning_rate: float = 0.1):
        super().__init__(part, learning_rate=learning_rate)
        self.layer = layer


class WithShape(Plain):
    def __init__(self, part: nn.Module, shape: Shape, learning_rate: float = 0.1):
        super().__init__(part, learning_rate=learning_rate)
        self.shape = shape


class WithAny(Plain):
    def __init__(self, part, learning_rate: float = 0.1, **others):
        super().__init__(part, learning_rate=learning_rate)
        self.others = others


def workload(name: str, **arguments) -> Workload:
    part = {"class_path": f"{__name__}.Part", "init_args": {"sizes": [4, 2]}}
    model = {"class_path": f"{__name__}.{name}", "init_args": {"part": part, **arguments}}
    return Workload(model, DATA, {"accelerator": "cpu"})


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The classes of models and parts that are called without jsonargparse."""
    names = []
    original = workload_module._construct

    def construct(parsed):
        names.append(parsed.class_path.rpartition(".")[2])
        return original(parsed)

    monkeypatch.setattr(workload_module, "_construct", construct)
    return names


PLAIN = {"other": {"class_path": f"{__name__}.Part"}, "steps": 7, "kind": "b", "names": ["x"]}


def test_plain_arguments_make_the_object_that_jsonargparse_makes(made, monkeypatch):
    used = workload("Plain", **PLAIN)
    with preserve_rng_state():
        before = torch.get_rng_state()
        ours = used.build(TRIAL)
        assert torch.equal(torch.get_rng_state(), before)
    assert made == ["Digits", "Plain", "Part", "Part"]
    monkeypatch.setattr(workload_module, "_is_plain", lambda parsed: False)
    theirs = used.build(TRIAL)
    assert ours.module.arguments == theirs.module.arguments == (0.25, 7, "b", ["x"], False)
    assert ours.module.part.sizes == theirs.module.part.sizes == (4, 2)
    assert vars(ours.data).keys() == vars(theirs.data).keys()
    states = ours.module.state_dict(), theirs.module.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize(
    ("name", "arguments", "attribute", "expected"),
    [
        ("WithFunction", {"call": "math.floor"}, "call", __import__("math").floor),
        ("WithType", {"layer": "torch.nn.Conv2d"}, "layer", nn.Conv2d),
        ("WithShape", {"shape": {"width": 5}}, "shape", Shape(5)),
        ("WithAny", {}, "others", {}),
    ],
)
def test_other_arguments_are_left_to_jsonargparse(made, name, arguments, attribute, expected):
    for rate in (0.25, 0.5):
        trial = Trial(Cell(16), 3, {"model.learning_rate": rate})
        module = workload(name, **arguments).build(trial).module
        assert getattr(module, attribute) == expected
        assert module.arguments[0] == rate
        assert isinstance(module.part, Part)
    assert name not in made


def test_the_error_of_a_class_is_that_of_jsonargparse(made, monkeypatch):
    trial = Trial(Cell(16), 3, {"model.learning_rate": 2.0})
    with raises_about(ValueError, "the rate is too large") as ours:
        workload("Plain").build(trial)
    assert "Plain" in made
    monkeypatch.setattr(workload_module, "_is_plain", lambda parsed: False)
    with raises_about(ValueError, "the rate is too large") as theirs:
        workload("Plain").build(trial)
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
