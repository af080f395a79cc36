"""The code of a function: its syntax tree, and the global and outer values that it reads."""

from __future__ import annotations

import ast
import dis
import linecache
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import getattr_static
from typing import Any, NamedTuple

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# From Python 3.12 on, the body of a class reads with LOAD_FROM_DICT_OR.
_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_OUTER_READS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_PADDING = ("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP")
# Functions whose results differ in each process.
_CLOCKS = (
    *("time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today", "strftime"),
    *("uuid1", "uuid4", "getpid", "mkdtemp"),
)


class _Source(NamedTuple):
    """The functions of a source.

    Attributes:
        text: The source.
        body: Its statements.
        functions: Functions by name and first line; the first line is of the first decorator.
        lambdas: Lambda expressions by first line.
    """

    text: str
    body: list[ast.stmt]
    functions: dict[tuple[str, int], ast.AST]
    lambdas: dict[int, list[ast.Lambda]]


def strip_docstrings(tree: ast.AST) -> None:
    """Remove the docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and node.body and _is_text(node.body[0]):
            del node.body[0]


def _is_text(statement: ast.stmt) -> bool:
    """Return True if a statement is only a text, such as a docstring."""
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def code_text(code: types.CodeType, is_tree: bool) -> str:
    """Return the source of code or, if `is_tree`, its syntax tree without docstrings.

    Without a source it is the byte code. A new version of Python may change the tree, but not the
    source.
    """
    node: Any = node_of(code)
    if node is None:
        return _byte_code(code)
    if is_tree:
        return ast.dump(node)
    if isinstance(node, ast.Lambda):
        return ast.get_source_segment(_source_of(code.co_filename).text, node) or ""
    lines = linecache.getlines(code.co_filename)
    return "".join(lines[code.co_firstlineno - 1 : node.end_lineno])


def node_of(code: types.CodeType) -> ast.AST | None:
    """Return the node of a function in the syntax tree of its file; None without a source."""
    source = _source_of(code.co_filename)
    if code.co_name != "<lambda>":
        return source.functions.get((code.co_name, code.co_firstlineno))
    candidates = source.lambdas.get(code.co_firstlineno, [])
    if len(candidates) < 2:
        return next(iter(candidates), None)
    places = _places(code)
    around = [each for each in candidates if places and _contains(each.body, places)]
    # A lambda expression may contain another one: the shortest contains only its own code.
    return min(around, key=_extent, default=None)


def _places(code: types.CodeType) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where the instructions of code begin and end in its source, as (line, column)."""
    places = []
    for line, end_line, column, end_column in code.co_positions():
        if line and end_line and end_column and column is not None:
            places.append(((line, column), (end_line, end_column)))
    return places


def _contains(node: ast.expr, places: Sequence[tuple[Any, Any]]) -> bool:
    begin, end = _range(node)
    return all(begin <= first and last <= end for first, last in places)


def _range(node: ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
    end = (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
    return (node.lineno, node.col_offset), end


def _extent(node: ast.Lambda) -> tuple[int, int]:
    """Return the lines and columns of a body, for lambda expressions within each other."""
    begin, end = _range(node.body)
    return end[0] - begin[0], end[1] - begin[1]


def _source_of(file: str) -> _Source:
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=256)
def _parsed(text: str) -> _Source:
    """Parse a source. It has no functions if it is empty or no Python."""
    source = _Source(text, [], {}, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return source
    strip_docstrings(tree)
    source.body.extend(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            source.lambdas.setdefault(node.lineno, []).append(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *[each.lineno for each in node.decorator_list]])
            source.functions[node.name, first] = node
    return source


def _byte_code(code: types.CodeType) -> str:
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants.append(_byte_code(constant))
        elif isinstance(constant, frozenset):
            constants.append(repr(sorted(map(repr, constant))))
        else:
            constants.append(repr(constant))
    return repr((code.co_code.hex(), code.co_names, constants))


def is_set_by_clock(module: types.ModuleType | None, name: str) -> bool:
    """Return True if a script sets a global by the clock, such as `START = time.time()`."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return False
    for statement in _source_of(file).body:
        if not isinstance(statement, ast.Assign):
            continue
        targets = [each.id for each in statement.targets if isinstance(each, ast.Name)]
        if name in targets and _asks_clock(statement.value):
            return True
    return False


def _asks_clock(value: ast.expr) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in _CLOCKS:
                return True
    return False


# ---- Values that code reads ----


class Read(NamedTuple):
    """A variable that code reads, with the attributes and elements that follow it.

    `args.width` has the name "args" and the path (("attribute", "width"),). In `CONFIG["width"]`
    the path is (("element", "width"),). `is_outer` is True for a variable of an outer function.
    """

    name: str
    path: tuple[tuple[str, Any], ...]
    is_outer: bool


def values_read(code: types.CodeType) -> Iterator[Read]:
    """Yield the global and outer variables that code reads, also in its inner functions."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _PADDING]
    for i, instruction in enumerate(instructions):
        is_outer = instruction.opname in _OUTER_READS
        if is_outer or instruction.opname in _GLOBAL_READS:
            yield Read(instruction.argval, tuple(_path_from(instructions, i + 1)), is_outer)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from values_read(constant)


def _path_from(instructions: Sequence[dis.Instruction], i: int) -> Iterator[tuple[str, Any]]:
    """Yield the attributes and elements that instructions from the i-th on read."""
    while i + 1 < len(instructions):
        this, following = instructions[i], instructions[i + 1]
        if this.opname in _ATTRIBUTES:
            yield "attribute", this.argval
            i += 1
        elif this.opname == "LOAD_CONST" and following.opname == "BINARY_SUBSCR":
            yield "element", this.argval
            i += 2
        else:
            return


def follow(value: Any, path: Sequence[tuple[str, Any]]) -> tuple[Any, str]:
    """Return the value at the end of a path, and the path as a text.

    The path ends before a method or a property, because they read the whole object. It also ends
    at a module.
    """
    text = ""
    for kind, key in path:
        is_collection = isinstance(value, (Mapping, Sequence))
        if isinstance(value, types.ModuleType) or (kind == "element" and not is_collection):
            break
        if kind == "attribute" and isinstance(getattr_static(type(value), key, None), property):
            break
        try:
            inner = value[key] if kind == "element" else getattr(value, key)
        # A container of a library may fail in any way.
        except Exception:
            break
        if attribute_or_none(inner, "__self__") is value:
            break
        value = inner
        text += f"[{key!r}]" if kind == "element" else f".{key}"
    return value, text


def attribute_or_none(item: Any, name: str) -> Any:
    """Return an attribute; None without it, or if a method of the user fails to return it."""
    try:
        return getattr(item, name, None)
    except Exception:
        return None
