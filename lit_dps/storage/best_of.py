"""Points that are the best ones of another study: its winners again, on other seeds and under other
measurements."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from lit_dps.core.search_space import Space
from lit_dps.core.trial import Cell
from lit_dps.storage.schema import AXES, POINT_ATTR, cell_study_name
from lit_dps.storage.sobol import distributions


class BestOfSampler(BaseSampler):
    """Every point of a cell is the point of K* of the same cell of another study in the storage.

    Once a trial of a cell is there, its point is that of all others, also if the other study finds
    a better one.
    """

    def __init__(self, name: str, space: Space):
        self.name, self.space = name, dict(space)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if known := [
            t.params
            for t in study.get_trials(deepcopy=False)
            if t.params.keys() == self.space.keys()
        ]:
            return dict(known[0])
        attrs = study.user_attrs
        cell = Cell(
            attrs["batch_size"], attrs["sparsity"], tuple(sorted(attrs.get(AXES, {}).items()))
        )
        other = optuna.load_study(
            study_name=cell_study_name(self.name, cell), storage=study._storage
        )
        complete = other.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return dict(min(complete, key=lambda t: (t.value, t.user_attrs[POINT_ATTR])).params)

    def sample_independent(self, study, trial, param_name, param_distribution):
        raise KeyError(f"{param_name} is not in the declared search space")
