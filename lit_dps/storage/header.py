"""The header of a study: what it intends to run. It can be extended, but not changed.

`declare` writes the header at the start of a study. When the study resumes, the same function
checks that the identity is the same, and extends the grid. `run_records` adds what runs measure.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optuna
from optuna.storages import BaseStorage, RDBStorage

from lit_dps.core.config import StudyConfig, check_kind, folder_name
from lit_dps.core.environment import DATA
from lit_dps.core.errors import ConfigError, StorageError, UserError
from lit_dps.core.goal import Goal
from lit_dps.core.identity import OBJECTS, one_spelling
from lit_dps.core.racing import larger_factor
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.search_space import ExpandedSpace, is_continuation, space_to_dict
from lit_dps.core.statistic import MINIMUM
from lit_dps.core.trial import check_names, derive_seed
from lit_dps.storage import schema
from lit_dps.storage.bulk import set_study_attrs
from lit_dps.storage.database import storage_errors, storage_name, temporary_storage
from lit_dps.storage.locks import storage_lock
from lit_dps.storage.ownership import refuse_foreign_cells, refuse_foreign_header
from lit_dps.storage.stored_format import read_header, study_attributes
from lit_dps.storage.urls import sqlite_file

# Earlier versions ended the name of a function or local class with a digest of its code.
_FORMER_OBJECT = re.compile(rf"{OBJECTS}\.\w+_[0-9a-f]{{8}}")


class StudyChanged(UserError):
    """A study cannot be resumed or merged, because its configuration, code or data differ.

    Attributes:
        parts: The files and data that differ; empty if the configuration differs.
        keys: The dotted configuration keys that differ; empty if code or data differ.
    """

    def __init__(self, message: str, parts: Sequence[str] = (), keys: Sequence[str] = ()):
        super().__init__(message)
        self.parts = tuple(parts)
        self.keys = tuple(keys)


class Difference(NamedTuple):
    """A configuration key whose values differ; "(absent)" stands for a missing value."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r} and is {self.now!r}"


class Declared(NamedTuple):
    """What a study's header holds after `declare`.

    Attributes:
        race_factor: The largest race factor that the study was ever run with; None if it does not
            race.
        uid: The study's id.
    """

    race_factor: float | None
    uid: str


def check_unchanged(
    url: str,
    name: str,
    identity: Mapping[str, Any],
    study: StudyConfig | None = None,
    spaces: Sequence[ExpandedSpace] = (),
) -> None:
    """Check that a stored study has this identity and may be extended. Creates nothing.

    Args:
        url: Optuna storage URL.
        name: The study's name. If there is no such study, only its names are checked.
        identity: All that decides results, as nested plain JSON.
        study: The configuration that is to extend the stored study; None for no extension.
        spaces: The expansions of the search space.

    Raises:
        StudyChanged: if the identity differs, or as `check_extension`.
        ConfigError: as `check_extension` and `_check_folder_name`.
        ForeignStudy: if another program made an Optuna study of this name, or of one of its cells.
    """
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return
    with storage_errors(url), temporary_storage(url) as storage:
        refuse_foreign_header(storage, name)
        if study is not None:
            refuse_foreign_cells(storage, name, study.cells)
        header = _checked_header(storage, name, identity)
        if study is not None and header:
            check_extension(name, header, _grid_attributes(study, spaces))


