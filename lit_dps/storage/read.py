"""Reads studies back from Optuna storages as `StudyRecord`s, also from other storages."""

from __future__ import annotations

import dataclasses
import lzma
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from optuna.storages import BaseStorage, RDBStorage
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from lit_dps.core.errors import ConfigError, StorageError, UserError
from lit_dps.core.goal import Goal
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.progress_line import with_progress
from lit_dps.core.racing import (
    best_trial,
    larger_factor,
    results_at_limit,
    truncate_at_race_limit,
)
from lit_dps.core.record import StudyRecord, shared_cells
from lit_dps.core.repeats import truncate_repeats
from lit_dps.core.search_space import ExpandedSpace, space_from_dict
from lit_dps.core.step_timing import StepTiming
from lit_dps.core.text import escape, escape_json
from lit_dps.core.trial import Cell, RepeatId, Status, Trial, TrialResult
from lit_dps.storage import schema
from lit_dps.storage.bulk import StoredTrial, read_trials
from lit_dps.storage.database import (
    RESTORE,
    first_line,
    storage_errors,
    storage_name,
    temporary_storage,
)
from lit_dps.storage.header import decode_plan, encode_plan
from lit_dps.storage.ownership import refuse_foreign_code
from lit_dps.storage.stored_format import check_format, read_header
from lit_dps.storage.urls import check_place, sqlite_file, without_password

# Limit for an unpacked database. The 15,000 trials of the replication take 0.1 GB.
UNPACKED_BYTES = 10**9
UNPACKING_MEMORY = 1 << 28  # bytes; xz -9 needs 65 MB
CHUNK_BYTES = 1 << 20
# Cells that are read by one query: few queries, and the trials of few cells in memory.
CELLS_PER_QUERY = 50
# Keys whose values may be valid in another environment, or were valid in an earlier version.
REFUSED_KEYS = ("study.statistic", "goal.rule", "goal.metric")
DAMAGE = (KeyError, TypeError, ValueError, AttributeError)  # raised by damaged values


# ---- Reading a study ----


def list_studies(storage: BaseStorage | str) -> list[str]:
    """Return the sorted names of the studies in a storage (an Optuna storage or a URL).

    Raises:
        StorageError: as `read_study`.
    """
    with storage_errors(storage), open_to_read(storage) as opened:
        return sorted(_headers(opened.get_all_studies()))


def read_study(
    storage: BaseStorage | str,
    name: str,
    trust: bool = False,
    truncates: bool = True,
    min_race_factor: float | None = 0.0,
    min_repeat_slack: float | None = 0.0,
    escapes: bool = True,
) -> StudyRecord:
    """Read a study, finished or not; change nothing in the storage.

    Args:
        storage: An Optuna storage or its URL. A SQLite file that does not exist is not created.
        name: The study's name.
        trust: Whether modules that the study names may be imported, although this user did not run
            it; this is recorded.
        truncates: Whether results end at the race limit. If not, each result is as its trial ended,
            and trials that must run again are in the record too.
        min_race_factor: A race factor that replaces the stored one if it is larger; None is the
            largest.
        min_repeat_slack: The same for the slack of repeats (`RepeatPlan`).
        escapes: Whether all texts have escapes such as \\u200c in place of invisible characters,
            which no terminal may show. If not, they are as the study stored them.

    Raises:
        UntrustedCode: if they may not, and there are any that are not imported yet.
        OtherFormat: if the study has another format.
        StorageError: if the storage cannot be read, or has no such study.
        ConfigError: if a class of the user that the study needs cannot be imported.
    """
    with storage_errors(storage), open_to_read(storage) as opened:
        studies = opened.get_all_studies()
        headers = _headers(studies)
        if name not in headers:
            names = ", ".join(sorted(headers)) or "none"
            raise StorageError(
                f"{storage_name(storage)} has no study {name!r}; its studies are: {names}",
                key="study.name",
                value=name,
            )
        header = headers[name]
        if escapes:
            header = escape_json(header)
        check_format(header[schema.FORMAT_ATTR], name, opened)
        # Axes may have values of the escaped header, so names of cells are escaped too.
        study_ids = {escape(study.study_name): study._study_id for study in studies}
        try:
            schema.check_keys(header, schema.HEADER_ATTRS)
            refuse_foreign_code(name, header, trust)
            plan = decode_plan(header[schema.REPEATS])
            slack = larger_factor(plan.slack, min_repeat_slack)
            header = {
                **header,
                schema.RACE_FACTOR: larger_factor(header[schema.RACE_FACTOR], min_race_factor),
                schema.REPEATS: encode_plan(dataclasses.replace(plan, slack=slack)),
            }
            trials = _read_cells(opened, name, header, study_ids, truncates, escapes)
            return _record(name, header, trials)
        except DAMAGE as error:
            if isinstance(error, ConfigError) and error.key in REFUSED_KEYS:
                # It is no damage.
                raise
            raise StorageError(
                f"study {name!r} has a value that cannot be read "
                f"({type(error).__name__}: {first_line(error)}). The database is damaged, or "
                f"another version of lit_dps wrote it: use that version, or {RESTORE}.",
                key="study.name",
                value=name,
            ) from error


