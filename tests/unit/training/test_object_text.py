"""Functions and objects have equal texts only if they make equal objects."""

from __future__ import annotations

import functools
import linecache
import logging
import re
import subprocess
import sys
import threading
import typing
from collections import UserDict, UserList, defaultdict
from os import environ
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchvision import transforms

from lit_dps.core.environment import UNKNOWN
from lit_dps.training.object_text import MAX_ELEMENTS, code_hashes, describe

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
    """The hashes of a factory that a script defines, and of what its code reads."""
    names = {"__name__": "__main__"}
    exec(SCRIPT.format(width=width, depth=depth), names)
    return str(code_hashes(eval(factory.format(size=size), names), "model"))


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
    seed = "2" if environ.get("PYTHONHASHSEED") == "1" else "1"  # of another order of sets
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[text_in_script(each) for each in FACTORIES.values()]}\n"


def texts_of(item, name: str = ""):
    """The texts of an item and of what its code reads."""
    return describe(item, name)[:2]


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


class AttrDict(dict):
    """The usual dict with attributes, which raises KeyError for an attribute that it lacks."""

    __getattr__ = dict.__getitem__


class Table(list):
    def __init__(self, scale):
        super().__init__([1])
        self.scale = scale


class Settings(dict):
    def __init__(self, **values):
        super().__init__(values)
        self.__dict__ = self


class Slots:
    __slots__ = "width"

    def __init__(self, width):
        self.width = width


class PrivateSlots:
    __slots__ = ("__width",)

    def __init__(self, width):
        self.__width = width


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
        lambda width: [typing.Callable[..., typing.Literal[width]]],
        lambda width: defaultdict(lambda: width),
        lambda width: AttrDict(width=width),
        lambda width: torch.distributions.Normal(torch.zeros(3), torch.full((3,), float(width))),
        lambda width: transforms.Compose([transforms.Lambda(lambda x: x * width)]),
        lambda width: transforms.Lambda(functools.partial(pow, exp=width)),
        lambda width: transforms.Lambda(Make(width).__call__),
        lambda width: torch.distributions.Independent(
            torch.distributions.Normal(torch.zeros(3), torch.full((3,), float(width))), 1
        ),
        lambda width: torch.distributions.AffineTransform(0.0, float(width)),
        lambda width: Settings(width=width),
        lambda width: Table(width),
        lambda width: Slots(width),
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
        assert one[:2] == same[:2] != other[:2]
        assert [part for part in one.opaque if not part.endswith("parameters")] == []


def test_a_part_without_a_comparable_value_is_named():
    lock = threading.Lock()
    assert describe(Make({"a": lock})).opaque == ("_value[0]",)
    assert describe(Make(np.random.default_rng(0))).opaque == ("_value",)
    assert describe(object()).opaque == ("",)
    assert describe(Make(1)).opaque == describe(Stateless()).opaque == ()
    assert describe(transforms.Lambda(Make(lock))).opaque == ("lambd._value",)
    assert texts_of(PrivateSlots(1)) == texts_of(PrivateSlots(1)) != texts_of(PrivateSlots(2))
    assert describe(lambda lr=0.1: lock, "model").opaque == ("model.lock",)
    hashes = code_hashes(functools.partial(build, lock), "model")
    assert hashes["model.args[0]"] == UNKNOWN and hashes["model"] != UNKNOWN


def test_of_a_long_collection_all_rows_count_and_further_objects_are_named():
    rows = [(i, str(i)) for i in range(3000)]
    for value in (list, lambda rows: table_of({"x": [list(row) for row in rows]})):
        text = texts_of(Make(value(rows)))
        assert texts_of(Make(value([*rows[:-1], (0, "1")]))) != text
        assert describe(Make(value(rows))).opaque == ()
    objects = [Make(i) for i in range(1001)]
    assert describe(Make(objects[1:])).opaque == ()
    assert describe(Make(objects)).opaque == ("_value[1000:]",)
    assert describe(Make(dict(enumerate(objects)))).opaque == ("_value[1000:]",)


@pytest.mark.parametrize("column", range(3))
def test_of_a_large_array_all_columns_count(column):
    # Each third element is in one column.
    array = np.zeros((700_001, 3), dtype=np.uint8)
    assert array.size // MAX_ELEMENTS + 1 == 3
    other = array.copy()
    other[:, column] = 1
    assert texts_of(Make(array)) != texts_of(Make(other))
    assert texts_of(Make(torch.tensor(array))) != texts_of(Make(torch.tensor(other)))


def reader_of(value):
    return lambda lr=0.1: value


def test_a_text_does_not_depend_on_the_process(monkeypatch):
    logger = logging.getLogger("of a test")
    functions = [reader_of(logger), reader_of(environ), reader_of(TABLE)]
    before = [texts_of(function) for function in functions]
    monkeypatch.setattr(logger, "level", logging.CRITICAL)
    monkeypatch.setenv("LIT_DPS_TEST", "1")
    with pandas.option_context("display.max_rows", 3, "display.width", 20):
        assert [texts_of(function) for function in functions] == before
    assert texts_of(reader_of(logging.getLogger("of a test"))) == before[0]
    assert texts_of(reader_of(logging.getLogger("of another test"))) != before[0]


