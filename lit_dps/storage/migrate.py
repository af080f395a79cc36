"""Converts studies of format 1 to the present format, with `lit_dps.storage.format_1`.

Each study is converted in one transaction of its database. So a process that is killed leaves a
study either as it was or converted. The same command then converts the remaining studies.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from optuna.storages import RDBStorage
from optuna.storages._rdb.models import (
    StudyModel,
    StudyUserAttributeModel,
    TrialModel,
    TrialUserAttributeModel,
)
from optuna.trial import TrialState
from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from lit_dps.core.atomic_write import replacing
from lit_dps.core.errors import StorageError
from lit_dps.storage import schema
from lit_dps.storage.database import RESTORE, storage_errors, temporary_storage
from lit_dps.storage.format_1 import convert_advice, convert_cell, convert_header, convert_trial
from lit_dps.storage.locks import Liveness, describe_owner, peers, storage_lock, token_of
from lit_dps.storage.read import UNPACKED_BYTES, decompress
from lit_dps.storage.stored_format import OtherFormat
from lit_dps.storage.urls import check_place, check_writable, sqlite_file, without_password

FORMER = 1  # the format that this module converts
# An owner of a file storage whose process is dead: no process ever has a file of this name.
_DEAD_TOKEN = "0" * 16


class Migration(NamedTuple):
    """What a migration did.

    Attributes:
        converted: Number of trials of each converted study, by name.
        unchanged: Names of the studies that have the present format already.
        backup: The copy of the SQLite file before the migration; None without a copy.
    """

    converted: dict[str, int]
    unchanged: list[str]
    backup: Path | None


class StudyInUse(StorageError):
    """Other processes may be working on a study that is to be converted.

    Attributes:
        processes: The processes.
    """

    def __init__(self, place: str, processes: list[str], hint: str):
        super().__init__(
            f"{place} cannot be converted while {', '.join(processes)} uses it: {hint}"
        )
        self.processes = processes


def migrate(
    url: str, only: str | None = None, take_over: bool = False, backs_up: bool = True
) -> Migration:
    """Convert the studies of a storage to the present format, with their advice.

    Args:
        url: Optuna storage URL.
        only: The name of the study to convert; None for all studies.
        take_over: Whether to convert a study although a process of another host, which does not
            answer, may still run its trials.
        backs_up: Whether to copy a SQLite file first.

    Raises:
        StudyInUse: if other processes use the storage.
        OtherFormat: if a study is newer than this version.
        StorageError: if the storage cannot be used, or if it has no study `only`.
    """
    check_place(url)
    check_writable(url)
    file = sqlite_file(url)
    if file is not None and not file.is_file():
        raise StorageError(
            f"{file} does not exist. Name the storage of the studies by --storage.", key=str(file)
        )
    with storage_errors(url), temporary_storage(url, make=False) as storage, storage_lock(url):
        formats = _read_formats(storage, url)
        if only is not None:
            if only not in formats:
                raise StorageError(
                    f"{without_password(url)} has no study {only!r}", key="--study", value=only
                )
            formats = {only: formats[only]}
        names = [name for name, stored in formats.items() if stored == FORMER]
        unchanged = [name for name in formats if name not in names]
        if not names:
            return Migration({}, unchanged, None)
        _refuse_other_processes(url)
        for name in names:
            _refuse_running(storage, url, name, take_over)
        backup = None
        if file is not None and backs_up:
            backup = _back_up(file)
        converted = {}
        for name in names:
            with Session(storage.engine) as session, session.begin():
                if file is not None:
                    _mark_as_dead(session, name)
                converted[name] = _convert_study(session, name)
        if file is not None:
            _shrink(file)
    return Migration(converted, unchanged, backup)


def migrate_packed(file: Path, only: str | None = None) -> tuple[Migration, Path | None]:
    """Convert the studies of a compressed SQLite file (.db.xz) into a new file beside it.

    Returns:
        What was done, and the new file; None if nothing had to be converted.

    Raises:
        StorageError: as `migrate`, or if the file cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / "study.db"
        decompress(file, unpacked, UNPACKED_BYTES)
        migration = migrate(f"sqlite:///{unpacked}", only, backs_up=False)
        if not migration.converted:
            return migration, None
        with closing(sqlite3.connect(unpacked)) as connection:
            connection.execute("vacuum")
        name = file.name.removesuffix(".db.xz")
        target = file.with_name(f"{name}-format-{schema.FORMAT}.db.xz")
        with replacing(target) as temporary:
            pack(unpacked, temporary)
    return migration, target