def with_changed_samples(
    record: StudyRecord, storage: BaseStorage | str, trust: bool = False
) -> StudyRecord:
    """Return a study for a report, with `changed_samples`.

    It reads the study in `study.best_of` too, which can take seconds.

    Args:
        record: A study of `read_study`, with escapes.
        storage: The storage of both studies.
        trust: As in `read_study`, for the other study.
    """
    best_of = record.setting("study.best_of")
    if not isinstance(best_of, str):
        return record
    try:
        # Its best trials are the same without the race limit.
        other = read_study(storage, best_of, trust, truncates=False)
    except UserError:  # K* of this study does not need the other one
        return record
    changed = set()
    for cell, results in record.results.items():
        best = best_trial(other.results.get(cell, ()), other.statistic)
        if best is not None and any(each.trial.params != best.trial.params for each in results):
            changed.add(cell)
    return dataclasses.replace(record, changed_samples=frozenset(changed))


class _Trials(NamedTuple):
    """The trials of all cells of a study."""

    results: dict[Cell, list[TrialResult]]
    repeats: dict[Cell, list[TrialResult]]
    running: dict[Cell, int]  # see `StudyRecord.running`
    running_repeats: dict[Cell, int]
    shared: dict[Cell, Cell]  # see `StudyRecord.shared`


def _read_cells(
    storage: BaseStorage,
    name: str,
    header: Mapping[str, Any],
    study_ids: Mapping[str, int],
    truncates: bool,
    escapes: bool,
) -> _Trials:
    cells = schema.cells_of(header)
    seed, race_factor = header[schema.TRIAL_SEED], header[schema.RACE_FACTOR]
    statistic = schema.statistic_of(header)
    plan = decode_plan(header[schema.REPEATS])
    search_ids = [study_ids.get(escape(schema.cell_study_name(name, cell))) for cell in cells]
    repeat_ids = [study_ids.get(escape(schema.repeats_study_name(name, cell))) for cell in cells]
    search_trials = _read_trials(storage, search_ids)
    repeat_trials = _read_trials(storage, repeat_ids)
    read = _Trials({}, {}, {}, {}, {})
    for cell in with_progress("cells read", cells):
        search = _decode_trials(next(search_trials), cell, seed, truncates, escapes)
        repeated = _decode_trials(next(repeat_trials), cell, seed, truncates, escapes)
        if truncates:
            results = truncate_at_race_limit(search.attempts, race_factor, statistic)
            repeats = truncate_repeats(plan, results, repeated.attempts, statistic)
        else:
            results = results_at_limit(search.attempts, math.inf)
            repeats = results_at_limit(repeated.attempts, math.inf)
        read.results[cell] = results
        read.repeats[cell] = repeats
        # A paused trial that runs again has a result, but is not finished.
        read.running[cell] = len(search.started - {result.trial.repeat_id for result in results})
        read.running_repeats[cell] = len(
            repeated.started - {result.trial.repeat_id for result in repeats}
        )
    for cell, trained in shared_cells(cells, read.results).items():
        # A study of an earlier version has trained both cells.
        if not read.results[cell]:
            read.shared[cell] = trained
        read.results[cell] = _with_shared(read.results[cell], read.results[trained], cell)
        read.repeats[cell] = _with_shared(read.repeats[cell], read.repeats[trained], cell)
        for running in (read.running, read.running_repeats):
            running[cell] = max(running[cell], running[trained])
    return read


def _with_shared(
    ours: Sequence[TrialResult], theirs: Iterable[TrialResult], cell: Cell
) -> list[TrialResult]:
    """Return the results of a cell, and for the points that it lacks those of an equal cell."""
    results = {result.trial.repeat_id: result for result in ours}
    for result in theirs:
        trial = dataclasses.replace(result.trial, cell=cell)
        results.setdefault(trial.repeat_id, dataclasses.replace(result, trial=trial))
    return [results[key] for key in sorted(results)]