def test_a_container_of_a_library_whose_text_form_may_be_short_is_named():
    names: dict = {"__name__": "json.short"}  # a module of the standard library
    exec("class Short:\n    __len__ = lambda self: 3\n    __repr__ = lambda self: 'Short'", names)
    exec("class Cut:\n    __repr__ = lambda self: 'Cut(1, ..., 3)'", names)
    exec("class Whole:\n    __repr__ = lambda self: 'Whole(1)'", names)
    for name, parts in (("Short", ("args[0]",)), ("Cut", ("args[0]",)), ("Whole", ())):
        assert describe(functools.partial(build, names[name]())).opaque == parts


class Unread:
    """Replaces the methods of a collection that read its elements."""

    def keys(self):
        raise OSError("The file is closed.")

    def __iter__(self):
        raise OSError("The file is closed.")


@pytest.mark.parametrize("base", [UserDict, UserList])
def test_a_collection_whose_elements_cannot_be_read_is_named(base):
    cls = type("Closed", (Unread, base), {"__module__": "json.closed", "__repr__": lambda _: "C"})
    assert describe(Make(cls())).opaque == ("_value",)
    assert texts_of(reader_of(cls())) == texts_of(reader_of(cls()))


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
    assert texts_of(one) == texts_of(other)
    assert describe(Make(table(object()))).opaque == ("_value",)
    assert describe(Make(table((1, 2)))).opaque == ()
    assert texts_of(Make(table((1, 2)))) != texts_of(Make(table((1, 3))))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_parameter_without_a_shape_has_a_text():
    lazy, parameter = nn.LazyLinear(2), nn.UninitializedParameter()
    assert texts_of(functools.partial(build, lazy)) != texts_of(
        functools.partial(build, nn.LazyLinear(3))
    )
    assert texts_of(functools.partial(build, parameter))


def test_an_object_that_contains_itself_has_a_text():
    item = Make(1)
    item.itself = [item]
    other = Make(2)
    other.itself = [other]
    assert texts_of(item) != texts_of(other)


def test_compiled_functions_are_named():
    acts = (torch.relu, torch.tanh, nn.functional.gelu, np.tanh, np.mean, max, torch.Tensor.relu)
    texts = [describe(functools.partial(build, act)) for act in acts]
    assert len({each.text for each in texts}) == len(acts)
    assert all(each.opaque == () for each in texts)
    [one, other] = [describe(functools.partial(build, {width: 1}.get)) for width in (1, 2)]
    assert one.text != other.text


def test_a_lambda_is_described_by_its_expression_or_by_its_byte_code_beside_another_one():
    hashes = []
    others = []
    for code in (
        "f = (lambda x=1:\n    x + 1)",
        "f = (lambda x=1:\n    x + 2)",
        "f = (lambda x=1:  x  +  2); y = 3",
        "g, f = lambda x=1: x + 1, lambda x=1: x + 2",
        "g, f = lambda x=1: x + 2, lambda x=1: x + 1",
        "h = lambda: (lambda x=1: x + 2); f = h()",
    ):
        name = f"<cell {len(hashes)}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        names: dict = {"__name__": "__main__"}
        exec(compile(code, name, "exec"), names)
        hashes.append(describe(names["f"]).text)
        if "g" in names:
            others.append(describe(names["g"]).text)
    assert hashes[0] != hashes[1] == hashes[2]
    assert hashes[3] == others[1] == hashes[5] != hashes[4] == others[0]


def test_of_an_object_the_attributes_that_code_reads_are_described():
    args = SimpleNamespace(width=3, trials=8, nested={"depth": 1, "other": 1})

    def hashes():
        names = {"args": args, "len": len, "__name__": "__main__"}
        code = "f = lambda: (args.width, args.nested['depth'])"
        exec(code, names)
        return code_hashes(names["f"], "model")

    before = hashes()
    args.trials, args.nested["other"] = 16, 2
    assert hashes() == before
    args.nested["depth"] = 2
    after = hashes()
    changed = [name for name in after if after[name] != before[name]]
    assert changed == ["__main__.args.nested['depth']"]
    assert "__main__.args.width" in after

    def whole():
        return dict(vars(args))

    text = texts_of(whole)
    args.trials = 32
    assert texts_of(whole) != text


class Cached(Dataset):
    def __init__(self, scale):
        self.scale = scale
        self.cache = {}
        self.file = None

    def __len__(self):
        return 3

    def __getitem__(self, i):
        self.file = threading.Lock()
        self.cache[i] = self.scale * i
        return self.cache[i]


def test_a_data_set_is_described_without_what_reading_it_changes():
    data = Cached(2)
    before = code_hashes(reader_of(data), "data")
    data[1]
    # The study compares the content of data.
    assert code_hashes(reader_of(data), "data") == before and UNKNOWN not in before.values()
    assert code_hashes(reader_of(Cached(3)), "data") != before
    assert describe(data).opaque == ("cache", "file")


def test_a_long_set_has_the_same_text_in_every_order():
    elements = [(i, str(i)) for i in range(3000)]
    text = texts_of(Make(set(elements)))
    assert texts_of(Make(set(reversed(elements)))) == text
    assert texts_of(Make({*elements[1:], (0, "1")})) != text