def pack(file: Path, target: Path) -> None:
    """Compress a SQLite file as much as xz can."""
    best = 9 | lzma.PRESET_EXTREME
    with file.open("rb") as plain, lzma.open(target, "wb", preset=best) as packed:
        shutil.copyfileobj(plain, packed)


def _read_formats(storage: RDBStorage, url: str) -> dict[str, Any]:
    """Return the format of each study, and of advice without a study, by the study's name.

    Raises:
        OtherFormat: if a study is newer than this version.
    """
    formats: dict[str, Any] = {}
    for study in storage.get_all_studies():
        attrs = study.user_attrs
        name = study.study_name.removesuffix(schema.ADVICE_SUFFIX)
        is_advice = name != study.study_name
        if is_advice and attrs.keys() & schema.ADVICE_ATTRS.keys():
            stored = attrs.get(schema.ADVICE_FORMAT, FORMER)
        elif not is_advice and schema.FORMAT_ATTR in attrs:
            stored = attrs[schema.FORMAT_ATTR]
        else:
            continue
        if stored not in (FORMER, schema.FORMAT):
            raise OtherFormat(name, stored, without_password(url))
        formats[name] = min(stored, formats.get(name, stored))
    return dict(sorted(formats.items()))


# ---- Safety ----


def _refuse_other_processes(url: str) -> None:
    """Raise StudyInUse if other processes run trials of any study in the storage."""
    others = peers(url).others()
    if others:
        raise StudyInUse(without_password(url), others, "wait for its end, or stop it")


def _refuse_running(storage: RDBStorage, url: str, name: str, take_over: bool) -> None:
    """Raise StudyInUse if a process without a file may be running a trial of a study."""
    with Session(storage.engine) as session:
        owners = {json.loads(row.value_json) for row in _running_owners(session, name)}
    for owner in sorted(owners):
        if sqlite_file(url) is None or token_of(owner) is not None:
            # `_refuse_other_processes` has checked that these owners are dead.
            continue
        liveness = liveness_without_token(owner)
        if liveness is Liveness.ALIVE:
            hint = "wait for its end, or stop it"
            raise StudyInUse(f"study {name!r}", [describe_owner(owner)], hint)
        if liveness is Liveness.UNKNOWN and not take_over:
            hint = "if it has ended, add --take-over true"
            raise StudyInUse(f"study {name!r}", [describe_owner(owner)], hint)


def _mark_as_dead(session: Session, name: str) -> None:
    """Replace the owners of trials whose dead process had no file, so that they are claimed again.

    `_refuse_running` has checked that these processes are dead.
    """
    for row in _running_owners(session, name):
        owner = json.loads(row.value_json)
        if token_of(owner) is None:
            process = ":".join(owner.split(":")[:2])
            row.value_json = json.dumps(f"{_DEAD_TOKEN}@{process}")


def _running_owners(session: Session, name: str) -> Sequence[Any]:
    """Return the rows (`TrialUserAttributeModel`) of the owners of running trials of a study."""
    rows = (
        select(TrialUserAttributeModel)
        .join(TrialModel, TrialModel.trial_id == TrialUserAttributeModel.trial_id)
        .where(
            TrialModel.study_id.in_(_cell_ids(session, name)),
            TrialModel.state == TrialState.RUNNING,
            TrialUserAttributeModel.key == schema.OWNER,
        )
    )
    return session.scalars(rows).all()


def _cell_ids(session: Session, name: str) -> list[int]:
    """Return the ids of the Optuna studies that are the cells of a study."""
    # In Python, because LIKE of SQLite ignores case.
    rows = session.execute(select(StudyModel.study_id, StudyModel.study_name))
    return [study_id for study_id, cell in rows if cell.startswith(f"{name} | ")]


def liveness_without_token(owner: str) -> Liveness:
    """Return whether an owner "host:pid:start" is alive, as the first versions stored it.

    A process of this host is alive if a process with the same number and start time exists. A
    process of another host is UNKNOWN.
    """
    match = re.fullmatch(r"([^:]*):(\d+):(.*)", owner)
    if match is None or match[1] != socket.gethostname():
        return Liveness.UNKNOWN
    process = int(match[2])
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return Liveness.DEAD
    except PermissionError:
        pass
    if start_of(process) == match[3]:
        return Liveness.ALIVE
    return Liveness.DEAD