def _record(name: str, header: Mapping[str, Any], trials: _Trials) -> StudyRecord:
    goal = Goal(**header[schema.GOAL])
    space = space_from_dict(header[schema.SPACE])
    expansions = [ExpandedSpace.from_dict(each) for each in header[schema.SPACE_HISTORY]]
    spaces: tuple[ExpandedSpace, ...] = ()
    if expansions:
        spaces = (ExpandedSpace(0, expansions[0].first, space), *expansions)
        space = dict(expansions[-1].space)
    axes = {}
    for key, values in sorted(header[schema.AXES].items()):
        axes[key] = tuple(values)
    noise = header[schema.NOISE]
    if noise is not None:
        noise = NoiseScale.from_dict(noise)
    timing = header[schema.STEP_TIMING]
    if timing is not None:
        timing = StepTiming.from_dict(timing)
    return StudyRecord(
        name=name,
        workload=header[schema.WORKLOAD],
        goal=goal,
        space=space,
        spaces=spaces,
        batch_sizes=tuple(sorted(header[schema.BATCH_SIZES])),
        sparsities=tuple(sorted(header[schema.SPARSITIES])),
        axes=axes,
        trials=header[schema.TRIALS],
        seed=header[schema.SEED],
        goals=tuple(sorted(header[schema.GOALS], reverse=not goal.at_least)),
        race_factor=header[schema.RACE_FACTOR],
        statistic=schema.statistic_of(header),
        config=header[schema.CONFIG],
        results=trials.results,
        repeats=trials.repeats,
        running=trials.running,
        running_repeats=trials.running_repeats,
        noise=noise,
        step_timing=timing,
        shared=trials.shared,
        train_past_goal=header[schema.TRAIN_PAST_GOAL],
        plan=decode_plan(header[schema.REPEATS]),
        environments=tuple(header[schema.ENVIRONMENTS]),
        notes=header.get(schema.NOTES, {}),
    )


def study_uid(url: str, name: str) -> str | None:
    """Return the uid of a stored study; None if there is no such study."""
    with storage_errors(url), open_to_read(url) as opened:
        return read_header(opened, name).get(schema.UID)


def _headers(studies: Iterable[FrozenStudy]) -> dict[str, dict[str, Any]]:
    """Return the complete headers among Optuna studies, by name."""
    headers = {}
    for study in studies:
        if schema.FORMAT_ATTR in study.user_attrs:
            headers[study.study_name] = study.user_attrs
    return headers


def _read_trials(
    storage: BaseStorage, study_ids: Sequence[int | None]
) -> Iterator[Sequence[FrozenTrial | StoredTrial]]:
    """Yield the trials of each Optuna study by its id; no trials for None."""
    for first in range(0, len(study_ids), CELLS_PER_QUERY):
        part = study_ids[first : first + CELLS_PER_QUERY]
        existing = [study_id for study_id in part if study_id is not None]
        trials: dict[int, Sequence[FrozenTrial | StoredTrial]] = {}
        if isinstance(storage, RDBStorage):
            trials.update(read_trials(storage, existing))
        else:
            for study_id in existing:
                trials[study_id] = storage.get_all_trials(study_id, deepcopy=False)
        for study_id in part:
            if study_id is None:
                yield []
            else:
                yield trials[study_id]


class _DecodedTrials(NamedTuple):
    """The trials of a cell, or its repeats.

    Attributes:
        attempts: The attempts that ended, by point and repeat, and then in their order.
        started: The trials that are started or queued.
    """

    attempts: list[TrialResult]
    started: set[RepeatId]


def _decode_trials(
    trials: Sequence[FrozenTrial | StoredTrial],
    cell: Cell,
    seed: int,
    truncates: bool,
    escapes: bool,
) -> _DecodedTrials:
    """Return the attempts of a cell, and the trials that are started or queued.

    A failed attempt is omitted while its trial runs again, unless `truncates` is False.
    """
    attempts = []
    started = set()
    running = set()
    for trial in sorted(trials, key=lambda trial: trial.number):
        attrs = trial.user_attrs
        key = attrs[schema.POINT_ATTR], attrs[schema.REPEAT_ATTR]
        if not trial.state.is_finished():
            started.add(key)
            if trial.state is TrialState.RUNNING:
                running.add(key)
        elif schema.RESULT_ATTR in attrs:
            params = trial.params
            if escapes:
                params = escape_json(params)
            decoded = Trial(cell, key[0], params, seed, key[1])
            attempts.append(_decode_trial(trial, decoded, escapes))
    if truncates:
        # A failed trial that runs again is not finished. A waiting one keeps its reason.
        attempts = [
            attempt
            for attempt in attempts
            if attempt.status is not Status.FAILED or attempt.trial.repeat_id not in running
        ]
    return _DecodedTrials(sorted(attempts, key=lambda attempt: attempt.trial.repeat_id), started)


