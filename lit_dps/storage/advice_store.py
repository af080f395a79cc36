"""Stores the measurements of `advise` beside the study that it probes.

They are the user attributes of an Optuna study without trials, "NAME (advice)"
(`lit_dps.storage.schema.ADVICE_ATTRS`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from filelock import Timeout
from optuna.storages import BaseStorage

from lit_dps.core.environment import SOURCES, UNKNOWN
from lit_dps.core.errors import UserError
from lit_dps.storage.database import storage_errors, temporary_storage
from lit_dps.storage.locks import MachinePeers, peers, storage_lock
from lit_dps.storage.ownership import refuse_foreign_advice
from lit_dps.storage.read import open_to_read
from lit_dps.storage.schema import ADVICE_FORMAT, ADVICE_SUFFIX, FORMAT, MADE_BY
from lit_dps.storage.stored_format import check_format, study_attributes
from lit_dps.storage.urls import sqlite_file


class AdviceStore:
    """Named values of plain JSON, with which `advise` on a study continues.

    All methods raise StorageError if the storage cannot be used.

    Args:
        url: Optuna storage URL.
        name: The study's name.
    """

    def __init__(self, url: str, name: str):
        self.url = url
        self.name = f"{name}{ADVICE_SUFFIX}"

    def read(self) -> dict[str, Any]:
        """Return all stored values by name; empty if no advice is stored. Creates nothing."""
        file = sqlite_file(self.url)
        if file is not None and not file.exists():
            return {}
        with storage_errors(self.url), temporary_storage(self.url) as storage:
            refuse_foreign_advice(storage, self.name)
            return _values(study_attributes(storage, self.name), self.name, storage)

    def keep(self, **values: Any) -> None:
        """Store values by name; a value replaces an earlier one of the same name."""
        with self._open() as study:
            for key, value in values.items():
                study.set_user_attr(key, value)

    def forget_files(self, files: Sequence[str]) -> None:
        """Set the hashes of files in the stored environment to `UNKNOWN`: trials write them."""
        environment = self.read().get("environment")
        if files and environment is not None:
            environment[SOURCES] |= dict.fromkeys(files, UNKNOWN)
            self.keep(environment=environment)

    def append(self, key: str, value: Any) -> None:
        """Append a value to the list of a key; the first value creates the list."""
        with self._open() as study:
            study.set_user_attr(key, [*study.user_attrs.get(key, []), value])

    @contextmanager
    def sole_command(self) -> Iterator[None]:
        """Hold the lock of the commands that ask for this advice; the body is the command.

        On a PostgreSQL server there is no such lock, because it would hold a session for hours.

        Raises:
            UserError: if another process holds the lock.
            StorageError: if the folder of the storage cannot be created.
        """
        shared = peers(self.url)
        if not isinstance(shared, MachinePeers):
            yield
            return
        digest = hashlib.sha256(self.name.encode()).hexdigest()[:16]
        lock = shared.lock(f"advice-{digest}")
        with storage_errors(self.url):
            try:
                held = lock.acquire(timeout=0)
            except Timeout:
                name = self.name.removesuffix(ADVICE_SUFFIX)
                raise UserError(
                    f"another command measures advice for study.name {name!r} at this time. Wait "
                    "until it ends, or choose another study.name.",
                    key="study.name",
                    value=name,
                ) from None
        with held:
            yield

    @contextmanager
    def _open(self) -> Iterator[optuna.Study]:
        """Give the Optuna study of the advice under the storage's lock; create it if needed."""
        url = self.url
        with storage_errors(url), temporary_storage(url) as storage, storage_lock(url):
            refuse_foreign_advice(storage, self.name)
            study = optuna.create_study(study_name=self.name, storage=storage, load_if_exists=True)
            if not _values(study.user_attrs, self.name, storage):
                study.set_user_attr(MADE_BY, "lit_dps")
                study.set_user_attr(ADVICE_FORMAT, FORMAT)
            yield study


def _values(attrs: Mapping[str, Any], name: str, storage: BaseStorage) -> dict[str, Any]:
    """Return the measured values among the user attributes of advice.

    Raises:
        OtherFormat: if the advice has another format.
    """
    values = {key: value for key, value in attrs.items() if key not in (MADE_BY, ADVICE_FORMAT)}
    if values:
        # The first format had no number.
        check_format(attrs.get(ADVICE_FORMAT, 1), name, storage)
    return values


def list_advice(url: str) -> dict[str, dict[str, Any]]:
    """Return all advice of a storage: its values by the name of the study, sorted.

    Raises:
        StorageError: if the storage does not exist, or if it cannot be read.
    """
    advice = {}
    with storage_errors(url), open_to_read(url) as storage:
        for study in storage.get_all_studies():
            if study.study_name.endswith(ADVICE_SUFFIX):
                name = study.study_name.removesuffix(ADVICE_SUFFIX)
                advice[name] = _values(study.user_attrs, study.study_name, storage)
    return dict(sorted(advice.items()))
