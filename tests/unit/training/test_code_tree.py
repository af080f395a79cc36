"""The source of a function is found by its name and its byte code, wherever it is in the file."""

from __future__ import annotations

import linecache
import types

import pytest

from lit_dps.training.code_tree import code_text, is_edited, node_at_place, node_of

CODE = '''
def one(x):
    """Returns one more."""
    return x + 1
pair = [lambda x: x + 1, lambda x: (x - 1)]
nested = lambda x: lambda y: x + y
class Net:
    def step(self): return 1
class Other:
    def step(self): return 1
'''


def put(file: str, code: str) -> None:
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)


def names_of(file: str) -> dict:
    put(file, CODE)
    names: dict = {}
    exec(compile(CODE, file, "exec"), names)
    return names


@pytest.mark.parametrize(
    "code", [CODE, "# a comment\n\n" + CODE, CODE.replace("one more", "x + 1")]
)
def test_functions_have_their_source_after_comments_and_docstrings_changed(code):
    names = names_of("<moved>")
    put("<moved>", code)
    assert code_text(names["one"].__code__) == "def one(x):\n    return x + 1"
    assert [code_text(each.__code__) for each in names["pair"]] == [
        "lambda x: x + 1",
        "lambda x: x - 1",
    ]
    assert code_text(names["nested"].__code__) == "lambda x: lambda y: x + y"
    assert code_text(names["nested"](1).__code__) == "lambda y: x + y"
    # Two equal functions have the same text.
    assert code_text(names["Other"].step.__code__) == "def step(self):\n    return 1"
    assert not any(is_edited(names[name].__code__) for name in ("one", "nested"))


def test_an_edited_function_has_no_source_and_a_removed_one_is_not_edited():
    code = names_of("<edited>")["one"].__code__
    put("<edited>", CODE.replace("x + 1", "x + 2"))
    assert is_edited(code) and node_of(code) is None
    put("<edited>", CODE.replace("def one", "def first"))
    assert not is_edited(code) and node_of(code) is None


def test_an_equal_method_of_another_class_does_not_hide_an_edited_one():
    names = names_of("<twins>")
    put("<twins>", CODE.replace("def step(self): return 1", "def step(self): return 2", 1))
    assert is_edited(names["Net"].step.__code__)
    assert not is_edited(names["Other"].step.__code__)


def test_a_function_that_a_decorator_compiled_again_is_found_at_its_place():
    function: types.FunctionType = names_of("<recompiled>")["one"]
    code = function.__code__.replace(co_varnames=("renamed",))
    assert node_of(code) is None
    assert node_at_place(code) is node_of(function.__code__)
