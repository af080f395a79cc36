"""MLflow's tables from a copy that is made once per session: its migrations take 3 s for each new
database."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import sqlalchemy
from mlflow.store.db import utils

KEY = (
    "LIT_DPS_TEST_MLFLOW"  # without it in its environment a process makes the tables as MLflow does
)
make_tables = utils._initialize_tables


def use_copies() -> None:
    """From here on new sqlite databases of MLflow get their tables from the copy."""
    utils._initialize_tables = _initialize


def _initialize(engine: sqlalchemy.Engine) -> None:
    new = engine.dialect.name == "sqlite" and not sqlalchemy.inspect(engine).get_table_names()
    if KEY not in os.environ or not new:
        return make_tables(engine)
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(_copy())) as source,
        engine.connect() as target,
    ):
        source.backup(target.connection.driver_connection)
        return None
    return make_tables(engine)  # which says what is wrong with the place in MLflow's own words


def _copy() -> Path:
    path = Path(os.environ[KEY])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            engine = sqlalchemy.create_engine(f"sqlite:///{folder}/new.db")
            make_tables(engine)
            engine.dispose()
            Path(folder, "new.db").rename(path)
    return path
