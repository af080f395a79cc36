"""Which attributes of an object, and which globals, change in use. Found in the source of code."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from lit_dps.core.user_code import is_user_module
from lit_dps.training.code_tree import node_of, values_read

_BASES = (LightningModule, LightningDataModule, nn.Module, object)
# Functions that set an attribute whose name is an argument.
_SETTERS = ("setattr", "add_module", "register_module", "register_buffer", "register_parameter")
_MUTATORS = (
    *("append", "extend", "insert", "add", "update", "setdefault", "appendleft"),
    *("pop", "popitem", "popleft", "remove", "discard", "clear"),
)
# The user calls them to make or to change an object.
_OF_USER = ("__init__", "__new__", "__post_init__", "__setattr__", "freeze", "unfreeze")


class Stored(NamedTuple):
    """Names of attributes that methods store, and beginnings of such names.

    A method stores `self.x` if it assigns it, an element of it, or calls `self.x.append` or a
    similar method.
    """

    names: frozenset[str]
    prefixes: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Return True if the methods may store an attribute."""
        return name in self.names or name.startswith(self.prefixes)


@functools.cache
def stored_in_use(cls: type) -> Stored:
    """Return the attributes that a class stores while its objects are used.

    Training calls the hooks of Lightning, special methods such as `__call__`, and properties. The
    methods that they call count too. Other methods are left out: the user calls them to change an
    object. A class of a library may store in each method.
    """
    methods = _methods_of(cls)
    reached = [name for name in methods if _is_entry(cls, name)]
    for name in reached:  # grows
        for node in methods[name]:
            for each in ast.walk(node):
                called = getattr(each, "attr", None)
                if called in methods and called not in reached and called not in _OF_USER:
                    reached.append(called)
    stored = _stored([node for name in reached for node in methods[name]])
    cached = [name for name in dir(cls) if _is_cached_property(cls, name)]
    return Stored(stored.names | {*cached}, stored.prefixes)


@functools.cache
def stored_by_user(cls: type) -> Stored:
    """Return the attributes that any method of the user's classes stores."""
    nodes = []
    for base in cls.__mro__:
        if is_user_module(base.__module__):
            for member in vars(base).values():
                nodes += _nodes_of(member)
    return _stored(nodes)


def _methods_of(cls: type) -> dict[str, list[ast.AST]]:
    """Return the syntax trees of methods by name, also of base classes outside Lightning."""
    methods: dict[str, list[ast.AST]] = {}
    for base in cls.__mro__:
        if base in _BASES:
            continue  # their setters take any name
        for name, member in vars(base).items():
            nodes = _nodes_of(member)
            if nodes:
                methods.setdefault(name, []).extend(nodes)
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


def _is_cached_property(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def _nodes_of(member: Any) -> list[ast.AST]:
    """Return the syntax tree of a method, also decorated, or of the getter of a property.

    The setter of a property is left out: an assignment of the user calls it.
    """
    found: Any = member
    if isinstance(member, property):
        found = member.fget
    elif isinstance(member, functools.cached_property):
        found = member.func
    elif isinstance(member, (staticmethod, classmethod)):
        found = member.__func__
    if callable(found):
        found = inspect.unwrap(found)
    if not isinstance(found, types.FunctionType):
        return []
    node = node_of(found.__code__)
    return [] if node is None else [node]


def _stored(nodes: list[ast.AST]) -> Stored:
    names: set[str] = set()
    prefixes: set[str] = set()
    for node in nodes:
        inner = list(ast.walk(node))
        names.update(_names_stored(inner))
        if any(_is_setter(each) for each in inner):
            # Any text of the method may be the name, or its beginning.
            for each in inner:
                names.update(_texts(each))
                prefixes.update(_first_texts(each))
    return Stored(frozenset(names), tuple(sorted(prefixes)))


def _names_stored(nodes: list[ast.AST]) -> Iterator[str]:
    for target in _targets(nodes):
        if isinstance(target, ast.Attribute):
            yield target.attr


def _targets(nodes: list[ast.AST], elements: bool = False) -> Iterator[ast.AST]:
    """Yield the variables and attributes that code stores, fills or changes by a method.

    If `elements`, an element with a constant key counts as a variable.
    """
    for node in nodes:
        target: Any = node
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _MUTATORS:
            target = getattr(node.func, "value", None)
        elif not isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            continue
        while isinstance(target, ast.Subscript):
            if elements and isinstance(target.slice, ast.Constant):
                break
            target = target.value
        yield target


def globals_changed(code: types.CodeType) -> list[str]:
    """Return the globals that code stores or fills, such as "losses" or "counts['calls']"."""
    node = node_of(code)
    if node is None:
        return []
    nodes = list(ast.walk(node))
    declared = set()
    for each in nodes:
        if isinstance(each, ast.Global):
            declared.update(each.names)
    read = {each.name for each in values_read(code) if not each.is_outer}
    changed = set()
    for target in _targets(nodes, elements=True):
        root = target
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            root = root.value
        if not isinstance(root, ast.Name):
            continue
        # Without a declaration, an assignment makes a local variable.
        is_stored = root is target and isinstance(root.ctx, (ast.Store, ast.Del))
        if root.id in declared or (root.id in read and not is_stored):
            changed.add(_place_of(target))
    return sorted(changed)


def _place_of(target: Any) -> str:
    """Return the path of a variable; it ends before an element without a constant key."""
    if isinstance(target, ast.Name):
        return target.id
    inner = _place_of(target.value)
    if isinstance(target, ast.Attribute):
        return f"{inner}.{target.attr}"
    if isinstance(target.slice, ast.Constant):
        return f"{inner}[{target.slice.value!r}]"
    return inner


def _is_setter(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", "")) in _SETTERS


def _texts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return []


def _first_texts(node: ast.AST) -> list[str]:
    """Return the constant beginning of an f-string or a sum of texts, if it may begin a name."""
    first: Any = None
    if isinstance(node, ast.JoinedStr) and node.values:
        first = node.values[0]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        first = node.left
    return [text for text in _texts(first) if text.isidentifier()]
