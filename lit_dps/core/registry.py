"""What a configuration names: something of the package by its name, or somebody else's by its class
path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypeVar

from lit_dps.core.errors import ConfigError
from lit_dps.core.text import closest_name

T = TypeVar("T")


def named(
    key: str, name: str, known: Mapping[str, T], kind: str, fits: Callable[[object], bool]
) -> T:
    """The value that a configuration names.

    Args:
        key: Where it stands in the configuration, such as "pruning.method".
        name: One of `known`, or a class path, package.module.Name.
        known: The package's own, by name.
        kind: What it has to be, for messages.
        fits: Whether what a class path names is that.

    Raises:
        ConfigError: if there is no such thing, or it is of another kind.
    """
    if name in known:
        return known[name]
    module, _, attribute = str(name).rpartition(".")
    allowed = f"one of {', '.join(known)}, or the class path of a {kind}"
    hint = None
    near = closest_name(str(name), known)
    if near is not None:
        hint = f"Did you mean {near}?"
    if not module:
        raise ConfigError(key, name, allowed, hint)
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(key, name, f"{allowed}: {error}", hint) from error
    if not fits(found):
        raise ConfigError(key, name, allowed, hint)
    return found
