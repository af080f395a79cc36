"""Checks that the best points of another study can be the points of a study (study.best_of)."""

from __future__ import annotations

from collections.abc import Mapping

from lit_dps.analysis.summary import summarize
from lit_dps.core.errors import ConfigError, StorageError
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import is_inside
from lit_dps.core.trial import Cell, Value
from lit_dps.storage.read import read_study
from lit_dps.study.setup import StudySetup

KEY = "study.best_of"


def check_best_of(setup: StudySetup) -> None:
    """Check that another study has a best point for each cell, within this study's ranges.

    If trials of this study are stored, they must have been run at the same points.

    Raises:
        ConfigError: if a check fails.
        StorageError: if there is no such study.
    """
    study, url = setup.study, setup.storage.optuna_url
    assert study.best_of is not None
    other = read_study(url, study.best_of)
    if other.space.keys() != study.space.keys():
        allowed = f"the keys of study {other.name!r}: {sorted(other.space)}"
        raise ConfigError("study.space", sorted(study.space), allowed)
    best = {summary.cell: summary.best for summary in summarize(other)}
    stored = _stored(setup)
    for cell in setup.cells:
        winner = best.get(cell)
        if winner is None:
            raise ConfigError(KEY, study.best_of, f"a study with a complete trial at {cell}")
        params = winner.trial.params
        _check_ranges(setup, cell, params)
        results = [] if stored is None else stored.results.get(cell, [])
        if any(result.trial.params != params for result in results):
            allowed = (
                f"a study whose best points stay; at {cell} it is another by now: choose another "
                "study.name"
            )
            raise ConfigError(KEY, study.best_of, allowed)


def _stored(setup: StudySetup) -> StudyRecord | None:
    """Return the stored study; None if it is not stored yet. `declare` reports other errors."""
    try:
        return read_study(setup.storage.optuna_url, setup.study.name)
    except StorageError:
        return None


def _check_ranges(setup: StudySetup, cell: Cell, params: Mapping[str, Value]) -> None:
    for key, box in setup.study.space.items():
        if not is_inside({key: box}, params):
            allowed = f"a range that holds {params[key]:g}, its best value at {cell}"
            raise ConfigError(f"study.space.{key}", str(box), allowed)
