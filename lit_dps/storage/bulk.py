"""Many reads or writes of Optuna trials at once.

`add_trials` adds many trials to a study, `add_to_trial` many values to a trial, and
`set_study_attrs` sets many attributes of a study, each in one transaction. SQLite waits for the
disk at each transaction, often 10 ms. `read_trials` reads the trials of many studies in three
queries.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import optuna
from optuna.distributions import (
    BaseDistribution,
    check_distribution_compatibility,
    distribution_to_json,
    json_to_distribution,
)
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session


class StoredTrial(NamedTuple):
    """The part of Optuna's `FrozenTrial` that readers of a study need."""

    number: int
    state: TrialState
    params: dict[str, Any]
    user_attrs: dict[str, Any]


def read_trials(storage: RDBStorage, study_ids: Collection[int]) -> dict[int, list[StoredTrial]]:
    """Return the trials of each study by its id, in the order of their numbers."""
    trial = models.TrialModel
    param = models.TrialParamModel
    attribute = models.TrialUserAttributeModel
    is_requested = trial.study_id.in_(study_ids)
    trials = select(trial.trial_id, trial.study_id, trial.number, trial.state)
    params = select(param.trial_id, param.param_name, param.param_value, param.distribution_json)
    attributes = select(attribute.trial_id, attribute.key, attribute.value_json)
    by_study: dict[int, list[StoredTrial]] = {study_id: [] for study_id in study_ids}
    by_id: dict[int, StoredTrial] = {}
    json_to_box = cache(json_to_distribution)
    with _create_scoped_session(storage.scoped_session) as session:
        rows = session.execute(trials.where(is_requested).order_by(trial.number))
        for trial_id, study_id, number, state in rows:
            by_id[trial_id] = StoredTrial(number, state, {}, {})
            by_study[study_id].append(by_id[trial_id])
        # A worker may add trials between two queries; these are not in `by_id`.
        rows = session.execute(params.join(trial).where(is_requested).order_by(param.param_id))
        for trial_id, name, value, box in rows:
            if trial_id in by_id:
                by_id[trial_id].params[name] = json_to_box(box).to_external_repr(value)
        for trial_id, key, text in session.execute(attributes.join(trial).where(is_requested)):
            if trial_id in by_id:
                by_id[trial_id].user_attrs[key] = _value_of(text, key, by_id[trial_id].number)
    return by_study


