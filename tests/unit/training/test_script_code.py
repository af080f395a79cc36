"""Hashes of the code of a script: its functions, classes, and the globals that they read."""

from __future__ import annotations

import linecache
import sys
import types

import pytest

from lit_dps.core.environment import UNKNOWN
from lit_dps.training.object_text import code_hashes

CLASSES = """
import typing, collections, enum, logging, dataclasses
class Config(typing.NamedTuple):
    width: int = 64
    def network(self): return "relu"
class Table(dict):
    def network(self): return "relu"
class Row(list):
    def network(self): return "relu"
class Marks(set):
    def network(self): return "relu"
class Kind(enum.Enum):
    A = 1
    def network(self): return "relu"
@dataclasses.dataclass
class Plan:
    kind: Kind
    steps: int = 3
    def network(self): return logging.getLogger(__name__), LOG
LOG = logging.getLogger(__name__)
VALUES = [Config(), Table(a=1), Row([1]), Marks([1]), Kind.A, Plan(Kind.A)]
"""


def hashes_in_script(monkeypatch, code: str, function: str, module: str = "__main__"):
    """The hashes of a function of a script."""
    names = types.ModuleType(module)
    monkeypatch.setitem(sys.modules, module, names)
    file = f"<script {hash(code)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), vars(names))
    return code_hashes(eval(function, vars(names)), "model")


@pytest.mark.parametrize("i", range(5))
def test_methods_of_collections_and_of_members_of_an_enum_are_described(monkeypatch, i):
    function = f"lambda lr=0.1: VALUES[{i}].network()"
    before = hashes_in_script(monkeypatch, CLASSES, function)
    assert hashes_in_script(monkeypatch, CLASSES, function) == before
    parts = CLASSES.split('"relu"')
    parts[i] += '"tanh"' + parts.pop(i + 1)
    after = hashes_in_script(monkeypatch, '"relu"'.join(parts), function)
    assert UNKNOWN not in before.values() and after != before
    # Methods that Python makes for a NamedTuple may differ between its versions.
    assert all(name.startswith(("model", "__main__.")) for name in before)
    if i == 0:
        wider = CLASSES.replace("width: int = 64", "width: int = 65")
        assert hashes_in_script(monkeypatch, wider, function) != before


METHODS = """
import dataclasses, functools, typing, torch
class Config(typing.NamedTuple):
    width: int = 64
    @torch.no_grad()
    def scaled(self): return "relu"
@dataclasses.dataclass
class Plan:
    steps: int = 3
    @torch.no_grad()
    def scaled(self): return "relu"
class Net:
    def step(self, stage, beta): return stage, beta
    training_step = functools.partialmethod(step, "train", beta="relu")
VALUES = [Config(), Plan(), Net()]
"""


@pytest.mark.parametrize(("i", "method"), [(0, "scaled"), (1, "scaled"), (2, "training_step")])
def test_decorated_methods_and_the_arguments_of_a_partial_method_are_described(
    monkeypatch, i, method
):
    function = f"lambda lr=0.1: VALUES[{i}].{method}()"
    before = hashes_in_script(monkeypatch, METHODS, function)
    assert hashes_in_script(monkeypatch, METHODS, function) == before
    parts = METHODS.split('"relu"')
    parts[i] += '"tanh"' + parts.pop(i + 1)
    assert hashes_in_script(monkeypatch, '"relu"'.join(parts), function) != before
    assert UNKNOWN not in before.values()
    # No method that Python makes is read, and none of its modules.
    assert all(name.startswith(("model", "__main__.")) for name in before)


HISTORY = """
from torch import nn
class Net(nn.Module):
    losses = []
    widths = [64]
    def training_step(self, batch, i):
        self.losses.append(batch)
        return self.widths
"""


def test_a_list_of_a_class_that_training_fills_is_named_and_others_are_compared(monkeypatch):
    def hashes(losses, width):
        code = HISTORY.replace("[64]", f"[{width}]").replace("losses = []", f"losses = {losses}")
        return hashes_in_script(monkeypatch, code, "lambda lr=0.1: Net()")

    before = hashes([], 64)
    assert before["__main__.Net.losses"] == UNKNOWN
    script = sys.modules["__main__"]
    script.Net.losses.append(0.5)
    assert code_hashes(eval("lambda lr=0.1: Net()", vars(script)), "model") == before
    assert hashes([], 65) != before


def test_loggers_and_names_of_a_script_are_equal_in_its_workers(monkeypatch):
    function = "lambda lr=0.1: (LOG, VALUES[5].network())"
    before = hashes_in_script(monkeypatch, CLASSES, function)
    assert hashes_in_script(monkeypatch, CLASSES, function, "__mp_main__") == before
    assert {"__main__.LOG", "__main__.Plan", "__main__.Kind"} <= before.keys()
    # A field without a default has no value that cannot be compared.
    assert UNKNOWN not in before.values()
    changed = CLASSES.replace("steps: int", "steps: float")
    assert hashes_in_script(monkeypatch, changed, function) != before


