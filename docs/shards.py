"""Writes one study of a storage into a small file for the repository.

    python docs/shards.py STORAGE STUDY FILE.db.xz

STORAGE is a SQLite file, which may be compressed. The file holds the study alone, without the
values that Optuna's plots show: `lit-dps merge` computes these again. A file is written once and
never changed. More trials of a study go into another file, and `lit-dps replicate` merges all.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from lit_dps.core.errors import StorageError
from lit_dps.storage.migrate import pack
from lit_dps.storage.read import UNPACKED_BYTES, decompress

OTHER_STUDIES = "select study_id from studies where study_name <> ?1 and instr(study_name, ?2) <> 1"
OF_STUDIES = ("study_user_attributes", "study_system_attributes", "study_directions", "studies")
OF_TRIALS = (
    "trial_user_attributes",
    "trial_system_attributes",
    "trial_params",
    "trial_values",
    "trial_heartbeats",
)


def write_shard(storage: Path, study: str, target: Path) -> None:
    """Write a study of a SQLite file into a compressed file.

    Raises:
        StorageError: if the storage has no such study, or if the target exists.
    """
    if target.exists():
        raise StorageError(f"{target} exists; committed studies are never changed")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "study.db"
        if storage.suffix == ".xz":
            decompress(storage, copy, UNPACKED_BYTES)
        else:
            shutil.copyfile(storage, copy)
        with closing(sqlite3.connect(copy)) as connection:
            _keep_only(connection, study)
        target.parent.mkdir(parents=True, exist_ok=True)
        pack(copy, target)


def _keep_only(connection: sqlite3.Connection, study: str) -> None:
    """Delete all other studies, and the values that can be computed again."""
    found = connection.execute("select 1 from studies where study_name = ?", (study,)).fetchone()
    if found is None:
        raise StorageError(f"no study {study!r}")
    names = (study, f"{study} | ")
    with connection:
        others = f"study_id in ({OTHER_STUDIES})"
        trials = f"trial_id in (select trial_id from trials where {others})"
        connection.execute("delete from trial_intermediate_values")
        for table in OF_TRIALS:
            connection.execute(f"delete from {table} where {trials}", names)
        connection.execute(f"delete from trials where {others}", names)
        for table in OF_STUDIES:
            connection.execute(f"delete from {table} where {others}", names)
    connection.execute("vacuum")


if __name__ == "__main__":
    source, name, file = sys.argv[1:]
    write_shard(Path(source), name, Path(file))
    print(f"written: {file}")
