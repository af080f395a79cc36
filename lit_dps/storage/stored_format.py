"""Refuses studies of another storage format, before anything of them is used or changed."""

from __future__ import annotations

from typing import Any

from optuna.storages import BaseStorage

from lit_dps.core.errors import StorageError
from lit_dps.storage import schema
from lit_dps.storage.database import storage_name


class OtherFormat(StorageError):
    """A study is stored in another format than this version reads and writes.

    Attributes:
        name: The study's name.
        stored_format: Its format.
    """

    def __init__(self, name: str, stored_format: Any, place: str):
        remedy = "use a newer version of lit_dps"
        if isinstance(stored_format, int) and stored_format < schema.FORMAT:
            remedy = f"convert it with lit-dps migrate --storage {place}"
        super().__init__(
            f"study {name!r} has format {stored_format!r}; this version reads format "
            f"{schema.FORMAT}. To read it, {remedy}.",
            key="study.name",
            value=name,
        )
        self.name = name
        self.stored_format = stored_format


def study_id_of(storage: BaseStorage, name: str) -> int | None:
    """Return the id of the Optuna study of a name; None if there is no such study."""
    # Listing the names of all studies takes longer.
    try:
        return storage.get_study_id_from_name(name)
    except KeyError:
        return None


def study_attributes(storage: BaseStorage, name: str) -> dict[str, Any]:
    """Return the user attributes of an Optuna study; empty if there is no such study."""
    study_id = study_id_of(storage, name)
    if study_id is None:
        return {}
    return storage.get_study_user_attrs(study_id)


def read_header(storage: BaseStorage, name: str) -> dict[str, Any]:
    """Return the header of a study; empty if there is none, or if it is incomplete.

    Raises:
        OtherFormat: if the study has another format.
    """
    attrs = study_attributes(storage, name)
    if schema.FORMAT_ATTR not in attrs:
        return {}
    check_format(attrs[schema.FORMAT_ATTR], name, storage)
    return attrs


def check_format(stored_format: Any, name: str, storage: BaseStorage | str) -> None:
    """Raise OtherFormat if the format of a study or of advice is not the present one."""
    if stored_format != schema.FORMAT:
        raise OtherFormat(name, stored_format, storage_name(storage))
