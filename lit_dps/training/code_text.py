"""Code as text: the byte code of functions, the names in it, and the paths of functions."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_dps.core.identity import OBJECTS

# Modules of this process alone: the script or notebook, and classes without an importable path.
PROCESS_MODULES = ("__main__", OBJECTS)
# From Python 3.12 on, the body of a class reads with LOAD_FROM_DICT_OR_GLOBALS.
_EXTENDED = dis.EXTENDED_ARG  # a prefix of an instruction with a large argument
READS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
# Variables that the body of a class stores, and that decide nothing.
_NOT_CODE = ("__doc__", "__firstlineno__", "__static_attributes__")


@functools.lru_cache(maxsize=4096)
def byte_code(code: types.CodeType) -> str:
    """Return the instructions of code with their values, without docstrings and line numbers."""
    instructions: list[Any] = []
    for each in dis.get_instructions(code):
        value = each.argval
        if each.opname == "STORE_NAME" and value in _NOT_CODE:
            instructions.pop()  # the value that it stores
            continue
        if isinstance(value, types.CodeType):
            value = byte_code(value)
        elif isinstance(value, frozenset):
            value = sorted(map(repr, value))
        instructions.append((each.opname, value))
    return repr((code.co_varnames, code.co_argcount, instructions))


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType, *operations: str) -> frozenset[str]:
    """Return the names that some instructions of code read or store, also in inner functions."""
    names: set[str] = set()
    for each in codes_in(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in operations:
                names.add(instruction.argval)
    return frozenset(names)


def attributes_stored(code: types.CodeType, instance: str) -> set[str]:
    """Return the attributes that code stores in other objects than in a variable, such as self."""
    names: set[str] = set()
    for each in codes_in(code):
        instructions = [part for part in dis.get_instructions(each) if part.opcode != _EXTENDED]
        for i, instruction in enumerate(instructions):
            if instruction.opname != "STORE_ATTR":
                continue
            receiver = i - 1
            if instructions[receiver].opname == "SWAP":  # such as `self.x += 1`
                # The object is loaded, copied, and its attribute is read at the same position.
                while receiver > 2 and not _reads_same(instructions[receiver], instruction):
                    receiver -= 1
                receiver -= 2
            if not instance or _loaded_variable(instructions[receiver]) != instance:
                names.add(instruction.argval)
    return names


def _reads_same(one: dis.Instruction, other: dis.Instruction) -> bool:
    return one.opname == "LOAD_ATTR" and one.positions == other.positions


def _loaded_variable(instruction: dis.Instruction) -> str:
    """Return the variable of a function that an instruction loads last; "" without one."""
    name = instruction.argval
    if isinstance(name, tuple):  # two instructions in one, from Python 3.13 on
        name = name[-1]
    is_load = "LOAD_FAST" in instruction.opname or instruction.opname == "LOAD_DEREF"
    return name if is_load else ""


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and the code of its inner functions and classes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def is_edited(code: types.CodeType) -> bool:
    """Return True if the functions with this name in the file all have another byte code."""
    same_name = []
    for each in codes_in(_code_of_file(code.co_filename, os.path.getmtime(code.co_filename))):
        if each.co_qualname == code.co_qualname:
            same_name.append(byte_code(each))
    return bool(same_name) and byte_code(code) not in same_name


@functools.lru_cache(maxsize=256)
def _code_of_file(file: str, modified: float) -> types.CodeType:
    try:
        return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return compile("", file, "exec")


def attribute_or_none(item: Any, name: str) -> Any:
    """Return an attribute; None without it, or if a method of the user fails to return it."""
    try:
        return getattr(item, name, None)
    except Exception:
        return None


def function_of_member(member: Any) -> types.FunctionType | None:
    """Return the function of a method, also decorated, or of the getter of a property.

    The setter of a property is left out: an assignment of the user calls it.
    """
    inner: Any = member
    for name in ("fget", "func", "__func__"):
        held = attribute_or_none(inner, name)
        if held is not None:  # its truth value may raise
            inner = held
    if callable(inner):
        with suppress(ValueError):  # of endless wrappers
            inner = inspect.unwrap(inner)
    return inner if isinstance(inner, types.FunctionType) else None


def path_of(item: Any) -> str:
    """Return the path of a class or function."""
    return f"{item.__module__}.{item.__qualname__}"


def is_importable(item: Any) -> bool:
    """Return True for a class or function that each process finds by its path."""
    name, module = attribute_or_none(item, "__qualname__"), attribute_or_none(item, "__module__")
    if not isinstance(name, str) or module in PROCESS_MODULES:
        return False
    named: Any = sys.modules.get(str(module))
    for part in name.split("."):
        named = attribute_or_none(named, part)
    return named is item
