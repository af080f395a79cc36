"""Made-up results and storages full of them, to measure what keeping a trial costs without training
one."""

from __future__ import annotations

from collections.abc import Sequence

import optuna

from lit_dps.core.attempt import AttemptRules
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.schema import (
    ENVIRONMENT,
    POINT_ATTR,
    REPEAT_ATTR,
    RESULT_ATTR,
    STATES,
    cell_study_name,
    encode_result,
)
from lit_dps.storage.trial_queue import TrialQueue

SPACE = {
    "model.learning_rate": Range(1e-4, 1.0, "log"),
    "model.momentum": Range(0.9, 0.9999, "reverse_log"),
}
CHECKS = 25  # of a made-up trial, where it is not these that matter


def result(trial: Trial, checks: int = CHECKS) -> TrialResult:
    """An ended trial with so many checks; every fourth point is complete, the others are
    incomplete."""
    steps = [16 * (i + 1) for i in range(checks)]
    error = [0.02 + 0.8 / (i + 1) for i in range(checks)]
    curve = {
        "step": steps,
        "val_error": error,
        "train_loss": [2.5 * e for e in error],
        "exact": [1] * checks,
    }
    complete = trial.point % 4 == 0
    status = Status.COMPLETE if complete else Status.INCOMPLETE
    return TrialResult(
        trial,
        status,
        steps[-1] if complete else None,
        curve,
        {"linear.weight": (1_024, 10_240)},
        1.0,
    )


def trial(cell: Cell, point: int, points: int) -> Trial:
    """One of so many trials, evenly spread over the space."""
    return Trial(cell, point, {key: box.at(point / points) for key, box in SPACE.items()})


def store(folder: str, points: int, cells: Sequence[Cell]) -> TrialQueue:
    """The trials of a raced study with so many points a cell, in a file of the folder."""
    return TrialQueue(
        f"sqlite:///{folder}/study.db",
        "s",
        cells,
        points,
        SobolSampler(SPACE, 0),
        0,
        AttemptRules(Goal(0.02)),
        race_factor=1.0,
    )


def fill(kept: TrialQueue, cell: Cell, points: int, checks: int = CHECKS) -> None:
    """Stores so many finished trials of a cell, with so many checks each, as ask and tell leave
    them."""
    study = optuna.create_study(study_name=cell_study_name(kept.name, cell), storage=kept.storage)
    for point in range(points):
        ended = result(trial(cell, point, points), checks)
        study.add_trial(
            optuna.trial.create_trial(
                state=STATES[ended.status],
                value=ended.steps,
                params=dict(ended.trial.params),
                distributions=kept.distributions,
                user_attrs={
                    POINT_ATTR: point,
                    REPEAT_ATTR: 0,
                    ENVIRONMENT: None,
                    RESULT_ATTR: encode_result(ended),
                },
            )
        )
