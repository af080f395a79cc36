"""One cell of a study in Optuna: how its trials are opened, claimed, counted and ended.

The queries are single statements, because Optuna's public API would read all trials of the cell.
They use Optuna's private models: the public API cannot claim a waiting trial and store its owner in
one transaction, and it cannot skip the rows that other workers have locked.
"""

from __future__ import annotations

import datetime
import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.storages._rdb.models import TrialModel, TrialUserAttributeModel, TrialValueModel
from optuna.trial import TrialState
from sqlalchemy import Integer, Select, cast, select
from sqlalchemy.orm import Session, aliased

from lit_dps.core.errors import StorageError
from lit_dps.core.goal import RESERVED_NAMES
from lit_dps.core.racing import reruns_above
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.core.unit import STEPS, Cost, Unit
from lit_dps.storage import columns, schema
from lit_dps.storage.bulk import add_to_trial
from lit_dps.storage.ownership import refuse_foreign_cell
from lit_dps.storage.schema import cell_study_name, encode_result, repeats_study_name
from lit_dps.storage.stored_format import study_id_of

# The most intermediate values of a trial, enough for Optuna's plots.
REPORTED_VALUES = 32


class WrongCell(StorageError):
    """An Optuna study has the name of a cell, but holds another cell.

    Attributes:
        name: The name of the Optuna study.
        keys: Its user attributes that differ from the user attributes of the cell.
    """

    def __init__(self, message: str, name: str = "", keys: Sequence[str] = ()):
        super().__init__(message)
        self.name, self.keys = name, tuple(keys)


# ---- Opening ----


def open_cell(
    storage: RDBStorage,
    name: str,
    cell: Cell,
    uid: str | None,
    sampler: BaseSampler | None = None,
    repeats: bool = False,
    unit: Unit = STEPS,
) -> optuna.Study:
    """Return the Optuna study of a cell, or of its repeats; create it if it does not exist.

    Optuna's plots name the values of its trials by their unit.

    Raises:
        WrongCell: as `check_cell`.
        ForeignStudy: if another program made the Optuna study.
    """
    study_name = cell_study_name(name, cell)
    if repeats:
        study_name = repeats_study_name(name, cell)
    refuse_foreign_cell(storage, study_name)
    study = optuna.create_study(
        study_name=study_name,
        storage=storage,
        sampler=sampler,
        direction="minimize",
        load_if_exists=True,
    )
    stored = study.user_attrs
    check_cell(stored, name, cell, uid)
    set_metric_name(study, f"K [{unit.name}]")
    attrs: dict[str, Any] = {
        schema.BATCH_SIZE: cell.batch_size,
        schema.SPARSITY: cell.sparsity,
        schema.AXES: dict(cell.axes),
        schema.UID: uid,
    }
    for key, value in attrs.items():
        if stored.get(key) != value:
            study.set_user_attr(key, value)
    return study


def set_metric_name(study: optuna.Study, name: str) -> None:
    """Set the name of the trials' values in Optuna's plots, unless it is set."""
    if study.metric_names is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([name])


def check_cell(attrs: Mapping[str, Any], name: str, cell: Cell, uid: str | None) -> None:
    """Check that an Optuna study has the user attributes of a cell.

    Raises:
        WrongCell: if the study holds another cell of this name, or a deleted study's cell.
    """
    study_name = cell_study_name(name, cell)
    stored, expected = {}, {}
    for key, value in ((schema.SPARSITY, cell.sparsity), (schema.AXES, dict(cell.axes))):
        if attrs.get(key, value) != value:
            stored[key], expected[key] = attrs[key], value
    if stored:
        raise WrongCell(
            f"{study_name!r} holds trials of {stored}, not of {expected}, although both "
            "have the same name. Choose another study.name for one of the two.",
            study_name,
            sorted(stored),
        )
    stored_uid = attrs.get(schema.UID)
    if uid is not None and stored_uid is not None and stored_uid != uid:
        raise WrongCell(
            f"{study_name!r} belongs to a deleted study {name!r}. Delete it too, or "
            "choose another study.name.",
            study_name,
            [schema.UID],
        )


