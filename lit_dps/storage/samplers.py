"""Adaptive searches: Optuna's samplers on the unit cube of a study's space, in place of the Sobol
points."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from lit_dps.core.config import SAMPLERS, StudyConfig
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.registry import named
from lit_dps.core.search_space import Box
from lit_dps.core.space_history import ExpandedSpace
from lit_dps.core.trial import Status, Value, derive_seed
from lit_dps.storage.best_of import BestOfSampler
from lit_dps.storage.schema import POINT_ATTR, RESULT_ATTR
from lit_dps.storage.sobol import SobolSampler, distributions, sobol_point

UNIT = FloatDistribution(0.0, 1.0)
INFEASIBLE = 2.0  # of a logarithm of steps: how much worse than one that spent its budget


def _tpe(seed: int, first: int) -> BaseSampler:
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=first, multivariate=True)


def _gp(seed: int, first: int) -> BaseSampler:
    return optuna.samplers.GPSampler(seed=seed, n_startup_trials=first)


_MAKE: dict[str, Callable[[int, int], BaseSampler]] = {"tpe": _tpe, "gp": _gp}


def sampler_of(study: StudyConfig, goal: Goal, boxes: Sequence[ExpandedSpace] = ()) -> BaseSampler:
    """The sampler of a study's points, in a box that was widened. Raises ConfigError for one that
    there is not."""
    if study.best_of is not None:
        return BestOfSampler(study.best_of, study.space)
    if study.sampler == "sobol":
        return SobolSampler(study.space, study.seed, study.scramble, boxes)
    return SearchSampler(study, goal, make_of(study.sampler))


def make_of(name: str) -> Callable[[int, int], BaseSampler]:
    """What makes an adaptive sampler of a name or class path, from a seed and the number of its
    first points."""

    def fits(found: object) -> bool:
        return isinstance(found, type) and issubclass(found, BaseSampler)

    found = named(
        "study.sampler", name, {**dict.fromkeys(SAMPLERS), **_MAKE}, "sampler of Optuna", fits
    )
    if name in _MAKE:
        return found
    try:
        found(seed=0)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError("study.sampler", name, f"a sampler that takes a seed: {error}") from error
    return lambda seed, first: found(seed=seed)


class SearchSampler(BaseSampler):
    """Any of Optuna's samplers, on the unit cube, so that all scales of a space are searched alike.

    The first points are the Sobol points of the study; each later one is drawn from the results of
    its cell so far, by a sampler made anew under a seed of the point. So nothing is kept between
    points, and one worker's search is repeatable; but a trial that was cut short runs again after
    those that wait, so that a study that was interrupted in the middle of one draws other points
    from then on than an unbroken one. Of several workers each draws from what it finds stored, and
    which results are there depends on who was faster: such a search is not repeatable. Points that
    others are running count as bad, so that nobody draws them again. A point that runs again keeps
    its metaparameters.

    What is minimised is the logarithm of the steps to result; of a trial that did not get there it
    is that of twice the budget, and the more the farther its metric stayed from the goal.
    """

    def __init__(self, study: StudyConfig, goal: Goal, make: Callable[[int, int], BaseSampler]):
        self.space, self._seed, self._scramble = dict(study.space), study.seed, study.scramble
        self._goal, self._make = goal, make
        self.first = 2 * (len(self.space) + 1)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return distributions(self.space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        point = trial.user_attrs[POINT_ATTR]
        others = [
            t for t in study.get_trials(deepcopy=False) if t.number != trial.number and t.params
        ]
        if (again := [t for t in others if t.user_attrs.get(POINT_ATTR) == point]) and self._known(
            again[-1]
        ):
            return dict(again[-1].params)
        if point < self.first:
            return dict(sobol_point(self.space, self._seed, point, self._scramble))
        return self._draw(point, others)

    def sample_independent(self, study, trial, param_name, param_distribution):
        raise KeyError(f"{param_name} is not in the declared search space")

    def _known(self, trial: FrozenTrial) -> bool:
        return trial.params.keys() == self.space.keys()

    def _draw(self, point: int, others: list[FrozenTrial]) -> dict[str, Value]:
        values: dict[int, tuple[FrozenTrial, float | None]] = {}
        for t in others:  # of several attempts at a point the last one that ended
            value = self.value(t)
            if self._known(t) and (value is not None or t.state is TrialState.RUNNING):
                values[t.user_attrs[POINT_ATTR]] = t, value
        told = [value for _, value in values.values() if value is not None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            memory = optuna.create_study(
                sampler=self._make(derive_seed(self._seed, "search", point), self.first)
            )
            for key in sorted(values):
                t, value = values[key]
                value = max(told, default=0.0) if value is None else value
                unit = {
                    name: min(max(box.unit(t.params[name]), 0.0), 1.0)
                    for name, box in self.space.items()
                }
                spans = dict.fromkeys(unit, UNIT)
                memory.add_trial(create_trial(params=unit, distributions=spans, value=value))
            drawn = memory.ask(dict.fromkeys(sorted(self.space), UNIT)).params
        return {name: _at(box, drawn[name]) for name, box in self.space.items()}

    def value(self, trial: FrozenTrial) -> float | None:
        """What is minimised, of a trial that ended; None of others, and of failed ones, which tell
        nothing."""
        result: Mapping[str, Any] | None = trial.user_attrs.get(RESULT_ATTR)
        if result is None or result["status"] == Status.FAILED:
            return None
        if result["status"] == Status.COMPLETE:
            return math.log(result["steps"])
        spent = math.log(2 * self._goal.max_steps)
        values = [float(value) for value in result["curve"].get(self._goal.metric, [])]
        # A check can lack a finite value without divergence: the last one that has a value counts.
        found = [value for value in values if math.isfinite(value)]
        if result["status"] == Status.INFEASIBLE or not found:
            return spent + INFEASIBLE
        left = abs(found[-1] - self._goal.value) / (abs(self._goal.value) or 1.0)
        return spent + left / (1 + left)


def _at(box: Box, u: float) -> Value:
    return box.at(min(u, math.nextafter(1.0, 0.0)))