def start_of(process: int) -> str:
    """Return the start time of a process in clock ticks; "" without /proc, "dead" for a zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rsplit(")", 1)[1].split()
    if state == "Z":
        return "dead"
    return fields[18]


def _back_up(file: Path) -> Path:
    """Copy a SQLite file to a new file beside it, and return the new file."""
    target = file.with_name(f"{file.name}.format-{FORMER}")
    number = 1
    while target.exists():
        number += 1
        target = file.with_name(f"{file.name}.format-{FORMER}-{number}")
    with (
        replacing(target) as temporary,
        closing(sqlite3.connect(file)) as source,
        closing(sqlite3.connect(temporary)) as copy,
    ):
        source.backup(copy)
    return target


def _shrink(file: Path) -> None:
    """Return the space that a SQLite file no longer needs to the disk, if that is possible now."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(file)) as connection:
        connection.execute("vacuum")


# ---- Converting ----


def _convert_study(session: Session, name: str) -> int:
    """Convert a study and its advice; return the number of its trials."""
    uid = _convert_header(session, name)
    _convert_advice(session, name)
    if uid is None:
        # The cells of a study have the format of its header. Only the advice was older.
        return 0
    trials = 0
    for study_id in _cell_ids(session, name):
        attrs = _study_attrs(session, study_id)
        # A cell of a deleted study stays as it is; it is refused when the study resumes.
        if attrs.get(schema.UID, uid) == uid:
            _replace_study_attrs(session, study_id, convert_cell(attrs, uid))
            trials += _convert_trials(session, study_id)
    return trials


def _convert_header(session: Session, name: str) -> str | None:
    """Convert a header of the former format, and return its uid; None without such a header."""
    study_id = session.scalar(select(StudyModel.study_id).where(StudyModel.study_name == name))
    if study_id is None:
        return None
    attrs = _study_attrs(session, study_id)
    if attrs.get(schema.FORMAT_ATTR) != FORMER:
        return None
    try:
        converted = convert_header(name, attrs)
        schema.check_keys(converted, schema.HEADER_ATTRS)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"study {name!r} is damaged ({error!r}): {RESTORE}") from error
    _replace_study_attrs(session, study_id, converted)
    return converted[schema.UID]


def _convert_advice(session: Session, name: str) -> None:
    study_name = f"{name}{schema.ADVICE_SUFFIX}"
    study_id = session.scalar(
        select(StudyModel.study_id).where(StudyModel.study_name == study_name)
    )
    if study_id is not None:
        attrs = _study_attrs(session, study_id)
        if attrs and schema.ADVICE_FORMAT not in attrs:
            _replace_study_attrs(session, study_id, convert_advice(attrs))


def _study_attrs(session: Session, study_id: int) -> dict[str, Any]:
    model = StudyUserAttributeModel
    rows = session.execute(select(model.key, model.value_json).where(model.study_id == study_id))
    return {key: json.loads(text) for key, text in rows}


def _replace_study_attrs(session: Session, study_id: int, attrs: Mapping[str, Any]) -> None:
    session.execute(
        delete(StudyUserAttributeModel).where(StudyUserAttributeModel.study_id == study_id)
    )
    rows = []
    for key, value in attrs.items():
        rows.append({"study_id": study_id, "key": key, "value_json": json.dumps(value)})
    session.execute(insert(StudyUserAttributeModel), rows)


def _convert_trials(session: Session, study_id: int) -> int:
    """Convert the trials of an Optuna study, and return their number."""
    model = TrialUserAttributeModel
    trials = select(TrialModel.trial_id).where(TrialModel.study_id == study_id)
    by_trial: dict[int, dict[str, Any]] = {}
    rows = session.execute(
        select(model.trial_id, model.key, model.value_json)
        .where(model.trial_id.in_(trials))
        .order_by(model.trial_id, model.trial_user_attribute_id)
    )
    for trial_id, key, text in rows:
        by_trial.setdefault(trial_id, {})[key] = json.loads(text)
    converted = []
    for trial_id, attrs in by_trial.items():
        for key, value in convert_trial(attrs).items():
            converted.append({"trial_id": trial_id, "key": key, "value_json": json.dumps(value)})
    if converted:
        session.execute(delete(model).where(model.trial_id.in_(trials)))
        session.execute(insert(model), converted)
    return len(by_trial)
