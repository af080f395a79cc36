"""Workload: from a configuration and a trial to a fresh module, data module and trainer arguments.

Model and data are named by class path, so a workload knows nothing of the classes it builds.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from lit_dps.core.errors import ConfigError, find_user_error
from lit_dps.core.parse_errors import refusal
from lit_dps.core.registry import class_at
from lit_dps.core.trial import Cell, Trial
from lit_dps.data import ImageData
from lit_dps.parallel.ddp import trainer_arguments
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.trainer_rules import (
    ACCUMULATION_KEY,
    STUDY_TRAINER,
    as_list,
    filter_callbacks,
)

CLASS_KEYS = ("init_args", "dict_kwargs")  # they hold the arguments of a class
MAX_PARSED = 256  # parsed configurations to keep: more than the classes of any study


class NoLogger(DummyLogger):
    """A logger that keeps nothing; `trainer.log_dir` is its folder."""

    def __init__(self, folder: str):
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        return self._folder


@dataclass(frozen=True)
class Built:
    """What one trial trains."""

    module: LightningModule
    data: LightningDataModule
    trainer: dict[str, Any]


class Setting(NamedTuple):
    """A value that a trial sets, and the key of `study` that the value comes from."""

    source: str
    key: str
    value: Any


@dataclass(frozen=True)
class Workload:
    """Model, data module and trainer arguments as plain configuration (class_path, init_args).

    Attributes:
        model: The LightningModule.
        data: The LightningDataModule.
        trainer: Arguments of `lightning.pytorch.Trainer`.
        batch_size_key: Configuration key of the batch size. The batch size of a cell is the number
            of examples of an optimizer step. If the trainer accumulates gradients, its batches are
            smaller.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    trainer: Mapping[str, Any]
    batch_size_key: str = "data.batch_size"

    @property
    def accumulated(self) -> int:
        """Batches of the train dataloader that make an optimizer step, unless the cell sets it."""
        return self.trainer.get("accumulate_grad_batches") or 1

    def parts_of(self, cell: Cell) -> int:
        """Return how many batches of the train dataloader make an optimizer step of a cell."""
        return int(dict(cell.axes).get(ACCUMULATION_KEY, self.accumulated))

    @contextmanager
    def without_side_effects(self) -> Iterator[Workload]:
        """Yield a copy whose trials write into a temporary folder; for runs that are no trials."""
        with tempfile.TemporaryDirectory(prefix="lit_dps-") as folder:
            yield replace(self, trainer={**self.trainer, "default_root_dir": folder})

    def build(self, trial: Trial) -> Built:
        """Return fresh objects for a trial.

        Module and data module are drawn under seeds of the point, not of global state. The trainer
        is for the group of ranks that this process is in, else for one device.

        Raises:
            UserError: if a key of the trial names nothing, or if its value is refused.
        """
        order_seed = trial.seed_for("order")
        specs = self.specs(trial)
        data = self._instantiate("data", specs["data"], trial, order_seed)
        # Other data modules draw from the seed under which they are made and run.
        if trial.repeat and isinstance(data, ImageData):
            data.reseed_order(order_seed)
        module = self._instantiate("model", specs["model"], trial, trial.seed_for("init"))
        options = _instantiate(
            "trainer", {**self.trainer_of(trial), **STUDY_TRAINER}, {}, order_seed
        )
        trainer = trainer_arguments(options)
        # Each trial has a separate folder, because Lightning resumes checkpoints that are there.
        root = trainer.get("default_root_dir") or os.getcwd()
        folder = os.path.join(root, "trials", trial.cell.stored_name, trial.file_name)
        trainer = {
            **trainer,
            "callbacks": filter_callbacks(as_list(trainer.get("callbacks")), "trainer.callbacks"),
            "default_root_dir": folder,
            "logger": NoLogger(folder),
        }
        return Built(module, data, trainer)

    def trainer_of(self, trial: Trial) -> dict[str, Any]:
        """Return the trainer's arguments of a trial, with the values of its cell."""
        arguments = dict(self.trainer)
        for key, value in trial.cell.axes:
            section, _, name = key.partition(".")
            if section == "trainer":
                arguments[name] = value
        return arguments

    def module(self, trial: Trial, purpose: str = "init") -> LightningModule:
        """Return a fresh module, drawn under the point's seed for a purpose; raises as `build`."""
        spec = self.specs(trial)["model"]
        return self._instantiate("model", spec, trial, trial.seed_for(purpose))

    def specs(self, trial: Trial) -> dict[str, Any]:
        """Return the configuration of the model and the data of a trial, with the trial's values.

        Raises:
            ConfigError: if a key of the trial names nothing.
        """
        specs = {"model": copy.deepcopy(dict(self.model)), "data": copy.deepcopy(dict(self.data))}
        for source, key, value in self._settings(trial):
            node, name = locate(specs, key, source, classes=isinstance(value, str))
            if isinstance(node.get(name), dict):
                value = {"class_path": value}
            node[name] = value
        if "order_seed" in specs["data"].get("init_args", {}):
            specs["data"]["init_args"]["order_seed"] = trial.seed_for("order")
        return specs

    def _settings(self, trial: Trial) -> list[Setting]:
        """Return what a trial sets in model and data; a class comes before what is below it."""
        batch_size = trial.cell.batch_size // self.parts_of(trial.cell)
        settings = [Setting("study.batch_size_key", self.batch_size_key, batch_size)]
        for key, value in trial.params.items():
            if not key.startswith("local."):
                settings.append(Setting("study.space", key, value))
        # The other keys of the grid decide how the trial is trained.
        for key, value in trial.cell.axes:
            if key.startswith(("model.", "data.")):
                settings.append(Setting("study.grid", key, value))
        return sorted(settings, key=lambda setting: place_of(setting.key))

    def _instantiate(self, name: str, spec: Mapping[str, Any], trial: Trial, seed: int) -> Any:
        keys = [setting.key for setting in self._settings(trial)]
        numbers = _plain_numbers(spec, [*keys, "data.order_seed"], name)
        return _instantiate(name, spec, numbers, seed)


