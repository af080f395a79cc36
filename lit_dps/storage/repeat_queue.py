"""The queue of repeats: the best points of each cell run again on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from lit_dps.core.repeats import RepeatId, RepeatPlan
from lit_dps.core.statistic import Statistic
from lit_dps.core.trial import Cell
from lit_dps.core.unit import Unit
from lit_dps.storage.cells import costs_by_point, covered_cost, open_cell
from lit_dps.storage.locks import MachinePeers, ServerPeers
from lit_dps.storage.schema import OWNER, POINT_ATTR, REPEAT_ATTR


class ClaimedRepeat(NamedTuple):
    """A claimed repeat, and the cost that it must reach."""

    trial: optuna.Trial
    limit: float


@dataclass(eq=False)
class RepeatQueue:
    """The repeats of the best points of each cell on fresh seeds, as one worker sees them.

    The repeats of a cell are trials of a separate Optuna study, so that readers of K* do not see
    them. The cell's complete trials determine which points are repeated. If a new trial becomes the
    best one, its point is repeated too, and the stored repeats of the former one remain.

    Attributes:
        storage, name, uid, peers, distributions, run_number, statistic: As in `TrialQueue`.
        plan: What is repeated.
        unit: The unit of K*.
        end_dead_trials: Ends the trials of an Optuna study whose processes are dead, and returns
            all its trials.
    """

    storage: RDBStorage
    name: str
    uid: str | None
    peers: ServerPeers | MachinePeers
    plan: RepeatPlan
    distributions: Mapping[str, BaseDistribution]
    run_number: int
    statistic: Statistic
    unit: Unit
    end_dead_trials: Callable[[optuna.Study], list[FrozenTrial]]

    def claim(self, cell: Cell, search: optuna.Study) -> ClaimedRepeat | None:
        """Claim a repeat that no process has run or is running; None if there is none.

        There is none while a process runs a trial of the cell's search, because K* may change. The
        caller holds the storage's lock.

        Args:
            cell: The cell.
            search: The Optuna study of its search.
        """
        costs = costs_by_point(self.storage, search._study_id)
        complete = [(cost, point) for point, cost in costs.items()]
        k_star = self.statistic.k_star(costs.values())
        if k_star is None or self._is_running(search):
            return None
        study = open_cell(self.storage, self.name, cell, self.uid, repeats=True, unit=self.unit)
        remaining = self.plan.missing(complete, self._read_covered(study), self.statistic)
        if not remaining:
            return None
        point, number = remaining[0]
        params = _params_of_point(search, point)
        study.enqueue_trial(params, user_attrs={POINT_ATTR: point, REPEAT_ATTR: number})
        claimed = study.ask(fixed_distributions=dict(self.distributions))
        claimed.set_user_attr(OWNER, self.peers.owner)
        return ClaimedRepeat(claimed, self.plan.limit(k_star))

    def _is_running(self, search: optuna.Study) -> bool:
        for trial in search.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self.peers.alive(trial.user_attrs.get(OWNER)):
                return True
        return False

    def _read_covered(self, study: optuna.Study) -> dict[RepeatId, float]:
        """Return the limit to which each repeat is covered; end the repeats of dead processes.

        The limit is infinite for repeats that are final or run.
        """
        covered: dict[RepeatId, float] = {}
        for trial in self.end_dead_trials(study):
            if trial.state is TrialState.WAITING:
                # A process was killed within `claim`, after it had enqueued the repeat.
                self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                continue
            cost = math.inf
            if trial.state is not TrialState.RUNNING:
                cost = covered_cost(trial.user_attrs, self.run_number)
            repeat = trial.user_attrs[POINT_ATTR], trial.user_attrs[REPEAT_ATTR]
            covered[repeat] = max(covered.get(repeat, -math.inf), cost)
        return covered


def _params_of_point(search: optuna.Study, point: int) -> dict[str, Any]:
    """Return the metaparameters of the complete trial at a point."""
    for trial in search.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        if trial.user_attrs[POINT_ATTR] == point:
            return trial.params
    raise KeyError(point)
