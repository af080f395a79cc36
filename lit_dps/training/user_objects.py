"""From a module or data module in Python to its configuration: class path and arguments.

Trials build new objects, so `config_of` returns how to make another one. It takes a class path, a
class, a `functools.partial` of a class, a function that makes the object, or an object whose
arguments can be recovered. What cannot be made again is refused in one line.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.core.identity import OBJECTS
from lit_dps.core.registry import class_at
from lit_dps.core.text import shorten
from lit_dps.pruning.mask import MAX_LENGTH
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.method_attributes import class_sets
from lit_dps.training.object_text import (
    CachedFunction,
    describe,
    is_of_user,
    shape_of,
    shown_without_address,
    source_of,
)

BASES = {"model": LightningModule, "data": LightningDataModule}
EXAMPLES = {
    "model": "model=lambda lr=1e-3: MyModel(my_network(), lr=lr)",
    "data": "data=lambda batch_size=32: MyData(my_table, batch_size)",
}
BATCH_SIZE_NAMES = ("batch_size", "train_batch_size", "batchsize", "batch", "bs")
DIGEST_LENGTH = 8  # hexadecimal digits
_CLASS_OF = "the class of "
_HOOKS_OF = "the number of hooks of "


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
    if isinstance(given, Mapping):
        if not isinstance(given.get("class_path"), str):
            allowed = "the class path of the " + section
            raise ConfigError(f"{section}.class_path", given.get("class_path"), allowed)
        return ObjectConfig(dict(given))
    if isinstance(given, str):
        return ObjectConfig({"class_path": given})
    if isinstance(given, base):
        return _config_of_instance(section, given)
    if isinstance(given, type):
        if not issubclass(given, base):
            raise ConfigError(section, given.__name__, f"a subclass of {base.__name__}")
        return ObjectConfig({"class_path": class_path_of(given)})
    if isinstance(given, functools.partial) and isinstance(given.func, type):
        bound = inspect.signature(given.func).bind_partial(*given.args, **given.keywords)
        arguments = dict(bound.arguments)
        _refuse_objects(section, given.func, arguments)
        inner = config_of(section, given.func).config
        return ObjectConfig({**inner, "init_args": arguments})
    if callable(given):
        return ObjectConfig({"class_path": class_path_of(_class_of_factory(section, given))})
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


def class_path_of(cls: type) -> str:
    """Return a path that imports a class in this process."""
    module = sys.modules.get(cls.__module__)
    if "." not in cls.__qualname__ and getattr(module, cls.__name__, None) is cls:
        return f"{cls.__module__}.{cls.__name__}"
    # For example, a class that a function defines.
    return _registered(cls, f"{cls.__name__}_{_digest(describe(cls).text)}")


def _registered(cls: type, name: str) -> str:
    """Make a class importable in this process, and return its path."""
    if OBJECTS not in sys.modules:
        sys.modules[OBJECTS] = types.ModuleType(OBJECTS)
    setattr(sys.modules[OBJECTS], name, cls)
    return f"{OBJECTS}.{name}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _class_of_factory(section: str, factory: Callable[..., Any]) -> type:
    """Return a class whose call returns what a function makes.

    Its name has a digest of the function's text. So a study or stored advice does not resume
    with another function.
    """
    base = BASES[section]
    _refuse_cached(section, factory)
    name = getattr(factory, "__name__", section)
    if not name.isidentifier():  # <lambda>
        name = section
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

    def make(cls: type, **arguments: Any) -> Any:
        made = factory(**arguments)
        if not isinstance(made, base):
            found = type(made).__name__
            raise ConfigError(
                section, f"a function that returns {found}", f"one of {base.__name__}"
            )
        return made

    def never_called(self: Any, **arguments: Any) -> None:
        """`make` returns an object of another class, so Python does not call this."""

    # jsonargparse reads the signature of `__new__`, this package that of `__init__`.
    for function, first in ((make, "cls"), (never_called, "self")):
        _set_signature(function, first, parameters)
    full_name = f"{name}_{_digest(_text_of_factory(section, factory))}"
    members = {"__new__": make, "__init__": never_called, "__module__": OBJECTS}
    cls = type(full_name, (base,), members)
    _registered(cls, full_name)
    return cls


def _refuse_cached(section: str, factory: Any) -> None:
    """Raise ConfigError for a cached function, which returns the object of an earlier trial."""
    function = factory
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, CachedFunction):
        found = "a cached function, which returns the same trained object again"
        allowed = "a function that returns a new object in each call"
        hint = f"Remove its functools.cache. Example: {EXAMPLES[section]}"
        raise ConfigError(section, found, allowed, hint)


def _text_of_factory(section: str, factory: Any) -> str:
    """Return the text of a factory.

    Raises:
        ConfigError: if a study could not detect that a value of the factory changes.
    """
    text, opaque_part = describe(factory)
    if opaque_part is not None:
        found = f"a {type(factory).__name__}"
        if opaque_part:
            found += f" whose {opaque_part} cannot be compared"
        allowed = (
            "a function, or an object whose parts a resumed study can compare: numbers, texts, "
            "arrays, functions, classes and objects with attributes"
        )
        raise ConfigError(section, found, allowed, f"Give a function: {EXAMPLES[section]}")
    return text


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


def is_plain(value: Any) -> bool:
    """Return True for None, numbers and texts, and for lists and dicts of them."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


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