def declare(
    url: str,
    study: StudyConfig,
    workload: str,
    goal: Goal,
    identity: Mapping[str, Any],
    config: Mapping[str, Any],
    spaces: Sequence[ExpandedSpace] = (),
) -> Declared:
    """Write the header of a new study, or extend the header of a stored one.

    More trials, more values of the grid's axes, more goals and a larger race factor extend a study.
    The header never loses a value.

    Args:
        url: Optuna storage URL.
        study: The grid and the search.
        workload: Name of the workload. A stored study keeps its own, unless `study.workload` is
            set: MLflow has its runs in the experiment of this name.
        goal: When trials stop.
        identity: All that decides results, as nested plain JSON.
        config: The entire configuration, for the record.
        spaces: The expansions of the search space.

    Raises:
        StudyChanged: if the stored study has another identity, or as `check_extension`.
        ConfigError: as `check_extension` and `_check_folder_name`.
        ForeignStudy: if another program made an Optuna study of this name, or of one of its cells.
        StorageError: if the storage cannot be used.
    """
    attrs = {
        **_study_attributes(study),
        **_grid_attributes(study, spaces),
        schema.WORKLOAD: workload,
        schema.GOAL: goal.to_stored(),
        schema.IDENTITY: dict(identity),
        schema.CONFIG: dict(config),
    }
    with storage_errors(url), temporary_storage(url) as storage, storage_lock(url):
        refuse_foreign_header(storage, study.name)
        refuse_foreign_cells(storage, study.name, study.cells)
        stored = _checked_header(storage, study.name, identity)
        if study.best_of is not None:
            # The other study may have the same seed. Then a trial could be identical to the best
            # trial of the other study.
            attrs[schema.TRIAL_SEED] = derive_seed(study.seed, f"best of {study.best_of}")
        if stored:
            attrs[schema.TRIAL_SEED] = stored[schema.TRIAL_SEED]
            if not study.workload:
                attrs[schema.WORKLOAD] = stored[schema.WORKLOAD]
        header = extend(storage, study.name, attrs)
    return Declared(header[schema.RACE_FACTOR], header[schema.UID])


def _study_attributes(study: StudyConfig) -> dict[str, Any]:
    """Return the header's attributes about the search, without the grid."""
    name = study.name
    attrs = {
        schema.ABOUT: f"study {name}: K* of each cell; the trials of a cell are in {name} | B=...",
        schema.SEED: study.seed,
        schema.TRIAL_SEED: study.seed,
        schema.SPACE: space_to_dict(study.space),
        schema.GOALS: study.goals,
        schema.RACE_FACTOR: study.race_factor,
        schema.TRAIN_PAST_GOAL: study.train_past_goal,
        schema.REPEATS: encode_plan(study.repeat_plan),
    }
    if study.statistic != MINIMUM.name:
        attrs[schema.STATISTIC] = study.statistic
    return attrs