def place_of(key: str) -> tuple[str, ...]:
    """Return the names on the way to a key, without `CLASS_KEYS`: equal for all spellings."""
    return tuple(name for name in key.split(".") if name not in CLASS_KEYS)


def locate(
    specs: Mapping[str, Any], key: str, source: str, classes: bool = False
) -> tuple[dict[str, Any], str]:
    """Return the dict that holds a dotted key, and the last part of the key.

    Below a class, the dict is in its init_args.

    Args:
        specs: The configuration of the model and of the data.
        key: The key.
        source: The key that `key` comes from, for the error.
        classes: Whether `key` may be the key of a class.

    Raises:
        ConfigError: if there is no such key.
    """
    first, *path = key.split(".")
    if first not in specs or not path:
        raise ConfigError(
            source, key, "a key of the model or the data, such as model.learning_rate"
        )
    node = specs[first]
    *parents, last = path
    for i, name in enumerate(parents):
        node = _arguments(node, name)
        if not isinstance(node.get(name), dict):
            raise ConfigError(
                source,
                key,
                f"the key of an existing part; {'.'.join([first, *path[:i]])} has no part {name!r}",
            )
        node = node[name]
    node = _arguments(node, last)
    is_mapping = isinstance(node.get(last), dict)
    if is_mapping and not (classes and "class_path" in node[last]):
        allowed = "the key of a number"
        if classes:
            allowed += ", a name or a class"
        raise ConfigError(source, key, allowed)
    return node, last


def class_paths(workload: Workload) -> Iterator[str]:
    """Yield all classes that the model and the data of a workload name, however deep."""
    for node in classes_in([workload.model, workload.data]):
        yield node["class_path"]


def classes_in(nested: Any) -> Iterator[Any]:
    """Yield all mappings of a nested configuration that name a class, the outer ones first."""
    nodes: list[Any] = [nested]
    for node in nodes:  # the list grows during the loop
        if isinstance(node, Mapping):
            if isinstance(node.get("class_path"), str):
                yield node
            nodes.extend(node.values())
        elif isinstance(node, (list, tuple)):
            nodes.extend(node)


def _arguments(node: dict[str, Any], name: str) -> dict[str, Any]:
    if "class_path" not in node or name == "dict_kwargs":
        return node
    arguments = node.setdefault("init_args", {})
    if name == "init_args":
        return node
    return arguments


@cache
def _parser(name: str) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    if name == "trainer":
        parser.add_class_arguments(
            Trainer, name, fail_untyped=False, instantiate=False, sub_configs=True
        )
    else:
        base = LightningDataModule
        if name == "model":
            base = LightningModule
        parser.add_subclass_arguments(base, name, fail_untyped=False, required=True)
    return parser


def _instantiate(
    name: str, spec: Mapping[str, Any], numbers: Mapping[str, int | float], seed: int
) -> Any:
    """Return the object of a configuration, drawn under a seed.

    Args:
        name: "model", "data" or "trainer".
        spec: Its configuration.
        numbers: Numbers of `spec` that other trials set differently; see `_plain_numbers`.
        seed: The seed.
    """
    parsed = _parse(name, spec, numbers)
    if next(classes_in(spec), None) is None:  # a trainer of plain values
        return parsed[name]
    if _is_plain(parsed[name]):
        # jsonargparse needs 2 ms of CPU more. If a class raises an error, it reports the error.
        with preserve_rng_state(seed=seed), suppress(Exception):
            return _construct(parsed[name])
    with preserve_rng_state(seed=seed):
        try:
            return _parser(name).instantiate_classes(parsed)[name]
        except (ValueError, TypeError) as error:  # jsonargparse wraps what a class refuses
            raise find_user_error(error) or error from None