# ---- Reading ----


def costs_by_point(storage: RDBStorage, study: int) -> dict[int, Cost]:
    """Return the costs of an Optuna study's complete trials by point."""
    point = aliased(TrialUserAttributeModel)
    values = (
        select(point.value_json, TrialValueModel.value)
        .join(TrialModel, TrialModel.trial_id == TrialValueModel.trial_id)
        .join(point, point.trial_id == TrialModel.trial_id)
        .where(
            TrialModel.study_id == study,
            TrialModel.state == TrialState.COMPLETE,
            point.key == schema.POINT_ATTR,
        )
        .order_by(TrialModel.trial_id)
    )
    with Session(storage.engine) as session:
        return {json.loads(key): _whole(value) for key, value in session.execute(values)}


def _whole(value: float) -> Cost:
    """Return a value of Optuna, which has floats only, as an integer if it is whole."""
    return int(value) if value.is_integer() else value


def stored_costs_by_point(storage: RDBStorage, name: str, cell: Cell) -> dict[int, Cost]:
    """Return the `costs_by_point` of a cell by its name; empty if there is no such cell."""
    study = study_id_of(storage, cell_study_name(name, cell))
    if study is None:
        return {}
    return costs_by_point(storage, study)


def stored_reruns_above(
    user_attrs: Mapping[str, Any], run_number: int = 0, unit: Unit | None = None
) -> float:
    """Return the race limit above which a stored attempt runs again.

    An interrupted attempt has no result: minus infinity. A failed attempt is retried by the runs of
    the study that began after it failed.

    Args:
        user_attrs: The user attributes of the attempt.
        run_number: The number of the current run (`lit_dps.storage.run_records.begin_run`). With 0,
            no failed attempt is retried.
        unit: The unit of the limit; None for the unit of K*. Rungs are in steps.
    """
    result = user_attrs.get(schema.RESULT_ATTR)
    if result is None:
        return -math.inf
    unit = unit or schema.stored_unit(result)
    last_check = columns.last_value(result["curve"], unit.column)
    has_failed = result["status"] == Status.FAILED
    if has_failed and result[schema.FAILED_IN] < run_number:
        return last_check
    return reruns_above(Status(result["status"]), last_check)


def has_waiting(storage: RDBStorage, study: int, points: int) -> bool:
    """Return True if a trial at one of the first `points` points is waiting."""
    with Session(storage.engine) as session:
        return session.scalars(_first_waiting(study, points)).first() is not None


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
            TrialUserAttributeModel.key == schema.POINT_ATTR,
            TrialUserAttributeModel.value_json == json.dumps(point),
            result.key == schema.RESULT_ATTR,
        )
    )
    with Session(storage.engine) as session:
        return [json.loads(text) for text in session.scalars(results)]


def cell_distance(cell: Cell, other: Cell) -> float:
    """Return how much two cells differ.

    A factor of 2 in batch size counts 1, as much as a quarter of the weights. A different value on
    a further axis counts as much as all of the weights.
    """
    octaves = abs(math.log2(cell.batch_size / other.batch_size))
    weights = abs(cell.sparsity - other.sparsity)
    other_axes = len(set(cell.axes) - set(other.axes))
    return octaves + 4 * weights + 4 * other_axes


# ---- Claiming and ending ----


