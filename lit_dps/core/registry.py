"""Names in a configuration: a name of the package, or a class path of other code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, TypeVar

from lit_dps.core.errors import ConfigError
from lit_dps.core.text import did_you_mean

T = TypeVar("T")

# What to do about a class path whose module is not found.
OWN_MODULE = (
    "If the module is a file of yours, run the command in its folder, or add its folder to "
    "PYTHONPATH."
)
# What `Described.describe` returns.
DESCRIPTION = "a text of one line"


class Described:
    """A part of a study that texts name in words, such as a rule of the goal or a statistic.

    A subclass defines `describe`; `str` returns the same text.
    """

    def describe(self) -> str:
        """Return what it is, in a few words of one line; by default the name of the class."""
        # Rules of earlier versions define `__str__` only.
        return str(self)

    def __str__(self) -> str:
        if type(self).describe is Described.describe:
            return type(self).__name__
        return self.describe()


def description_error(part: Described) -> str | None:
    """Return what is wrong with the text of `describe`; None if it is a text of one line."""
    try:
        text = part.describe()
    except Exception as error:
        return f"describe raises {type(error).__name__}: {error}"
    if not isinstance(text, str) or len(text.splitlines()) != 1 or not text.strip():
        return f"describe returns {text!r}"
    return None


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
    # A class path that was used before may be in `built_in` too.
    names = [each for each in built_in if "." not in each]
    allowed = f"one of {', '.join(names)}, or the class path of a {kind}"
    hint = did_you_mean(str(name), built_in)
    if not all(part.isidentifier() for part in str(name).split(".")) or not module:
        raise ConfigError(key, name, allowed, hint)
    try:
        value = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        if is_missing and f"{module}.".startswith(f"{error.name}."):
            hint = hint or OWN_MODULE
        raise ConfigError(key, name, f"{allowed}: {error}", hint) from error
    if not is_kind(value):
        allowed += f"; {attribute} is of type {type(value).__name__}"
        raise ConfigError(key, name, allowed, hint)
    return value


def named_class(key: str, name: str, built_in: Mapping[str, type[T]], base: type[T]) -> type[T]:
    """Return the subclass of a base class that a configuration names, as `named` does."""

    def is_kind(value: object) -> bool:
        return isinstance(value, type) and issubclass(value, base)

    return named(key, name, built_in, base.__name__, is_kind)


def imported_class(path: str) -> type | None:
    """Return the class of a path; None if its module is not imported, or has no such class."""
    module, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) else None


def class_at(path: str) -> type | None:
    """Return the class of a path; None if no class has it, or if it cannot be imported."""
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(module), name, None)
    except Exception:  # the module may raise anything; whoever needs the class reports it
        return None
    return kind if isinstance(kind, type) else None


def name_of_class(name: str, built_in: Mapping[str, type]) -> str:
    """Return the name of a class in `built_in`, or else its class path where it is defined.

    A class path of a module that is not imported yet stays as it is: no code of users runs.
    """
    kind = imported_class(name)
    if kind is None:
        return name
    for known, value in built_in.items():
        if value is kind:
            return known
    return f"{kind.__module__}.{kind.__qualname__}"


def instance_of(kind: type[T], key: str, name: str, options: Mapping[str, Any] | None) -> T:
    """Return an instance of a class that a configuration names.

    Args:
        kind: The class.
        key: The key of the options in the configuration, such as "pruning.options".
        name: The name of the class there.
        options: Arguments of its constructor.

    Raises:
        ConfigError: if the constructor does not take the options.
    """
    options = dict(options or {})
    try:
        return kind(**options)
    except TypeError as error:
        names = argument_names(kind)
        takes = f"because {name} takes only {', '.join(names) or 'no options'}"
        refuse_unknown_option(key, options, names, f"omitted, {takes}")
        _refuse_missing_option(kind, key, name, options)
        raise ConfigError(key, options, f"options that {name} accepts ({error})") from error


def refuse_unknown_option(
    key: str, options: Mapping[str, Any], names: Collection[str], allowed: str
) -> None:
    """Raise ConfigError about `allowed` for the first option that is not among some names."""
    for option, value in options.items():
        if option not in names:
            raise ConfigError(f"{key}.{option}", value, allowed, did_you_mean(option, names))


def _refuse_missing_option(kind: type, key: str, name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first argument of a class that needs a value and has none."""
    for parameter in inspect.signature(kind).parameters.values():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        needs_value = parameter.default is parameter.empty and not is_variadic
        if needs_value and parameter.name not in options:
            allowed = f"options with {parameter.name}, which {name} needs"
            raise ConfigError(key, options, allowed)


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
