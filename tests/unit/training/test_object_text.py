"""Functions and objects have equal texts only if they make equal objects."""

from __future__ import annotations

import functools
import logging
import re
import subprocess
import sys
import threading
import typing
from collections import UserDict, UserList
from os import environ
from types import MappingProxyType

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

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


TABLE = pandas.DataFrame({"x": range(1000)})


def build(network, lr=0.1):
    return network


def network_of(width):
    return nn.Sequential(nn.Linear(width, 2), nn.Dropout(width / 1000))


class Make:
    def __init__(self, value):
        self._value = value

    def __call__(self, lr=0.1):
        return self._value


def table_of(columns, index=None):
    return pandas.DataFrame(columns, index=index)


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
        lambda width: table_of({"x": range(width, width + 1000)}),
        lambda width: table_of({"x": [0] * 500 + [width] + [0] * 500}),
        lambda width: table_of({str(width): [1]}),
        lambda width: table_of({"x": [[width]]}),
        lambda width: table_of({"x": [1]}, index=[width]),
        lambda width: pandas.Series([1], name=str(width)),
        lambda width: pandas.Series([1.0], dtype=f"float{width // 2}"),
        lambda width: TensorDataset(torch.full((3,), width)),
        lambda width: re.compile("a" * 300 + str(width)),
        lambda width: functools.cache(lambda: width),
        lambda width: MappingProxyType({"width": width}),
        lambda width: np.str_(width),
        lambda width: range(width),
        lambda width: np.dtype(f"float{width // 2}"),
        lambda width: UserList([width]),
        lambda width: {width: 1}.keys(),
        lambda width: {1: width}.values(),
        lambda width: {1: width}.items(),
        lambda width: tuple[typing.Literal[width], ...],
        lambda width: [typing.Callable[..., typing.Literal[width]], sys.stdout],
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


def reader_of(value):
    return lambda lr=0.1: value


def test_a_text_does_not_depend_on_the_process(monkeypatch):
    logger = logging.getLogger("of a test")
    functions = [reader_of(logger), reader_of(environ), reader_of(TABLE)]
    before = [describe(function).text for function in functions]
    monkeypatch.setattr(logger, "level", logging.CRITICAL)
    monkeypatch.setenv("LIT_DPS_TEST", "1")
    with pandas.option_context("display.max_rows", 3, "display.width", 20):
        assert [describe(function).text for function in functions] == before
    assert describe(reader_of(logging.getLogger("of a test"))).text == before[0]
    assert describe(reader_of(logging.getLogger("of another test"))).text != before[0]


def test_a_container_of_a_library_whose_text_form_may_be_short_is_named():
    names: dict = {"__name__": "json.short"}  # a module of the standard library
    exec("class Short:\n    __len__ = lambda self: 3\n    __repr__ = lambda self: 'Short'", names)
    exec("class Cut:\n    __repr__ = lambda self: 'Cut(1, ..., 3)'", names)
    exec("class Whole:\n    __repr__ = lambda self: 'Whole(1)'", names)
    for name, part in (("Short", "args[0]"), ("Cut", "args[0]"), ("Whole", None)):
        assert describe(functools.partial(build, names[name]())).opaque_part == part


class Unread:
    """Replaces the methods of a collection that read its elements."""

    def keys(self):
        raise OSError("The file is closed.")

    def __iter__(self):
        raise OSError("The file is closed.")


@pytest.mark.parametrize("base", [UserDict, UserList])
def test_a_collection_whose_elements_cannot_be_read_is_named(base):
    cls = type("Closed", (Unread, base), {"__module__": "json.closed", "__repr__": lambda _: "C"})
    assert describe(Make(cls())).opaque_part == "_value"
    assert describe(reader_of(cls())).text == describe(reader_of(cls())).text


@pytest.mark.parametrize(
    "table",
    [
        lambda cell: table_of({"x": [1, cell]}),
        lambda cell: table_of({"x": [1, 2]}, index=["a", (cell, 1)]),
        lambda cell: pandas.Series(["a", cell]),
        lambda cell: pandas.Index(["a", cell]),
    ],
)
def test_a_table_with_an_address_in_a_cell_is_named(table):
    one, other = reader_of(table(object())), reader_of(table(object()))
    assert describe(one).text == describe(other).text
    assert describe(Make(table(object()))).opaque_part == "_value"
    assert describe(Make(table((1, 2)))).opaque_part is None
    assert describe(Make(table((1, 2)))).text != describe(Make(table((1, 3)))).text


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_parameter_without_a_shape_has_a_text():
    lazy, parameter = nn.LazyLinear(2), nn.UninitializedParameter()
    assert (
        describe(functools.partial(build, lazy)).text
        != describe(functools.partial(build, nn.LazyLinear(3))).text
    )
    assert describe(functools.partial(build, parameter)).text


def test_an_object_that_contains_itself_has_a_text():
    item = Make(1)
    item.itself = [item]
    other = Make(2)
    other.itself = [other]
    assert describe(item).text != describe(other).text
