"""Reads studies back from Optuna storages, also from those of other machines, as `StudyRecord`s."""

from __future__ import annotations

import lzma
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from optuna.storages import BaseStorage, RDBStorage
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial

from lit_dps.core.errors import ConfigError, StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.progress_line import with_progress
from lit_dps.core.racing import longest_attempt, truncate_at_race_limit
from lit_dps.core.record import StudyRecord
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.search_space import space_from_dict
from lit_dps.core.space_history import ExpandedSpace
from lit_dps.core.step_timing import StepTiming
from lit_dps.core.text import escape_json
from lit_dps.core.trial import Cell, Trial, TrialResult
from lit_dps.storage import schema
from lit_dps.storage.bulk import StoredTrial, read_trials
from lit_dps.storage.database import first_line, open_storage, place, storage_errors
from lit_dps.storage.lost_study import RESTORE
from lit_dps.storage.urls import check_place, sqlite_file, without_password

UNPACKED_BYTES = 10**9  # of a compressed database; 15,000 trials of the replication have 0.1 GB
UNPACKING_MEMORY = 1 << 28  # bytes; xz -9 needs 65 MB
CHUNK = 1 << 20
READ_TOGETHER = 50  # cells; few queries, and the trials of few cells in memory
Stored = FrozenTrial | StoredTrial


def list_studies(storage: BaseStorage | str) -> list[str]:
    """Names of the studies in a storage (an Optuna storage or a URL), sorted. Raises StorageError
    as `read_study`."""
    with storage_errors(storage), open_to_read(storage) as opened:
        return sorted(_headers(opened.get_all_studies()))