def _config_of_instance(section: str, instance: Any) -> ObjectConfig:
    """Return how to make an object like an existing one, if its arguments can be recovered."""
    cls = type(instance)
    arguments = _recovered_arguments(section, instance)
    _refuse_objects(section, cls, arguments)
    _refuse_difference(section, instance, arguments)
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    note = ""
    if section == "model":
        note = (
            f"Each trial trains a new {cls.__name__}({written}). The weights of the object are not "
            "used."
        )
    return ObjectConfig({"class_path": class_path_of(cls), "init_args": arguments}, note)


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


def _refuse_difference(section: str, instance: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if a new object with these arguments differs from an existing one.

    Compared are hyperparameters, classes of submodules, public attributes, and the shapes and types
    of weights. Attributes that a method of the class sets, such as `setup`, may be added.
    """
    cls = type(instance)
    with preserve_rng_state(seed=0):
        try:
            made = cls(**arguments)
        except Exception as error:
            why = f"{cls.__name__} with its arguments fails: {type(error).__name__}: {error}"
            raise _cannot_rebuild(section, cls, why) from error
    before, after = _facts(instance), _facts(made)
    for name in [*after, *before]:
        is_added = name not in after
        if is_added and _is_set_by_methods(instance, name, after):
            continue
        if is_added or name not in before or before[name] != after[name]:
            was = _shown_fact(before, name)
            why = (
                f"{name} of the object is {was}, and {name} of a new {cls.__name__} is "
                f"{_shown_fact(after, name)}"
            )
            raise _cannot_rebuild(section, cls, why)


def _shown_fact(facts: Mapping[str, Any], name: str) -> str:
    """Return a fact for a message."""
    if name not in facts:
        return "missing"
    return shorten(str(facts[name]))


def _facts(instance: Any) -> dict[str, Any]:
    """Return what determines how an object trains, by dotted name, except values of weights."""
    facts: dict[str, Any] = {}
    for name, value in dict(instance.hparams).items():
        if is_plain(value):
            facts[f"hparams.{name}"] = value
    if isinstance(instance, nn.Module):
        facts |= _facts_of_weights(instance)
    for path, part in _parts_of(instance).items():
        if path:
            facts[f"{_CLASS_OF}{path}"] = type(part).__qualname__
        for name, value in vars(part).items():
            if _is_compared(name):
                facts[f"{path}.{name}".lstrip(".")] = _comparable(value)
        if isinstance(part, nn.Module):
            hooks = len(part._forward_hooks) + len(part._forward_pre_hooks)
            facts[f"{_HOOKS_OF}{path or 'the module'}"] = hooks
    return facts


def _parts_of(instance: Any) -> dict[str, Any]:
    """Return the submodules of a module by path, with the module itself; the instance else."""
    if isinstance(instance, nn.Module):
        return dict(instance.named_modules())
    return {"": instance}


def _facts_of_weights(module: nn.Module) -> dict[str, Any]:
    """Return the shapes and types of parameters and buffers, and whether they are trained."""
    facts: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        facts[name] = shape_of(value)
        facts[f"the type of {name}"] = value.dtype
        facts[f"requires_grad of {name}"] = value.requires_grad
    return facts


def _is_compared(name: str) -> bool:
    """Return True for a public attribute that Lightning does not set."""
    return not name.startswith("_") and name not in ("training", "trainer")


def _comparable(value: Any, depth: int = 4) -> Any:
    """Return a value whose equality shows that two objects have equal attributes.

    Elements of tensors are not compared, because they may be random.
    """
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if is_plain(value):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{type(value).__name__} {shape_of(value)}"
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__} {source_of(value.__code__)}"
    if isinstance(value, type):
        return value.__qualname__
    name = type(value).__qualname__
    if isinstance(value, nn.Module):
        return f"{name} {_facts_of_weights(value)}"
    if depth == 0:
        return name
    contents: Any = None
    if isinstance(value, functools.partial):
        contents = [value.func, *value.args, value.keywords]
    elif isinstance(value, (list, tuple)):
        contents = value[:MAX_LENGTH]
    elif isinstance(value, dict):
        contents = list(value.items())[:MAX_LENGTH]
    if contents is not None:
        return [name, *[_comparable(each, depth - 1) for each in contents]]
    if not is_of_user(type(value)):
        return f"{name} {shown_without_address(value)}"
    attributes = getattr(value, "__dict__", {})
    compared = {}
    for key, each in attributes.items():
        if _is_compared(key):
            compared[key] = _comparable(each, depth - 1)
    return [name, compared]


def _is_set_by_methods(instance: Any, name: str, after: Mapping[str, Any]) -> bool:
    """Return True for an added fact of an attribute that a method of its object's class sets.

    Args:
        instance: The object.
        name: Name of the fact. Facts of weights are never set by methods.
        after: The facts of a new object.
    """
    path = name.removeprefix(_CLASS_OF).removeprefix(_HOOKS_OF)
    if isinstance(instance, nn.Module) and name in _facts_of_weights(instance):
        return False
    parts = _parts_of(instance)
    while path:
        owner, _, attribute = path.rpartition(".")
        if owner in parts and class_sets(type(parts[owner]), attribute):
            return True
        # A method may set a whole submodule, with its attributes.
        if f"{_CLASS_OF}{owner}" in after:
            return False
        path = owner
    return False
