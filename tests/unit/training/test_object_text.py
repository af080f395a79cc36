"""Functions and objects have equal texts only if they make equal objects."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

from lit_dps.training.object_text import describe

SCRIPT = """
import dataclasses, functools
from torch import nn
WIDTH = {width}
@dataclasses.dataclass
class Config:
    depth: int
    marks: set = dataclasses.field(default_factory=lambda: set("abcdefgh"))
CONFIG = Config({depth})
def layer():
    return nn.Linear(WIDTH, 2)
def network():
    return [layer() for _ in range(CONFIG.depth)]
class Net:
    def __init__(self):
        self.layer = layer()
def build(size, lr=0.1):
    return network()
class Make:
    def __init__(self, size):
        self.size = size
    def __call__(self, lr=0.1):
        return network()
"""
FACTORIES = {
    "function": "lambda lr=0.1: network()",
    "class": "lambda lr=0.1: Net()",
    "partial": "functools.partial(build, {size})",
    "object": "Make({size})",
    "method": "Make({size}).__call__",
}


def text_in_script(factory: str, width: int = 3, depth: int = 1, size: int = 3) -> str:
    """The text of a factory that a script defines."""
    names = {"__name__": "__main__"}
    exec(SCRIPT.format(width=width, depth=depth), names)
    return describe(eval(factory.format(size=size), names)).text


@pytest.mark.parametrize("factory", FACTORIES.values(), ids=list(FACTORIES))
def test_a_text_changes_with_values_at_any_depth(factory):
    text = text_in_script(factory)
    assert text_in_script(factory) == text
    assert text_in_script(factory, width=4) != text
    reads_config = factory != FACTORIES["class"]
    assert (text_in_script(factory, depth=2) != text) == reads_config
    assert (text_in_script(factory, size=4) != text) == ("size" in factory)


def test_texts_are_equal_in_two_processes():
    script = "from tests.unit.training.test_object_text import FACTORIES, text_in_script\n"
    script += "print([text_in_script(each) for each in FACTORIES.values()])"
    texts = set()
    for seed in ("1", "2"):  # of the order of sets
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        texts.add(done.stdout)
    assert len(texts) == 1


def build(network, lr=0.1):
    return network


def network_of(width):
    return nn.Sequential(nn.Linear(width, 2), nn.Dropout(width / 1000))


class Make:
    def __init__(self, value):
        self._value = value

    def __call__(self, lr=0.1):
        return self._value


class Stateless:
    def __call__(self, lr=0.1):
        return None


@pytest.mark.parametrize(
    "value",
    [
        lambda width: width,
        network_of,
        lambda width: torch.full((3,), width),
        lambda width: np.full(3, width),
        lambda width: {"widths": [width, nn.ReLU]},
        lambda width: lambda: width,
        lambda width: Make([Make(width)]),
        lambda width: {str(width), "a"},
    ],
)
def test_texts_differ_by_values_in_partials_objects_methods_and_closures(value):
    def closure(width):
        kept = value(width)
        return lambda lr=0.1: kept

    for factory in (
        lambda width: functools.partial(build, value(width)),
        lambda width: functools.partial(build, network=value(width)),
        lambda width: Make(value(width)),
        lambda width: Make(value(width)).__call__,
        closure,
    ):
        one, same, other = describe(factory(64)), describe(factory(64)), describe(factory(128))
        assert one.text == same.text != other.text
        assert one.opaque_part is None


def test_a_part_without_a_comparable_value_is_named():
    lock = threading.Lock()
    assert describe(functools.partial(build, lock)).opaque_part == "args[0]"
    assert describe(Make({"a": lock})).opaque_part == "_value[0]"
    assert describe(Make(np.random.default_rng(0))).opaque_part == "_value"
    assert describe(object()).opaque_part == ""
    assert describe(Make(1)).opaque_part is None and describe(Stateless()).opaque_part is None
    assert describe(lambda lr=0.1: lock).opaque_part is None


def test_an_object_that_contains_itself_has_a_text():
    item = Make(1)
    item.itself = [item]
    other = Make(2)
    other.itself = [other]
    assert describe(item).text != describe(other).text
