"""Hashes of the code of a script: its functions, classes, and the constants that they name."""

from __future__ import annotations

import functools
import subprocess
import sys
import types
from os import environ

import pytest

from lit_dps.core.environment import UNKNOWN, is_same_source, text_version
from lit_dps.study.script_code import code_hashes

SCRIPT = """
import dataclasses, enum, functools, typing
import torch
from torch import nn
from torch.nn.functional import relu as act
WIDTH = 3
SIZES = (1, 2, frozenset({"a", "b", "c"}), range(3))
TABLE = {"width": 3}
class Kind(enum.Enum):
    A = "kind"
KIND = Kind.A
class Pair(typing.NamedTuple):
    depth: int = 5
@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.5
CONFIG = Config(0.25)
def quiet(function):
    def call(*args):
        return function(*args)
    return call
@quiet
def layer():
    return nn.Linear(WIDTH, 2)
@torch.no_grad()
def network():
    return [layer() for _ in SIZES], act, KIND, Pair(), CONFIG.rate, TABLE["width"]
class Base:
    momentum = 0.9
    @property
    def size(self):
        return 6
class Net(Base):
    \"\"\"A network.\"\"\"
    losses = []
    def __init__(self, dropout=0.1):
        self.layer = layer()
        self.inner = [lambda x: x + 7]
    @torch.no_grad()
    def forward(self):
        return 8
    step = functools.partialmethod(forward, 9)
class Make:
    def __call__(self, lr=0.1):
        return network()
def build(size, lr=0.1):
    return network()
def closure(share):
    return lambda lr=0.1: share
"""
FACTORIES = {
    "function": "lambda lr=0.1: network()",
    "class": "lambda lr=0.1: Net()",
    "partial": "functools.partial(build, 3)",
    "object": "Make()",
    "method": "Make().__call__",
    "closure": "closure(network)",
}


def hashes_in_script(code: str, item: str):
    """The hashes of an item of a script."""
    names = types.ModuleType("__main__")
    exec(compile(code, "<script>", "exec"), vars(names))
    return code_hashes({"model": eval(item, vars(names))})


def all_hashes() -> list:
    return [hashes_in_script(SCRIPT, each) for each in FACTORIES.values()]


CHANGES = {
    "WIDTH = 3": "WIDTH = 4",
    "(1, 2,": "(1, 3,",
    '"c"}': '"d"}',
    "range(3)": "range(4)",
    "Kind.A\n": "Kind('kind').value\n",
    'A = "kind"': 'A = "other"',
    "relu as act": "gelu as act",
    "depth: int = 5": "depth: int = 6",
    "Config(0.25)": "Config(0.3)",
    "nn.Linear(WIDTH, 2)": "nn.Linear(WIDTH, 3)",
    "return function(*args)": "return None",
}
CHANGES_OF_CLASS = {
    "momentum = 0.9": "momentum = 0.8",
    "return 6": "return 0",
    "dropout=0.1": "dropout=0.2",
    "x + 7": "x - 7",
    "return 8": "return 0",
    "forward, 9": "forward, 0",
}


