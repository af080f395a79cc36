"""Objects of a configuration: their arguments, their errors, and that generators stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_dps.core.trial import Cell, Trial
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


PLAIN = {"other": {"class_path": f"{__name__}.Part"}, "steps": 7, "kind": "b", "names": ["x"]}


def test_an_object_has_the_arguments_of_its_configuration_and_leaves_generators_alone():
    used = workload("Plain", **PLAIN)
    with preserve_rng_state():
        before = torch.get_rng_state()
        made = used.build(TRIAL)
        assert torch.equal(torch.get_rng_state(), before)
    assert made.module.arguments == (0.25, 7, "b", ["x"], False)
    assert made.module.part.sizes == (4, 2) and isinstance(made.module.other, Part)


@pytest.mark.parametrize(
    ("name", "arguments", "attribute", "expected"),
    [
        ("WithFunction", {"call": "math.floor"}, "call", __import__("math").floor),
        ("WithType", {"layer": "torch.nn.Conv2d"}, "layer", nn.Conv2d),
        ("WithShape", {"shape": {"width": 5}}, "shape", Shape(5)),
        ("WithAny", {}, "others", {}),
    ],
)
def test_arguments_may_be_functions_types_and_dataclasses(name, arguments, attribute, expected):
    for rate in (0.25, 0.5):
        trial = Trial(Cell(16), 3, {"model.learning_rate": rate})
        module = workload(name, **arguments).build(trial).module
        assert getattr(module, attribute) == expected
        assert module.arguments[0] == rate
        assert isinstance(module.part, Part)


def test_the_error_of_a_class_is_raised():
    trial = Trial(Cell(16), 3, {"model.learning_rate": 2.0})
    with raises_about(ValueError, "the rate is too large"):
        workload("Plain").build(trial)
