"""Merges studies: copies the results of other storages, so that several machines share a study."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from lit_dps.core.config import check_name
from lit_dps.core.environment import DATA, UNKNOWN, Hashes, is_same_data
from lit_dps.core.errors import StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.noise_scale import reading_batch_size
from lit_dps.core.racing import STOPPED_BY_RACE, longest_attempt, race_limit
from lit_dps.core.trial import Cell, RepeatId, Status, Trial, TrialResult, Value
from lit_dps.storage import schema
from lit_dps.storage.bulk import add_trials
from lit_dps.storage.cells import (
    check_cell,
    costs_by_point,
    intermediate_values,
    open_cell,
    stored_reruns_above,
)
from lit_dps.storage.database import storage_errors, temporary_storage
from lit_dps.storage.header import (
    StudyChanged,
    check_extension,
    check_seeds,
    extend,
    has_digests_of_values,
    identity_changes,
    stored_identity,
)
from lit_dps.storage.locks import storage_lock
from lit_dps.storage.ownership import refuse_foreign_cells, refuse_foreign_header
from lit_dps.storage.read import OtherStorage, list_studies, read_study
from lit_dps.storage.run_records import add_environments, add_notes
from lit_dps.storage.stored_format import read_header, study_attributes, study_id_of
from lit_dps.storage.urls import without_password

# Parameters are equal up to this relative difference: machines round logarithms differently.
PARAM_TOLERANCE = 1e-9
# Attributes of a header that `extend` writes, or that runs of the study measure.
_UNMERGED_ATTRIBUTES = {schema.MADE_BY, schema.FORMAT_ATTR, schema.UID, *schema.UNMEASURED}
# Attributes of a header that a merge extends. It does not change the others of an existing header.
_EXTENDED_ATTRIBUTES = (
    schema.BATCH_SIZES,
    schema.SPARSITIES,
    schema.AXES,
    schema.TRIALS,
    schema.GOALS,
    schema.RACE_FACTOR,
    schema.REPEATS,
    schema.SPACE_HISTORY,
)


@dataclass(frozen=True)
class Conflict:
    """A trial that ended differently in the other storage.

    Attributes:
        point: Its point.
        place: The other storage.
        repeat: The number of the repeat; 0 for a trial of the search.
        k_differs: Whether its steps to result differ, or are missing on one side.
    """

    point: int
    place: str
    repeat: int
    k_differs: bool


@dataclass
class Merged:
    """What a merge did to the trials of a study.

    Attributes:
        added: Number of trials of which an attempt was copied.
        unchanged: Number of trials of which the other storage has nothing new.
        conflicts: Trials that ended differently, by cell. The stored result was kept.
    """

    added: int = 0
    unchanged: int = 0
    conflicts: dict[Cell, list[Conflict]] = field(default_factory=dict)


class _Attempt(NamedTuple):
    stored: FrozenTrial
    result: TrialResult


class _Source(NamedTuple):
    """A study in another storage."""

    other: OtherStorage
    name: str


def merge(
    url: str, others: Sequence[OtherStorage], only: str | None = None, trust: bool = False
) -> dict[str, Merged]:
    """Copy the results of studies from other storages; stored results stay as they are.

    Everything is checked before anything is created or changed.

    Args:
        url: Optuna storage URL; the storage is created if it does not exist.
        others: The other storages.
        only: The name of the study to merge; None for all studies of the other storages.
        trust: As in `read_study`.

    Returns:
        What the merge did to each study, by name.

    Raises:
        StudyChanged: if studies of the same name have different identities, or as
            `check_extension`.
        ConfigError: as `check_extension`.
        StorageError: if a storage cannot be used, or if a study in it is incomplete.
    """
    sources = []
    for other in others:
        for name in [only] if only else _list_studies(other):
            sources.append(_Source(other, name))
    _check_sources(sources, trust)
    merged = {source.name: Merged() for source in sources}
    with storage_errors(url), temporary_storage(url) as storage, storage_lock(url):
        for source in sources:
            _check_target(storage, without_password(url), source, trust)
        for source in sources:
            _merge_study(storage, source, merged[source.name])
    return merged


# ---- Checks ----


def _list_studies(other: OtherStorage) -> list[str]:
    names = list_studies(other.storage)
    if not names:
        raise StorageError(f"{other.place} has no study. Name a storage with studies.")
    return names


def _check_sources(sources: Sequence[_Source], trust: bool) -> None:
    """Check that every source is complete, and that sources of the same name can be merged."""
    earlier: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for other, name in sources:
        header = _read_checked_header(other.storage, name, trust)
        for earlier_place, earlier_header in earlier.setdefault(name, []):
            _check_same_study(name, earlier_place, earlier_header, other.place, header)
        earlier[name].append((other.place, header))


def _read_checked_header(storage: BaseStorage, name: str, trust: bool) -> Mapping[str, Any]:
    """Return the header of a study.

    Raises:
        StorageError: if anything of the study is missing or damaged.
    """
    record = read_study(storage, name, trust)
    # Files and folders are named after both.
    check_name("study.name", name)
    check_name("study.workload", record.workload)
    header = read_header(storage, name)
    _check_cells(storage, name, header, header[schema.UID])
    return header


def _check_cells(
    storage: BaseStorage, name: str, header: Mapping[str, Any], uid: str | None
) -> None:
    for cell in schema.cells_of(header):
        for study in (schema.cell_study_name(name, cell), schema.repeats_study_name(name, cell)):
            check_cell(study_attributes(storage, study), name, cell, uid)


def _check_same_study(
    name: str, place: str, ours: Mapping[str, Any], other_place: str, theirs: Mapping[str, Any]
) -> None:
    identity, other_identity = stored_identity(ours), stored_identity(theirs)
    if has_digests_of_values(ours) and has_digests_of_values(theirs):
        # Each identity has the digest of one value of the axis, and the values may differ.
        other_identity["data_digest"] = identity.get("data_digest")
        _check_same_data(name, place, ours, other_place, theirs)
    differences = identity_changes(identity, other_identity)
    if differences:
        raise StudyChanged(
            f"study {name!r} cannot be merged: its configuration in {other_place} differs "
            f"from {place}: {'; '.join(map(str, differences))}",
            keys=[difference.key for difference in differences],
        )
    check_extension(name, ours, theirs)
    check_seeds(name, ours, theirs)


def _check_same_data(
    name: str, place: str, ours: Mapping[str, Any], other_place: str, theirs: Mapping[str, Any]
) -> None:
    """Raise StudyChanged if the data at a value of an axis differ between all runs of the studies.

    The result is the same if the studies are exchanged.
    """
    versions, other_versions = _data_versions(ours), _data_versions(theirs)
    changed = []
    for value in sorted(versions.keys() & other_versions.keys()):
        pairs = list(product(versions[value], other_versions[value]))
        # The last text is of the processor and the versions. A rough comparison of two processors
        # must not hide a change on one of them.
        exact = [(one, other) for one, other in pairs if one[-1] == other[-1]]
        if not any(is_same_data(one, other) for one, other in exact or pairs):
            changed.append(value)
    values = ", ".join(changed)
    if values:
        raise StudyChanged(
            f"study {name!r} cannot be merged: its data at {values} in {other_place} differ from "
            f"{place}",
            keys=["data_digest"],
        )


def _data_versions(header: Mapping[str, Any]) -> dict[str, list[Hashes]]:
    """Return the known hashes of the data at each value of an axis, from all runs of a study."""
    versions: dict[str, list[Hashes]] = {}
    for environment in header[schema.ENVIRONMENTS]:
        for value, hashes in environment.get(DATA, {}).items():
            if list(hashes) != UNKNOWN:
                versions.setdefault(value, []).append(hashes)
    return versions


def _check_target(storage: RDBStorage, place: str, source: _Source, trust: bool) -> None:
    """Check that a source can be merged into the target storage."""
    other, name = source
    theirs = read_header(other.storage, name)
    refuse_foreign_header(storage, name)
    refuse_foreign_cells(storage, name, schema.cells_of(theirs))
    if read_header(storage, name):
        ours = _read_checked_header(storage, name, trust)
        _check_same_study(name, place, ours, other.place, theirs)
        uid = ours[schema.UID]
    else:
        # The study is new here, so every cell that exists belongs to a deleted study.
        uid = study_attributes(storage, name).get(schema.UID, "no uid yet")
    _check_cells(storage, name, theirs, uid)


# ---- Merging ----


def _merge_study(storage: RDBStorage, source: _Source, merged: Merged) -> None:
    other, name = source
    ours, theirs = read_header(storage, name), read_header(other.storage, name)
    header = extend(storage, name, _merged_attributes(ours, theirs))
    _merge_noise(storage, name, header[schema.NOISE], theirs[schema.NOISE])
    _merge_step_timing(storage, name, header[schema.STEP_TIMING], theirs[schema.STEP_TIMING])
    add_environments(storage, name, theirs[schema.ENVIRONMENTS])
    add_notes(storage, name, theirs.get(schema.NOTES, {}))
    for cell in schema.cells_of(theirs):
        for repeats in (False, True):
            _merge_cell(storage, source, cell, repeats, header, merged)


def _merged_attributes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what extends our header: their grid, and our other attributes if we have a header."""
    kept = ours or theirs
    attrs = {}
    for key in schema.HEADER_ATTRS:
        if key in kept and key not in _UNMERGED_ATTRIBUTES:
            attrs[key] = kept[key]
    for key in _EXTENDED_ATTRIBUTES:
        attrs[key] = theirs[key]
    return attrs


