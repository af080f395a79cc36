"""Finds parts of a configuration that have no effect in a study.

Only what a user writes is checked. A stored configuration is not, because its trials are retrained
as they were.
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
    """Return a line for each value that the study overrides.

    Raises:
        ConfigError: for a pruning.sparsity that no cell has, and for arguments of a class that an
            axis or a choice replaces.
    """
    study, workload = setup.study, setup.workload
    specs = {"model": dict(workload.model), "data": dict(workload.data)}
    keys = [("study.space", key) for key, box in study.space.items() if isinstance(box, Choices)]
    keys += [("study.grid", key) for key in study.axes]
    for source, key in keys:
        if key.startswith(("model.", "data.")):
            node, name = locate(specs, key, source, classes=True)
            if isinstance(node.get(name), dict):
                _refuse_lost_arguments(source, key, node[name])
    sparsity = setup.pruning.sparsity
    if sparsity and sparsity not in study.sparsities:
        allowed = f"one of study.sparsities {study.sparsities}, or left out"
        raise ConfigError("pruning.sparsity", sparsity, allowed)
    if not sparsity or study.sparsities == [sparsity]:
        return []
    return [
        f"pruning.sparsity = {sparsity:g} has no effect in a study: it prunes to study.sparsities "
        f"{study.sparsities}"
    ]


def _refuse_lost_arguments(source: str, key: str, spec: Mapping[str, Any]) -> None:
    """Raise ConfigError if a class that others replace was configured with arguments."""
    module, _, name = spec["class_path"].rpartition(".")
    try:
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    except (ImportError, AttributeError, ValueError):
        # A class within another class, or one of a library in C, has no readable signature.
        return
    for argument, value in (spec.get("init_args") or {}).items():
        default = inspect.Parameter.empty
        if argument in parameters:
            default = parameters[argument].default
        if isinstance(default, tuple):
            default = list(default)
        if value != default:
            allowed = (
                f"a class without arguments of its own: {key}.{argument} = {value!r} would be "
                "lost; leave it out, or make it an axis too"
            )
            raise ConfigError(source, key, allowed)
