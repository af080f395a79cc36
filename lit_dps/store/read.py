"""Reads a study back from an Optuna storage as a `StudyRecord`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.storages import BaseStorage

from lit_dps.errors import StorageError
from lit_dps.goal import Goal
from lit_dps.racing import longest_attempt, truncate_at_race_limit
from lit_dps.record import StudyRecord
from lit_dps.space import Range
from lit_dps.store.database import first_line, open_storage, place, storage_errors
from lit_dps.store.schema import (
    AXES,
    FORMAT,
    FORMAT_ATTR,
    POINT_ATTR,
    RESULT_ATTR,
    cell_study_name,
    cells_of,
    decode_result,
)
from lit_dps.store.urls import sqlite_file
from lit_dps.trial import Cell, Trial, TrialResult


def list_studies(storage: BaseStorage | str) -> list[str]:
    """Names of the studies in a storage (an Optuna storage or a URL), sorted. Raises StorageError as `read_study`."""
    with storage_errors(storage), open_to_read(storage) as opened:
        return sorted(_headers(opened))


def read_study(storage: BaseStorage | str, name: str) -> StudyRecord:
    """Reads a study, finished or not; changes nothing in the storage.

    Args:
        storage: An Optuna storage or its URL. A SQLite file that is not there is not created.
        name: The study's name.

    Raises:
        StorageError: in one line, if the storage cannot be read, holds no such study, or holds it in another format.
    """
    with storage_errors(storage), open_to_read(storage) as opened:
        headers = _headers(opened)
        if name not in headers:
            known = ", ".join(sorted(headers)) or "none"
            raise StorageError(f"no study {name!r} in {place(storage)}; studies there: {known}")
        existing = set(optuna.get_all_study_names(opened))
        header = headers[name]
        if header[FORMAT_ATTR] != FORMAT:
            raise StorageError(f"study {name!r} has format {header[FORMAT_ATTR]!r}; this version reads {FORMAT}")
        try:
            cells = cells_of(header)
            axes = {key: tuple(values) for key, values in sorted(header.get(AXES, {}).items())}
            results, running = dict.fromkeys(cells), dict.fromkeys(cells)
            for cell in cells:
                study = cell_study_name(name, cell)
                trials = optuna.load_study(study_name=study, storage=opened).trials if study in existing else []
                found, running[cell] = _read_cell(trials, cell, header["seed"])
                results[cell] = truncate_at_race_limit(found, header.get("slack"))
            return StudyRecord(
                name=name,
                workload=header["workload"],
                goal=Goal.of_stored(header["goal"]),
                space={key: Range(**value) for key, value in header["space"].items()},
                batch_sizes=tuple(sorted(header["batch_sizes"])),
                sparsities=tuple(sorted(header["sparsities"])),
                trials=header["trials"],
                seed=header["seed"],
                goals=tuple(sorted(header.get("goals", ()), reverse=not header["goal"].get("at_least", False))),
                slack=header.get("slack"),
                config=header["config"],
                results=results,
                running=running,
                axes=axes,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"study {name!r} is damaged: {first_line(error)}") from error


def _headers(storage: BaseStorage) -> dict[str, dict]:
    summaries = optuna.get_all_study_summaries(storage, include_best_trial=False)
    return {s.study_name: s.user_attrs for s in summaries if FORMAT_ATTR in s.user_attrs}


def _read_cell(trials: list[optuna.trial.FrozenTrial], cell: Cell, seed: int) -> tuple[list[TrialResult], int]:
    finished, started = {}, set()
    for trial in sorted(trials, key=lambda t: t.number):
        point = trial.user_attrs.get(POINT_ATTR)
        if not trial.state.is_finished():
            started.add(trial.number if point is None else point)
        elif RESULT_ATTR in trial.user_attrs:
            result = decode_result(trial.user_attrs[RESULT_ATTR], Trial(cell, point, trial.params, seed), trial.number)
            finished[point] = longest_attempt(finished.get(point), result)
    return [finished[point] for point in sorted(finished)], len(started - finished.keys())


@contextmanager
def open_to_read(storage: BaseStorage | str) -> Iterator[BaseStorage]:
    """An Optuna storage, or the one at a URL, for the time of the body; makes none where there is none.

    Raises:
        StorageError: if there is no such file.
    """
    if not isinstance(storage, str):
        yield storage
        return
    path = sqlite_file(storage)
    if path is not None and not path.is_file():
        raise StorageError(f"no study database at {path}")
    opened = open_storage(storage, make=False)
    try:
        yield opened
    finally:
        opened.engine.dispose()  # a server has so many connections
