"""The attempts at the points of a cell, as Optuna's trials: how far each went, and how one is ended."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.trial import TrialState

from lit_dps.racing import settled
from lit_dps.store.schema import FAILED_AT, POINT_ATTR, RESULT_ATTR, STATES, encode_result
from lit_dps.trial import Status, TrialResult


def steps_of(study: optuna.Study) -> dict[int, int]:
    """Steps to result of a cell's complete trials, by point."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return {trial.user_attrs[POINT_ATTR]: int(trial.value) for trial in complete}


def ran_to(user_attrs: Mapping[str, Any], began: float = 0.0) -> float:
    """The step up to which an attempt tells how a trial goes, if it was stopped there and may be run again.

    Args:
        user_attrs: Of the attempt. One that was cut short has no result.
        began: One that failed before this time, in seconds since the epoch, may be run again; others are final.
    """
    result = user_attrs.get(RESULT_ATTR)
    if result is None:
        return -math.inf
    run = max(result["curve"].get("step", ()), default=-math.inf)
    again = result["status"] == Status.FAILED and user_attrs.get(FAILED_AT, -math.inf) < began
    return run if again or not settled(Status(result["status"]), run, math.inf) else math.inf


def end(trial: optuna.Trial, result: TrialResult) -> None:
    """Stores a result and ends its trial."""
    if result.status is Status.FAILED:
        trial.set_user_attr(FAILED_AT, time.time())  # first: no failed result is without it
    trial.set_user_attr(RESULT_ATTR, encode_result(result))
    finish(trial.study, trial.number, result.status, result.steps)


def finish(study: optuna.Study, number: int, status: Status, steps: int | None) -> None:
    """Ends a trial whose result is stored."""
    study.tell(number, values=steps, state=STATES[status], skip_if_finished=True)


def give_up(study: optuna.Study, number: int, user_attrs: Mapping[str, Any]) -> None:
    """Ends a trial that was cut short: with its result if that was stored already, else as failed without one."""
    result = user_attrs.get(RESULT_ATTR)
    if result is not None:
        finish(study, number, Status(result["status"]), result["steps"])
    else:
        study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
