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


class _Source(NamedTuple):
    """The functions of a source, by name and first line. The first decorator begins a function.

    Attributes:
        body: The statements of the source.
        functions: Functions and lambda expressions.
        byte_codes: Their byte codes; several for lambda expressions on one line.
    """

    body: list[ast.stmt]
    functions: dict[tuple[str, int], ast.AST]
    byte_codes: dict[tuple[str, int], list[str]]


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

    Returns:
        None without a source, if the file was edited after its import, or for one of several lambda
        expressions on a line.
    """
    source = _source_of(code.co_filename)
    place = (code.co_name, code.co_firstlineno)
    if source.byte_codes.get(place) != [_byte_code(code)]:
        return None
    return source.functions.get(place)


def _source_of(file: str) -> _Source:
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=256)
def _parsed(text: str) -> _Source:
    """Parse a source. It has no functions if it is empty or no Python."""
    source = _Source([], {}, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
            code = compile(text, "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return source
    strip_docstrings(tree)
    source.body.extend(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            source.functions["<lambda>", node.lineno] = node
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *[each.lineno for each in node.decorator_list]])
            source.functions[node.name, first] = node
    for inner in _inner_codes(code):
        place = (inner.co_name, inner.co_firstlineno)
        source.byte_codes.setdefault(place, []).append(_byte_code(inner))
    return source


def _inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inner_codes(constant)


def _byte_code(code: types.CodeType) -> str:
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants.append(_byte_code(constant))
        elif isinstance(constant, frozenset):
            constants.append(repr(sorted(map(repr, constant))))
        else:
            constants.append(repr(constant))
    return repr((code.co_code.hex(), code.co_names, code.co_varnames, constants))


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
