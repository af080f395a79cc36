"""Whose study is it? Refuses Optuna studies of other programs; records the studies of this user.

`refuse_foreign_*` run before anything is written to an Optuna study whose name another program may
have used.

A database holds no code. But its configuration names modules, and importing a module runs code.
So `lit-dps study` writes the uid of each study that it runs into a file of the user. An entry in
the storage would prove nothing, because the storage may come from another person.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from sqlalchemy import text

from lit_dps.core.batch_schedule import NAME_KEY as SCHEDULE_AXIS
from lit_dps.core.errors import StorageError, UserError
from lit_dps.core.text import shorten
from lit_dps.core.trial import Cell
from lit_dps.core.user_code import texts_in
from lit_dps.storage import schema
from lit_dps.storage.stored_format import study_id_of

# ---- Optuna studies of other programs ----

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
            f"the storage has an Optuna study {name!r} of another program. Choose another "
            "study.name.",
            key="study.name",
            value=name,
        )
        self.name = name


def refuse_foreign_header(storage: RDBStorage, name: str) -> None:
    """Raise ForeignStudy if another program made the Optuna study of a header."""

    def is_header(study: int, attrs: Mapping[str, Any]) -> bool:
        return schema.FORMAT_ATTR in attrs or schema.MADE_BY in attrs

    _refuse_foreign(storage, name, schema.HEADER_ATTRS, is_header)


def refuse_foreign_cells(storage: RDBStorage, name: str, cells: Iterable[Cell]) -> None:
    """Raise ForeignStudy if `refuse_foreign_cell` does, for a cell or for its repeats."""
    for cell in cells:
        for study_name in (
            schema.cell_study_name(name, cell),
            schema.repeats_study_name(name, cell),
        ):
            refuse_foreign_cell(storage, study_name)


def refuse_foreign_cell(storage: RDBStorage, study_name: str) -> None:
    """Raise ForeignStudy if another program made a cell's Optuna study, or one of its trials."""

    def is_cell(study: int, attrs: Mapping[str, Any]) -> bool:
        values = {"key": schema.POINT_ATTR, "study": study}
        with storage.engine.connect() as connection:
            foreign_trials = connection.execute(_WITHOUT_POINT, values).scalar_one()
        is_complete = {schema.BATCH_SIZE, schema.SPARSITY} <= attrs.keys()
        return not foreign_trials and (is_complete or storage.get_n_trials(study) > 0)

    _refuse_foreign(storage, study_name, schema.CELL_ATTRS, is_cell)


def refuse_foreign_advice(storage: RDBStorage, study_name: str) -> None:
    """Raise ForeignStudy if another program made the Optuna study of advice."""

    def is_advice(study: int, attrs: Mapping[str, Any]) -> bool:
        has_advice = not attrs.keys().isdisjoint(schema.ADVICE_ATTRS)
        return has_advice and storage.get_n_trials(study) == 0

    _refuse_foreign(storage, study_name, schema.ADVICE_ATTRS, is_advice)


def _refuse_foreign(
    storage: RDBStorage,
    name: str,
    our_attrs: Mapping[str, schema.Stored],
    is_ours: Callable[[int, Mapping[str, Any]], bool],
) -> None:
    """Raise ForeignStudy if an Optuna study exists, and lit_dps did not make it.

    Args:
        storage: The storage.
        name: The name of the Optuna study.
        our_attrs: The attributes that lit_dps stores in such a study.
        is_ours: Decides by the id of the study and its attributes.
    """
    study = study_id_of(storage, name)
    if study is None:
        return
    attrs = storage.get_study_user_attrs(study)
    if is_ours(study, attrs):
        return
    if not _may_be_interrupted(storage, study, attrs, our_attrs):
        raise ForeignStudy(name)


def _may_be_interrupted(
    storage: RDBStorage,
    study: int,
    attrs: Mapping[str, Any],
    our_attrs: Mapping[str, schema.Stored],
) -> bool:
    """Return True if lit_dps may have been interrupted while it created an Optuna study.

    Such a study has no trials, only attributes of lit_dps, and one objective, which is minimized.
    """
    if storage.get_n_trials(study) > 0 or not attrs.keys() <= our_attrs.keys():
        return False
    return storage.get_study_directions(study) == [StudyDirection.MINIMIZE]


# ---- Studies of this user ----

# Packages that lit_dps imports anyway. Any other module may run arbitrary code.
KNOWN_PACKAGES = {"lit_dps", "lightning", "torch", "torchvision", "optuna"}


def user_studies_file() -> Path:
    """Return the file of uids, one a line, below $XDG_STATE_HOME or ~/.local/state."""
    folder = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(folder) / "lit_dps" / "studies"


def remember(uid: str) -> None:
    """Record that this user has run a study, or trusts its code."""
    if was_run_by_user(uid):
        return
    file = user_studies_file()
    # Without an entry, the user can still pass --trust.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{uid}\n")


def was_run_by_user(uid: str | None) -> bool:
    """Return True if this user has run the study with this uid, or trusts its code."""
    if uid is None:
        return False
    try:
        return uid in user_studies_file().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return False


def foreign_modules(config: Any) -> list[str]:
    """Return the modules outside `KNOWN_PACKAGES` that a configuration may import, sorted.

    Every text that may be a class path counts, under any key, because a configuration may name a
    class without the key `class_path`.
    """
    modules = {text.rpartition(".")[0] for text in texts_in(config) if _is_dotted_name(text)}
    return sorted(module for module in modules if module.partition(".")[0] not in KNOWN_PACKAGES)


class UntrustedCode(UserError):
    """Reading a study imports modules that it names, and this user did not run it.

    Attributes:
        modules: The modules, sorted.
    """

    def __init__(self, name: str, modules: list[str]):
        super().__init__(
            f"study {name!r} was not run by you on this machine, and reading it imports "
            f"{shorten(', '.join(modules))}, which runs code. If you trust that code, add --trust "
            "to the command, or trust=True to lit_dps.load",
            key="study.name",
            value=name,
        )
        self.modules = modules


def refuse_foreign_code(name: str, header: Mapping[str, Any], trust: bool) -> None:
    """Raise UntrustedCode if reading a study runs code that this user has not run.

    The goal's rule, the statistic and batch schedules may be classes of users. A module that is
    already imported runs no code.

    Args:
        name: The study's name.
        header: Its header.
        trust: Whether the user trusts the code. The study is then recorded as one of the user's.
    """
    batch = header[schema.CONFIG].get("batch")
    schedules = list(header[schema.AXES].get(SCHEDULE_AXIS, ()))
    if isinstance(batch, dict):
        schedules.append(batch.get("schedule"))
    names = [header[schema.GOAL].get("rule"), header.get(schema.STATISTIC), *schedules]
    unknown = [module for module in foreign_modules(names) if module not in sys.modules]
    if not unknown or was_run_by_user(header[schema.UID]):
        return
    if not trust:
        raise UntrustedCode(name, unknown)
    remember(header[schema.UID])


def _is_dotted_name(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.split("."))
