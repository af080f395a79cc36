"""A kill while a SQLite storage is created: the next command completes the file, or refuses it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from sqlalchemy import Engine, create_engine, event, inspect

from lit_dps.core.errors import StorageError
from lit_dps.storage.database import open_storage
from lit_dps.storage.read import read_study
from tests.support.errors import refuses
from tests.support.runs import trials_of
from tests.unit.storage.test_store import ended
from tests.unit.storage.test_store_shared import declared, opened

KILLED = 9
READING = ("PRAGMA", "SELECT")


def killed_after(moment: int, create: Callable[[], object]) -> bool:
    """Call a function in a process that ends after a statement, as by SIGKILL.

    Args:
        moment: The number of the statement, from 1, among those that may write.
        create: The function.

    Returns:
        Whether the process ended at the statement; False if there are fewer statements.
    """
    child = os.fork()
    if child == 0:
        remaining = moment

        def count_down(connection, cursor, statement: str, *arguments) -> None:
            nonlocal remaining
            remaining -= not statement.upper().lstrip().startswith(READING)
            if remaining == 0:
                os._exit(KILLED)

        event.listen(Engine, "after_cursor_execute", count_down)
        try:
            create()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def schema_of(file: Path) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(file)) as connection:
        return set(connection.execute("select name, sql from sqlite_master"))


def results_of_a_study(url: str) -> list[tuple[int, int | None]]:
    """Run a study of three trials, and return their points and steps to the goal."""
    queue = opened(url, declared(url))
    for trial in trials_of(queue):
        queue.store_result(ended(trial))
    queue.leave()
    (results,) = read_study(url, "s").results.values()
    return [(result.trial.point, result.steps) for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("create", [open_storage, RDBStorage])
def test_a_kill_at_any_statement_of_the_creation_loses_no_result(create, tmp_path):
    """`RDBStorage` creates the file as earlier versions did: it commits each statement."""
    whole = tmp_path / "whole.db"
    expected = results_of_a_study(f"sqlite:///{whole}")
    assert [point for point, _ in expected] == [0, 1, 2]
    moment = 1
    while True:
        file = tmp_path / f"{moment}.db"
        url = f"sqlite:///{file}"
        if not killed_after(moment, lambda url=url: create(url)):
            break
        if file.exists():
            # A command that reads says so; it neither fails otherwise nor invents a study.
            with pytest.raises(StorageError) as caught:
                read_study(url, "s")
            assert "\n" not in str(caught.value)
        assert results_of_a_study(url) == expected, f"killed at statement {moment}"
        assert schema_of(file) == schema_of(whole), f"killed at statement {moment}"
        moment += 1
    assert moment > len(models.BaseModel.metadata.tables)


def test_the_tables_of_a_new_file_are_created_together(tmp_path):
    file = tmp_path / "study.db"
    counts = []
    while killed_after(len(counts) + 1, lambda: open_storage(f"sqlite:///{file}")):
        names = {name for name, _ in schema_of(file)}
        counts.append(len(names & {"studies", "ix_studies_study_name", "trials", "trial_values"}))
        file.unlink()
    assert counts == sorted(counts) and set(counts) == {0, 4}


@pytest.fixture
def two_studies(tmp_path) -> tuple[Path, str]:
    """A file in which the study "s" was created twice, because a kill left out the index."""
    file = tmp_path / "study.db"
    url = f"sqlite:///{file}"
    results_of_a_study(url)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("drop index ix_studies_study_name")
        connection.execute("insert into studies (study_name) values ('s')")
    return file, url


@pytest.mark.parametrize("lock", [True, False])
def test_two_studies_of_one_name_are_refused(two_studies, lock):
    file, url = two_studies
    if not lock:
        Path(f"{file}.lock").unlink()
    content = file.read_bytes()
    for use in (lambda: read_study(url, "s"), lambda: declared(url)):
        with refuses(str(file), "s", error=StorageError):
            use()
    assert file.read_bytes() == content


def test_a_missing_index_is_created_again(two_studies):
    file, url = two_studies
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(
            "delete from studies where study_id = (select max(study_id) from studies)"
        )
    assert [trial.point for trial in trials_of(opened(url, declared(url)))] == []
    with pytest.raises(optuna.exceptions.DuplicatedStudyError):
        optuna.create_study(study_name="s", storage=url)


@pytest.mark.slow
def test_postgresql_creates_all_tables_or_none(postgres):
    assert killed_after(8, lambda: open_storage(postgres))
    engine = create_engine(postgres)
    assert inspect(engine).get_table_names() == []
    engine.dispose()
    assert len(results_of_a_study(postgres)) == 3
