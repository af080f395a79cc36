"""The Sobol points of a study."""

from __future__ import annotations

import warnings
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import QMCSampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from scipy.stats import qmc

from lit_dps.space import Box, Choices, Space
from lit_dps.store.schema import POINT_ATTR
from lit_dps.trial import Value


def sobol_point(space: Space, seed: int, index: int, scramble: bool = True) -> dict[str, Value]:
    """Point `index` of the Sobol sequence over the space: depends on these arguments alone.

    Dimensions go by sorted key. `seed=` and not `rng=`: the latter draws another sequence, and the former is what
    Optuna's QMCSampler uses.
    """
    keys = sorted(space)
    with warnings.catch_warnings():
        # balance needs 2^m points; prefixes of the sequence are wanted here
        warnings.simplefilter("ignore", UserWarning)
        engine = qmc.Sobol(len(keys), scramble=scramble, seed=seed)
        if index:
            engine.fast_forward(index)
        u = engine.random(1)[0]
    return {key: space[key].at(float(x)) for key, x in zip(keys, u, strict=True)}


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space as Optuna distributions. Optuna has no reverse-log one: it stores the value, the sampler scales it."""
    return {key: _distribution(box) for key, box in sorted(space.items())}


def _distribution(box: Box) -> BaseDistribution:
    if isinstance(box, Choices):
        return CategoricalDistribution(box.choices)
    if box.integer:
        return IntDistribution(int(box.low), int(box.high))
    return FloatDistribution(box.low, box.high, log=box.scale == "log")


class SobolSampler(QMCSampler):
    """Optuna's QMCSampler with every trial, the first too, on the Sobol point that its point index names.

    The stock sampler draws the first trial at random and counts points in the storage, non-atomically, so that workers
    repeat and skip some. Here the index is the trial's user attribute `POINT_ATTR`, which a retried trial keeps.
    """

    def __init__(self, space: Space, seed: int, scramble: bool = True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            super().__init__(qmc_type="sobol", scramble=scramble, seed=seed)
        self.space, self._sobol_seed, self._scrambled = dict(space), seed, scramble

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return dict(sobol_point(self.space, self._sobol_seed, trial.user_attrs[POINT_ATTR], self._scrambled))

    def sample_independent(self, study, trial, param_name, param_distribution):
        raise KeyError(f"{param_name} is not in the declared search space")
