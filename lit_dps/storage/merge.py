"""Takes over trials of the same studies that were run elsewhere, so that results of several
machines join."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from lit_dps.core.config import check_name
from lit_dps.core.errors import StorageError
from lit_dps.core.noise_scale import read_at
from lit_dps.core.racing import longest_attempt
from lit_dps.core.repeats import RepeatId
from lit_dps.core.trial import Cell, Status, Trial, TrialResult, Value
from lit_dps.storage import schema
from lit_dps.storage.bulk import add_trials
from lit_dps.storage.cells import check_cell, open_cell, race_limit, ran_to
from lit_dps.storage.compatibility import StudyChanged, changed, check_joint, check_seeds
from lit_dps.storage.database import storage_errors, storage_for_now
from lit_dps.storage.environments import add_environments
from lit_dps.storage.foreign_studies import refuse_foreign_cells, refuse_foreign_header
from lit_dps.storage.header import attributes, extend
from lit_dps.storage.locks import storage_lock
from lit_dps.storage.read import Elsewhere, list_studies, read_study
from lit_dps.storage.urls import without_password

# What an existing study keeps of its own header
_RECORDS = (
    "workload",
    "goal",
    "seed",
    "space",
    schema.IDENTITY,
    "config",
    schema.RUN_ON,
    schema.TRIAL_SEED,
)


@dataclass(frozen=True)
class Conflict:
    """A trial that ended otherwise elsewhere."""

    point: int
    place: str
    repeat: int  # 0 for a trial of the search
    k_differs: (
        bool  # whether its steps to result are others, or it has some in one of the two alone
    )


@dataclass
class Merged:
    """What became of the trials of a study."""

    taken: int = 0  # trials of which something was taken over
    known: int = 0  # trials of which nothing was new
    conflicts: dict[Cell, list[Conflict]] = field(
        default_factory=dict
    )  # that ended otherwise: what was there is kept


@dataclass(frozen=True)
class _Attempt:
    stored: FrozenTrial
    result: TrialResult


def merge(url: str, others: Sequence[Elsewhere], only: str | None = None) -> dict[str, Merged]:
    """Takes over what other storages know of their studies, of one or all. What is stored already
    stays.

    Args:
        url: Optuna storage URL; the storage is made where there is none.
        others: The other storages.
        only: The name of the one study to take over.

    Returns:
        What became of each study, by name.

    Raises:
        StudyChanged: if studies of the same name have different identities; then nothing was
            changed.
        StudyChanged or ConfigError: likewise, if their grids or boxes do not join (`check_joint`).
        StorageError: if a storage cannot be used, or does not hold what it should.
    """
    wanted = [(other, name) for other in others for name in ([only] if only else _studies(other))]
    found: dict[str, list[tuple[str, Mapping]]] = {name: [] for _, name in wanted}
    for other, name in wanted:  # all that can be wrong is found before anything is made or changed
        theirs = _header(other.storage, name)
        for earlier in found[name]:
            _check_same(name, *earlier, other.place, theirs)
        found[name].append((other.place, theirs))
    with storage_errors(url), storage_for_now(url) as storage, storage_lock(url):
        for other, name in wanted:
            _check_target(storage, without_password(url), other, name)
        merged = {name: Merged() for _, name in wanted}
        for other, name in wanted:
            _merge_study(storage, other, name, merged[name])
    return merged


def _studies(other: Elsewhere) -> list[str]:
    if not (names := list_studies(other.storage)):
        raise StorageError(f"no study in {other.place}")
    return names


def _header(storage: BaseStorage, name: str) -> Mapping[str, Any]:
    """The user attributes of a study. Raises StorageError if anything of it is missing or
    damaged."""
    record = read_study(storage, name)
    # Files and folders are named after both.
    check_name("study.name", name)
    check_name("study.workload", record.workload)
    header = attributes(storage, name)
    if schema.IDENTITY not in header:
        raise StorageError(f"study {name!r} is damaged: it has no identity")
    _check_cells(storage, name, header, header.get(schema.UID))
    return header


def _check_cells(
    storage: BaseStorage, name: str, header: Mapping[str, Any], uid: str | None
) -> None:
    for cell in schema.cells_of(header):
        for study in (schema.cell_study_name(name, cell), schema.repeats_study_name(name, cell)):
            check_cell(attributes(storage, study), name, cell, uid)


def _check_same(name: str, here: str, ours: Mapping, there: str, theirs: Mapping) -> None:
    if differences := changed(ours[schema.IDENTITY], theirs[schema.IDENTITY]):
        raise StudyChanged(
            f"study {name!r} of {there} was made with another configuration than that of {here}: "
            f"{'; '.join(differences)}"
        )
    check_joint(name, ours, theirs)
    check_seeds(name, ours, theirs)


def _check_target(storage: BaseStorage, place: str, other: Elsewhere, name: str) -> None:
    refuse_foreign_header(storage, name)
    refuse_foreign_cells(storage, name, schema.cells_of(attributes(other.storage, name)))
    ours, theirs = attributes(storage, name), attributes(other.storage, name)
    whole = schema.FORMAT_ATTR in ours
    if whole:
        _check_same(name, place, _header(storage, name), other.place, theirs)
    _check_cells(storage, name, theirs, ours.get(schema.UID, None if whole else "none yet"))


def _merge_study(storage: BaseStorage, other: Elsewhere, name: str, merged: Merged) -> None:
    ours, theirs = attributes(storage, name), attributes(other.storage, name)
    kept = ours if schema.FORMAT_ATTR in ours else theirs
    grown = {key: theirs[key] for key in ("batch_sizes", "sparsities", "trials")}
    grown |= {
        schema.REPEATS: theirs.get(schema.REPEATS),
        schema.BOXES: theirs.get(schema.BOXES, []),
    }
    grown |= {
        "goals": theirs.get("goals", []),
        "slack": theirs.get("slack"),
        schema.AXES: theirs.get(schema.AXES, {}),
    }
    header = extend(storage, name, {**{key: kept[key] for key in _RECORDS if key in kept}, **grown})
    _merge_noise(storage, name, ours.get(schema.NOISE), theirs.get(schema.NOISE))
    add_environments(storage, name, theirs.get(schema.ENVIRONMENTS, []))
    for cell in schema.cells_of(theirs):
        for repeats in (False, True):
            _merge_cell(storage, other, name, cell, header, merged, repeats)


def _merge_noise(
    storage: BaseStorage, name: str, ours: Mapping | None, theirs: Mapping | None
) -> None:
    """Keeps the noise scale that was read where the whole study would have read it; of equals that
    of more readings."""
    if not theirs:
        return
    here, there = (ours and ours["batch_size"]), theirs["batch_size"]
    if ours is None or (
        ours["readings"] < theirs["readings"] if here == there else read_at((here, there)) == there
    ):
        optuna.load_study(study_name=name, storage=storage).set_user_attr(schema.NOISE, theirs)


def _merge_cell(
    storage: BaseStorage,
    other: Elsewhere,
    name: str,
    cell: Cell,
    header: Mapping[str, Any],
    merged: Merged,
    repeats: bool,
) -> None:
    studies = schema.repeats_study_name if repeats else schema.cell_study_name
    there = _attempts(other.storage, studies(name, cell), cell)
    if not there:
        return
    is_new = not _has_study(storage, studies(name, cell))
    here = _attempts(storage, studies(name, cell), cell)
    study = open_cell(storage, name, cell, header[schema.UID], repeats=repeats)
    added: list[FrozenTrial] = []
    for each, attempts in sorted(there.items()):
        new = _news(here.get(each, []), attempts)
        if new is None:
            k_differs = _telling(here[each]).result.steps != _telling(attempts).result.steps
            merged.conflicts.setdefault(cell, []).append(
                Conflict(each[0], other.place, each[1], k_differs)
            )
            continue
        for attempt in new:
            trial = copy.copy(attempt.stored)
            # the first place, if there are several
            trial.user_attrs = {schema.MERGED_FROM: other.place, **trial.user_attrs}
            # This number counts the runs of the other storage.
            trial.user_attrs.pop(schema.FAILED_IN, None)
            added.append(trial)
        merged.taken += bool(new)
        merged.known += not new
    add_trials(storage, study, added)
    if not (repeats or is_new):  # repeats never wait, and a new cell has no waiting trials
        _withdraw(study, storage, header["slack"])


def _attempts(storage: BaseStorage, study: str, cell: Cell) -> dict[RepeatId, list[_Attempt]]:
    """The finished attempts in an Optuna study of a cell that have a result, by point and repeat,
    oldest first."""
    found: dict[RepeatId, list[_Attempt]] = {}
    if not _has_study(storage, study):
        return found
    for trial in storage.get_all_trials(storage.get_study_id_from_name(study), deepcopy=False):
        if trial.state.is_finished() and schema.RESULT_ATTR in trial.user_attrs:
            point, repeat = (
                trial.user_attrs[schema.POINT_ATTR],
                trial.user_attrs.get(schema.REPEAT_ATTR, 0),
            )
            result = schema.decode_result(
                trial.user_attrs[schema.RESULT_ATTR], Trial(cell, point, trial.params)
            )
            found.setdefault((point, repeat), []).append(_Attempt(trial, result))
    return found


def _has_study(storage: BaseStorage, study: str) -> bool:
    """Return True if the storage has an Optuna study of this name."""
    # Listing the names of all studies takes longer.
    try:
        storage.get_study_id_from_name(study)
    except KeyError:
        return False
    return True


def _news(here: Sequence[_Attempt], there: Sequence[_Attempt]) -> Sequence[_Attempt] | None:
    """What other attempts at a point tell beyond those that are here; None where they contradict
    them."""
    if len(here) <= len(there) and all(
        map(_equal, here, there)
    ):  # the same and perhaps more, or nothing here
        return there[len(here) :]
    ours, theirs = _telling(here), _telling(there)
    if not _alike(ours, theirs):
        return None
    if theirs.result.status is Status.FAILED or _equal(ours, theirs):
        return []
    if longest_attempt(ours.result, theirs.result) is theirs.result:
        return [theirs]
    return [] if longest_attempt(theirs.result, ours.result) is ours.result else None


def _telling(attempts: Sequence[_Attempt]) -> _Attempt:
    """The attempt that tells most; a failed one only where there is nothing else."""
    told = [each for each in attempts if each.result.status is not Status.FAILED] or attempts
    return reduce(
        lambda one, two: two if longest_attempt(one.result, two.result) is two.result else one, told
    )


def _alike(one: _Attempt, other: _Attempt) -> bool:
    """Whether two attempts have the same metaparameters, but for how a machine rounds its
    logarithms."""
    ours, theirs = one.stored.params, other.stored.params
    return ours.keys() == theirs.keys() and all(_close(ours[key], theirs[key]) for key in ours)


def _close(one: Value, other: Value) -> bool:
    return one == other or (not isinstance(one, str) and math.isclose(one, other, rel_tol=1e-9))


def _equal(one: _Attempt, other: _Attempt) -> bool:
    ours, theirs = (
        one.stored.user_attrs[schema.RESULT_ATTR],
        other.stored.user_attrs[schema.RESULT_ATTR],
    )
    return _alike(one, other) and all(
        ours[key] == theirs[key] for key in ("status", "steps", "curve")
    )


def _withdraw(study: optuna.Study, storage: BaseStorage, slack: float | None) -> None:
    """Ends trials that wait to be run and need not be any more; a worker declares anew what it
    still needs."""
    trials = study.get_trials(deepcopy=False)
    limit = race_limit(study, slack)
    ran: dict[int, float] = {}
    for trial in trials:
        result = trial.user_attrs.get(schema.RESULT_ATTR)
        if trial.state.is_finished() and result is not None and result["status"] != Status.FAILED:
            point = trial.user_attrs[schema.POINT_ATTR]
            ran[point] = max(ran.get(point, -math.inf), ran_to(trial.user_attrs))
    for trial in trials:
        if (
            trial.state is TrialState.WAITING
            and ran.get(trial.user_attrs[schema.POINT_ATTR], -math.inf) >= limit
        ):
            storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
