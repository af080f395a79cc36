"""What a configuration asks for that has no effect in a study: refused, or told.

It is looked for in what a user writes, and not in a configuration that is stored: trials of it are
trained again as they were.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lit_dps.core.errors import ConfigError
from lit_dps.core.search_space import Choices
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import locate


def check_effects(setup: StudySetup) -> list[str]:
    """A line for what gives way to the study.

    Raises:
        ConfigError: for a pruning.sparsity that no cell has, and arguments that an axis or a choice
            takes away.
    """
    study, workload = setup.study, setup.workload
    specs = {"model": dict(workload.model), "data": dict(workload.data)}
    classes = [("study.space", key) for key, box in study.space.items() if isinstance(box, Choices)]
    classes += [("study.grid", key) for key in study.axes]
    for source, key in classes:
        if key.startswith(("model.", "data.")):
            node, name = locate(specs, key, source, classes=True)
            if isinstance(node.get(name), dict):
                _check_arguments(source, key, node[name])
    asked = setup.pruning.sparsity  # which is that of `fit`
    if asked and asked not in study.sparsities:
        raise ConfigError(
            "pruning.sparsity", asked, f"one of study.sparsities {study.sparsities}, or left out"
        )
    if not asked or study.sparsities == [asked]:
        return []
    return [
        f"pruning.sparsity = {asked:g} has no effect in a study: it prunes to study.sparsities "
        f"{study.sparsities}"
    ]


def _check_arguments(source: str, key: str, spec: Mapping[str, Any]) -> None:
    """Raises ConfigError where a class that others take the place of was configured: none of them
    would be so."""
    module, _, name = spec["class_path"].rpartition(".")
    try:
        arguments = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    except (
        ImportError,
        AttributeError,
        ValueError,
    ):  # one within another class, or of a library in C
        return
    for argument, value in (spec.get("init_args") or {}).items():
        default = arguments[argument].default if argument in arguments else inspect.Parameter.empty
        default = list(default) if isinstance(default, tuple) else default
        if value != default:
            lost = (
                f"a class without arguments of its own: {key}.{argument} = {value!r} would be "
                "lost; leave it out"
            )
            raise ConfigError(source, key, f"{lost}, or make it an axis too")
