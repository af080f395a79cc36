"""Which parts of objects decide the hash of a function, and which are only named."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass

import pytest
import torch
from torch import nn

from lit_dps.core.environment import UNKNOWN, is_same_source, text_version
from lit_dps.training.method_attributes import function_of_member
from lit_dps.training.object_text import code_hashes, describe, known_texts
from tests.unit.training.test_script_code import hashes_in_script

CONFIGS = """
import dataclasses
@dataclasses.dataclass
class Config:
    width: int = 64
    trials: int = 8
class Dotted(dict):
    def __init__(self, **values):
        super().__init__(values)
        self.__dict__ = self
class Checked:
    def __init__(self):
        self.__dict__ = {"width": 64, "trials": 8}
    @property
    def width(self): return self.__dict__["width"] * self.trials
class Counter:
    def __init__(self, width=64): self.width, self.trials = width, 8
    def __call__(self): self.width += 1
plain, dotted, checked, counter = Config(), Dotted(width=64, trials=8), Checked(), Counter()
"""


@pytest.mark.parametrize("name", ["plain", "dotted"])
def test_only_the_attribute_that_the_code_reads_counts(monkeypatch, name):
    function = f"lambda lr=0.1: print({name}.width)"
    before = hashes_in_script(monkeypatch, CONFIGS, function)
    assert set(before) == {"model", f"__main__.{name}.width"}
    more_trials = CONFIGS.replace("trials: int = 8", "trials: int = 9").replace(
        "trials=8", "trials=9"
    )
    assert hashes_in_script(monkeypatch, more_trials, function) == before
    wider = CONFIGS.replace("64", "65")
    assert hashes_in_script(monkeypatch, wider, function) != before


@pytest.mark.parametrize("name", ["checked", "counter"])
def test_an_object_counts_whole_if_a_property_reads_it_or_a_method_stores_it(monkeypatch, name):
    hashes = hashes_in_script(monkeypatch, CONFIGS, f"lambda lr=0.1: print({name}.width)")
    assert f"__main__.{name}" in hashes
    assert hashes.get(f"__main__.{name}.width", UNKNOWN) == UNKNOWN


def test_a_set_of_a_data_class_of_a_library_has_one_order():
    cls = make_dataclass("LoraConfig", ["modules"])
    cls.__module__ = "torch.configs"
    items = [cls(set(order)) for order in ("abcdefgh", "hgfedcba")]
    texts = [describe(each).text for each in items]
    assert texts[0] == texts[1] != describe(cls(set("abc"))).text
    assert describe(items[0]).opaque == ()


def test_many_elements_without_a_text_have_one_name():
    assert describe([object() for _ in range(4)], "parts").opaque == ("parts[]",)
    assert describe([object()] * 2, "parts").opaque == ("parts[0]",)
    three = tuple(f"parts[{i}]" for i in range(3))
    assert describe([object() for _ in range(3)], "parts").opaque == three


def test_linked_objects_that_are_too_deep_are_named():
    chain: list = []
    for _ in range(sys.getrecursionlimit()):
        chain = [chain]
    assert describe(chain, "chain") == ("", {}, ("chain",), False)


def double(grad):
    return 2 * grad


def halve(grad):
    return grad / 2


def hooked(function, place: str) -> nn.Module:
    layer = nn.Linear(2, 2)
    if place == "weight":
        layer.weight.register_hook(function)
    elif place:
        getattr(layer, f"register_{place}_hook")(function)
    return layer


@pytest.mark.parametrize(
    "place", ["weight", "forward", "forward_pre", "full_backward", "full_backward_pre"]
)
def test_the_functions_of_hooks_decide_the_text_of_a_module(place):
    texts = [describe(hooked(each, place)).text for each in (double, halve, double)]
    assert texts[0] == texts[2] != texts[1]
    assert texts[0] != describe(hooked(double, "")).text


def test_long_lists_of_rows_are_compared_by_their_content():
    rows = [[float(i), 1.0] for i in range(2000)]
    texts = [describe(each).text for each in (rows, list(rows), [*rows[:-1], [0.0, 1.0]])]
    assert texts[0] == texts[1] != texts[2]


def test_a_nested_tensor_and_a_name_with_dots_have_a_text():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert describe(nested, "rows").opaque == ("rows",)
    module = nn.Module()
    object.__setattr__(module, "block.rate", 1)
    other = nn.Module()
    object.__setattr__(other, "block.rate", 2)
    assert describe(module).text != describe(other).text


def test_known_parts_are_described_by_their_path():
    layer, other = nn.Linear(1, 1), nn.Linear(2, 2)
    texts = [describe([each], known=known_texts({"layer": each})).text for each in (layer, other)]
    assert texts[0] == texts[1] != describe([layer]).text


def test_byte_code_is_compared_within_one_version_of_python():
    names: dict = {"__name__": "__main__"}
    exec("def make(lr=0.1): return 1", names)
    hashes = code_hashes(names["make"], "model")["model"]
    version = f"text 3 of Python {sys.version_info.major}.{sys.version_info.minor}: "
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert text_version(hashes) == ("text 3", python)
    other = [hashes[0].replace(version, "text 3 of Python 3.99: ")[:-1]]
    assert is_same_source(hashes, other) and not is_same_source(hashes, [hashes[0][:-1]])
    # A function whose file was edited after its import has no source.
    source = [hashes[0].replace(version, "text 3: ")[:-1]]
    assert not is_same_source(hashes, source) and not is_same_source(source, hashes)


def test_rows_of_a_long_list_are_compared_one_by_one():
    rows, others = [1, 11] + [0] * 2_000, [11, 1] + [0] * 2_000
    assert describe(rows).text != describe(others).text


def test_a_member_without_a_truth_value_is_no_function():
    class Column:
        """As columns of polars, whose attributes are expressions."""

        def __getattr__(self, name):
            return self

        def __bool__(self):
            raise TypeError("the truth value is ambiguous")

    assert function_of_member(Column()) is None


WRAPPED = """
import functools
class Scaled:
    def __init__(self, function, factor):
        functools.update_wrapper(self, function)
        self.factor = factor
    def __call__(self): return self.factor
def make(): return 1
make = Scaled(make, 2)
"""


def test_an_object_with_the_name_of_a_function_is_described(monkeypatch):
    one = hashes_in_script(monkeypatch, WRAPPED, "lambda lr=0.1: make()")
    other = hashes_in_script(monkeypatch, WRAPPED.replace("make, 2", "make, 3"), "lambda: make()")
    assert one["__main__.make"] != other["__main__.make"]