FILLED = """
import settings_of_a_test as settings, ops_of_a_test as ops
losses, total, counts, args = [], 0, {"calls": 0, "width": 3}, settings.Args()
unused, kept = [], []
class Net:
    def step(self, loss):
        global total, created
        losses.append(loss)
        total = total + loss
        counts["calls"] += 1
        args.last[0] = loss
        settings.CACHE[loss] = 1
        created = loss
        unused = [1]
        unused.append(2)
        return created
    def end(self):
        return sum(losses), counts["width"], args.width, len(kept), ops.add(ops.SCALE)
"""


@pytest.fixture
def filled(monkeypatch):
    """The hashes of a factory of the script above, and its globals."""
    settings, ops = types.ModuleType("settings_of_a_test"), types.ModuleType("ops_of_a_test")
    exec("class Args:\n    def __init__(self): self.width, self.last = 3, [0]", vars(settings))
    vars(settings).update(CACHE={}, WIDTH=3, OTHER=3)
    vars(ops).update(add=max, SCALE=3)
    for module in (settings, ops):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    function = "lambda lr=0.1: (Net(), settings.WIDTH)"
    hashes_in_script(monkeypatch, FILLED, function)
    names = vars(sys.modules["__main__"])
    make = eval(function, names)
    return names, lambda: code_hashes(make, "model")


def test_globals_that_code_fills_are_named_and_others_are_compared(filled):
    names, hashes = filled
    before = hashes()
    net = names["Net"]()
    net.step(0.5)
    net.step(0.7)
    after = hashes()
    changed = [each for each in before if before[each] not in (UNKNOWN, after.get(each))]
    assert changed == []
    main = ("losses", "total", "counts", "args.last")
    filled_names = {f"__main__.{each}" for each in main} | {"settings_of_a_test.CACHE"}
    assert filled_names <= {each for each in before if before[each] == UNKNOWN}
    assert before["__main__.Net"] != UNKNOWN and "__main__.unused" not in before
    for name, change in {
        "__main__.counts['width']": lambda: names["counts"].update(width=4),
        "__main__.args.width": lambda: setattr(names["args"], "width", 4),
        "__main__.kept": lambda: names["kept"].append(1),
        "ops_of_a_test.SCALE": lambda: setattr(names["ops"], "SCALE", 4),
        "settings_of_a_test.WIDTH": lambda: setattr(names["settings"], "WIDTH", 4),
    }.items():
        before = hashes()
        change()
        after = hashes()
        assert [each for each in before if after.get(each) != before[each]] == [name]


READING = """
WIDTH = rate = 3
def outer(rate=1):
    scaled = [rate * each for each in range(3)]
    def inner():
        return rate
    return scaled, inner
def closure(kept):
    def make(lr=0.1):
        class Net:
            width = kept
        return Net, outer()
    return make
"""


def test_local_variables_are_no_globals_and_the_body_of_a_class_reads_outer_ones(monkeypatch):
    before = hashes_in_script(monkeypatch, READING, "closure(3)")
    assert before.keys() == {"model", "model.kept", "__main__.outer"}
    after = hashes_in_script(monkeypatch, READING, "closure(4)")
    assert [name for name in before if after[name] != before[name]] == ["model.kept"]


def test_a_method_that_lit_dps_adds_changes_no_class(monkeypatch):
    code = "class Net:\n    def wrongness(self, x): return x\n"
    before = hashes_in_script(monkeypatch, code, "Net")
    function = "[setattr(Net, 'per_example_error', Net.wrongness), Net][1]"
    assert hashes_in_script(monkeypatch, code, function) == before
    both = code + "    def per_example_error(self, x): return -x\n"
    assert hashes_in_script(monkeypatch, both, "Net") != before


SPECIAL = """
def quiet(method):
    def call(*args):
        return method(*args)
    return call
def twice(cls):
    cls.__call__ = lambda self: 2
    return cls
def element(self, i):
    return 2
@twice
class Net:
    __getitem__ = element
    @quiet
    def __init__(self):
        self.width = 2
"""


@pytest.mark.parametrize("old", ["self: 2", "return 2", "width = 2"])
def test_special_methods_count_if_they_are_decorated_replaced_or_assigned(monkeypatch, old):
    before = hashes_in_script(monkeypatch, SPECIAL, "Net")
    assert hashes_in_script(monkeypatch, SPECIAL, "Net") == before
    assert UNKNOWN not in before.values()
    assert (
        hashes_in_script(monkeypatch, SPECIAL.replace(old, old.replace("2", "3")), "Net") != before
    )


def test_defaults_of_a_pydantic_model_are_described(monkeypatch):
    pytest.importorskip("pydantic")
    code = "import pydantic\nclass Settings(pydantic.BaseModel):\n    width: int = 2\n"
    before = hashes_in_script(monkeypatch, code, "lambda lr=0.1: Settings()")
    assert hashes_in_script(monkeypatch, code, "lambda lr=0.1: Settings()") == before
    after = hashes_in_script(monkeypatch, code.replace("2", "3"), "lambda lr=0.1: Settings()")
    assert [name for name in before if after[name] != before[name]] == ["__main__.Settings"]
