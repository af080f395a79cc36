"""Which attributes the methods of a class set. Found in their byte code, without a call."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

# Functions that set an attribute whose name is an argument.
_SETTERS = ("setattr", "add_module", "register_module")


def class_sets(cls: type, attribute: str) -> bool:
    """Return True if a method or a `cached_property` of a class sets an attribute."""
    for base in cls.__mro__:
        if base in (LightningModule, LightningDataModule, nn.Module):
            continue  # their setters take any name
        if isinstance(vars(base).get(attribute), functools.cached_property):
            return True
        for member in vars(base).values():
            for function in _functions_of(member):
                if _sets_attribute(function.__code__, attribute):
                    return True
    return False


def _functions_of(member: Any) -> list[types.FunctionType]:
    """Return the functions of a member of a class: a method, also decorated, or a property.

    The setter of a property is left out: the user's own assignment calls it.
    """
    found = [member]
    if isinstance(member, property):
        found = [member.fget]
    elif isinstance(member, functools.cached_property):
        found = [member.func]
    elif isinstance(member, (staticmethod, classmethod)):
        found = [member.__func__]
    functions = []
    for each in found:
        original = each
        if callable(each):
            original = inspect.unwrap(each)
        functions += [part for part in (original, each) if isinstance(part, types.FunctionType)]
    return functions


def _sets_attribute(code: types.CodeType, name: str) -> bool:
    """Return True if code, or a function within it, may set an attribute of a name."""
    instructions = list(dis.get_instructions(code))
    # Such as `f"fold_{i}"`.
    makes_name = any(name.startswith(prefix) for prefix in _prefixes(instructions))
    may_name = makes_name or _has_constant(code.co_consts, name)
    for instruction in instructions:
        if instruction.opname == "STORE_ATTR" and instruction.argval == name:
            return True
        if may_name and instruction.argval in _SETTERS:
            return True
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return any(_sets_attribute(each, name) for each in inner)


def _has_constant(constants: Sequence[object], name: str) -> bool:
    """Return True if a name is a constant of code, or an element of one."""
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)) and name in constant:
            return True
        if constant == name:
            return True
    return False


def _prefixes(instructions: Sequence[dis.Instruction]) -> Iterator[str]:
    """Yield the constant beginnings of the texts that f-strings and sums make.

    The parts of a text are on the stack. The search goes back to the instruction that put the
    first part there.
    """
    for i, instruction in enumerate(instructions):
        n_parts = 0
        if instruction.opname == "BUILD_STRING":
            n_parts = instruction.arg or 0
        elif instruction.opname == "BINARY_OP" and instruction.argrepr == "+":
            n_parts = 2
        depth = 0
        for earlier in reversed(instructions[:i]):
            if depth >= n_parts:
                break
            depth += dis.stack_effect(earlier.opcode, earlier.arg, jump=False)
            is_first = depth == n_parts and earlier.opname == "LOAD_CONST"
            if is_first and isinstance(earlier.argval, str) and earlier.argval.isidentifier():
                yield earlier.argval
