"""The Sobol points of a study."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import QMCSampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from scipy.stats import qmc

from lit_dps.core.search_space import Box, Choices, Space
from lit_dps.core.space_history import ExpandedSpace, is_inside
from lit_dps.core.trial import Value
from lit_dps.storage.schema import POINT_ATTR


def sobol_point(space: Space, seed: int, index: int, scramble: bool = True) -> dict[str, Value]:
    """Point `index` of the Sobol sequence over the space: depends on these arguments alone.

    Dimensions go by sorted key. `seed=` and not `rng=`: the latter draws another sequence, and the
    former is what Optuna's QMCSampler uses.
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


def boxed_point(
    space: Space, history: Sequence[ExpandedSpace], seed: int, index: int, scramble: bool = True
) -> dict[str, Value]:
    """Point `index` of a study whose box was widened: depends on these arguments alone.

    The first points are the Sobol sequence over the first box. Once it is widened, the points of
    the sequence over the new box that lie outside of the old one follow, as many as `ExpandedSpace`
    says, and then all that come after those.
    """
    at = next((i for i in reversed(range(len(history))) if index >= history[i].first), None)
    if at is None:
        return sobol_point(space, seed, index, scramble)
    box, before = history[at], history[at - 1].space if at else space
    outside = (
        i for i in count() if not is_inside(before, sobol_point(box.space, seed, i, scramble))
    )
    found = next(islice(outside, min(index, box.end - 1) - box.first, None))
    return sobol_point(box.space, seed, found + max(0, index - box.end + 1), scramble)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space as Optuna distributions. Optuna has no reverse-log one: it stores the value, the
    sampler scales it."""
    return {key: _distribution(box) for key, box in sorted(space.items())}


def _distribution(box: Box) -> BaseDistribution:
    if isinstance(box, Choices):
        return CategoricalDistribution(box.choices)
    if box.integer:
        return IntDistribution(int(box.low), int(box.high))
    return FloatDistribution(box.low, box.high, log=box.scale == "log")


class SobolSampler(QMCSampler):
    """Optuna's QMCSampler with every trial, the first too, on the Sobol point that its point index
    names.

    The stock sampler draws the first trial at random and counts points in the storage,
    non-atomically, so that workers repeat and skip some. Here the index is the trial's user
    attribute `POINT_ATTR`, which a retried trial keeps.
    """

    def __init__(
        self, space: Space, seed: int, scramble: bool = True, history: Sequence[ExpandedSpace] = ()
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            super().__init__(qmc_type="sobol", scramble=scramble, seed=seed)
        self.space, self._sobol_seed, self._scrambled = (
            dict(history[-1].space if history else space),
            seed,
            scramble,
        )
        self._first, self._history = dict(space), tuple(history)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        where = self._first, self._history, self._sobol_seed
        return dict(boxed_point(*where, trial.user_attrs[POINT_ATTR], self._scrambled))

    def sample_independent(self, study, trial, param_name, param_distribution):
        raise KeyError(f"{param_name} is not in the declared search space")