def _merge_noise(
    storage: RDBStorage, name: str, ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None
) -> None:
    """Keep the better of two noise scales.

    It is the one that was measured at the batch size where the merged study would measure it. At
    equal batch sizes it is the one with more readings.
    """
    if not theirs:
        return
    if ours is None:
        is_better = True
    elif ours["batch_size"] == theirs["batch_size"]:
        is_better = ours["readings"] < theirs["readings"]
    else:
        preferred = reading_batch_size((ours["batch_size"], theirs["batch_size"]))
        is_better = preferred == theirs["batch_size"]
    if is_better:
        optuna.load_study(study_name=name, storage=storage).set_user_attr(schema.NOISE, theirs)


def _merge_step_timing(
    storage: RDBStorage, name: str, ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None
) -> None:
    """Take over their step times if there are none here; an analysis checks that they apply."""
    if ours is None and theirs is not None:
        header = optuna.load_study(study_name=name, storage=storage)
        header.set_user_attr(schema.STEP_TIMING, theirs)


def _merge_cell(
    storage: RDBStorage,
    source: _Source,
    cell: Cell,
    repeats: bool,
    header: Mapping[str, Any],
    merged: Merged,
) -> None:
    """Copy the new attempts at the trials of a cell, or at its repeats."""
    other, name = source
    if repeats:
        study_name = schema.repeats_study_name(name, cell)
    else:
        study_name = schema.cell_study_name(name, cell)
    theirs = _read_attempts(other.storage, study_name, cell)
    if not theirs:
        return
    is_new = study_id_of(storage, study_name) is None
    ours = _read_attempts(storage, study_name, cell)
    unit = Goal.from_dict(header[schema.GOAL]).cost_unit
    study = open_cell(storage, name, cell, header[schema.UID], repeats=repeats, unit=unit)
    copies: list[FrozenTrial] = []
    for (point, repeat), attempts in sorted(theirs.items()):
        stored = ours.get((point, repeat), [])
        new_attempts = _new_attempts(stored, attempts)
        if new_attempts is None:
            k_differs = _longest(stored).result.cost != _longest(attempts).result.cost
            conflict = Conflict(point, other.place, repeat, k_differs)
            merged.conflicts.setdefault(cell, []).append(conflict)
            continue
        copies += [_copy_of(attempt, other.place) for attempt in new_attempts]
        if new_attempts:
            merged.added += 1
        else:
            merged.unchanged += 1
    add_trials(storage, study, copies)
    # Repeats never wait, and a new cell has no waiting trials.
    if not repeats and not is_new:
        _end_unneeded_waiting(study, storage, header)


