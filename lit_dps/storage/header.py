"""The header of a study: what it set out to do. Written once; afterwards a study can be extended,
not changed."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage

from lit_dps.core.config import StudyConfig
from lit_dps.core.environment import DATA
from lit_dps.core.goal import Goal
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.search_space import space_to_dict
from lit_dps.core.space_history import ExpandedSpace
from lit_dps.core.step_timing import StepTiming
from lit_dps.core.trial import derive_seed
from lit_dps.storage.compatibility import StudyChanged, changed, check_apart, check_joint
from lit_dps.storage.database import storage_errors, storage_for_now
from lit_dps.storage.foreign_studies import refuse_foreign_cells, refuse_foreign_header
from lit_dps.storage.locks import storage_lock
from lit_dps.storage.schema import (
    AXES,
    BOXES,
    ENVIRONMENTS,
    FORMAT,
    FORMAT_ATTR,
    IDENTITY,
    MADE_BY,
    NOISE,
    REPEATS,
    RUN_ON,
    RUNS,
    STEP_TIMING,
    TRIAL_SEED,
    UID,
)
from lit_dps.storage.urls import sqlite_file


def attributes(storage: BaseStorage, name: str) -> dict[str, Any]:
    """The user attributes of a study in Optuna; none where there is no such study."""
    try:
        return storage.get_study_user_attrs(storage.get_study_id_from_name(name))
    except KeyError:
        return {}


def uid_of(storage: BaseStorage, name: str) -> str | None:
    """The uid of a study; None where there is no such study, or one of before there were uids."""
    return attributes(storage, name).get(UID)


def check_unchanged(
    url: str,
    name: str,
    identity: Mapping[str, Any],
    study: StudyConfig | None = None,
    boxes: Sequence[ExpandedSpace] = (),
) -> None:
    """Checks that a study of this name, if there is one, has this identity, and may be extended;
    creates nothing.

    Args:
        url, name: Optuna storage URL, and the study's name.
        identity: All that decides results, nested, plain JSON.
        study, boxes: What is to extend it; by default nothing.

    Raises:
        StudyChanged: naming every key that differs, and as `check_joint`.
        ConfigError: as `check_joint` and `check_apart`.
        ForeignStudy: if another program made an Optuna study of this name, or of one of its cells.
    """
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return
    with storage_errors(url), storage_for_now(url) as storage:
        refuse_foreign_header(storage, name)
        if study is not None:
            refuse_foreign_cells(storage, name, study.cells)
        _refuse_changed(storage, name, identity)
        if study is not None and FORMAT_ATTR in (known := attributes(storage, name)):
            check_joint(name, known, _grid(study, boxes))


def _grid(study: StudyConfig, boxes: Sequence[ExpandedSpace]) -> dict[str, Any]:
    """What extends a study, as its header has it."""
    grid = {
        "batch_sizes": study.batch_sizes,
        "sparsities": study.sparsities,
        AXES: study.axes,
        "trials": study.trials,
    }
    return grid | {BOXES: [box.to_dict() for box in boxes]}


def _refuse_changed(storage: BaseStorage, name: str, identity: Mapping[str, Any]) -> None:
    attrs = attributes(storage, name)
    if FORMAT_ATTR not in attrs:
        check_apart(
            name, (s.study_name for s in storage.get_all_studies() if FORMAT_ATTR in s.user_attrs)
        )
    elif differences := changed(_comparable(attrs, identity), identity):
        raise StudyChanged(
            f"study {name!r} was made with another configuration: {'; '.join(differences)}; "
            "restore it, or give the new one another study.name"
        )


def _comparable(attrs: Mapping[str, Any], identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the stored identity as it has to be compared with the identity of this run.

    With a data axis, the digest in the identity belongs to the axis' largest value, so a new value
    changes it. If the environments hold a digest of each value, these are compared instead.
    """
    has_axis = any(key.startswith("data.") for key in attrs.get(AXES, {}))
    has_digests = any(each.get(DATA) for each in attrs.get(ENVIRONMENTS, []))
    if has_axis and has_digests:
        return {**attrs[IDENTITY], "data_digest": identity.get("data_digest")}
    return attrs[IDENTITY]