def _decode_trial(stored: FrozenTrial | StoredTrial, trial: Trial, escapes: bool) -> TrialResult:
    attrs = stored.user_attrs
    result = attrs[schema.RESULT_ATTR]
    if escapes:
        result = escape_json(result)
    try:
        schema.check_keys(result, schema.RESULT_KEYS)
        return schema.decode_result(result, trial, stored.number, attrs[schema.ENVIRONMENT])
    except DAMAGE as error:
        raise ValueError(f"trial {stored.number} of {trial.cell}: {first_line(error)}") from error


# ---- Opening storages to read ----


@contextmanager
def open_to_read(storage: BaseStorage | str) -> Iterator[BaseStorage]:
    """Give an Optuna storage, or open the storage at a URL for the time of the block.

    Raises:
        StorageError: if the URL names a SQLite file that does not exist.
    """
    if not isinstance(storage, str):
        yield storage
        return
    path = sqlite_file(storage)
    if path is not None and not path.is_file():
        raise StorageError(
            f"{path} does not exist. Name the folder of the studies by --storage.folder, "
            "or run a study first.",
            key=str(path),
        )
    with temporary_storage(storage, make=False) as opened:
        yield opened


class OtherStorage(NamedTuple):
    """A storage that is only read, such as the source of a merge.

    Attributes:
        place: Its URL or path without passwords.
        storage: The opened storage.
    """

    place: str
    storage: BaseStorage


@contextmanager
def open_elsewhere(other: str, url: str, limit: int = UNPACKED_BYTES) -> Iterator[OtherStorage]:
    """Open another storage to read it, for the time of the block.

    Args:
        other: Its URL, or the path of a SQLite file, which may be compressed: .db.xz.
        url: The URL of the study's storage; "" if it has no storage.
        limit: Bytes that a compressed file may have when unpacked.

    Raises:
        ConfigError: if both are the same.
        StorageError: if it cannot be read.
    """
    other_url = other if "://" in other else f"sqlite:///{other}"
    file = sqlite_file(other_url)
    if file is not None and not file.is_file():
        place = without_password(other)
        raise StorageError(
            f"{place} does not exist. Name a database of studies, or a folder that has one.",
            key=place,
        )
    if _is_same_storage(other_url, url):
        allowed = f"another storage than --storage.optuna = {without_password(url)}"
        raise ConfigError("OTHER", without_password(other), allowed)
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / "study.db"
        is_compressed = file is not None and file.suffix == ".xz"
        if file is not None and is_compressed:
            other_url = f"sqlite:///{unpacked}"
            decompress(file, unpacked, limit)
        try:
            check_place(other_url)
            with storage_errors(other_url), open_to_read(other_url) as storage:
                yield OtherStorage(without_password(other), storage)
        except StorageError as error:
            if not is_compressed:
                raise
            # The user does not know the temporary file.
            error.args = (str(error).replace(f"sqlite:///{unpacked}", other),)
            raise


def _is_same_storage(url: str, other: str) -> bool:
    file, other_file = sqlite_file(url), sqlite_file(other)
    if file is None or other_file is None:
        return url == other
    return other_file.exists() and file.samefile(other_file)


def decompress(file: Path, target: Path, limit: int) -> None:
    """Unpack an .xz file.

    Raises:
        StorageError: if the file is damaged, or has more than `limit` bytes when unpacked.
    """
    written = 0
    try:
        with file.open("rb") as packed, target.open("wb") as plain:
            unpack = lzma.LZMADecompressor(memlimit=UNPACKING_MEMORY)
            while not unpack.eof:
                data = b""
                if unpack.needs_input:
                    data = packed.read(CHUNK_BYTES)
                    if not data:
                        raise EOFError("it is truncated")
                part = unpack.decompress(data, max_length=CHUNK_BYTES)
                written += len(part)
                if written > limit:
                    raise StorageError(
                        f"{file} has more than {limit / 1e9:g} GB when unpacked. If you trust it, "
                        "raise the limit by merge --unpacked_gb.",
                        key=str(file),
                        value=limit,
                    )
                plain.write(part)
            if unpack.unused_data.strip(b"\0") or packed.read(1).strip(b"\0"):
                raise EOFError("other data follow the end of the compressed data")
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise StorageError(f"cannot read {file}: {error}", key=str(file)) from error
