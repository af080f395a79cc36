"""Which attributes of an object, and which globals, change in use. Found in the source of code."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from lit_dps.core.user_code import is_user_module
from lit_dps.training.code_tree import Read, attribute_or_none, node_at_place, values_read

_BASES = (LightningModule, LightningDataModule, nn.Module, object)
# Functions that set an attribute whose name is an argument.
_SETTERS = ("setattr", "add_module", "register_module", "register_buffer", "register_parameter")
_MUTATORS = (
    *("append", "extend", "insert", "add", "update", "setdefault", "appendleft"),
    *("pop", "popitem", "popleft", "remove", "discard", "clear"),
    *("fit", "fit_transform", "partial_fit"),  # of scikit-learn
)
# The user calls them to make or to change an object.
_OF_USER = ("__init__", "__new__", "__post_init__", "__setattr__", "freeze", "unfreeze")


@functools.cache
def stored_in_use(cls: type) -> frozenset[str]:
    """Return the attributes that a class stores while its objects are used.

    A method stores `self.x` if it assigns it, an element of it, or calls `self.x.append`,
    `self.x.copy_` or a similar method.

    Training calls the hooks of Lightning, special methods such as `__call__`, and properties. The
    methods that they call count too. Other methods are left out: the user calls them to change an
    object. A class of a library may store in each method.
    """
    methods = _methods_of(cls)
    reached = [name for name in methods if _is_entry(cls, name)]
    stored: set[str] = set()
    for name in reached:  # grows
        for node in methods[name]:
            nodes = list(ast.walk(node))
            stored.update(_names_stored(nodes))
            for each in nodes:
                called = getattr(each, "attr", None)
                if called in methods and called not in reached and called not in _OF_USER:
                    reached.append(called)
    return frozenset(stored)


def _methods_of(cls: type) -> dict[str, list[ast.AST]]:
    """Return the syntax trees of methods by name, also of base classes outside Lightning."""
    methods: dict[str, list[ast.AST]] = {}
    for base in cls.__mro__:
        if base in _BASES:
            continue  # their setters take any name
        for name, member in vars(base).items():
            function = function_of_member(member)
            node = None if function is None else node_at_place(function.__code__)
            if node is not None:
                methods.setdefault(name, []).append(node)
    return methods


def _is_entry(cls: type, name: str) -> bool:
    """Return True for a method that training calls."""
    if name in _OF_USER:
        return False
    if not is_user_module(cls.__module__) or (name.startswith("__") and name.endswith("__")):
        return True
    member = inspect.getattr_static(cls, name, None)
    if isinstance(member, (property, functools.cached_property)):
        return True
    return hasattr(LightningModule, name) or hasattr(LightningDataModule, name)


def function_of_member(member: Any) -> types.FunctionType | None:
    """Return the function of a method, also decorated, or of the getter of a property.

    The setter of a property is left out: an assignment of the user calls it.
    """
    found: Any = member
    for name in ("fget", "func", "__func__"):
        held = attribute_or_none(found, name)
        if held is not None:  # its truth value may raise
            found = held
    if callable(found):
        with suppress(ValueError):  # of endless wrappers
            found = inspect.unwrap(found)
    return found if isinstance(found, types.FunctionType) else None


def _names_stored(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the attributes that code stores, such as "count" of `self.count += 1`."""
    for node in nodes:
        target: Any = _target(node)
        while isinstance(target, ast.Subscript) or getattr(target, "attr", "") == "data":
            if isinstance(target.value, ast.Name):
                break  # self.data
            target = target.value
        if isinstance(target, ast.Attribute):
            yield target.attr
        called = getattr(node, "func", None)
        if getattr(called, "attr", getattr(called, "id", "")) in _SETTERS:
            for argument in getattr(node, "args", ()):
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def _target(node: ast.AST) -> ast.AST | None:
    """Return the variable, attribute or element that a node stores, or changes by a method."""
    if isinstance(node, ast.Call):
        method = getattr(node.func, "attr", "")
        # The methods of PyTorch that change a tensor in place end with "_", such as `copy_`.
        if method in _MUTATORS or (method.endswith("_") and not method.endswith("__")):
            return getattr(node.func, "value", None)
    if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return node
    return None


def globals_changed(code: types.CodeType) -> Iterator[Read]:
    """Yield the globals that code stores or fills, such as `losses` or `counts["calls"]`."""
    node = node_at_place(code)
    nodes = [] if node is None else list(ast.walk(node))
    declared = set()
    for each in nodes:
        if isinstance(each, ast.Global):
            declared.update(each.names)
    read = {each.name for each in values_read(code) if not each.is_outer}
    for target in map(_target, nodes):
        root: Any = target
        path: list[tuple[bool, Any]] = []
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            if isinstance(root, ast.Attribute):
                path.insert(0, (False, root.attr))
            elif isinstance(root.slice, ast.Constant):
                path.insert(0, (True, root.slice.value))
            else:
                path.clear()  # any element
            root = root.value
        if not isinstance(root, ast.Name):
            continue
        # Without a declaration, an assignment makes a local variable.
        is_stored = root is target and isinstance(root.ctx, (ast.Store, ast.Del))
        if root.id in declared or (root.id in read and not is_stored):
            yield Read(root.id, tuple(path), is_outer=False)