def read_study(storage: BaseStorage | str, name: str) -> StudyRecord:
    """Reads a study, finished or not; changes nothing in the storage.

    Args:
        storage: An Optuna storage or its URL. A SQLite file that is not there is not created.
        name: The study's name.

    Raises:
        StorageError: in one line, if the storage cannot be read, holds no such study, or holds it
            in another format.
    """
    with storage_errors(storage), open_to_read(storage) as opened:
        studies = opened.get_all_studies()
        headers = _headers(studies)
        if name not in headers:
            known = ", ".join(sorted(headers)) or "none"
            raise StorageError(f"no study {name!r} in {place(storage)}; studies there: {known}")
        header = escape_json(headers[name])
        stored_format = header[schema.FORMAT_ATTR]
        if stored_format != schema.FORMAT:
            raise StorageError(
                f"study {name!r} has format {stored_format!r}; this version reads {schema.FORMAT}"
            )
        ids = {study.study_name: study._study_id for study in studies}
        try:
            results, repeats, running = {}, {}, {}
            seed = header.get(schema.TRIAL_SEED, header["seed"])
            cells = schema.cells_of(header)
            searches = _trials(
                opened, [ids.get(schema.cell_study_name(name, cell)) for cell in cells]
            )
            repeated = _trials(
                opened, [ids.get(schema.repeats_study_name(name, cell)) for cell in cells]
            )
            for cell in with_progress("cells read", cells):
                found, running_searches = _read_cell(next(searches), cell, seed)
                repeats[cell], running_repeats = _read_cell(next(repeated), cell, seed)
                running[cell] = running_searches + running_repeats
                results[cell] = truncate_at_race_limit(found, header.get("slack"))
            space = space_from_dict(header["space"])
            boxes = tuple(map(ExpandedSpace.from_dict, header.get(schema.BOXES, ())))
            return StudyRecord(
                name=name,
                workload=header["workload"],
                goal=Goal.from_dict(header["goal"]),
                space=dict(boxes[-1].space) if boxes else space,
                boxes=(ExpandedSpace(0, boxes[0].first, space), *boxes) if boxes else (),
                batch_sizes=tuple(sorted(header["batch_sizes"])),
                sparsities=tuple(sorted(header["sparsities"])),
                trials=header["trials"],
                seed=header["seed"],
                goals=tuple(
                    sorted(
                        header.get("goals", ()), reverse=not header["goal"].get("at_least", False)
                    )
                ),
                slack=header.get("slack"),
                config=header["config"],
                results=results,
                running=running,
                noise=NoiseScale.from_dict(header[schema.NOISE])
                if schema.NOISE in header
                else None,
                step_timing=_read_timing(header),
                run_on=header.get(schema.RUN_ON, False),
                repeats=repeats,
                plan=RepeatPlan(**header.get(schema.REPEATS, {})),
                environments=tuple(header.get(schema.ENVIRONMENTS, ())),
                axes={
                    key: tuple(values)
                    for key, values in sorted(header.get(schema.AXES, {}).items())
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(
                f"study {name!r} is damaged: {first_line(error)}; {RESTORE}"
            ) from error


def _read_timing(header: dict) -> StepTiming | None:
    """Return the step times in a header; None if there are none."""
    if schema.STEP_TIMING not in header:
        return None
    return StepTiming.from_dict(header[schema.STEP_TIMING])


def study_uid(url: str, name: str) -> str | None:
    """Return the uid of a stored study; None if there is no such study, or if it has no uid."""
    with storage_errors(url), open_to_read(url) as opened:
        return _headers(opened.get_all_studies()).get(name, {}).get(schema.UID)


def _headers(studies: Iterable[FrozenStudy]) -> dict[str, dict]:
    return {s.study_name: s.user_attrs for s in studies if schema.FORMAT_ATTR in s.user_attrs}


def _trials(storage: BaseStorage, ids: Sequence[int | None]) -> Iterator[Sequence[Stored]]:
    """Yield the trials of each Optuna study by its id; no trials for None."""
    for first in range(0, len(ids), READ_TOGETHER):
        part = ids[first : first + READ_TOGETHER]
        known = [each for each in part if each is not None]
        if isinstance(storage, RDBStorage):
            found = read_trials(storage, known)
        else:
            found = {each: storage.get_all_trials(each, deepcopy=False) for each in known}
        for each in part:
            yield [] if each is None else found[each]


def _read_cell(trials: Sequence[Stored], cell: Cell, seed: int) -> tuple[list[TrialResult], int]:
    finished, started = {}, set()
    for trial in sorted(trials, key=lambda t: t.number):
        point, repeat = (
            trial.user_attrs.get(schema.POINT_ATTR),
            trial.user_attrs.get(schema.REPEAT_ATTR, 0),
        )
        if not trial.state.is_finished():
            started.add(trial.number if point is None else (point, repeat))
        elif schema.RESULT_ATTR in trial.user_attrs:
            stored = escape_json(trial.user_attrs[schema.RESULT_ATTR])
            asked = Trial(cell, point, trial.params, seed, repeat)
            environment = trial.user_attrs.get(schema.ENVIRONMENT)
            try:
                result = schema.decode_result(stored, asked, trial.number, environment)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"trial {trial.number} of {cell}: {first_line(error)}") from error
            finished[point, repeat] = longest_attempt(finished.get((point, repeat)), result)
    return [finished[each] for each in sorted(finished)], len(started - finished.keys())


@contextmanager
def open_to_read(storage: BaseStorage | str) -> Iterator[BaseStorage]:
    """An Optuna storage, or the one at a URL, for the time of the body. StorageError if there is no
    such file."""
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


class Elsewhere(NamedTuple):
    """A storage to take trials over from: what it was called, without passwords, and opened to be
    read alone."""

    place: str
    storage: BaseStorage


@contextmanager
def open_elsewhere(other: str, url: str, limit: int = UNPACKED_BYTES) -> Iterator[Elsewhere]:
    """Another storage, for the time of the body.

    Args:
        other: Its URL, or the path of a sqlite file, which may be compressed: .db.xz.
        url: The URL of the study's own storage; "" if it has none.
        limit: Bytes that a compressed file may have when unpacked.

    Raises:
        ConfigError: if both are the same.
        StorageError: if it cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        theirs = other if "://" in other else f"sqlite:///{other}"
        if (file := sqlite_file(theirs)) is not None and not file.is_file():
            raise StorageError(f"no study database at {without_password(other)}")
        if _same(theirs, url):
            allowed = f"another storage than --storage.optuna = {without_password(url)} expected"
            raise ConfigError("OTHER", without_password(other), allowed)
        if file is not None and file.suffix == ".xz":
            theirs = f"sqlite:///{folder}/study.db"
            _decompress(file, Path(folder) / "study.db", limit)
        try:
            check_place(theirs)
            with storage_errors(theirs), open_to_read(theirs) as storage:
                yield Elsewhere(without_password(other), storage)
        except StorageError as error:  # nobody knows a temporary file
            raise StorageError(str(error).replace(f"sqlite:///{folder}/study.db", other)) from error


def _same(one: str, other: str) -> bool:
    files = sqlite_file(one), sqlite_file(other)
    if None in files:
        return one == other
    return files[1].exists() and files[0].samefile(files[1])


def _decompress(file: Path, to: Path, limit: int) -> None:
    """Unpack an .xz file.

    Raises:
        StorageError: if the file is damaged, or has more than `limit` bytes when unpacked.
    """
    written = 0
    try:
        with file.open("rb") as packed, to.open("wb") as plain:
            unpack = lzma.LZMADecompressor(memlimit=UNPACKING_MEMORY)
            while not unpack.eof:
                data = packed.read(CHUNK) if unpack.needs_input else b""
                if unpack.needs_input and not data:
                    raise EOFError("it is truncated")
                part = unpack.decompress(data, max_length=CHUNK)
                written += len(part)
                if written > limit:
                    raise StorageError(
                        f"cannot read {file}: it has more than {limit / 1e9:g} GB when unpacked; "
                        "if you trust it, raise the limit by merge --unpacked_gb"
                    )
                plain.write(part)
            if unpack.unused_data.strip(b"\0") or packed.read(1).strip(b"\0"):
                raise EOFError("other data follow the end of the compressed data")
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise StorageError(f"cannot read {file}: {error}") from error
