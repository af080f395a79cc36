"""The attempts at the points of a cell, as Optuna's trials: how far each went, and how one is ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.trial import TrialState

from lit_dps.analysis.results import POINT_ATTR, RESULT_ATTR
from lit_dps.trial import Status

STATES = {
    Status.COMPLETE: TrialState.COMPLETE,
    Status.INCOMPLETE: TrialState.PRUNED,
    Status.INFEASIBLE: TrialState.FAIL,
    Status.OUTRACED: TrialState.PRUNED,
    Status.STOPPED: TrialState.FAIL,
    Status.FAILED: TrialState.FAIL,
}


def steps_of(study: optuna.Study) -> dict[int, int]:
    """Steps to result of a cell's complete trials, by point."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return {trial.user_attrs[POINT_ATTR]: int(trial.value) for trial in complete}


def ran_to(result: Mapping[str, Any] | None) -> float:
    """The step up to which a stored result tells how a trial went; an outraced one was stopped there."""
    if result is None:
        return -math.inf
    return result["curve"]["step"][-1] if result["status"] == Status.OUTRACED else math.inf


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
