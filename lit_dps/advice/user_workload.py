"""What a configuration says of the user's own batch size and learning rate, and the study that
probes around them."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from lit_dps.analysis.rates import RATE_NAMES
from lit_dps.core.errors import ConfigError
from lit_dps.core.search_space import Range
from lit_dps.storage.schema import PROBES_SUFFIX
from lit_dps.study.setup import StudySetup
from lit_dps.training.adam_scaling import AdamScales
from lit_dps.training.trainer_rules import as_list
from lit_dps.training.workload import Workload, locate

# the default box reaches from the module's own rate divided by this to the rate times this
WIDTH = 32.0
SCALING = "lit_dps.training.AdamScalingCallback"


def own_batch_size(workload: Workload) -> int:
    """The batch size of an optimizer step that the configuration gives, or its class by default.

    Raises:
        ConfigError: where neither does.
    """
    value = own_value(workload, workload.batch_size_key)
    if not isinstance(value, int) or value < 1:
        key = workload.batch_size_key
        raise ConfigError(
            "study.batch_size_key", key, f"a key with a batch size to begin from: set {key}"
        )
    return value * workload.accumulated


def own_value(workload: Workload, key: str) -> Any:
    """Return the value that the configuration gives to a key of the model or the data, or its class
    by default."""
    node, name = locate(
        {"model": dict(workload.model), "data": dict(workload.data)}, key, "study.space"
    )
    if node.get(name) is not None:
        return node[name]
    section = workload.model if key.startswith("model.") else workload.data
    return _defaults(section).get(name)


def rate_range(workload: Workload) -> dict[str, Range]:
    """A box around the module's own learning rate, for a configuration without a study.space.

    Raises:
        ConfigError: naming what to set, where no argument is called lr or learning_rate, or several
            are.
    """
    init = {**_defaults(workload.model), **workload.model.get("init_args", {})}
    found = [
        (path, x)
        for path, x in _numbers(init, "model")
        if path.rpartition(".")[2] in RATE_NAMES and 0 < x < math.inf
    ]
    if len(found) != 1:
        which = (
            f"{', '.join(path for path, _ in found)} are several"
            if found
            else "no argument lr or learning_rate"
        )
        what = (
            f"a range of the learning rate, such as model.lr: {{low: 1e-4, high: 0.1, scale: "
            f"log}} ({which})"
        )
        raise ConfigError("study.space", {}, what)
    path, rate = found[0]
    return {path: Range(rate / WIDTH, rate * WIDTH, "log")}


def probing(setup: StudySetup, trials: int, adaptive: AdamScales | None) -> StudySetup:
    """The study that probes: of the dense network alone, its grid grows with the probes.

    Args:
        setup: The user's configuration.
        trials: Of each probe.
        adaptive: Settings of an adaptive optimizer, whose second moment and weight decay follow the
            batch size; else None.
    """
    space = setup.study.space or rate_range(setup.workload)
    own = own_batch_size(setup.workload)
    study = dataclasses.replace(
        setup.study,
        name=f"{setup.study.name}{PROBES_SUFFIX}",
        batch_sizes=[own],
        sparsities=[0.0],
        grid={},
        goals=[],
        trials=trials,
        space=space,
        noise_scale=False,
    )
    trainer = dict(setup.workload.trainer)
    if adaptive is not None and not searches_scales(space):
        given: dict[str, Any] = {"reference": own}
        if adaptive.rate is not None and adaptive.weight_decay:
            given["rate"] = adaptive.rate
        scaling = {"class_path": SCALING, "init_args": given}
        trainer["callbacks"] = [*as_list(trainer.get("callbacks")), scaling]
    workload = dataclasses.replace(setup.workload, trainer=trainer)
    return dataclasses.replace(
        setup,
        study=study,
        workload=workload,
        smoothness=dataclasses.replace(setup.smoothness, interval=None),
    )


def searches_scales(space: Mapping[str, Any]) -> bool:
    """Whether the second moment or the weight decay is searched at each batch size, so that nothing
    moves it with B."""
    return any(key.rpartition(".")[2] in ("beta2", "betas", "weight_decay") for key in space)


def _defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    module, _, name = spec["class_path"].rpartition(".")
    arguments = inspect.signature(getattr(import_module(module), name).__init__).parameters
    return {
        key: p.default for key, p in arguments.items() if p.default is not inspect.Parameter.empty
    }


def _numbers(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            inner = value.get("init_args", {}) if "class_path" in value else value
            yield from _numbers(inner, f"{path}.{key}")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{path}.{key}", float(value)
