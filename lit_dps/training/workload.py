"""Workload: from a configuration and a trial to a fresh module, data module and trainer arguments.

Model and data are named by class path, so a workload knows nothing of the classes it builds.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from lit_dps.core.error_origin import find_user_error
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.parse_errors import one_line
from lit_dps.core.trial import Trial
from lit_dps.data import ImageData
from lit_dps.parallel.settings import arguments
from lit_dps.training.rng_state import preserve_rng_state
from lit_dps.training.trainer_rules import STUDY_TRAINER, as_list, filter_callbacks

_HOLDERS = ("init_args", "dict_kwargs")  # of what is below a class


class NoLogger(DummyLogger):
    """Takes everything that callbacks and modules log, and keeps nothing; `trainer.log_dir` is this
    folder."""

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


@dataclass(frozen=True)
class Workload:
    """A model, a data module and trainer arguments as plain configuration (class_path and
    init_args).

    Attributes:
        model: The LightningModule.
        data: The LightningDataModule.
        trainer: Arguments of `lightning.pytorch.Trainer`.
        batch_size_key: Configuration key of the batch size. A cell's is that of an optimizer step:
            where the trainer accumulates gradients over batches, each of these is as many times
            smaller.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    trainer: Mapping[str, Any]
    batch_size_key: str = "data.batch_size"

    @property
    def accumulated(self) -> int:
        """Batches of the train dataloader that make an optimizer step."""
        return self.trainer.get("accumulate_grad_batches") or 1

    @contextmanager
    def without_side_effects(self) -> Iterator[Workload]:
        """In here the same, but what a trial writes into its folder is gone afterwards: for runs
        that are no trials."""
        with tempfile.TemporaryDirectory(prefix="lit_dps-") as folder:
            yield replace(self, trainer={**self.trainer, "default_root_dir": folder})

    def build(self, trial: Trial) -> Built:
        """Fresh objects for a trial: module and data module drawn under seeds of the point, not of
        global state.

        The trainer is for the group of ranks that this process is in, else for one device.

        Raises:
            UserError: if a key of the trial names nothing, or its value is refused.
        """
        specs = self.specs(trial)
        data = _instantiate("data", specs["data"], trial.seed_for("order"))
        if trial.repeat and isinstance(
            data, ImageData
        ):  # others draw from the seed that they are made and run under
            data.order_anew(trial.seed_for("order"))
        module = self.module(trial)
        trainer = arguments(
            _instantiate("trainer", {**self.trainer, **STUDY_TRAINER}, trial.seed_for("order"))
        )
        callbacks = filter_callbacks(as_list(trainer.get("callbacks")), "trainer.callbacks")
        # a folder of the trial's own: Lightning takes up checkpoints that it finds there
        root = trainer.get("default_root_dir") or os.getcwd()
        folder = os.path.join(root, "trials", str(trial.cell), trial.file_name)
        own = {"callbacks": callbacks, "default_root_dir": folder, "logger": NoLogger(folder)}
        return Built(module, data, {**trainer, **own})

    def module(self, trial: Trial, purpose: str = "init") -> LightningModule:
        """A fresh module for a trial, drawn under the point's seed for a purpose; raises as
        `build`."""
        return _instantiate("model", self.specs(trial)["model"], trial.seed_for(purpose))

    def specs(self, trial: Trial) -> dict[str, Any]:
        """The configuration of the model and of the data of a trial, with its batch size and
        metaparameters in place.

        Raises:
            ConfigError: if a key of the trial names nothing.
        """
        specs = {"model": copy.deepcopy(dict(self.model)), "data": copy.deepcopy(dict(self.data))}
        batch_size = trial.cell.batch_size // self.accumulated
        pairs = [("study.batch_size_key", self.batch_size_key, batch_size)]
        pairs += [
            ("study.space", key, value)
            for key, value in trial.params.items()
            if not key.startswith("local.")
        ]
        # of the grid's other keys is how it is trained
        pairs += [
            ("study.grid", *pair)
            for pair in trial.cell.axes
            if pair[0].startswith(("model.", "data."))
        ]
        for source, key, value in sorted(
            pairs, key=lambda pair: place_of(pair[1])
        ):  # a class before what is below it
            node, name = locate(specs, key, source, classes=isinstance(value, str))
            node[name] = {"class_path": value} if isinstance(node.get(name), dict) else value
        if "order_seed" in specs["data"].get("init_args", {}):
            specs["data"]["init_args"]["order_seed"] = trial.seed_for("order")
        return specs


def place_of(key: str) -> tuple[str, ...]:
    """The names on the way to a key, alike for all ways to write it: a class comes before what is
    below it."""
    return tuple(name for name in key.split(".") if name not in _HOLDERS)


def locate(
    specs: Mapping[str, Any], key: str, source: str, classes: bool = False
) -> tuple[dict[str, Any], str]:
    """The dict that holds a dotted key, below the init_args of each class on the way, and the key's
    last part.

    With `classes` it may be the key of a class.

    Raises:
        ConfigError: naming `source`, where the key comes from, if the way does not exist.
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
            raise ConfigError(source, key, f"{'.'.join([first, *path[:i]])} has no part {name!r}")
        node = node[name]
    node = _arguments(node, last)
    if isinstance(node.get(last), dict) and not (classes and "class_path" in node[last]):
        raise ConfigError(
            source, key, "the key of a number" + (", a name or a class" if classes else "")
        )
    return node, last


def class_paths(workload: Workload) -> Iterator[str]:
    """All classes that the model and the data of a workload name, however deep."""
    return (node["class_path"] for node in classes_in([workload.model, workload.data]))


def classes_in(nested: Any) -> Iterator[Any]:
    """All that name a class in a nested configuration, however deep, the outer ones first."""
    nodes: list[Any] = [nested]
    for node in nodes:  # grows on the way
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
    return node if name == "init_args" else arguments


@cache
def _parser(name: str) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    if name == "trainer":
        parser.add_class_arguments(
            Trainer, name, fail_untyped=False, instantiate=False, sub_configs=True
        )
    else:
        base = LightningModule if name == "model" else LightningDataModule
        parser.add_subclass_arguments(base, name, fail_untyped=False, required=True)
    return parser


def _instantiate(name: str, spec: Mapping[str, Any], seed: int):
    try:
        parsed = _parser(name).parse_object(
            {name: copy.deepcopy(dict(spec))}
        )  # it puts its own types into what it gets
    except ArgumentError as error:
        raise find_user_error(error) or UserError(one_line(error)) from None
    with preserve_rng_state(seed=seed):
        try:
            return _parser(name).instantiate_classes(parsed)[name]
        except (ValueError, TypeError) as error:  # jsonargparse wraps what a class refuses
            raise find_user_error(error) or error from None
