"""What is stored of advice, beside the study that it probes: one Optuna study without trials, "NAME
(advice)"."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.storages import RDBStorage

from lit_dps.storage.database import storage_errors, storage_for_now
from lit_dps.storage.foreign_studies import refuse_foreign_advice
from lit_dps.storage.header import attributes
from lit_dps.storage.locks import storage_lock
from lit_dps.storage.read import open_to_read
from lit_dps.storage.schema import ADVICE_SUFFIX
from lit_dps.storage.urls import sqlite_file


class AdviceStore:
    """Named values of plain JSON that advice on a study goes on from.
    `lit_dps.storage.schema.ADVICE_ATTRS` names them.

    All methods raise StorageError where the storage cannot be used.

    Args:
        url: Optuna storage URL.
        name: The study's name.
    """

    def __init__(self, url: str, name: str):
        self.url, self.name = url, f"{name}{ADVICE_SUFFIX}"

    def read(self) -> dict[str, Any]:
        """Return all stored values by name; empty if no advice is stored. Creates nothing."""
        file = sqlite_file(self.url)
        if file is not None and not file.exists():
            return {}
        with storage_errors(self.url), storage_for_now(self.url) as storage:
            refuse_foreign_advice(storage, self.name)
            return attributes(storage, self.name)

    def keep(self, **values: Any) -> None:
        """Store values by name; a value replaces an earlier one of the same name."""
        with storage_errors(self.url), storage_for_now(self.url) as storage, storage_lock(self.url):
            study = self._open(storage)
            for key, value in values.items():
                study.set_user_attr(key, value)

    def append(self, key: str, value: Any) -> None:
        """Append a value to the list of a key; the first value creates the list."""
        with storage_errors(self.url), storage_for_now(self.url) as storage, storage_lock(self.url):
            study = self._open(storage)
            study.set_user_attr(key, [*study.user_attrs.get(key, []), value])

    def _open(self, storage: RDBStorage) -> optuna.Study:
        """Return the Optuna study of the advice; create it if it does not exist."""
        refuse_foreign_advice(storage, self.name)
        return optuna.create_study(study_name=self.name, storage=storage, load_if_exists=True)


def list_advice(url: str) -> dict[str, dict[str, Any]]:
    """All advice of a storage: its values by the name of the study. StorageError if there is no
    such storage."""
    with storage_errors(url), open_to_read(url) as storage:
        advice = (s for s in storage.get_all_studies() if s.study_name.endswith(ADVICE_SUFFIX))
        return dict(
            sorted((s.study_name.removesuffix(ADVICE_SUFFIX), dict(s.user_attrs)) for s in advice)
        )