def _copy_of(attempt: _Attempt, place: str) -> FrozenTrial:
    trial = attempt.stored
    copied = copy.copy(trial)
    # If the trial was merged before, the first storage remains.
    copied.user_attrs = {schema.MERGED_FROM: place, **trial.user_attrs}
    # This number counts the runs of the other storage. A failure counts as older than every run.
    copied.user_attrs[schema.RESULT_ATTR] = {
        **trial.user_attrs[schema.RESULT_ATTR],
        schema.FAILED_IN: 0,
    }
    # Files that were made to be small hold no intermediate values.
    copied.intermediate_values = intermediate_values(attempt.result)
    return copied


def _read_attempts(
    storage: BaseStorage, study_name: str, cell: Cell
) -> dict[RepeatId, list[_Attempt]]:
    """Return the finished attempts with a result, by point and repeat, oldest first."""
    attempts: dict[RepeatId, list[_Attempt]] = {}
    study_id = study_id_of(storage, study_name)
    if study_id is None:
        return attempts
    for trial in storage.get_all_trials(study_id, deepcopy=False):
        attrs = trial.user_attrs
        if trial.state.is_finished() and schema.RESULT_ATTR in attrs:
            point, repeat = attrs[schema.POINT_ATTR], attrs[schema.REPEAT_ATTR]
            result = schema.decode_result(
                attrs[schema.RESULT_ATTR], Trial(cell, point, trial.params)
            )
            attempts.setdefault((point, repeat), []).append(_Attempt(trial, result))
    return attempts


