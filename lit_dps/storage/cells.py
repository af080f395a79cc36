"""The cells of a study in an Optuna storage: whom they belong to, and the attempts at their
points."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState

from lit_dps.core.errors import StorageError
from lit_dps.core.goal import RESERVED_NAMES
from lit_dps.core.racing import best_steps, last_step, needs_no_rerun
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage.foreign_studies import refuse_foreign_cell
from lit_dps.storage.schema import (
    AXES,
    FAILED_AT,
    FAILED_IN,
    POINT_ATTR,
    RESULT_ATTR,
    STATES,
    STATUS_ATTR,
    UID,
    cell_study_name,
    encode_result,
    repeats_study_name,
)

OBJECTIVE = "steps to result"  # what Optuna's plots call the value of a trial
# intermediate values of a trial at most: each is a transaction of its own, 1 to 2 ms in SQLite
REPORTED_VALUES = 32


def open_cell(
    storage: RDBStorage,
    name: str,
    cell: Cell,
    uid: str | None,
    sampler: BaseSampler | None = None,
    repeats: bool = False,
) -> optuna.Study:
    """The Optuna study of a cell of study `name`, or that of its repeats, made where there is none;
    as `check_cell`."""
    study_name = repeats_study_name(name, cell) if repeats else cell_study_name(name, cell)
    refuse_foreign_cell(storage, study_name)
    study = optuna.create_study(
        study_name=study_name,
        storage=storage,
        sampler=sampler,
        direction="minimize",
        load_if_exists=True,
    )
    known = study.user_attrs
    check_cell(known, name, cell, uid)
    name_value(study, OBJECTIVE)
    attrs = {"batch_size": cell.batch_size, "sparsity": cell.sparsity, UID: uid}
    attrs |= {AXES: dict(cell.axes)} if cell.axes else {}
    for key, value in attrs.items():
        if known.get(key) != value:
            study.set_user_attr(key, value)
    return study


def name_value(study: optuna.Study, name: str) -> None:
    """Says what Optuna's plots call the value of a study's trials, unless that was said."""
    if study.metric_names is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([name])


def check_cell(attrs: Mapping[str, Any], name: str, cell: Cell, uid: str | None) -> None:
    """Raises StorageError if a cell, by its user attributes, is not this one, or is an earlier
    study's than `uid`."""
    stood = {"sparsity": cell.sparsity, AXES: dict(cell.axes)}
    if held := {key: attrs[key] for key, value in stood.items() if attrs.get(key, value) != value}:
        asked = {key: stood[key] for key in held}
        raise StorageError(
            f"{cell_study_name(name, cell)!r} holds trials of {held}, not of {asked}, which is "
            "called the same: "
            "give one of the two another study.name"
        )
    if None not in (uid, attrs.get(UID)) and attrs[UID] != uid:
        raise StorageError(
            f"{cell_study_name(name, cell)!r} belongs to an earlier study {name!r}, which was "
            "deleted without it: "
            "delete it too, or give the new one another study.name"
        )


def steps_of(study: optuna.Study) -> dict[int, int]:
    """Steps to result of a cell's complete trials, by point."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return {trial.user_attrs[POINT_ATTR]: int(trial.value) for trial in complete}


def stored_steps(storage: BaseStorage, name: str, cell: Cell) -> dict[int, int]:
    """Steps to result of the complete trials of a cell of study `name`, by point; none of a cell
    that has not begun."""
    try:
        return steps_of(optuna.load_study(study_name=cell_study_name(name, cell), storage=storage))
    except KeyError:
        return {}


def race_limit(study: optuna.Study, slack: float | None) -> float:
    """The step that the trials of a cell have to reach by its complete ones; infinite where nothing
    is raced yet."""
    return last_step(best_steps(steps_of(study).values()), slack)


def ran_to(user_attrs: Mapping[str, Any], run_number: float = 0) -> float:
    """Return the step up to which the result of an attempt is known; infinity if it is final.

    An interrupted attempt has no result: minus infinity. A failed attempt is retried by the runs of
    the study that began after it failed.

    Args:
        user_attrs: The user attributes of the attempt.
        run_number: The number of the current run (`lit_dps.storage.header.begin_run`). With 0, no
            failed attempt is retried.
    """
    result = user_attrs.get(RESULT_ATTR)
    if result is None:
        return -math.inf
    run = max(result["curve"].get("step", ()), default=-math.inf)
    # Failures of earlier versions have no number; they count as older than every run.
    has_failed = result["status"] == Status.FAILED
    has_failed_before = has_failed and user_attrs.get(FAILED_IN, 0) < run_number
    if has_failed_before or not needs_no_rerun(Status(result["status"]), run, math.inf):
        return run
    return math.inf


def end(trial: optuna.Trial, result: TrialResult, last_run: int) -> None:
    """Store a result and end its trial; `last_run` is the number of the study's last run."""
    if result.status is Status.FAILED:
        # Before the result, so that every failed result has both attributes.
        trial.set_user_attr(FAILED_AT, time.time())
        trial.set_user_attr(FAILED_IN, last_run)
    trial.set_user_attr(RESULT_ATTR, encode_result(result))
    trial.set_user_attr(STATUS_ATTR, str(result.status))
    finish(trial.study, trial.number, result.status, result.steps)


def finish(study: optuna.Study, number: int, status: Status, steps: int | None) -> None:
    """Ends a trial whose result is stored."""
    if STATES[status] is not TrialState.PRUNED:
        study.tell(number, values=steps, state=STATES[status], skip_if_finished=True)
        return
    # `tell` would make its last intermediate value, an error, the value of a study whose values are
    # steps
    storage = study._storage
    trial = storage.get_trial(
        storage.get_trial_id_from_study_id_trial_number(study._study_id, number)
    )
    if not trial.state.is_finished():
        storage.set_trial_state_values(trial._trial_id, TrialState.PRUNED)


def report(trial: optuna.Trial, result: TrialResult) -> None:
    """Report the finite values of the goal's metric to Optuna.

    The curve is thinned to `REPORTED_VALUES`; its first and last values are kept.
    """
    steps = result.curve.get("step", ())
    metric = next((key for key in result.curve if key not in RESERVED_NAMES), None)
    if metric is None or not steps:
        return
    chosen = {round(i * (len(steps) - 1) / (REPORTED_VALUES - 1)) for i in range(REPORTED_VALUES)}
    for i in sorted(chosen):
        if math.isfinite(result.curve[metric][i]):
            trial.report(result.curve[metric][i], int(steps[i]))


def give_up(study: optuna.Study, number: int, user_attrs: Mapping[str, Any]) -> None:
    """Ends a trial that was cut short: with its result if that was stored already, else as failed
    without one."""
    result = user_attrs.get(RESULT_ATTR)
    if result is not None:
        finish(study, number, Status(result["status"]), result["steps"])
    else:
        study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def distance(one: Cell, other: Cell) -> float:
    """How much two cells differ: a factor of 2 in batch size counts as much as a quarter of the
    weights.

    Another value on any further axis counts as much as all of the weights.
    """
    sizes, weights = math.log2(one.batch_size / other.batch_size), one.sparsity - other.sparsity
    return abs(sizes) + 4 * abs(weights) + 4 * len(set(one.axes) - set(other.axes))
