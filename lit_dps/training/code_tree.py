"""The code of a function: its source without comments, and the variables that it reads."""

from __future__ import annotations

import ast
import dis
import linecache
import types
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
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


class _Function(NamedTuple):
    """A function or lambda expression of a source. Its first decorator begins it."""

    first_line: int
    node: ast.AST
    code: types.CodeType


class _Source(NamedTuple):
    """The statements of a source, and its functions by name."""

    body: list[ast.stmt]
    functions: dict[str, list[_Function]]


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


def code_text(code: types.CodeType) -> str:
    """Return the source of code without comments, docstrings and formatting.

    Without a source it is the byte code, which differs between versions of Python.
    """
    node: Any = node_of(code)
    if node is None:
        return _byte_code(code)
    return ast.unparse(node)


def node_of(code: types.CodeType) -> ast.AST | None:
    """Return the node of a function in the syntax tree of its file.

    The function may have moved in the file since its import.

    Returns:
        None without a source, if the function was edited after its import, or if several different
        functions have its name and its byte code.
    """
    functions = _functions_like(code)
    exact = [each.node for each in functions if each.first_line == code.co_firstlineno]
    nodes = exact or [each.node for each in functions]
    if len(nodes) > 1 and len(set(map(ast.unparse, nodes))) > 1:
        return None
    return nodes[0] if nodes else None


def node_at_place(code: types.CodeType) -> ast.AST | None:
    """Return `node_of`, else the node with the name and the line of code.

    Some decorators compile a function again, with another byte code.
    """
    node = node_of(code)
    if node is not None:
        return node
    for function in _source_of(code.co_filename).functions.get(code.co_qualname, []):
        if function.first_line == code.co_firstlineno:
            return function.node
    return None


def is_edited(code: types.CodeType) -> bool:
    """Return True if the functions with this name in the file all have another byte code."""
    has_name = code.co_qualname in _source_of(code.co_filename).functions
    return has_name and not _functions_like(code)


def _functions_like(code: types.CodeType) -> list[_Function]:
    """Return the functions of the file that have the name and the byte code of code."""
    functions = _source_of(code.co_filename).functions.get(code.co_qualname, [])
    return [each for each in functions if _byte_code(each.code) == _byte_code(code)]


def _source_of(file: str) -> _Source:
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=256)
def _parsed(text: str) -> _Source:
    """Parse a source. It has no functions if it is empty or no Python."""
    source = _Source([], {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
            code = compile(text, "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return source
    strip_docstrings(tree)
    source.body.extend(tree.body)
    nodes: dict[tuple[str, int, int], ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            nodes["<lambda>", node.body.lineno, node.body.col_offset] = node
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # The first decorator begins a function.
            first = min([node.lineno, *[each.lineno for each in node.decorator_list]])
            nodes[node.name, first, 0] = node
    for inner in _inner_codes(code):
        node = nodes.get(_place_of(inner))
        if node is not None:
            function = _Function(inner.co_firstlineno, node, inner)
            source.functions.setdefault(inner.co_qualname, []).append(function)
    return source


def _place_of(code: types.CodeType) -> tuple[str, int, int]:
    """Return the name and first line of a function; of a lambda expression, where its body is."""
    if code.co_name != "<lambda>":
        return code.co_name, code.co_firstlineno, 0
    places = []
    for line, _, column, end in code.co_positions():
        if line is not None and column is not None and end:  # not of the code that begins it
            places.append((line, column))
    line, column = min(places, default=(0, 0))
    return code.co_name, line, column


def _inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inner_codes(constant)


@lru_cache(maxsize=4096)
def _byte_code(code: types.CodeType) -> str:
    """Return the instructions of code with their values; they do not read its docstring."""
    instructions = []
    for each in dis.get_instructions(code):
        value = each.argval
        if isinstance(value, types.CodeType):
            value = _byte_code(value)
        elif isinstance(value, frozenset):
            value = sorted(map(repr, value))
        instructions.append((each.opname, value))
    return repr((code.co_varnames, instructions))


def is_set_by_clock(module: types.ModuleType | None, name: str) -> bool:
    """Return True if a script sets a global by the clock, such as `START = time.time()`."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return False
    for statement in _source_of(file).body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            if name in [getattr(each, "id", "") for each in targets]:
                calls = [each.func for each in ast.walk(statement) if isinstance(each, ast.Call)]
                called = {getattr(each, "attr", getattr(each, "id", "")) for each in calls}
                if not called.isdisjoint(_CLOCKS):
                    return True
    return False


# ---- Values that code reads ----


class Read(NamedTuple):
    """A variable that code reads, with the attributes and elements that follow it.

    `args.width` has the name "args" and the path ((False, "width"),). In `CONFIG["width"]` the path
    is ((True, "width"),), where True stands for an element. `is_outer` is True for a variable of an
    outer function.
    """

    name: str
    path: tuple[tuple[bool, Any], ...]
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


def _path_from(instructions: Sequence[dis.Instruction], i: int) -> Iterator[tuple[bool, Any]]:
    """Yield the attributes and elements that instructions from the i-th on read."""
    while i + 1 < len(instructions):
        this, following = instructions[i], instructions[i + 1]
        # BINARY_OP [] from Python 3.14 on.
        is_element = following.opname == "BINARY_SUBSCR" or following.argrepr == "[]"
        if this.opname in _ATTRIBUTES:
            yield False, this.argval
            i += 1
        elif this.opname == "LOAD_CONST" and is_element:
            yield True, this.argval
            i += 2
        else:
            return


def attribute_or_none(item: Any, name: str) -> Any:
    """Return an attribute; None without it, or if a method of the user fails to return it."""
    try:
        return getattr(item, name, None)
    except Exception:
        return None