def declare(
    url: str,
    study: StudyConfig,
    workload: str,
    goal: Goal,
    identity: Mapping[str, Any],
    config: Mapping[str, Any],
    boxes: Sequence[ExpandedSpace] = (),
) -> tuple[float | None, str]:
    """Writes the header of a new study, or extends that of an existing one.

    More trials, values of the grid's axes and goals, and a larger slack, extend a study; nothing is
    ever taken away.

    Args:
        url: Optuna storage URL.
        study: The grid and the search.
        workload: Name of the workload.
        goal: When trials stop.
        identity: All that decides results, nested, plain JSON: must be equal when a study is taken
            up again.
        config: The whole configuration, for the record.
        boxes: How the box was widened.

    Returns:
        The study's slack, the largest that it was ever run with, and its uid.

    Raises:
        StudyChanged: naming every key that differs.
        ConfigError: as `check_joint` and `check_apart`.
        ForeignStudy: if another program made an Optuna study of this name, or of one of its cells.
        StorageError: if the storage cannot be used.
    """
    attrs = {
        "about": f"study {study.name}: K* of each cell; the trials of a cell are in {study.name} "
        "| B=...",
        "workload": workload,
        "goal": goal.to_dict(),
        "seed": study.seed,
        "space": space_to_dict(study.space),
        IDENTITY: dict(identity),
        "config": dict(config),
        **_grid(study, boxes),
        "goals": study.goals,
        "slack": study.slack,
        **({RUN_ON: True} if study.run_on else {}),
        REPEATS: dataclasses.asdict(study.repeat_plan),
    }
    with storage_errors(url), storage_for_now(url) as storage, storage_lock(url):
        refuse_foreign_header(storage, study.name)
        refuse_foreign_cells(storage, study.name, study.cells)
        _refuse_changed(storage, study.name, identity)
        if study.best_of is not None and FORMAT_ATTR not in attributes(storage, study.name):
            # the seed of the other study may be the same: then one of these trials may be the very
            # one that was best
            attrs[TRIAL_SEED] = derive_seed(study.seed, f"best of {study.best_of}")
        written = extend(storage, study.name, attrs)
    return written["slack"], written[UID]


def extend(storage: RDBStorage, name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """As `declare`, from the header's user attributes but for uid and format, under the storage's
    lock.

    What of them neither extends nor is part of the identity takes the place of what was there.

    Returns:
        The header's user attributes.
    """
    refuse_foreign_header(storage, name)
    check_joint(name, attributes(storage, name), attrs)
    header = optuna.create_study(study_name=name, storage=storage, load_if_exists=True)
    known = header.user_attrs
    was = {"batch_sizes": [], "sparsities": [], "goals": [], "trials": 0, AXES: {}, **known}
    axes = {
        key: _union(was[AXES].get(key, ()), values) for key, values in attrs.get(AXES, {}).items()
    }
    new = {
        **attrs,
        UID: was.get(UID) or uuid.uuid4().hex,
        **{key: _union(was[key], attrs[key]) for key in ("batch_sizes", "sparsities", "goals")},
        AXES: was[AXES] | axes,
        "trials": max(was["trials"], attrs["trials"]),
        # a header of before there was racing has no slack: its trials ran to the budget
        "slack": _larger(was.get("slack"), attrs["slack"])
        if FORMAT_ATTR in was
        else attrs["slack"],
        FORMAT_ATTR: FORMAT,  # last: a header without it was cut short and is written anew
    }
    plans = [
        RepeatPlan(**plan)
        for plan in (was.get(REPEATS), new.pop(REPEATS, None))
        if plan and plan["count"]
    ]
    if plans:
        new = {REPEATS: dataclasses.asdict(reduce(RepeatPlan.extended, plans)), **new}
    if boxes := max(was.get(BOXES, []), new.pop(BOXES, []), key=len):  # one goes on from the other
        new = {BOXES: boxes, **new}
    if not new[AXES]:
        del new[AXES]
    if FORMAT_ATTR not in known:
        # First, so that an interrupted header is recognized as ours.
        new = {MADE_BY: "lit_dps", **new}
    for key, value in new.items():
        if key not in known or known[key] != value:
            header.set_user_attr(key, value)
    return new


def begin_run(url: str, name: str) -> int:
    """Begin a new run of a declared study, and return its number, from 1.

    Runs are ordered by this number, because clocks may be set back.

    Raises:
        StorageError: if the storage cannot be used.
    """
    with storage_errors(url), storage_for_now(url) as storage, storage_lock(url):
        header = optuna.load_study(study_name=name, storage=storage)
        number = header.user_attrs.get(RUNS, 0) + 1
        header.set_user_attr(RUNS, number)
    return number


def seed_of_trials(url: str, study: StudyConfig) -> int:
    """What the seeds of a declared study's trials are derived from."""
    with storage_errors(url), storage_for_now(url) as storage:
        return attributes(storage, study.name).get(TRIAL_SEED, study.seed)


def keep_noise_scale(url: str, name: str, noise: NoiseScale) -> None:
    """Stores the noise scale of a declared study, beside what it declares. StorageError if that
    cannot be."""
    with storage_errors(url), storage_for_now(url) as storage, storage_lock(url):
        optuna.load_study(study_name=name, storage=storage).set_user_attr(NOISE, noise.to_dict())


def keep_step_timing(url: str, name: str, timing: StepTiming) -> None:
    """Store the step times of a declared study, in place of earlier ones.

    Raises:
        StorageError: if the storage cannot be used.
    """
    with storage_errors(url), storage_for_now(url) as storage, storage_lock(url):
        optuna.load_study(study_name=name, storage=storage).set_user_attr(
            STEP_TIMING, timing.to_dict()
        )


def _union(one: Iterable, other: Iterable) -> list:
    """The values of both, sorted, numbers before names."""
    return sorted({*one, *other}, key=lambda value: (isinstance(value, str), value))


def _larger(one: float | None, other: float | None) -> float | None:
    """The larger slack; None is the largest."""
    return None if None in (one, other) else max(one, other)