def extend(storage: RDBStorage, name: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Extend a header by user attributes, and return the attributes of the extended header.

    Attributes that cannot be extended replace the stored ones. The caller holds the storage's lock.
    """
    refuse_foreign_header(storage, name)
    before = read_header(storage, name)
    if before:
        check_extension(name, before, attrs)
        extended = _extended(before, attrs)
    else:
        check_extension(name, {}, attrs)
        uid = study_attributes(storage, name).get(schema.UID) or uuid.uuid4().hex
        extended: dict[str, Any] = {schema.MADE_BY: "lit_dps", schema.UID: uid}
        extended |= schema.UNMEASURED | _extended({}, attrs)
    extended[schema.FORMAT_ATTR] = schema.FORMAT
    header = optuna.create_study(study_name=name, storage=storage, load_if_exists=True)
    stored = header.user_attrs
    changed = {}
    for key, value in extended.items():
        if key not in stored or stored[key] != value:
            changed[key] = value
    # In one transaction: also after a kill, the number of trials and the search space belong
    # together. Earlier versions wrote one attribute at a time, the format last.
    set_study_attrs(storage, header._study_id, changed)
    return extended


def _extended(before: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a header after its extension.

    Args:
        before: The stored header; empty for a new study.
        attrs: What extends it.
    """
    extended = {**before, **attrs}
    for key in (schema.BATCH_SIZES, schema.SPARSITIES, schema.GOALS):
        extended[key] = _sorted_union(before.get(key, []), attrs[key])
    axes = {}
    for key, values in attrs[schema.AXES].items():
        axes[key] = _sorted_union(before.get(schema.AXES, {}).get(key, []), values)
    extended[schema.AXES] = axes
    if before:
        extended[schema.TRIALS] = max(before[schema.TRIALS], attrs[schema.TRIALS])
        extended[schema.RACE_FACTOR] = larger_factor(
            before[schema.RACE_FACTOR], attrs[schema.RACE_FACTOR]
        )
        plan = _larger_plan(decode_plan(before[schema.REPEATS]), decode_plan(attrs[schema.REPEATS]))
        extended[schema.REPEATS] = encode_plan(plan)
        # One list continues the other (`check_extension`).
        histories = (before[schema.SPACE_HISTORY], attrs[schema.SPACE_HISTORY])
        extended[schema.SPACE_HISTORY] = max(histories, key=len)
    return extended


def encode_plan(plan: RepeatPlan) -> dict[str, Any]:
    """Return a plan of repeats as plain JSON with the keys of `schema.REPEAT_KEYS`."""
    return {"count": plan.count, "points": plan.points, schema.RACE_FACTOR: plan.slack}


def decode_plan(stored: Mapping[str, Any]) -> RepeatPlan:
    """Return a stored plan of repeats."""
    return RepeatPlan(stored["count"], stored["points"], stored[schema.RACE_FACTOR])


def _grid_attributes(study: StudyConfig, spaces: Sequence[ExpandedSpace]) -> dict[str, Any]:
    return {
        schema.BATCH_SIZES: study.batch_sizes,
        schema.SPARSITIES: study.sparsities,
        schema.AXES: study.axes,
        schema.TRIALS: study.trials,
        schema.SPACE_HISTORY: [box.to_dict() for box in spaces],
    }


def seed_of_trials(url: str, study: StudyConfig) -> int:
    """Return the seed from which the seeds of a declared study's trials are derived.

    Raises:
        StorageError: if the storage has no such study, for example because it was deleted.
    """
    with storage_errors(url), temporary_storage(url) as storage:
        header = read_header(storage, study.name)
        if not header:
            raise StorageError(
                f"{storage_name(url)} has no study {study.name!r}. Its file was deleted, or "
                "replaced by a copy. Restore the file, or start the command again.",
                key="study.name",
                value=study.name,
            )
        return header[schema.TRIAL_SEED]


def stored_workload(url: str, name: str) -> str | None:
    """Return the name of the workload of a stored study; None if the study is not stored."""
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return None
    with storage_errors(url), temporary_storage(url) as storage:
        return read_header(storage, name).get(schema.WORKLOAD)


# ---- Checks ----


def _checked_header(storage: BaseStorage, name: str, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of a stored study, which must have this identity; empty without one.

    Raises:
        StudyChanged: if the stored study has another identity.
        ConfigError: as `_check_folder_name`.
    """
    header = read_header(storage, name)
    if not header:
        _check_folder_name(storage, name)
        return header
    differences = identity_changes(_comparable_identity(header, identity), identity)
    if differences:
        raise StudyChanged(
            f"study {name!r} was made with another configuration: "
            f"{'; '.join(map(str, differences))}. {remedy_of(differences)}",
            keys=[difference.key for difference in differences],
        )
    return header


def _comparable_identity(
    header: Mapping[str, Any], identity: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the stored identity in the form that can be compared with the identity of this run.

    With a data axis, the digest in the identity belongs to the axis' largest value, so a new value
    changes it. If the environments hold a digest of each value, these are compared instead.
    """
    identity_there = stored_identity(header)
    if has_digests_of_values(header):
        return {**identity_there, "data_digest": identity.get("data_digest")}
    return identity_there


def has_digests_of_values(header: Mapping[str, Any]) -> bool:
    """Return True if a study has an axis of the data, and digests of the data by its values."""
    has_axis = any(key.startswith("data.") for key in header[schema.AXES])
    # An environment has digests if its run has read the data.
    return has_axis and any(each.get(DATA) for each in header[schema.ENVIRONMENTS])


def stored_identity(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a header, spelled as that of a new study."""
    return one_spelling(header[schema.IDENTITY], header[schema.AXES])


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the keys whose values differ between two identities.

    Arguments of data of which nothing was read are compared if both identities record them.
    """
    if schema.UNREAD in before and schema.UNREAD in now:
        return compare(before, now)
    before, now = dict(before), dict(now)
    before.pop(schema.UNREAD, None)
    now.pop(schema.UNREAD, None)
    return compare(before, now)


def remedy_of(differences: Iterable[Difference]) -> str:
    """Return what a user can do about differences of a configuration."""
    remedy = "Restore the former values, or choose another study.name for the new configuration."
    for difference in differences:
        if _FORMER_OBJECT.fullmatch(str(difference.before)):
            return (
                f"An earlier version of lit_dps ended {difference.key} with a digest of the code, "
                "which this version cannot compare. Choose another study.name."
            )
    return remedy


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the dotted keys whose values differ between two nested configurations, sorted."""
    flat_before, flat_now = flatten(before), flatten(now)
    differences = []
    for key in sorted(flat_before | flat_now):
        old, new = flat_before.get(key, "(absent)"), flat_now.get(key, "(absent)")
        if old != new:
            differences.append(Difference(key, old, new))
    return differences


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check_folder_name(storage: BaseStorage, name: str) -> None:
    """Check that no other study of the storage has the same folder of files as a new study.

    Raises:
        ConfigError: if another study's name gives the same folder name.
    """
    for study in storage.get_all_studies():
        other = study.study_name
        if schema.FORMAT_ATTR not in study.user_attrs or other == name:
            continue
        if folder_name(other) == folder_name(name):
            allowed = f"a name whose folder differs from the folder of study {other!r}"
            raise ConfigError("study.name", name, allowed)


def check_extension(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Check that one header of a study can be extended by another.

    Args:
        name: The study's name.
        ours: The stored header; empty for a new study.
        theirs: Another header of the study, or what is to extend the stored one.

    Raises:
        ConfigError: if two values of an axis are of different kinds or give cells of the same name,
            or if the axes differ.
        StudyChanged: if the search space was expanded in two ways, or if one side has points of a
            space that the other side has expanded.
    """
    axes, other_axes = ours.get(schema.AXES, {}), theirs[schema.AXES]
    if ours and axes.keys() != other_axes.keys():
        allowed = f"{sorted(axes)}, the axes of study {name!r}. Or choose another study.name"
        raise ConfigError("study.grid", sorted(other_axes), allowed)
    sparsities = [*ours.get(schema.SPARSITIES, ()), *theirs[schema.SPARSITIES]]
    check_names("study.sparsities", sparsities)
    for key, values in other_axes.items():
        all_values = [*axes.get(key, ()), *values]
        check_kind(f"study.grid.{key}", all_values)
        check_names(f"study.grid.{key}", all_values)
    if ours:
        _check_space_history(name, ours, theirs)


def check_seeds(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise StudyChanged if the trials of two headers have different seeds."""
    if ours[schema.TRIAL_SEED] != theirs[schema.TRIAL_SEED]:
        # With study.best_of, the first versions used the seeds of the study that it names.
        raise StudyChanged(
            f"the two parts of study {name!r} cannot be merged: their trials have "
            "different seeds. An earlier version started one part, and used the seeds of "
            "the study in study.best_of.",
            keys=[schema.TRIAL_SEED],
        )


def _check_space_history(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise StudyChanged if points of two headers differ because the space was expanded."""
    spaces, other_spaces = ours[schema.SPACE_HISTORY], theirs[schema.SPACE_HISTORY]
    if not is_continuation(spaces, other_spaces):
        raise StudyChanged(
            f"the two parts of study {name!r} cannot be merged: their search spaces were "
            "expanded in different ways. Their samples therefore differ.",
            keys=[schema.SPACE_HISTORY],
        )
    if len(spaces) == len(other_spaces):
        return
    if len(spaces) < len(other_spaces):
        shorter, expansion = ours, other_spaces[len(spaces)]
    else:
        shorter, expansion = theirs, spaces[len(other_spaces)]
    trials, first = shorter[schema.TRIALS], expansion["first"]
    if trials > first:
        raise StudyChanged(
            f"the two parts of study {name!r} cannot be merged. The search space of one "
            f"part was expanded after {first} trials a cell, and the other part has "
            f"{trials} trials in the former space. Samples from {first} on differ.",
            keys=[schema.SPACE_HISTORY],
        )


def _sorted_union(values: Iterable, others: Iterable) -> list:
    """Return the values of both, which are of one kind (`check_extension`)."""
    return sorted({*values, *others})


def _larger_plan(plan: RepeatPlan, other: RepeatPlan) -> RepeatPlan:
    """Return the plan that repeats at least what both plans repeat."""
    if not plan.count:
        return other
    if not other.count:
        return plan
    return RepeatPlan(
        count=max(plan.count, other.count),
        points=max(plan.points, other.points),
        slack=larger_factor(plan.slack, other.slack),
    )
