"""The cells of a study in an Optuna storage, and whom they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage

from lit_dps.errors import StorageError
from lit_dps.store.schema import AXES, UID, cell_study_name
from lit_dps.trial import Cell


def open_cell(
    storage: BaseStorage, name: str, cell: Cell, uid: str | None, sampler: BaseSampler | None = None
) -> optuna.Study:
    """The Optuna study of a cell, made where there is none.

    Args:
        storage: The study's storage.
        name: The study's name.
        cell: Which cell.
        uid: The study's uid; None asks nothing.
        sampler: Where its points lie.

    Raises:
        StorageError: if it belongs to an earlier study of that name.
    """
    study = optuna.create_study(
        study_name=cell_study_name(name, cell),
        storage=storage,
        sampler=sampler,
        direction="minimize",
        load_if_exists=True,
    )
    known = study.user_attrs
    check_cell(known, name, cell, uid)
    attrs = {"batch_size": cell.batch_size, "sparsity": cell.sparsity, UID: uid}
    attrs |= {AXES: dict(cell.others)} if cell.others else {}
    for key, value in attrs.items():
        if known.get(key) != value:
            study.set_user_attr(key, value)
    return study


def check_cell(attrs: Mapping[str, Any], name: str, cell: Cell, uid: str | None) -> None:
    """Raises StorageError if a cell, by its user attributes, belongs to an earlier study of that name."""
    if None not in (uid, attrs.get(UID)) and attrs[UID] != uid:
        raise StorageError(
            f"{cell_study_name(name, cell)!r} belongs to an earlier study {name!r}, which was deleted without it: "
            "delete it too, or give the new one another study.name"
        )
