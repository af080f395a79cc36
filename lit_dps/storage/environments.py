"""The environments that a study's trials ran in: code, data, versions and machines. See
`lit_dps.core.environment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.storages import BaseStorage

from lit_dps.core.environment import KEY, changes_since
from lit_dps.storage.compatibility import StudyChanged
from lit_dps.storage.database import storage_errors, storage_for_now
from lit_dps.storage.header import attributes
from lit_dps.storage.locks import storage_lock
from lit_dps.storage.schema import ENVIRONMENTS, FORMAT_ATTR
from lit_dps.storage.urls import sqlite_file

WAY_OUT = (
    "restore it, choose another study.name, or continue with --accept-code-change; "
    "a note below the table then reports the change"
)


def keep_environment(url: str, name: str, environment: Mapping[str, Any]) -> None:
    """Add an environment to those of a declared study, unless it is stored already.

    Raises:
        StorageError: if the storage cannot be used.
    """
    with storage_errors(url), storage_for_now(url) as storage, storage_lock(url):
        add_environments(storage, name, [environment])


def add_environments(storage: BaseStorage, name: str, others: Sequence[Mapping[str, Any]]) -> None:
    """Add environments to those of a study: each once, the oldest first.

    The caller holds the storage's lock.
    """
    header = optuna.load_study(study_name=name, storage=storage)
    known = list(header.user_attrs.get(ENVIRONMENTS, []))
    before = len(known)
    for environment in others:
        if not any(_is_same(environment, other) for other in known):
            known.append(dict(environment))
    if len(known) > before:
        header.set_user_attr(ENVIRONMENTS, known)


def changed_environment(url: str, name: str, environment: Mapping[str, Any]) -> list[str]:
    """Return the code and data that differ from all environments of a study. Creates nothing.

    The list is empty if there is no study of this name, or if it was stored without hashes by an
    earlier version.

    Returns:
        Words such as "my_code.py" and "the data at noise=0.5".
    """
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return []
    with storage_errors(url), storage_for_now(url) as storage:
        header = attributes(storage, name)
    if FORMAT_ATTR not in header:
        return []
    return changes_since(header.get(ENVIRONMENTS, []), environment)


def check_environment(url: str, name: str, environment: Mapping[str, Any]) -> None:
    """Check that a stored study of this name was made with this code and these data.

    Raises:
        StudyChanged: naming the files and the data that differ.
    """
    changes = changed_environment(url, name, environment)
    if changes:
        verb = "is" if len(changes) == 1 else "are"
        message = (
            f"study {name!r}: {', '.join(changes)} {verb} not as in its stored trials; {WAY_OUT}"
        )
        raise StudyChanged(message, changes)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if KEY in one:
        return one[KEY] == other.get(KEY)
    return one == other