def _construct(parsed: Namespace) -> Any:
    """Return the object of a parsed class for which `_is_plain` is true."""
    arguments = {}
    for name, value in vars(parsed.init_args).items():
        if isinstance(value, Namespace):
            value = _construct(value)
        arguments[name] = value
    kind: Any = class_at(parsed.class_path)
    return kind(**arguments)


def _is_plain(parsed: Namespace) -> bool:
    """Return True if jsonargparse would only call a parsed class with its parsed arguments.

    It is false for arguments that jsonargparse changes, such as class paths of functions.
    """
    if vars(parsed).keys() != {"class_path", "init_args"}:
        return False
    kind = class_at(parsed.class_path)
    if kind is None:
        return False
    hints = _hints_of(kind)
    for name, value in vars(parsed.init_args).items():
        hint = _without_none(hints.get(name))
        if isinstance(value, Namespace):
            if not isinstance(hint, type) or not _is_plain(value):
                return False
        elif value is not None and not _is_plain_hint(hint):
            return False
    return True


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    """Return the annotations of a class's arguments; empty if they cannot be evaluated."""
    try:
        return get_type_hints(kind.__init__)
    except Exception:  # annotations may name anything
        return {}


def _without_none(hint: Any) -> Any:
    """Return X for Optional[X]; other annotations as they are."""
    if get_origin(hint) in (Union, types.UnionType):
        others = [each for each in get_args(hint) if each is not type(None)]
        if len(others) == 1:
            return others[0]
    return hint


def _is_plain_hint(hint: Any) -> bool:
    """Return True for a number, a text, a Literal, and tuples and lists of them."""
    if get_origin(hint) in (tuple, list):
        return all(each is Ellipsis or _is_plain_hint(each) for each in get_args(hint))
    return hint in (bool, int, float, str) or get_origin(hint) is Literal


# Parsed configurations, by their text without numbers and by their classes. jsonargparse needs
# about 10 ms of CPU for a class; trials of a study differ in numbers only, or in few classes.
_parsed: dict[tuple, Namespace] = {}


def _parse(name: str, spec: Mapping[str, Any], numbers: Mapping[str, int | float]) -> Namespace:
    """Return a configuration as jsonargparse parses it; at best, a kept one with these numbers."""
    template = copy.deepcopy(dict(spec))
    for path, number in numbers.items():
        node = template
        *parents, last = path.split(".")
        for part in parents:
            node = node[part]
        node[last] = type(number).__name__
    classes = tuple(class_at(node["class_path"]) for node in classes_in(template))
    key = name, json.dumps(template, sort_keys=True, default=repr), classes
    if key not in _parsed:
        if len(_parsed) >= MAX_PARSED:
            _parsed.clear()
        _parsed[key] = _parse_object(name, spec)
    # A class may change the lists and dicts that it is given.
    parsed = copy.deepcopy(_parsed[key])
    for path, number in numbers.items():
        parsed[f"{name}.{path}"] = number
    return parsed


def _parse_object(name: str, spec: Mapping[str, Any]) -> Namespace:
    try:
        # jsonargparse replaces values in the dict that it is given.
        return _parser(name).parse_object({name: copy.deepcopy(dict(spec))})
    except ArgumentError as error:
        raise find_user_error(error) or refusal(error) from None


def _plain_numbers(
    spec: Mapping[str, Any], keys: Sequence[str], section: str
) -> dict[str, int | float]:
    """Return the numbers of a configuration that need no check, by their paths below `section`.

    These are numbers of exactly the annotated type of their argument, so that jsonargparse would
    accept each of them without a change. All other values take part in `_parse`.

    Args:
        spec: The configuration of a class.
        keys: Configuration keys, such as model.learning_rate.
        section: The section of `spec`, such as "model".
    """
    numbers = {}
    for key in keys:
        first, *names = place_of(key)
        if first != section or "dict_kwargs" in key:
            continue
        node: Any = spec
        path: list[str] = []
        class_path = ""
        for name in names:
            if not isinstance(node, Mapping) or not isinstance(node.get("init_args"), Mapping):
                break
            class_path = str(node.get("class_path"))
            node = node["init_args"].get(name)
            path += ["init_args", name]
        else:
            kind = class_at(class_path)
            if kind is not None and _takes_any(kind, names[-1], type(node)):
                numbers[".".join(path)] = node
    return numbers


def _takes_any(cls: type, argument: str, kind: type) -> bool:
    """Return True if an argument of a class takes every int, or every float."""
    return kind in (int, float) and _without_none(_hints_of(cls).get(argument)) is kind
