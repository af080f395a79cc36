"""The queue of repeats: the best points of each cell run again on fresh seeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import optuna
from optuna.trial import TrialState

from lit_dps.core.trial import Cell, RepeatId
from lit_dps.storage.cells import costs_by_point, open_cell, stored_reruns_above
from lit_dps.storage.schema import OWNER, POINT_ATTR, REPEAT_ATTR

if TYPE_CHECKING:  # which imports this module
    from lit_dps.storage.trial_queue import TrialQueue


class ClaimedRepeat(NamedTuple):
    """A claimed repeat, and the cost that it must reach."""

    trial: optuna.Trial
    limit: float


def claim_repeat(queue: TrialQueue, cell: Cell, search: optuna.Study) -> ClaimedRepeat | None:
    """Claim a repeat that no process has run or is running; None if there is none.

    The repeats of a cell are trials of a separate Optuna study, so that readers of K* do not see
    them. The cell's complete trials determine which points are repeated. If a new trial becomes the
    best one, its point is repeated too, and the stored repeats of the former one remain.

    There is no repeat while a process runs a trial of the cell's search, because K* may change. The
    caller holds the storage's lock.

    Args:
        queue: The `TrialQueue` of the study.
        cell: The cell.
        search: The Optuna study of its search.
    """
    costs = costs_by_point(queue.storage, search._study_id)
    complete = [(cost, point) for point, cost in costs.items()]
    k_star = queue.statistic.k_star(costs.values())
    if k_star is None or _is_running(queue, search):
        return None
    unit = queue.rules.goal.cost_unit
    study = open_cell(queue.storage, queue.name, cell, queue.uid, repeats=True, unit=unit)
    reruns_above = _repeats_rerun_above(queue, study)
    remaining = queue.repeat_plan.missing(complete, reruns_above, queue.statistic)
    if not remaining:
        return None
    point, number = remaining[0]
    params = _params_of_point(search, point)
    study.enqueue_trial(params, user_attrs={POINT_ATTR: point, REPEAT_ATTR: number})
    claimed = study.ask(fixed_distributions=dict(queue.distributions))
    claimed.set_user_attr(OWNER, queue.peers.owner)
    return ClaimedRepeat(claimed, queue.repeat_plan.limit(k_star))


def _is_running(queue: TrialQueue, search: optuna.Study) -> bool:
    for trial in search.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if queue.peers.alive(trial.user_attrs.get(OWNER)):
            return True
    return False


def _repeats_rerun_above(queue: TrialQueue, study: optuna.Study) -> dict[RepeatId, float]:
    """Return the limit above which each repeat runs again; end the repeats of dead processes.

    The limit is infinite for repeats that are final or run.
    """
    limits: dict[RepeatId, float] = {}
    for trial in queue.end_dead_trials(study):
        if trial.state is TrialState.WAITING:
            # A process was killed within `claim_repeat`, after it had enqueued the repeat.
            queue.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            continue
        limit = math.inf
        if trial.state is not TrialState.RUNNING:
            limit = stored_reruns_above(trial.user_attrs, queue.run_number)
        repeat = trial.user_attrs[POINT_ATTR], trial.user_attrs[REPEAT_ATTR]
        limits[repeat] = max(limits.get(repeat, -math.inf), limit)
    return limits


def _params_of_point(search: optuna.Study, point: int) -> dict[str, Any]:
    """Return the metaparameters of the complete trial at a point."""
    for trial in search.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        if trial.user_attrs[POINT_ATTR] == point:
            return trial.params
    raise KeyError(point)
