"""The database queries of a claim, one statement each. Optuna's public API would read all trials.

The module uses Optuna's private models. The public API cannot claim a waiting trial and store its
owner in one transaction, and it cannot skip the rows that other workers have locked.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

from optuna.storages import RDBStorage
from optuna.storages._rdb.models import TrialModel, TrialUserAttributeModel, TrialValueModel
from optuna.trial import TrialState
from sqlalchemy import Integer, Select, cast, func, select
from sqlalchemy.orm import Session, aliased

from lit_dps.storage.schema import OWNER, POINT_ATTR, RESULT_ATTR


def claim_waiting(storage: RDBStorage, study: int, owner: str) -> int | None:
    """Claim the first waiting trial of an Optuna study, and return its id; None if none waits.

    State and owner are written in one transaction. On a server, workers claim different trials
    without waiting for each other (SELECT ... FOR UPDATE SKIP LOCKED). SQLite cannot lock rows, so
    the caller must hold the storage's lock.

    Args:
        storage: The storage.
        study: Id of the Optuna study.
        owner: The name of the process that claims the trial.
    """
    with Session(storage.engine) as session, session.begin():
        first = _waiting(study).with_for_update(of=TrialModel, skip_locked=True)
        trial = session.scalars(first).first()
        if trial is None:
            return None
        trial.state = TrialState.RUNNING
        trial.datetime_start = datetime.datetime.now()
        value = json.dumps(owner)
        session.add(TrialUserAttributeModel(trial_id=trial.trial_id, key=OWNER, value_json=value))
        return trial.trial_id


def has_waiting(storage: RDBStorage, study: int, points: int) -> bool:
    """Return True if a trial at one of the first `points` points is waiting."""
    waiting = (
        _waiting(study)
        .join(TrialUserAttributeModel, TrialUserAttributeModel.trial_id == TrialModel.trial_id)
        .where(
            TrialUserAttributeModel.key == POINT_ATTR,
            cast(TrialUserAttributeModel.value_json, Integer) < points,
        )
    )
    with Session(storage.engine) as session:
        return session.scalars(waiting).first() is not None


def fewest_steps(storage: RDBStorage, study: int) -> int | None:
    """Return K* of an Optuna study, the smallest value of its complete trials; None without any."""
    least = (
        select(func.min(TrialValueModel.value))
        .join(TrialModel, TrialModel.trial_id == TrialValueModel.trial_id)
        .where(TrialModel.study_id == study, TrialModel.state == TrialState.COMPLETE)
    )
    with Session(storage.engine) as session:
        steps = session.scalar(least)
    return None if steps is None else int(steps)


def pruned_results(storage: RDBStorage, study: int, point: int) -> list[dict[str, Any]]:
    """Return the stored results of a point's attempts in Optuna's state PRUNED."""
    result = aliased(TrialUserAttributeModel)
    results = (
        select(result.value_json)
        .join(TrialModel, TrialModel.trial_id == result.trial_id)
        .join(TrialUserAttributeModel, TrialUserAttributeModel.trial_id == TrialModel.trial_id)
        .where(
            TrialModel.study_id == study,
            TrialModel.state == TrialState.PRUNED,
            TrialUserAttributeModel.key == POINT_ATTR,
            TrialUserAttributeModel.value_json == json.dumps(point),
            result.key == RESULT_ATTR,
        )
    )
    with Session(storage.engine) as session:
        return [json.loads(text) for text in session.scalars(results)]


def _waiting(study: int) -> Select[tuple[TrialModel]]:
    return (
        select(TrialModel)
        .where(TrialModel.study_id == study, TrialModel.state == TrialState.WAITING)
        .order_by(TrialModel.trial_id)
        .limit(1)
    )