def _value_of(text: str, key: str, number: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{key!r} of trial {number} is not JSON") from error


def add_trials(storage: RDBStorage, study: optuna.Study, trials: Sequence[FrozenTrial]) -> None:
    """Add trials to a study with one objective, all in one transaction.

    The stored rows equal those of `study.add_trial`, called for each trial in order.

    Args:
        storage: The storage of the study, without Optuna's cache.
        study: The study.
        trials: The trials. They get new numbers. Either all are added, or none.

    Raises:
        ValueError: if a trial is inconsistent, or if its search space differs from the study's.
        StorageInternalError: if the database refuses the trials.
    """
    for trial in trials:
        trial._validate()
    with _create_scoped_session(storage.scoped_session) as session:
        # Optuna takes the same lock, because a trial's number is the count of earlier trials.
        models.StudyModel.find_or_raise_by_id(study._study_id, session, for_update=True)
        _check_distributions(session, study._study_id, trials)
        number = session.query(models.TrialModel).filter_by(study_id=study._study_id).count()
        rows = []
        for trial in trials:
            rows.append(
                models.TrialModel(
                    study_id=study._study_id,
                    number=number + len(rows),
                    state=trial.state,
                    datetime_start=trial.datetime_start,
                    datetime_complete=trial.datetime_complete,
                )
            )
        session.add_all(rows)
        session.flush()
        with_ids = [(row.trial_id, trial) for row, trial in zip(rows, trials, strict=True)]
        _insert(session, models.TrialValueModel, _values(with_ids))
        _insert(session, models.TrialParamModel, _params(with_ids))
        for model, attribute in (
            (models.TrialUserAttributeModel, "user_attrs"),
            (models.TrialSystemAttributeModel, "system_attrs"),
        ):
            _insert(session, model, _attributes(with_ids, attribute))
        _insert(session, models.TrialIntermediateValueModel, _intermediate_values(with_ids))


def add_to_trial(
    storage: RDBStorage,
    trial_id: int,
    user_attrs: Mapping[str, Any],
    intermediate_values: Mapping[int, float],
) -> None:
    """Add user attributes and intermediate values to a running trial, in one transaction.

    Args:
        storage: The storage of the trial, without Optuna's cache.
        trial_id: The id of the trial in the storage.
        user_attrs: The attributes, which replace those of the same names.
        intermediate_values: Values by step. The trial has none at these steps.

    Raises:
        UpdateFinishedTrialError: if the trial has ended.
        StorageInternalError: if the database refuses the values.
    """
    attribute = models.TrialUserAttributeModel
    added = create_trial(
        state=TrialState.RUNNING,
        user_attrs=dict(user_attrs),
        intermediate_values=dict(intermediate_values),
    )
    with_id = [(trial_id, added)]
    with _create_scoped_session(storage.scoped_session) as session:
        stored: Any = models.TrialModel.find_or_raise_by_id(trial_id, session)
        storage.check_trial_is_updatable(trial_id, stored.state)
        is_replaced = attribute.key.in_(list(user_attrs))
        session.execute(delete(attribute).where(attribute.trial_id == trial_id, is_replaced))
        _insert(session, attribute, _attributes(with_id, "user_attrs"))
        _insert(session, models.TrialIntermediateValueModel, _intermediate_values(with_id))


def set_study_attrs(storage: RDBStorage, study_id: int, user_attrs: Mapping[str, Any]) -> None:
    """Set user attributes of a study in one transaction.

    Args:
        storage: The storage of the study.
        study_id: The id of the study in the storage.
        user_attrs: The attributes, which replace those of the same names.

    Raises:
        StorageInternalError: if the database refuses the values.
    """
    attribute = models.StudyUserAttributeModel
    rows = []
    for key, value in user_attrs.items():
        rows.append({"study_id": study_id, "key": key, "value_json": json.dumps(value)})
    with _create_scoped_session(storage.scoped_session) as session:
        is_replaced = attribute.key.in_(list(user_attrs))
        session.execute(delete(attribute).where(attribute.study_id == study_id, is_replaced))
        _insert(session, attribute, rows)


TrialsWithIds = Sequence[tuple[int, FrozenTrial]]  # the primary key of each row, and the trial
Rows = Iterable[dict[str, Any]]  # column -> value


def _check_distributions(session: Session, study_id: int, trials: Sequence[FrozenTrial]) -> None:
    """Raise ValueError if a parameter's distribution is incompatible with the study's."""
    first: dict[str, BaseDistribution] = {}
    stored = session.query(models.TrialParamModel).join(models.TrialModel)
    stored = stored.filter_by(study_id=study_id)
    for trial in trials:
        for name, distribution in trial.distributions.items():
            if name not in first:
                record = stored.filter(models.TrialParamModel.param_name == name).first()
                first[name] = distribution
                if record is not None:
                    first[name] = json_to_distribution(str(record.distribution_json))
            check_distribution_compatibility(first[name], distribution)


def _insert(session: Session, model: type, rows: Rows) -> None:
    values = list(rows)
    if values:
        session.execute(insert(model), values)


def _values(trials: TrialsWithIds) -> Rows:
    for trial_id, trial in trials:
        if trial.value is not None:
            value, kind = models.TrialValueModel.value_to_stored_repr(trial.value)
            yield {"trial_id": trial_id, "objective": 0, "value": value, "value_type": kind}


def _params(trials: TrialsWithIds) -> Rows:
    for trial_id, trial in trials:
        for name, value in trial.params.items():
            distribution = trial.distributions[name]
            yield {
                "trial_id": trial_id,
                "param_name": name,
                "param_value": distribution.to_internal_repr(value),
                "distribution_json": distribution_to_json(distribution),
            }


def _attributes(trials: TrialsWithIds, attribute: str) -> Rows:
    for trial_id, trial in trials:
        for key, value in getattr(trial, attribute).items():
            yield {"trial_id": trial_id, "key": key, "value_json": json.dumps(value)}


def _intermediate_values(trials: TrialsWithIds) -> Rows:
    model = models.TrialIntermediateValueModel
    for trial_id, trial in trials:
        for step, value in trial.intermediate_values.items():
            stored, kind = model.intermediate_value_to_stored_repr(value)
            yield {
                "trial_id": trial_id,
                "step": step,
                "intermediate_value": stored,
                "intermediate_value_type": kind,
            }