@pytest.mark.parametrize("name", FACTORIES)
def test_hashes_change_with_the_code_and_the_constants_that_code_names(name):
    before = hashes_in_script(SCRIPT, FACTORIES[name])
    assert hashes_in_script(SCRIPT, FACTORIES[name]) == before
    assert UNKNOWN not in before.values()
    changes = CHANGES | CHANGES_OF_CLASS
    if name == "class":
        reached = {"WIDTH = 3", "nn.Linear(WIDTH, 2)", "return function(*args)", *CHANGES_OF_CLASS}
    else:
        reached = set(CHANGES)
    for old, new in changes.items():
        assert SCRIPT.count(old) == 1
        after = hashes_in_script(SCRIPT.replace(old, new), FACTORIES[name])
        assert (after != before) == (old in reached), old


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A network."""', '"""Another docstring."""'),
        ('    """A network."""\n', ""),
        ("WIDTH = 3", "WIDTH = 3  # a comment\n\n"),
        ("momentum = 0.9", "momentum = (0.9)"),
        ('{"width": 3}', '{"width": 4}'),  # the first steps compare it
        ("losses = []", "losses = [1]"),
    ],
)
def test_comments_and_values_that_code_may_change_are_left_out(old, new):
    for item in (FACTORIES["class"], FACTORIES["function"]):
        before = hashes_in_script(SCRIPT, item)
        assert hashes_in_script(SCRIPT.replace(old, new), item) == before


def test_values_of_a_closure_and_arguments_of_a_partial_count():
    for one, other, name in (
        ("closure(3)", "closure(4)", "model.share"),
        ("functools.partial(build, 3)", "functools.partial(build, 4)", "model"),
        ("closure(functools.cache(build))", "closure(build)", "model.share"),
    ):
        before, after = hashes_in_script(SCRIPT, one), hashes_in_script(SCRIPT, other)
        assert [each for each in after if after[each] != before[each]] == [name]
    arrays = [hashes_in_script(SCRIPT, f"closure(torch.full((3,), {i}))") for i in range(2)]
    assert arrays[0] == arrays[1]


def test_hashes_are_equal_in_two_processes():
    script = "from tests.unit.study.test_script_code import all_hashes\nprint(all_hashes())"
    seed = "2" if environ.get("PYTHONHASHSEED") == "1" else "1"  # of another order of sets
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{all_hashes()}\n"


FILLED = """
losses, total = [], 0
class Net:
    count, kept = 0, 1
    def step(self, loss):
        global total
        losses.append(loss)
        total += loss
        Net.count += 1
        type(self).added = 1
        return self.kept
def closure(calls=0):
    def make(lr=0.1):
        nonlocal calls
        calls += 1
        return Net()
    return make
"""


def test_what_training_changes_is_unknown_and_does_not_change_the_code():
    names = types.ModuleType("__main__")
    exec(FILLED, vars(names))
    make = names.closure()
    before = code_hashes({"model": make})
    unknown = {name for name, each in before.items() if each == UNKNOWN}
    assert unknown == {"__main__.total", "__main__.Net.count", "model.calls"}
    make().step(0.5)
    after = code_hashes({"model": make})
    assert {name: after[name] for name in before} == before
    names.Net.kept = 2
    changed = code_hashes({"model": make})
    assert [name for name in before if changed[name] != before[name]] == ["__main__.Net.kept"]


SHARED = """
def maker(k):
    return lambda lr=0.1: k
COUNT = 0
def model(lr=0.1):
    global COUNT
    COUNT += 1
    return maker(2)
"""


def test_functions_of_one_path_have_one_hash_together():
    def both(code: str, model: str = "maker(1)", data: str = "lambda bs=8: [maker(2), COUNT]"):
        names = types.ModuleType("__main__")
        exec(code, vars(names))
        held = {"model": model, "data": f"[(lambda f: lambda bs=8: f)(each) for each in [{data}]]"}
        items = {name: eval(text, vars(names)) for name, text in held.items()}
        items["data"] = items["data"][0]
        return code_hashes(items)

    before = both(SHARED, "lambda lr=0.1: (lambda: 1)", "lambda: 2")
    for model, data in (("lambda lr=0.1: (lambda: 3)", "lambda: 2"), ("maker(1)", "lambda: 3")):
        assert both(SHARED, model, data) != before
    closures = both(SHARED, "lambda lr=0.1, f=maker(1): f", "maker(2)")
    path = "__main__.maker.k"
    assert both(SHARED, "lambda lr=0.1, f=maker(3): f", "maker(2)")[path] != closures[path]
    assert both(SHARED, "lambda lr=0.1, f=maker(1): f", "maker(3)")[path] != closures[path]
    assert both(SHARED, "model", "lambda: COUNT")["__main__.COUNT"] == UNKNOWN


STORES = """
class Meta(type):
    def change(cls): cls.b = 1
class Net(metaclass=Meta):
    a, b, c, d, e, f, g, h = range(8)
    def __init__(self, rate=0.1):
        self.a = rate
        self.a += rate.a
        self.other, self.a = self.a, 2
        self.inner = lambda: setattr(self, "x", 1)
        def later():
            self.a = 3
            self.a *= 3
    @property
    def size(self):
        self.a = rate = 1
        return rate
    @classmethod
    def count(cls): cls.c += 1
    def step(self):
        type(self).d += 1
        Net.e = self.a
        self.net.f = 1
    @staticmethod
    def reset(net): net.g = 0
