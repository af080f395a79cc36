"""A function is edited if its file has only other functions of its name."""

from __future__ import annotations

import pytest

from lit_dps.training.code_text import byte_code, function_of_member, is_edited

CODE = '''
def one(x):
    """Returns one more."""
    return x + 1
class Net:
    def step(self): return 1
class Other:
    def step(self): return 1
'''


@pytest.mark.parametrize(
    ("old", "new", "edited"),
    [
        ("\ndef", "# a comment\n\n\ndef", []),
        ("one more", "x + 1", []),
        ("x + 1", "x + 2", ["one"]),
        ("def one", "def first", []),
        # An equal method of another class does not hide an edited one.
        ("return 1\nclass", "return 2\nclass", ["step"]),
    ],
)
def test_an_edited_function_is_found_and_a_moved_or_removed_one_is_not(tmp_path, old, new, edited):
    file = tmp_path / "code.py"
    file.write_text(CODE)
    names: dict = {}
    exec(compile(CODE, str(file), "exec"), names)
    assert CODE.count(old) == 1
    file.write_text(CODE.replace(old, new))
    functions = [names["one"], names["Net"].step, names["Other"].step]
    assert [each.__name__ for each in functions if is_edited(each.__code__)] == edited


def test_byte_code_has_no_docstrings_and_sets_in_one_order():
    codes = []
    for text in ('"""Doc."""', "pass"):
        names: dict = {}
        exec(f"def f(x):\n    class A:\n        {text}\n    return x in {{'a', 'b'}}", names)
        codes.append(names["f"].__code__)
    assert byte_code(codes[0]) == byte_code(codes[1])
    assert "frozenset" not in byte_code(codes[0])


def test_a_member_without_a_truth_value_is_no_function():
    class Column:
        """As columns of polars, whose attributes are expressions."""

        def __getattr__(self, name):
            return self

        def __bool__(self):
            raise TypeError("the truth value is ambiguous")

    assert function_of_member(Column()) is None
