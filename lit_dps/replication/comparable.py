"""Which series and which studies may be compared: what they trained, on what, by which rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lit_dps import Series, StudyRecord
from lit_dps.analysis import Analysis
from lit_dps.core.paper_protocol import workload
from lit_dps.replication.estimates import DENSE
from lit_dps.replication.rules import Measurement, Measurements

OPTIMIZER = "model.init_args.optimizer"
# Keys of what was trained on what, how it was pruned and by which schedule.
_TRAINING_KEYS = (
    *("data.class_path", "model.class_path", "data.init_args", "model.init_args"),
    *("pruning", "optim", "local", "batch"),
)
# Keys, by their last names, that two studies which trained the same may differ in, beside the
# searched keys.
_MAY_DIFFER = ("batch_size", "root", "sparsity", "optimizer", "learning_rate", "momentum")


def measure_pairs(
    study: Analysis,
    sparsity: float,
    measure: Callable[[Analysis, Series, Series], Measurement | None],
) -> Measurements | None:
    """Return the result of `measure(study, sparse, dense)` for each pair of series.

    The two series of a pair differ in sparsity alone. The name of a pair is empty in a study
    without further axes, which has one pair. None if no pair has a measurement.
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
    """Return what was trained on what, to which goal: what studies in one figure share."""
    return f"{' '.join(workload(record))} {record.goal}"


def have_same_goal(record: StudyRecord, other: StudyRecord) -> bool:
    """Return True if two studies have the same goal, and validate at the same steps."""
    goal, other_goal = record.goal, other.goal
    return (str(goal), goal.check_interval) == (str(other_goal), other_goal.check_interval)


def trained_the_same(record: StudyRecord, other: StudyRecord) -> bool:
    """Return True if two studies trained the same, except for update rule and goal.

    Configurations of earlier versions lack keys, which then have their defaults. So only keys that
    both have are compared.
    """
    values = _training_settings(record)
    other_values = _training_settings(other)
    return all(values[key] == other_values[key] for key in values.keys() & other_values.keys())


def _training_settings(record: StudyRecord) -> dict[str, object]:
    """Return what was trained on what, how it was pruned and by which schedule, by key."""
    values = {}
    for key in _TRAINING_KEYS:
        values |= _leaves(record.setting(key), key)
    values.setdefault("model.init_args.schedule", "constant")
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
        leaves |= _leaves(value, f"{name}.{part}")
    return leaves