def model(lr=0.1):
    Net.h += 1
    return Net()
"""


def test_an_attribute_that_a_method_stores_in_its_object_is_no_attribute_of_the_class():
    hashes = hashes_in_script(STORES, "Net")
    unknown = {name for name, each in hashes.items() if each == UNKNOWN}
    assert unknown == {f"model.{name}" for name in "bcdefg"}
    after = hashes_in_script(STORES.replace("range(8)", "(9, *range(1, 8))"), "Net")
    assert [name for name in hashes if after[name] != hashes[name]] == ["model.a"]
    assert hashes_in_script(STORES, "model")["__main__.Net.h"] == UNKNOWN


@pytest.mark.parametrize(
    "value",
    [
        "{'warm': warm}",
        "[(1, {'inner': [warm]})]",
        "{warm, Step}",
        "Library(warm)",
        "Library([Library(warm), 3])",
        "{'steps': [functools.partial(warm, 1)]}",
        "[Step()]",
    ],
)
def test_functions_and_classes_in_values_count(value):
    code = "import functools, types\nLibrary = lambda f: types.SimpleNamespace(transform=f)\n"
    code += "def warm(x=1):\n    return x + RATE\nRATE = 3\nclass Step:\n    size = warm\n"
    code += f"VALUES = {value}\ndef use():\n    return VALUES\n"
    before = hashes_in_script(code, "use")
    assert UNKNOWN not in before.values()
    for old, new, name in (("x + R", "x - R", "warm"), ("RATE = 3", "RATE = 4", "RATE")):
        after = hashes_in_script(code.replace(old, new), "use")
        assert [each for each in before if after[each] != before[each]] == [f"__main__.{name}"]
    # The values themselves are left to the first steps.
    after = hashes_in_script(code.replace("def use", "VALUES = [VALUES, 7]\ndef use"), "use")
    assert after == before


def test_values_that_contain_themselves_and_many_values_are_read_once():
    code = (
        "def warm(): return 1\nVALUES = [warm]\nfor _ in range(100):\n    VALUES.append(VALUES)\n"
    )
    code += "MANY = [[i] for i in range(100_000)]\nNUMBERS = list(range(100_000))\n"
    code += "def use(): return VALUES, MANY, NUMBERS\n"
    hashes = hashes_in_script(code, "use")
    assert hashes.keys() == {"model", "__main__.warm"}


def test_defaults_of_a_pydantic_model_are_constants():
    pytest.importorskip("pydantic")
    code = "import pydantic\nclass Settings(pydantic.BaseModel):\n    width: int = 2\n"
    before = hashes_in_script(code, "lambda lr=0.1: Settings()")
    assert hashes_in_script(code, "lambda lr=0.1: Settings()") == before
    after = hashes_in_script(code.replace("2", "3"), "lambda lr=0.1: Settings()")
    changed = [name for name in before if after[name] != before[name]]
    assert changed == ["__main__.Settings.width"]


def test_local_variables_are_no_globals():
    code = "rate = 3\ndef outer(rate=1):\n    return [rate for _ in range(3)]\n"
    assert hashes_in_script(code, "outer").keys() == {"model"}


def test_a_method_that_lit_dps_adds_changes_no_class():
    code = "class Net:\n    def wrongness(self, x): return x\n"
    before = hashes_in_script(code, "Net")
    added = "[setattr(Net, 'per_example_error', Net.wrongness), Net][1]"
    assert hashes_in_script(code, added) == before
    both = code + "    def per_example_error(self, x): return -x\n"
    assert hashes_in_script(both, "Net") != before


def test_code_is_compared_within_one_version_of_python_and_constants_in_all():
    hashes = hashes_in_script(SCRIPT, FACTORIES["function"])
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert text_version(hashes["model"]) == ("text 4", python)
    assert text_version(hashes["__main__.WIDTH"]) == ("text 4", "")
    edited = hashes["model"][0][:-1]
    assert is_same_source(hashes["model"], [edited.replace(python, "Python 3.99")])
    assert not is_same_source(hashes["model"], [edited])


def test_functions_of_other_modules_count_by_their_path():
    hashes = code_hashes({"model": functools.partial(subprocess.run, 1)})
    assert hashes.keys() == {"model"}
    assert hashes != code_hashes({"model": functools.partial(subprocess.call, 1)})