def claim_waiting(
    storage: RDBStorage, study: int, points: int, user_attrs: Mapping[str, Any]
) -> int | None:
    """Claim the first waiting trial of an Optuna study, and return its id; None if none waits.

    A later run of the study may have enqueued further points, from another search space. They are
    left to the workers of that run.

    State and attributes are written in one transaction. On a server, workers claim different trials
    without waiting for each other (SELECT ... FOR UPDATE SKIP LOCKED). SQLite cannot lock rows, so
    the caller must hold the storage's lock.

    Args:
        storage: The storage.
        study: Id of the Optuna study.
        points: The number of points that may be claimed: points 0 to points - 1.
        user_attrs: Attributes that the claimed trial gets, such as its owner.
    """
    with Session(storage.engine) as session, session.begin():
        first = _first_waiting(study, points).with_for_update(of=TrialModel, skip_locked=True)
        trial = session.scalars(first).first()
        if trial is None:
            return None
        trial.state = TrialState.RUNNING
        trial.datetime_start = datetime.datetime.now()
        for key, value in user_attrs.items():
            attribute = TrialUserAttributeModel(
                trial_id=trial.trial_id, key=key, value_json=json.dumps(value)
            )
            session.add(attribute)
        return trial.trial_id


def _first_waiting(study: int, points: int) -> Select[Any]:
    """Return the query for the first waiting trial at one of the first `points` points."""
    return (
        select(TrialModel)
        .join(TrialUserAttributeModel, TrialUserAttributeModel.trial_id == TrialModel.trial_id)
        .where(
            TrialModel.study_id == study,
            TrialModel.state == TrialState.WAITING,
            TrialUserAttributeModel.key == schema.POINT_ATTR,
            cast(TrialUserAttributeModel.value_json, Integer) < points,
        )
        .order_by(TrialModel.trial_id)
        .limit(1)
    )


def intermediate_values(result: TrialResult) -> dict[int, float]:
    """Return finite values of the goal's metric by step, for Optuna's plots.

    The curve is thinned to `REPORTED_VALUES`; its first and last values are kept.
    """
    steps = result.curve.get("step", ())
    metric = next((key for key in result.curve if key not in RESERVED_NAMES), None)
    if metric is None or not steps:
        return {}
    chosen = {round(i * (len(steps) - 1) / (REPORTED_VALUES - 1)) for i in range(REPORTED_VALUES)}
    values = {}
    for i in sorted(chosen):
        value = result.curve[metric][i]
        if math.isfinite(value):
            values[int(steps[i])] = value
    return values


def end_trial(storage: RDBStorage, trial: optuna.Trial, result: TrialResult, last_run: int) -> None:
    """Store a result, with the goal's metric as Optuna's intermediate values, and end its trial.

    Args:
        storage: The storage of the trial, without Optuna's cache.
        trial: The trial.
        result: Its result.
        last_run: The number of the study's last run, which a failure stores.
    """
    if result.status is Status.FAILED:
        stored = encode_result(result, failed_at=time.time(), failed_in=last_run)
    else:
        stored = encode_result(result)
    attributes = {schema.RESULT_ATTR: stored, schema.STATUS_ATTR: str(result.status)}
    add_to_trial(storage, trial._trial_id, attributes, intermediate_values(result))
    # If the process is killed before the next line, `end_interrupted` ends the trial.
    _set_final_state(trial.study, trial.number, result.status, result.cost)


def end_interrupted(study: optuna.Study, number: int, user_attrs: Mapping[str, Any]) -> None:
    """End a trial whose process ended. Without a result it fails, and its point runs again."""
    result = user_attrs.get(schema.RESULT_ATTR)
    if result is None:
        study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
    else:
        _set_final_state(study, number, Status(result["status"]), schema.stored_cost(result))


def _set_final_state(study: optuna.Study, number: int, status: Status, cost: Cost | None) -> None:
    """Set the state of a trial whose result is stored, unless it has ended."""
    state = schema.STATES[status]
    if state is not TrialState.PRUNED:
        study.tell(number, values=cost, state=state, skip_if_finished=True)
        return
    # For pruned trials, Optuna's `tell` would store the last intermediate value, which is an error
    # rate, as the value of the trial, which is its cost.
    storage = study._storage
    trial_id = storage.get_trial_id_from_study_id_trial_number(study._study_id, number)
    if not storage.get_trial(trial_id).state.is_finished():
        storage.set_trial_state_values(trial_id, TrialState.PRUNED)
