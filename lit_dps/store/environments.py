"""The environments that a study's trials ran in: versions and machines, for whoever reads the report later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import optuna
from optuna.storages import BaseStorage

from lit_dps.store.database import storage_errors, storage_for_now
from lit_dps.store.locks import storage_lock
from lit_dps.store.schema import ENVIRONMENTS


def keep_environment(url: str, name: str, environment: Mapping[str, str]) -> None:
    """Adds an environment to those of a declared study, unless it is there. StorageError if that cannot be."""
    with storage_errors(url), storage_for_now(url) as storage, storage_lock(url):
        add_environments(storage, name, [environment])


def add_environments(storage: BaseStorage, name: str, others: Sequence[Mapping[str, str]]) -> None:
    """Adds environments to those of a study, under the storage's lock; each is kept once, the oldest first."""
    header = optuna.load_study(study_name=name, storage=storage)
    known = header.user_attrs.get(ENVIRONMENTS, [])
    if new := [dict(each) for i, each in enumerate(others) if each not in known and each not in others[:i]]:
        header.set_user_attr(ENVIRONMENTS, [*known, *new])
