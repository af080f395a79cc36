"""Finds the LightningModule and the LightningDataModule in a Python file, and their keys."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule, LightningModule

from lit_dps.core.errors import ConfigError, UserError, first_line, place_in_user_code
from lit_dps.core.search_space import RATE_NAMES
from lit_dps.training.object_difference import is_plain
from lit_dps.training.user_objects import BATCH_SIZE_NAMES


class UserCode(NamedTuple):
    """What a file defines.

    Attributes:
        module: Its LightningModule.
        data: Its LightningDataModule.
        batch_size_key: The key of the batch size, such as data.batch_size.
        batch_size: Its default.
        rate_key: The key of the learning rate, such as model.lr.
        rate: Its default.
    """

    module: type[LightningModule]
    data: type[LightningDataModule]
    batch_size_key: str
    batch_size: int
    rate_key: str
    rate: float


def import_file(path: Path) -> ModuleType:
    """Return the module of a file, imported by its name as `lit-dps` imports it later.

    Raises:
        ConfigError: if the file is missing, or has a name that cannot be imported.
        UserError: if it fails.
    """
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError("FILE", str(path), "a Python file with your module and data")
    if not path.stem.isidentifier():
        raise ConfigError("FILE", path.name, "a name that Python can import, such as my_code.py")
    folder = str(path.parent.absolute())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(path.stem)
    except Exception as error:
        place = place_in_user_code(error)
        raise UserError(
            f"{path} cannot be imported ({type(error).__name__}: "
            f"{first_line(error)}{place}). Correct the file.",
            key="FILE",
            value=str(path),
        ) from error
    file = getattr(module, "__file__", None)
    if file is None or not path.samefile(file):
        raise ConfigError(
            "FILE", path.name, f"another name, because Python imports {file} by this name"
        )
    return module


def look_at(module: ModuleType, choices: Mapping[str, str | None]) -> UserCode:
    """Return the classes of a file with their keys.

    Args:
        module: The imported file.
        choices: Values of the options model, data, batch_size_key and rate_key; None to guess.

    Raises:
        ConfigError: if there is no class or key, or several without a choice.
    """
    net = _class_of(module, LightningModule, "--model", choices["model"], "training_step")
    data = _class_of(module, LightningDataModule, "--data", choices["data"], "train_dataloader")
    key, size = _number_of(
        "--batch-size-key", "data", data, choices["batch_size_key"], BATCH_SIZE_NAMES
    )
    if int(size) != size or size < 1:
        raise ConfigError("--batch-size-key", key, f"a key of a whole number, not {size:g}")
    rate_key, rate = _number_of("--rate-key", "model", net, choices["rate_key"], RATE_NAMES)
    if rate <= 0:
        raise ConfigError("--rate-key", rate_key, f"a key of a number above 0, not {rate:g}")
    return UserCode(net, data, key, int(size), rate_key, rate)


def _class_of(module: ModuleType, base: type, option: str, choice: str | None, method: str) -> Any:
    """Return the subclass of a base class that a file defines and that can be built.

    Without a choice, it is the only class that no other class of the file extends.
    """
    classes = {}
    for name, cls in vars(module).items():
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        # A base class without the method is for subclasses.
        has_method = getattr(cls, method, None) is not getattr(base, method, None)
        if issubclass(cls, base) and has_method:
            classes[name] = cls
    listed = ", ".join(classes)
    file = f"{module.__name__}.py"
    if choice is not None and choice not in classes:
        raise ConfigError(option, choice, f"a {base.__name__} of {file}: {listed or 'none there'}")
    if not classes:
        raise ConfigError(option, None, f"a {base.__name__} with {method}; {file} has none")
    leaves = _leaves(classes)
    if choice is None and len(leaves) > 1:
        hint = f"Choose one: {option} {leaves[0]}"
        raise ConfigError(option, None, f"one of {listed}, the classes in {file}", hint)
    cls = classes[choice or leaves[0]]
    for name, parameter in _arguments(cls).items():
        if parameter.default is parameter.empty:
            raise ConfigError(
                option,
                cls.__name__,
                f"a class whose arguments all have defaults; {name} has none",
                f"Write a default, such as {name}=... in its __init__.",
            )
    return cls


def _leaves(classes: Mapping[str, type]) -> list[str]:
    """Return the names of the classes that no other one of them extends."""
    extended = {base for cls in classes.values() for base in cls.__mro__[1:]}
    return [name for name, cls in classes.items() if cls not in extended]


def _arguments(cls: type) -> dict[str, inspect.Parameter]:
    """Return the named arguments of a constructor."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {each.name: each for each in list(parameters)[1:] if each.kind not in variable}


def _number_of(
    option: str, section: str, cls: type, choice: str | None, names: tuple[str, ...]
) -> tuple[str, float]:
    """Return the key of a number among the arguments of a class, and its default."""
    defaults = {}
    for name, parameter in _arguments(cls).items():
        is_number = is_plain(parameter.default) and isinstance(parameter.default, (int, float))
        if is_number and not isinstance(parameter.default, bool):
            defaults[name] = float(parameter.default)
    listed = ", ".join(f"{section}.{name}" for name in defaults) or "none"
    if choice is not None:
        name = choice.removeprefix(f"{section}.")
        if name not in defaults:
            allowed = f"an argument of {cls.__name__} with a number as default: {listed}"
            raise ConfigError(option, choice, allowed)
        return f"{section}.{name}", defaults[name]
    candidates = [name for name in defaults if name in names]
    if len(candidates) != 1:
        found = "several are" if candidates else "none is"
        allowed = (
            f"one of the arguments of {cls.__name__} with a number as default ({listed}); {found} "
            f"called {' or '.join(names)}"
        )
        raise ConfigError(option, None, allowed)
    return f"{section}.{candidates[0]}", defaults[candidates[0]]
