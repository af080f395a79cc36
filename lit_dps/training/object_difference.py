"""Compares an object with new objects of its class: does a new object train in the same way?"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lit_dps.core.text import shorten
from lit_dps.training.code_tree import attribute_or_none
from lit_dps.training.method_attributes import stored_in_use
from lit_dps.training.object_attributes import Fact, attributes_of, facts_of_module, shape_of
from lit_dps.training.object_paths import path_of
from lit_dps.training.object_text import describe, known_texts
from lit_dps.training.shown_text import SCALARS, shown_without_address

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


@dataclass
class _Facts:
    """The properties of an object and of its submodules.

    Attributes:
        parts: The object and its submodules by dotted path.
        known: The `known_texts` of parts and parameters.
        facts: The properties by name.
        texts: Their texts by name, equal for equal properties.
        uncompared: Parts of attributes of which only the class counts, by dotted path.
    """

    parts: dict[str, Any]
    known: dict[int, str]
    facts: dict[str, Fact] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    uncompared: list[str] = field(default_factory=list)

    def add(self, fact: Fact) -> None:
        name, place, value = fact
        self.facts[name] = fact
        if isinstance(value, type) or type(value) in SCALARS:
            self.texts[name] = path_of(value) if isinstance(value, type) else repr(value)
            return
        description = describe(value, place, self.known)
        self.texts[name] = repr(description[:2])
        self.uncompared.extend(description.opaque)
        # Of random contents, the size is compared.
        if isinstance(value, _ARRAYS):
            self.add(Fact(f"the shape of {name}", place, shape_of(value)))
        elif isinstance(value, _CONTAINERS) and value:
            self.add(Fact(f"the length of {name}", place, len(value)))

    def shown(self, name: str) -> str:
        """Return a fact for a message."""
        if name not in self.facts:
            return "missing"
        return shorten(_shown(self.facts[name].value))


def compare_objects(instance: Any, one: Any, other: Any) -> Difference:
    """Compare an object with two new objects that were made with two seeds.

    Compared are hyperparameters, attributes, and `facts_of_module`. Two differences are no reason:

    - The two new objects differ too, for example in a time or a random order.
    - A method stores the attribute in training (`stored_in_use`).
    """
    # The user may have set the whole module to evaluation, which hides the modes of its parts.
    with_modes = getattr(instance, "training", True)
    given, new, again = [facts_of(each, with_modes) for each in (instance, one, other)]
    unused: dict[str, None] = {}
    for name, fact in {**new.facts, **given.facts}.items():
        text = new.texts.get(name)
        if text == given.texts.get(name):
            continue
        place = fact.place
        if text == again.texts.get(name):
            place = _stored_place(new, place)
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


def _stored_place(new: _Facts, place: str) -> str:
    """Return the attribute with a place, if a method sets it in training; else "".

    A method may set a whole submodule, with its attributes.
    """
    while place:
        path, _, attribute = place.rpartition(".")
        if path in new.parts:
            return place if attribute in stored_in_use(type(new.parts[path])) else ""
        place = path
    return ""


def facts_of(instance: Any, with_modes: bool) -> _Facts:
    """Return what determines how an object trains, except values of weights."""
    parts = known = {"": instance}
    found = [Fact(f"hparams.{name}", "", value) for name, value in dict(instance.hparams).items()]
    if isinstance(instance, nn.Module):
        parts = dict(instance.named_modules())
        known = {**parts, **dict(instance.named_parameters())}
        found += facts_of_module(instance, with_modes)
    else:
        found += [Fact(name, name, value) for name, value in attributes_of(instance)]
    facts = _Facts(parts, known_texts(known))
    for fact in found:
        facts.add(fact)
    return facts


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
    is_enum = isinstance(value, Enum)  # YAML has none, also of numbers and texts
    return value is None or (isinstance(value, (bool, int, float, str)) and not is_enum)
