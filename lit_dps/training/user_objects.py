"""From a module or data module in Python to its configuration: class path and arguments.

Trials build new objects, so `config_of` returns how to make another one. It takes a class path, a
class, a `functools.partial` of a class, a function that makes the object, or an object whose
arguments can be recovered. What cannot be made again is refused in one line.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from lit_dps.core.errors import ConfigError
from lit_dps.core.identity import OBJECTS
from lit_dps.core.registry import class_at
from lit_dps.training.code_text import attribute_or_none
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.object_difference import (
    Difference,
    compare_objects,
    is_plain,
    stored_by_hooks,
)

BASES = {"model": LightningModule, "data": LightningDataModule}
EXAMPLES = {
    "model": "model=lambda lr=1e-3: MyModel(my_network(), lr=lr)",
    "data": "data=lambda batch_size=32: MyData(my_table, batch_size)",
}
BATCH_SIZE_NAMES = ("batch_size", "train_batch_size", "batchsize", "batch", "bs")
_FACTORY = "_lit_dps_factory"


class ObjectConfig(NamedTuple):
    """The configuration of an object.

    Attributes:
        config: `class_path` and `init_args`.
        note: What a reader should know; empty without a note.
    """

    config: dict[str, Any]
    note: str = ""


def config_of(section: str, given: Any) -> ObjectConfig:
    """Return how to make a module or data module.

    Args:
        section: "model" or "data".
        given: A class path, a configuration, a class, a partial, a function or an object.

    Raises:
        ConfigError: if it cannot be made again.
    """
    base = BASES[section]
    compiled = attribute_or_none(given, "_orig_mod")  # of `torch.compile(model)`
    if isinstance(compiled, base):
        given = compiled
    if isinstance(given, Mapping):
        if not isinstance(given.get("class_path"), str):
            allowed = "the class path of the " + section
            raise ConfigError(f"{section}.class_path", given.get("class_path"), allowed)
        return ObjectConfig(dict(given))
    if isinstance(given, str):
        return ObjectConfig({"class_path": given})
    if isinstance(given, base):
        is_compiled = given is compiled or attribute_or_none(given, "_compiled_call_impl")
        return _config_of_instance(section, given, is_compiled=bool(is_compiled))
    if isinstance(given, type):
        if not issubclass(given, base):
            raise ConfigError(section, given.__name__, f"a subclass of {base.__name__}")
        return ObjectConfig({"class_path": class_path_of(section, given)})
    if isinstance(given, functools.partial) and isinstance(given.func, type):
        signature = inspect.signature(given.func)
        arguments = dict(signature.bind_partial(*given.args, **given.keywords).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        _refuse_objects(section, given.func, arguments)
        inner = config_of(section, given.func).config
        return ObjectConfig({**inner, "init_args": arguments})
    if callable(given) and not isinstance(given, nn.Module):
        return ObjectConfig({"class_path": _class_path_of_factory(section, given)})
    allowed = f"a {base.__name__}, its class, or a function that returns it: {EXAMPLES[section]}"
    raise ConfigError(section, type(given).__name__, allowed)


def batch_size_key(data: Mapping[str, Any]) -> str | None:
    """Return the key of the batch size of a data module's configuration, guessed by its name.

    Returns:
        None if no argument, or several arguments, have such a name, or if the class cannot be
        imported.
    """
    cls = class_at(str(data["class_path"]))
    if cls is None:
        return None  # the command refuses the class path
    candidates = [name for name in _parameters(cls) if name in BATCH_SIZE_NAMES]
    if BATCH_SIZE_NAMES[0] in candidates:
        candidates = [BATCH_SIZE_NAMES[0]]
    if len(candidates) != 1:
        return None
    return f"data.{candidates[0]}"


# ---- Classes ----


def class_path_of(section: str, cls: type) -> str:
    """Return a path that imports the class of the model or the data in this process."""
    module = sys.modules.get(cls.__module__)
    if "." not in cls.__qualname__ and getattr(module, cls.__name__, None) is cls:
        return f"{cls.__module__}.{cls.__name__}"
    # For example, a class that a function defines. Model and data may have equal names.
    return _registered(cls, f"{section}_{cls.__name__}")


def _registered(cls: type, name: str) -> str:
    """Make a class importable in this process, and return its path."""
    if OBJECTS not in sys.modules:
        sys.modules[OBJECTS] = types.ModuleType(OBJECTS)
    setattr(sys.modules[OBJECTS], name, cls)
    return f"{OBJECTS}.{name}"


class Factory(NamedTuple):
    """A function that makes a module or data module."""

    section: str
    function: Callable[..., Any]


def factory_of_class(cls: type) -> Factory | None:
    """Return the function that makes the objects of a class; None for another class."""
    return vars(cls).get(_FACTORY)


def _class_path_of_factory(section: str, factory: Callable[..., Any]) -> str:
    """Return the path of a class whose call returns what a function makes."""
    base = BASES[section]
    parameters = []
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty or not is_plain(parameter.default):
            raise ConfigError(
                section,
                f"a function whose argument {parameter.name} has no plain default",
                f"a function with a number or text as default, such as {EXAMPLES[section]}",
            )
        parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    earlier: list[weakref.ref] = []

    def make(cls: type, **arguments: Any) -> Any:
        made = factory(**arguments)
        if not isinstance(made, base):
            found = type(made).__name__
            raise ConfigError(
                section, f"a function that returns {found}", f"one of {base.__name__}"
            )
        if any(made is each() for each in earlier):
            found = "a function that returns the same object again, such as a cached function"
            allowed = "a function that returns a new object in each call"
            raise ConfigError(section, found, allowed, f"Example: {EXAMPLES[section]}")
        earlier.append(weakref.ref(made))
        return made

    def never_called(self: Any, **arguments: Any) -> None:
        """`make` returns an object of another class, so Python does not call this."""

    # jsonargparse reads the signature of `__new__`, this package that of `__init__`.
    for function, first in ((make, "cls"), (never_called, "self")):
        _set_signature(function, first, parameters)
    name = section
    function_name = getattr(factory, "__name__", "")
    if function_name.isidentifier():  # not <lambda>
        name = f"{section}_{function_name}"
    members = {
        "__new__": make,
        "__init__": never_called,
        "__module__": OBJECTS,
        _FACTORY: Factory(section, factory),
    }
    cls = type(name, (base,), members)
    return _registered(cls, name)


def _set_signature(
    function: Callable[..., Any], first: str, parameters: Sequence[inspect.Parameter]
) -> None:
    """Show a function with other parameters, after a first one."""
    annotations = {}
    for parameter in parameters:
        if parameter.annotation is not parameter.empty:
            annotations[parameter.name] = parameter.annotation
    shown: Any = function
    shown.__annotations__ = annotations
    itself = inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    shown.__signature__ = inspect.Signature([itself, *parameters])


# ---- Arguments ----


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return the named parameters of the constructor of a class."""
    parameters = dict(inspect.signature(cls.__init__).parameters)
    parameters.pop("self", None)
    named = {}
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            named[name] = parameter
    return named


