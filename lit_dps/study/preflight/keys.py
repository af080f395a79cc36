"""What is checked of the keys of a study, and of its goals and workers, before any trial is
built."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import RESERVED_NAMES
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.search_space import Choices
from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.engine import OPTIONS
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import locate

LOCAL = [f"local.{field.name}" for field in dataclasses.fields(LocalSGDSchedule)]
PRUNING = [
    f"pruning.{name}" for name in ("method", "init", "biases", "batch_size")
]  # the seed is the point's
DELAY = "optim.delay"


def check_goals(setup: StudySetup) -> None:
    own = setup.goal_of_trials
    for name in setup.study.metrics:
        if name in (own.metric, *RESERVED_NAMES):
            raise ConfigError("study.metrics", name, "another one: this is kept anyway")
    for value in setup.study.goals:
        if not own.is_easier(value) and not setup.study.run_on:
            side = "below" if own.at_least else "above"
            allowed = f"{side} {setup.goal.value_key} = {own.value:g}, which stops the runs"
            raise ConfigError("study.goals", value, allowed)
        try:
            own.with_value(value)
        except ConfigError as error:
            raise ConfigError("study.goals", value, error.allowed) from None


def check_keys(setup: StudySetup) -> None:
    """Raises ConfigError for a key that two parts of a study set, and for batch sizes that cannot
    be accumulated."""
    study, workload = setup.study, setup.workload
    specs = copy.deepcopy({"model": dict(workload.model), "data": dict(workload.data)})
    set_by: dict[tuple[int, str], str] = {}
    if "order_seed" in (arguments := specs["data"].get("init_args", {})):
        set_by[id(arguments), "order_seed"] = "study.seed"
    for source, key in [
        *(("study.space", key) for key in study.space),
        *(("study.grid", key) for key in study.axes),
    ]:
        if key.startswith("local.") and key not in LOCAL:
            raise ConfigError(source, key, f"one of {', '.join(LOCAL)}")
        if key.startswith("pruning.") and not (key in PRUNING or key.startswith(OPTIONS)):
            raise ConfigError(
                source,
                key,
                f"one of {', '.join(PRUNING)}, {OPTIONS}NAME of an argument of the method",
            )
        if key.startswith("optim.") and key != DELAY:
            raise ConfigError(source, key, DELAY)
        if source == "study.grid" and key in study.space and key in LOCAL:
            raise ConfigError(source, key, "a key of its own: study.space sets this one already")
    searched = [key for key in study.space if not key.startswith("local.")]
    keys = [
        ("study.batch_size_key", workload.batch_size_key),
        *(("study.space", key) for key in searched),
    ]
    for source, key in [
        *keys,
        *(("study.grid", key) for key in study.axes if key.startswith(("model.", "data."))),
    ]:
        classes = source == "study.grid" or isinstance(study.space.get(key), Choices)
        node, name = locate(specs, key, source, classes)
        if (place := (id(node), name)) in set_by:
            raise ConfigError(
                source, key, f"a key of its own: {set_by[place]} sets this one already"
            )
        set_by[place] = source if source == "study.batch_size_key" else f"{source} {key}"
    for batch_size in study.batch_sizes:
        if batch_size % workload.accumulated:
            multiples = f"multiples of trainer.accumulate_grad_batches = {workload.accumulated}"
            raise ConfigError(
                "study.batch_sizes", batch_size, f"{multiples}: the examples of an optimizer step"
            )


def check_workers(setup: StudySetup, cell: Cell, params: Mapping[str, float]) -> None:
    """Raises ConfigError where the workers of local SGD cannot share a batch, or a value of theirs
    is not allowed."""
    rounds, study = setup.training().local_sgd_callback(Trial(cell, 0, params)).rounds, setup.study
    for batch_size in study.batch_sizes if rounds.on else ():
        if batch_size % rounds.workers:
            raise ConfigError(
                "study.batch_sizes", batch_size, f"multiples of local.workers = {rounds.workers}"
            )
