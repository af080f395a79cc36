"""Compares an object with new objects of its class: does a new object train in the same way?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lit_dps.core.text import shorten
from lit_dps.training.code_tree import attribute_or_none
from lit_dps.training.method_attributes import stored_in_use
from lit_dps.training.object_attributes import attributes_of, settings_of
from lit_dps.training.object_paths import is_of_user, path_of
from lit_dps.training.object_text import describe, shape_of
from lit_dps.training.shown_text import shown_without_address

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_ARRAYS = (Tensor, np.ndarray)


class Difference(NamedTuple):
    """How an object differs from a new object of its class.

    Attributes:
        reason: Why a new object trains differently; empty if it does not.
        unused: The attributes that changed while the object was used, or that are random.
        uncompared: The attributes with a value that cannot be compared, such as a tokenizer.
    """

    reason: str
    unused: list[str]
    uncompared: list[str]


class _Fact(NamedTuple):
    """A property of an object.

    Attributes:
        text: Equal for equal properties.
        value: The value, for messages.
        place: The dotted path of the attribute that has the property; empty without one.
    """

    text: str
    value: Any
    place: str = ""


@dataclass
class _Facts:
    """The properties of an object and of its parts.

    Attributes:
        facts: The properties by name.
        parts: The parts by dotted path.
        uncompared: Attributes with a value of which only the class counts, by dotted path.
    """

    facts: dict[str, _Fact] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    uncompared: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any, place: str = "", text: str | None = None) -> None:
        if text is None:
            description = describe(value, known=self.parts)
            text = repr(description[:2])
            if place and description.opaque:
                self.uncompared.append(place)
        self.facts[name] = _Fact(text, value, place)

    def shown(self, name: str) -> str:
        """Return a fact for a message."""
        if name not in self.facts:
            return "missing"
        return shorten(_shown(self.facts[name].value))


def compare_objects(instance: Any, one: Any, other: Any) -> Difference:
    """Compare an object with two new objects that were made with two seeds.

    Compared are hyperparameters, classes of submodules, attributes, and the shapes and types of
    weights. Two differences are no reason:

    - The two new objects differ too, for example in a time or a random order.
    - A method stores the attribute in training (`stored_in_use`). A new object lacks it, or has
      None, a number, a tensor or an empty container.
    """
    given, new, again = facts_of(instance), facts_of(one), facts_of(other)
    unused: dict[str, None] = {}
    for name in [*new.facts, *given.facts]:
        before, after = given.facts.get(name), new.facts.get(name)
        if before and after and before.text == after.text:
            continue
        if after and (name not in again.facts or again.facts[name].text != after.text):
            place = after.place
        elif after:
            place = _stored_place(new, after)
        else:
            place = _added_place(new, given.facts[name].place)
        if not place:
            reason = (
                f"{name} of the object is {given.shown(name)}, and {name} of a new "
                f"{type(instance).__name__} is {new.shown(name)}"
            )
            if given.shown(name) == new.shown(name):
                reason += " with another content"
            return Difference(reason, [], [])
        unused[place] = None
    uncompared = [place for place in given.uncompared if place not in unused]
    return Difference("", list(unused), uncompared)


def _stored_place(new: _Facts, fact: _Fact) -> str:
    """Return the attribute of a fact if training sets it and a new object has no content there."""
    path, _, attribute = fact.place.rpartition(".")
    if path not in new.parts or not _is_blank(fact.value):
        return ""
    if stored_in_use(type(new.parts[path])).has(attribute):
        return fact.place
    return ""


def _is_blank(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return not value
    return value is None or isinstance(value, (bool, int, float, complex, np.generic, *_ARRAYS))


def _added_place(new: _Facts, place: str) -> str:
    """Return the attribute with a place that new objects lack, if a method sets it in training.

    A method may set a whole submodule, with its attributes.
    """
    while place:
        path, _, attribute = place.rpartition(".")
        if path in new.parts:
            if stored_in_use(type(new.parts[path])).has(attribute):
                return place
            return ""
        place = path
    return ""


def facts_of(instance: Any) -> _Facts:
    """Return what determines how an object trains, except values of weights."""
    facts = _Facts(parts=dict(_parts_of(instance)))
    for name, value in dict(instance.hparams).items():
        if is_plain(value):
            facts.add(f"hparams.{name}", value)
    if isinstance(instance, nn.Module):
        _add_weights(facts, instance)
    for path, part in facts.parts.items():
        if isinstance(part, nn.Module) and part is not instance:
            facts.add(f"the class of {path}", type(part), path, path_of(type(part)))
        if isinstance(part, nn.Module):
            hooks = len(part._forward_hooks) + len(part._forward_pre_hooks)
            shown = path or "the module"
            facts.add(f"the number of hooks of {shown}", f"{hooks} hooks", path, str(hooks))
        for name, value in settings_of(part):
            _add_attribute(facts, f"{path}.{name}".lstrip("."), value)
    return facts


def _add_attribute(facts: _Facts, place: str, value: Any) -> None:
    if any(value is part for part in facts.parts.values()):
        facts.add(place, value, place, f"object of {type(value).__qualname__}")
    else:
        facts.add(place, value, place)
    # Of random contents, the size is compared.
    if isinstance(value, _ARRAYS):
        shape = shape_of(value)
        facts.add(f"the shape of {place}", shape, place, str(shape))
    elif isinstance(value, _CONTAINERS) and value:
        facts.add(f"the length of {place}", f"{len(value)} elements", place, str(len(value)))


def _add_weights(facts: _Facts, module: nn.Module) -> None:
    """Add the shapes and types of parameters and buffers, and whether they are trained."""
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            shape = shape_of(value)
            facts.add(name, str(shape), name, str(shape))
            facts.add(f"the type of {name}", str(value.dtype), name)
            facts.add(f"requires_grad of {name}", str(value.requires_grad), name)


def _parts_of(instance: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object, its submodules, and the objects of the user in attributes, by path."""
    parts: dict[str, Any] = {"": instance}
    if isinstance(instance, nn.Module):
        parts = dict(instance.named_modules())
    seen = {id(part) for part in parts.values()}
    remaining = list(parts.items())
    while remaining:
        path, part = remaining.pop(0)
        yield path, part
        for name, value in settings_of(part):
            if id(value) not in seen and _is_users_object(value):
                seen.add(id(value))
                remaining.append((f"{path}.{name}".lstrip("."), value))


def _is_users_object(value: Any) -> bool:
    if isinstance(value, (*_CONTAINERS, Enum, type, nn.Module)):
        return False
    return is_of_user(type(value)) and any(True for _ in attributes_of(value))


def _shown(value: Any) -> str:
    if isinstance(value, _ARRAYS):
        return f"{type(value).__name__} {shape_of(value)}"
    if isinstance(value, str):
        return value
    name = attribute_or_none(value, "__qualname__")
    if isinstance(name, str):
        return name
    return shown_without_address(value) or type(value).__name__


def is_plain(value: Any) -> bool:
    """Return True for None, numbers and texts, and for lists and dicts of them."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    return value is None or isinstance(value, (bool, int, float, str))
