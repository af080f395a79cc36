"""Whether the points of a study can be the best ones of another (study.best_of)."""

from __future__ import annotations

from lit_dps.analysis.summary import summarize
from lit_dps.core.errors import ConfigError, StorageError
from lit_dps.core.record import StudyRecord
from lit_dps.core.space_history import inside
from lit_dps.storage.read import read_study
from lit_dps.study.setup import StudySetup


def check_best_of(setup: StudySetup) -> None:
    """Checks that another study has a best point for each cell, in the box, and the one that cells
    here began with.

    Raises:
        ConfigError: if not.
        StorageError: if there is no such study.
    """
    study, url = setup.study, setup.storage.optuna_url
    other = read_study(url, study.best_of)
    if other.space.keys() != study.space.keys():
        raise ConfigError(
            "study.space",
            sorted(study.space),
            f"the keys of study {other.name!r}: {sorted(other.space)}",
        )
    try:
        mine: StudyRecord | None = read_study(url, study.name)
    except (
        StorageError
    ):  # there is none yet; what else is wrong with it is told where it is declared
        mine = None
    best = {summary.cell: summary.best for summary in summarize(other)}
    for cell in setup.cells:
        if best.get(cell) is None:
            raise ConfigError(
                "study.best_of", study.best_of, f"a study with a complete trial at {cell}"
            )
        params = best[cell].trial.params
        for key, box in study.space.items():
            if not inside({key: box}, params):
                held = f"a range that holds {params[key]:g}, its best value at {cell}"
                raise ConfigError(f"study.space.{key}", str(box), held)
        begun = [] if mine is None else mine.results.get(cell, [])
        if any(result.trial.params != params for result in begun):
            raise ConfigError(
                "study.best_of",
                study.best_of,
                f"a study whose best points stay; at {cell} it is another by now: choose another "
                "study.name",
            )
