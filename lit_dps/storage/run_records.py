"""What the runs of a study add to its header: run, measurements, environments, notes and K*."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage

from lit_dps.core.environment import KEY, SOURCES, UNKNOWN, changes_since, remedy_of_constants
from lit_dps.core.goal import Goal
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.step_timing import StepTiming
from lit_dps.core.trial import Cell, Trial
from lit_dps.core.unit import Cost
from lit_dps.storage import schema
from lit_dps.storage.cells import set_metric_name
from lit_dps.storage.database import storage_errors, temporary_storage
from lit_dps.storage.header import StudyChanged
from lit_dps.storage.locks import storage_lock
from lit_dps.storage.stored_format import read_header
from lit_dps.storage.urls import sqlite_file

# A number in a note, such as the end of a range; no digits of a name. A note on another batch size
# or another value of an axis is another note, so B = 16 and model.width=32 keep their numbers.
_NUMBER = re.compile(r"(?<!= )(?<!=)(?<![\w.-])-?\d[\w.+-]*")
CHANGED_ENVIRONMENT = (
    "restore it, choose another study.name, or continue with --accept-code-change; "
    "a note then reports the change."
)


def begin_run(url: str, name: str) -> int:
    """Begin a new run of a declared study, and return its number, from 1.

    Runs are ordered by this number, because clocks may be set back.

    Raises:
        StorageError: if the storage cannot be used.
    """
    with storage_errors(url), temporary_storage(url) as storage, storage_lock(url):
        header = optuna.load_study(study_name=name, storage=storage)
        number = header.user_attrs[schema.RUNS] + 1
        header.set_user_attr(schema.RUNS, number)
    return number


def store_noise_scale(url: str, name: str, noise: NoiseScale) -> None:
    """Store the noise scale of a declared study, in place of an earlier one.

    Raises:
        StorageError: if the storage cannot be used.
    """
    _store(url, name, schema.NOISE, noise.to_dict())


def store_step_timing(url: str, name: str, timing: StepTiming | None) -> None:
    """Store the step times of a declared study, in place of earlier ones; None removes them.

    Raises:
        StorageError: if the storage cannot be used.
    """
    value = None
    if timing is not None:
        value = timing.to_dict()
    _store(url, name, schema.STEP_TIMING, value)


def _store(url: str, name: str, key: str, value: Any) -> None:
    with storage_errors(url), temporary_storage(url) as storage, storage_lock(url):
        optuna.load_study(study_name=name, storage=storage).set_user_attr(key, value)


def store_environment(url: str, name: str, environment: Mapping[str, Any]) -> None:
    """Add an environment to a declared study, unless it is stored already.

    Raises:
        StorageError: if the storage cannot be used.
    """
    with storage_errors(url), temporary_storage(url) as storage, storage_lock(url):
        add_environments(storage, name, [environment])


def add_environments(
    storage: BaseStorage, name: str, environments: Sequence[Mapping[str, Any]]
) -> None:
    """Add environments to a study, unless they are stored already. The order stays.

    The caller holds the storage's lock.
    """
    header = optuna.load_study(study_name=name, storage=storage)
    stored = list(header.user_attrs[schema.ENVIRONMENTS])
    keys = {environment[KEY] for environment in stored}
    for environment in environments:
        if environment[KEY] not in keys:
            stored.append(dict(environment))
            keys.add(environment[KEY])
    if stored != header.user_attrs[schema.ENVIRONMENTS]:
        header.set_user_attr(schema.ENVIRONMENTS, stored)


def store_notes(url: str, name: str, notes: Mapping[str, str], has_trials: bool) -> None:
    """Store the notes of a dry run in a declared study.

    Args:
        url: Optuna storage URL.
        name: The study's name.
        notes: As in `add_notes`.
        has_trials: Whether trials of the study ran or run. If not, the notes replace the stored
            ones, because the user may have corrected the code. Otherwise they are added.

    Raises:
        StorageError: if the storage cannot be used.
    """
    with storage_errors(url), temporary_storage(url) as storage, storage_lock(url):
        add_notes(storage, name, notes, keeps_others=has_trials)


def add_notes(
    storage: BaseStorage, name: str, notes: Mapping[str, str], keeps_others: bool = True
) -> None:
    """Add notes to a study. A note replaces a stored one that differs in `_NUMBER` alone.

    Other stored notes stay, even if the last dry run lacks them. They hold for the trials of an
    earlier grid or an earlier code, which stay in the table. The caller holds the storage's lock.

    Args:
        storage: The storage.
        name: The study's name.
        notes: The level of each note, by its text.
        keeps_others: False removes all other notes.
    """
    header = optuna.load_study(study_name=name, storage=storage)
    stored = header.user_attrs.get(schema.NOTES, {})
    replaced = {_NUMBER.sub("", text) for text in notes}
    joined = {}
    for text, level in stored.items():
        if keeps_others and _NUMBER.sub("", text) not in replaced:
            joined[text] = level
    joined |= notes
    if joined != stored:
        header.set_user_attr(schema.NOTES, joined)


def forget_files(url: str, name: str, key: str, files: Iterable[str]) -> None:
    """Set the hashes of files in a stored environment to `UNKNOWN`, because its trials write them.

    Raises:
        StorageError: if the storage cannot be used.
    """
    with storage_errors(url), temporary_storage(url) as storage, storage_lock(url):
        header = optuna.load_study(study_name=name, storage=storage)
        environments = header.user_attrs[schema.ENVIRONMENTS]
        for environment in environments:
            if environment[KEY] == key:
                environment[SOURCES] |= dict.fromkeys(files, UNKNOWN)
        header.set_user_attr(schema.ENVIRONMENTS, environments)


def changed_environment(url: str, name: str, environment: Mapping[str, Any]) -> list[str]:
    """Return the code and data that differ from all environments of a study. Creates nothing.

    The list is empty if there is no study of this name.

    Returns:
        Words such as "my_code.py" and "the data at noise=0.5".
    """
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return []
    with storage_errors(url), temporary_storage(url) as storage:
        header = read_header(storage, name)
    return changes_since(header.get(schema.ENVIRONMENTS, []), environment)


def check_environment(url: str, name: str, environment: Mapping[str, Any]) -> None:
    """Check that a stored study of this name was made with this code and these data.

    Raises:
        StudyChanged: naming the files and the data that differ.
    """
    changes = changed_environment(url, name, environment)
    if changes:
        message = (
            f"study {name!r}: {', '.join(changes)} changed since its stored trials ran; "
            f"{CHANGED_ENVIRONMENT}{remedy_of_constants(changes)}"
        )
        raise StudyChanged(message, changes)


def store_k_star_trials(url: str, name: str, best_trials: Iterable[tuple[Trial, Cost]]) -> None:
    """Add the best trial of each cell and its K* to the header, as a trial for Optuna's plots.

    lit_dps does not read these trials. Optuna's finished trials cannot be changed. So if K* of a
    cell has changed, the cell gets another trial, and the last one counts.

    Args:
        url: Optuna storage URL.
        name: The study's name.
        best_trials: Each cell's best trial and its K*.

    Raises:
        StorageError: if the storage cannot be used.
    """
    with storage_errors(url), temporary_storage(url) as storage, storage_lock(url):
        header = optuna.load_study(study_name=name, storage=storage)
        set_metric_name(header, _metric_name(header.user_attrs))
        last_by_cell = {}
        for trial in header.get_trials(deepcopy=False):
            last_by_cell[trial.user_attrs.get(schema.CELL_ATTR)] = trial
        for best, k_star in best_trials:
            attrs = {
                schema.CELL_ATTR: best.cell.stored_name,
                schema.BEST_POINT: best.point,
                schema.BEST_ATTR: dict(best.params),
            }
            last = last_by_cell.get(attrs[schema.CELL_ATTR])
            if last is None or (last.value, last.user_attrs) != (k_star, attrs):
                header.add_trial(_k_star_trial(best.cell, k_star, attrs))


def _metric_name(attrs: Mapping[str, Any]) -> str:
    """Return the name of the header's values in Optuna's plots."""
    statistic = schema.statistic_of(attrs)
    name = Goal.from_dict(attrs[schema.GOAL]).cost_unit.head
    if statistic.is_minimum:
        return name
    return f"{name}: {statistic.label}"


def _k_star_trial(cell: Cell, k_star: Cost, attrs: dict[str, Any]) -> optuna.trial.FrozenTrial:
    params: dict[str, Any] = {"batch_size": cell.batch_size, "sparsity": cell.sparsity}
    # Optuna requires one kind of distribution for all trials of a parameter; the limits may differ.
    distributions: dict[str, BaseDistribution] = {}
    for key, value in cell.axes:
        # A bool is no number here.
        if type(value) in (int, float):
            params[key] = float(value)
            distributions[key] = FloatDistribution(float(value), float(value))
    distributions["batch_size"] = IntDistribution(1, max(1 << 20, cell.batch_size), log=True)
    distributions["sparsity"] = FloatDistribution(0, 1)
    return optuna.create_trial(
        params=params, distributions=distributions, value=k_star, user_attrs=attrs
    )
