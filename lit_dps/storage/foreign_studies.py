"""Refuses a study name if another program has made an Optuna study of this name.

The check comes before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from sqlalchemy import text

from lit_dps.core.errors import StorageError
from lit_dps.core.trial import Cell
from lit_dps.storage.schema import (
    ADVICE_ATTRS,
    CELL_ATTRS,
    FORMAT_ATTR,
    HEADER_ATTRS,
    IDENTITY,
    MADE_BY,
    POINT_ATTR,
    cell_study_name,
    repeats_study_name,
)

# lit_dps creates each trial together with its point, so a trial without a point is foreign.
_WITHOUT_POINT = text(
    """
    select count(*) from trials t
    left join trial_user_attributes a on a.trial_id = t.trial_id and a.key = :key
    where t.study_id = :study and a.trial_id is null"""
)


class ForeignStudy(StorageError):
    """Another program has made an Optuna study with a name that lit_dps needs.

    Attributes:
        name: The name of the Optuna study.
    """

    def __init__(self, name: str):
        super().__init__(
            f"there is an Optuna study {name!r} that lit_dps did not make: choose another "
            "study.name"
        )
        self.name = name


def refuse_foreign_header(storage: RDBStorage, name: str) -> None:
    """Raise ForeignStudy if another program made the Optuna study of a header."""
    study = _study_id(storage, name)
    if study is None:
        return
    attrs = storage.get_study_user_attrs(study)
    if FORMAT_ATTR in attrs or MADE_BY in attrs or {"workload", IDENTITY} <= attrs.keys():
        return
    # An earlier version may have been interrupted before it wrote these attributes.
    if not _may_be_cut_short(storage, study, attrs, HEADER_ATTRS):
        raise ForeignStudy(name)


def refuse_foreign_cells(storage: RDBStorage, name: str, cells: Iterable[Cell]) -> None:
    """Raise ForeignStudy if `refuse_foreign_cell` does, for a cell or for its repeats."""
    for cell in cells:
        for study_name in (cell_study_name(name, cell), repeats_study_name(name, cell)):
            refuse_foreign_cell(storage, study_name)


def refuse_foreign_cell(storage: RDBStorage, study_name: str) -> None:
    """Raise ForeignStudy if another program made an Optuna study of a cell, or one of its
    trials."""
    study = _study_id(storage, study_name)
    if study is None:
        return
    with storage.engine.connect() as connection:
        count = connection.execute(_WITHOUT_POINT, {"key": POINT_ATTR, "study": study}).scalar()
    attrs = storage.get_study_user_attrs(study)
    has_trials = storage.get_n_trials(study) > 0
    is_known = {"batch_size", "sparsity"} <= attrs.keys() or has_trials
    is_ours = is_known or _may_be_cut_short(storage, study, attrs, CELL_ATTRS)
    if count > 0 or not is_ours:
        raise ForeignStudy(study_name)


def refuse_foreign_advice(storage: RDBStorage, study_name: str) -> None:
    """Raise ForeignStudy if another program made the Optuna study of advice."""
    study = _study_id(storage, study_name)
    if study is None:
        return
    attrs = storage.get_study_user_attrs(study)
    is_known = bool(attrs.keys() & ADVICE_ATTRS.keys()) and storage.get_n_trials(study) == 0
    if not (is_known or _may_be_cut_short(storage, study, attrs, ADVICE_ATTRS)):
        raise ForeignStudy(study_name)


def _study_id(storage: RDBStorage, study_name: str) -> int | None:
    try:
        return storage.get_study_id_from_name(study_name)
    except KeyError:
        return None


def _may_be_cut_short(
    storage: RDBStorage, study: int, attrs: Mapping[str, Any], known: Mapping[str, str]
) -> bool:
    """Return True if a study may be an interrupted one of ours.

    It then has no trials, only `known` attributes, and one objective, which is minimized.
    """
    is_empty = storage.get_n_trials(study) == 0 and attrs.keys() <= known.keys()
    return is_empty and storage.get_study_directions(study) == [StudyDirection.MINIMIZE]
