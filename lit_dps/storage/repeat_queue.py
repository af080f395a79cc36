"""Hands out the repeats of the best points of each cell, once the search of that cell is through.

They are trials of an Optuna study of their own, "NAME | B=16 S=0.9 | repeats", so that nothing that
looks for K* sees them. Which they are follows from the cell's complete trials alone: where a
further trial becomes the best one, its point is repeated, and what there is of the former one
stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from lit_dps.core.repeats import RepeatId, RepeatPlan
from lit_dps.core.trial import Cell
from lit_dps.storage.cells import give_up, open_cell, ran_to, steps_of
from lit_dps.storage.locks import MachinePeers, ServerPeers
from lit_dps.storage.schema import OWNER, POINT_ATTR, REPEAT_ATTR


class Repeats:
    """The repeats of one study, as one worker sees them. All methods go under the lock of the
    storage.

    Args:
        storage, name, uid: Of the study.
        peers: The processes that share the storage.
        plan: What is repeated.
        distributions: Of the metaparameters.
        run_number: Of this run of the study; see `Store`.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        uid: str | None,
        peers: ServerPeers | MachinePeers,
        plan: RepeatPlan,
        distributions: Mapping[str, BaseDistribution],
        run_number: int,
    ):
        self.storage, self.name, self.uid, self.peers, self.plan = storage, name, uid, peers, plan
        self.distributions, self.run_number = dict(distributions), run_number

    def claim(self, cell: Cell, search: optuna.Study) -> tuple[optuna.Trial, float] | None:
        """A repeat that nobody has run or is running, in this process's name, and the step that it
        has to reach.

        None if there is none, or while somebody runs a trial of the cell's search: K* may be
        another one then.

        Args:
            cell: The cell.
            search: The Optuna study of its search.
        """
        complete = [(steps, point) for point, steps in steps_of(search).items()]
        if not complete or any(
            map(self._runs, search.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
        ):
            return None
        study = open_cell(self.storage, self.name, cell, self.uid, repeats=True)
        left = self.plan.missing(complete, self._known(study))
        if not left:
            return None
        point, number = left[0]
        attempts = search.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        params = next(trial.params for trial in attempts if trial.user_attrs[POINT_ATTR] == point)
        study.enqueue_trial(params, user_attrs={POINT_ATTR: point, REPEAT_ATTR: number})
        claimed = study.ask(fixed_distributions=self.distributions)
        claimed.set_user_attr(OWNER, self.peers.owner)
        return claimed, self.plan.limit(min(complete)[0])

    def _known(self, study: optuna.Study) -> dict[RepeatId, float]:
        """Up to which step it is known how each repeat goes, infinite for those that are run; gives
        up dead ones."""
        known: dict[RepeatId, float] = {}
        for trial in study.get_trials(deepcopy=False):
            if (
                trial.state is TrialState.WAITING
            ):  # its process was killed between these two lines of `claim`
                self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                continue
            if self._runs(trial):
                ran = math.inf
            else:
                ran = ran_to(trial.user_attrs, self.run_number)
                if (
                    trial.state is TrialState.RUNNING
                ):  # its process was killed, maybe once its result was written
                    give_up(study, trial.number, trial.user_attrs)
            each = trial.user_attrs[POINT_ATTR], trial.user_attrs[REPEAT_ATTR]
            known[each] = max(known.get(each, -math.inf), ran)
        return known

    def _runs(self, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.state is TrialState.RUNNING and self.peers.alive(trial.user_attrs.get(OWNER))