def _refuse_objects(section: str, cls: type, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that a configuration cannot contain."""
    for name, value in arguments.items():
        if not is_plain(value):
            raise _cannot_rebuild(section, cls, f"its argument {name} is a {type(value).__name__}")


def _cannot_rebuild(section: str, cls: type, why: str) -> ConfigError:
    allowed = f"an object that each trial can create again, but {why}"
    hint = f"Give a function that returns it: {EXAMPLES[section]}"
    return ConfigError(section, cls.__name__, allowed, hint)


def _config_of_instance(section: str, instance: Any, is_compiled: bool) -> ObjectConfig:
    """Return how to make an object like an existing one, if its arguments can be recovered."""
    cls = type(instance)
    stored_by_hooks.cache_clear()  # a reload may change a class in place
    arguments = _recovered_arguments(section, instance)
    _refuse_objects(section, cls, arguments)
    difference = _refuse_difference(section, instance, arguments)
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    unused = difference.unused
    if section == "model":
        unused = ["weights", *unused]
    sentences = [f"Each trial makes a new {cls.__name__}({written})."]
    if unused:
        sentences.append(f"It does not use these attributes of the object: {', '.join(unused)}.")
    if is_compiled:
        sentences.append("Trials do not compile it: step times are without compilation.")
    if difference.uncompared:
        sentences.append(
            "lit_dps cannot compare these attributes of the object with those of a new one: "
            f"{', '.join(difference.uncompared)}."
        )
    note = " ".join(sentences) if len(sentences) > 1 else ""
    return ObjectConfig({"class_path": class_path_of(section, cls), "init_args": arguments}, note)


def _recovered_arguments(section: str, instance: Any) -> dict[str, Any]:
    """Return the arguments of an object: by `save_hyperparameters`, else by attributes.

    Raises:
        ConfigError: for an argument that is neither.
    """
    cls = type(instance)
    saved = dict(instance.hparams)
    arguments = {}
    for name, parameter in _parameters(cls).items():
        if name in saved:
            arguments[name] = saved[name]
        elif name in vars(instance) or name in getattr(instance, "_modules", {}):
            arguments[name] = getattr(instance, name)
        else:
            why = f"its argument {name} is unknown; self.save_hyperparameters() in its __init__"
            why += " keeps it"
            raise _cannot_rebuild(section, cls, why)
        if isinstance(arguments[name], Path):
            arguments[name] = str(arguments[name])
        if isinstance(arguments[name], tuple) and parameter.annotation is parameter.empty:
            # A configuration has lists; only with an annotation they become tuples again.
            why = f"its argument {name} is a tuple and has no type annotation"
            raise _cannot_rebuild(section, cls, why)
    return arguments


def _refuse_difference(section: str, instance: Any, arguments: Mapping[str, Any]) -> Difference:
    """Return how an object differs from new objects that train in the same way.

    Raises:
        ConfigError: if a new object with these arguments trains differently.
    """
    cls = type(instance)
    made = []
    for seed in (0, 1):
        with preserve_rng_state(seed=seed):
            try:
                made.append(cls(**arguments))
            except Exception as error:
                why = f"{cls.__name__} with its arguments fails: {type(error).__name__}: {error}"
                raise _cannot_rebuild(section, cls, why) from error
    difference = compare_objects(instance, *made)
    if difference.reason:
        raise _cannot_rebuild(section, cls, difference.reason)
    return difference
