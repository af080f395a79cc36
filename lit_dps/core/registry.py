"""Names in a configuration: a name of the package, or a class path of other code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypeVar

from lit_dps.core.errors import ConfigError
from lit_dps.core.text import closest_name

T = TypeVar("T")


def named(
    key: str, name: str, built_in: Mapping[str, T], kind: str, is_kind: Callable[[object], bool]
) -> T:
    """Return the value that a configuration names.

    Args:
        key: Its key in the configuration, such as "pruning.method".
        name: One of `built_in`, or a class path, package.module.Name.
        built_in: The values of the package, by name.
        kind: What the value must be, for messages.
        is_kind: Returns True for a value of this kind.

    Raises:
        ConfigError: if the name has no value, or a value of another kind.
    """
    if name in built_in:
        return built_in[name]
    module, _, attribute = str(name).rpartition(".")
    allowed = f"one of {', '.join(built_in)}, or the class path of a {kind}"
    hint = None
    near = closest_name(str(name), built_in)
    if near is not None:
        hint = f"Did you mean {near}?"
    if not module:
        raise ConfigError(key, name, allowed, hint)
    try:
        value = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(key, name, f"{allowed}: {error}", hint) from error
    if not is_kind(value):
        raise ConfigError(key, name, allowed, hint)
    return value


def argument_names(cls: type) -> list[str]:
    """Return the names of the arguments of a class.

    If its constructor takes `**kwargs`, the arguments of the next base class follow.
    """
    names: dict[str, None] = {}
    for base in inspect.getmro(cls):
        if base is object or "__init__" not in vars(base):
            continue
        has_kwargs = False
        parameters = list(inspect.signature(base.__init__).parameters.values())
        for parameter in parameters[1:]:
            if parameter.kind is parameter.VAR_KEYWORD:
                has_kwargs = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                names[parameter.name] = None
        if not has_kwargs:
            break
    return list(names)