# ---- Comparing attempts at one point ----


def _new_attempts(
    ours: Sequence[_Attempt], theirs: Sequence[_Attempt]
) -> Sequence[_Attempt] | None:
    """Return their attempts that add to ours; None if they contradict ours."""
    if len(ours) <= len(theirs) and all(map(_has_same_result, ours, theirs)):
        return theirs[len(ours) :]
    our_longest, their_longest = _longest(ours), _longest(theirs)
    if not _has_same_params(our_longest, their_longest):
        return None
    has_failed = their_longest.result.status is Status.FAILED
    if has_failed or _has_same_result(our_longest, their_longest):
        return []
    if _contradict(our_longest.result, their_longest.result):
        return None
    if longest_attempt(our_longest.result, their_longest.result) is their_longest.result:
        return [their_longest]
    if longest_attempt(their_longest.result, our_longest.result) is our_longest.result:
        return []
    return None


def _contradict(first: TrialResult, second: TrialResult) -> bool:
    """Return True if one attempt was stopped after the other had come to its end."""
    for stopped, ended in ((first, second), (second, first)):
        if ended.status is Status.FAILED:
            continue
        was_stopped = stopped.status in STOPPED_BY_RACE
        has_ended = ended.status not in STOPPED_BY_RACE
        # In steps, because the seconds up to a step differ between machines.
        if was_stopped and has_ended and ended.steps_run <= stopped.steps_run:
            return True
    return False


def _longest(attempts: Sequence[_Attempt]) -> _Attempt:
    """Return the longest attempt; a failed one only if all have failed."""
    candidates = [each for each in attempts if each.result.status is not Status.FAILED] or attempts
    longest = candidates[0]
    for attempt in candidates[1:]:
        if longest_attempt(longest.result, attempt.result) is attempt.result:
            longest = attempt
    return longest


def _has_same_result(ours: _Attempt, theirs: _Attempt) -> bool:
    our_result = ours.stored.user_attrs[schema.RESULT_ATTR]
    their_result = theirs.stored.user_attrs[schema.RESULT_ATTR]
    for key in ("status", "steps", "curve"):
        if our_result[key] != their_result[key]:
            return False
    return _has_same_params(ours, theirs)


def _has_same_params(ours: _Attempt, theirs: _Attempt) -> bool:
    our_params, their_params = ours.stored.params, theirs.stored.params
    if our_params.keys() != their_params.keys():
        return False
    return all(_is_close(our_params[key], their_params[key]) for key in our_params)


def _is_close(value: Value, other: Value) -> bool:
    if isinstance(value, str) or isinstance(other, str):
        return value == other
    return value == other or math.isclose(value, other, rel_tol=PARAM_TOLERANCE)


def _end_unneeded_waiting(
    study: optuna.Study, storage: RDBStorage, header: Mapping[str, Any]
) -> None:
    """End waiting trials whose points need no run after the merge.

    A worker enqueues again what it still needs.
    """
    trials = study.get_trials(deepcopy=False)
    costs = costs_by_point(storage, study._study_id).values()
    limit = race_limit(costs, header[schema.RACE_FACTOR], schema.statistic_of(header))
    reruns_above: dict[int, float] = {}
    for trial in trials:
        result = trial.user_attrs.get(schema.RESULT_ATTR)
        if trial.state.is_finished() and result is not None and result["status"] != Status.FAILED:
            point = trial.user_attrs[schema.POINT_ATTR]
            limit_of_attempt = stored_reruns_above(trial.user_attrs)
            reruns_above[point] = max(reruns_above.get(point, -math.inf), limit_of_attempt)
    for trial in trials:
        if trial.state is TrialState.WAITING:
            point = trial.user_attrs[schema.POINT_ATTR]
            if reruns_above.get(point, -math.inf) >= limit:
                storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
