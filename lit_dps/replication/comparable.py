"""Which series and which studies may be compared: those that trained the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lit_dps import Series, StudyRecord
from lit_dps.analysis import Analysis
from lit_dps.core.paper_protocol import training_sections, workload
from lit_dps.replication.estimates import DENSE
from lit_dps.replication.rules import Measurement, Measurements

OPTIMIZER = "model.init_args.optimizer"
_MODEL_AND_DATA = ("data.class_path", "model.class_path", "data.init_args", "model.init_args")
# Arguments of the trainer that define the training, with their defaults.
_TRAINER = {
    "accumulate_grad_batches": 1,
    "callbacks": None,
    "gradient_clip_algorithm": None,
    "gradient_clip_val": None,
    "precision": None,
}
_SINGLE_PRECISION = ("32", "32-true", 32)
# Last parts of keys that may differ between two studies that trained the same way. The searched
# keys may differ too.
_MAY_DIFFER = ("batch_size", "root", "sparsity", "optimizer", "learning_rate", "momentum")


def measure_pairs(
    study: Analysis,
    sparsity: float,
    measure: Callable[[Analysis, Series, Series], Measurement | None],
) -> Measurements | None:
    """Return the result of `measure(study, sparse, dense)` for each pair of series.

    The two series of a pair differ only in sparsity. A study without further axes has one pair,
    whose name is empty. None if no pair has a measurement.
    """
    measurements = {}
    for series in study.record.series:
        dense = replace(series, sparsity=DENSE)
        if series.sparsity != sparsity or dense not in study.record.series:
            continue
        measurement = measure(study, series, dense)
        if measurement is not None:
            name = str(series) if series.axes else ""
            measurements[name] = measurement
    return measurements or None


def is_search(record: StudyRecord) -> bool:
    """Return True unless a study took the best points of another study (study.best_of)."""
    return record.setting("study.best_of") is None


def workload_and_goal(record: StudyRecord) -> str:
    """Return workload and goal as text; studies in one figure share both."""
    return f"{' '.join(workload(record))} {record.goal}"


def have_same_goal(record: StudyRecord, other: StudyRecord) -> bool:
    """Return True if two studies have the same goal, and validate at the same steps."""
    goal, other_goal = record.goal, other.goal
    return (str(goal), goal.check_interval) == (str(other_goal), other_goal.check_interval)


def trained_the_same(record: StudyRecord, other: StudyRecord) -> bool:
    """Return True if two studies trained the same way, except for update rule and goal.

    Keys that a configuration of an earlier version lacks have their defaults. The arguments of
    model and data have no known defaults, so only those of both configurations are compared.
    """
    values = _training_settings(record)
    other_values = _training_settings(other)
    # The cells of an axis have other values than its default.
    shared = values.keys() & other_values.keys() - {*record.axes, *other.axes}
    return all(values[key] == other_values[key] for key in shared)


def _training_settings(record: StudyRecord) -> dict[str, object]:
    """Return the settings that define the training, by key."""
    values = {}
    for key in _MODEL_AND_DATA:
        values |= _leaves(record.setting(key), key)
    values.setdefault("model.init_args.schedule", "constant")
    for name, defaults in training_sections().items():
        section: Any = record.setting(name) or {}
        values |= _leaves({**defaults, **section}, name)
    for name, default in _TRAINER.items():
        value = record.setting(f"trainer.{name}")
        values[f"trainer.{name}"] = default if value in (None, *_SINGLE_PRECISION) else value
    excluded = {*_MAY_DIFFER, *map(_last_name, record.space)}
    return {key: value for key, value in values.items() if _last_name(key) not in excluded}


def _last_name(key: str) -> str:
    return key.rpartition(".")[2]


def _leaves(node: object, name: str) -> dict[str, object]:
    """Return the values of a nested mapping by dotted key."""
    if not isinstance(node, Mapping):
        return {name: node}
    leaves = {}
    for part, value in node.items():
        if part == "options":
            leaves[f"{name}.{part}"] = value or {}  # its keys have no known defaults
        else:
            leaves |= _leaves(value, f"{name}.{part}")
    return leaves
